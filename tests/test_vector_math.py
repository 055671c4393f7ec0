"""exp2 and tanh against float64, in every form the kernels are compiled to."""

import numpy as np
import pytest
import tvm
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from attentune.compile import compile_module

CPUS = {"x86-64-v4": 16, "x86-64-v3": 8, "x86-64": 4}
N = 1 << 16


@T.prim_func(s_tir=True)
def exp2(x: T.Buffer((N,), "float32"), y: T.Buffer((N,), "float32")):
    for i in T.serial(N):
        with T.sblock("map"):
            vi = T.axis.spatial(N, i)
            y[vi] = T.exp2(x[vi])


@T.prim_func(s_tir=True)
def tanh(x: T.Buffer((N,), "float32"), y: T.Buffer((N,), "float32")):
    for i in T.serial(N):
        with T.sblock("map"):
            vi = T.axis.spatial(N, i)
            y[vi] = T.tanh(x[vi])


def run(func, values, cpu, lanes):
    sch = Schedule(func)
    (loop,) = sch.get_loops(sch.get_sblock("map"))
    if lanes > 1:
        _, vector = sch.split(loop, [None, lanes])
        sch.vectorize(vector)
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu, "num-cores": 1})
    name = next(iter(sch.mod.functions)).name_hint
    padded = np.zeros(N, np.float32)
    padded[: len(values)] = values
    out = np.full(N, np.nan, np.float32)
    built = compile_module(sch.mod, target)
    built[name](tvm.runtime.tensor(padded), result := tvm.runtime.tensor(out))
    return result.numpy()[: len(values)], built.inspect_source("s")


FORMS = [(cpu, lanes) for cpu, wide in CPUS.items() for lanes in (1, wide)]


@pytest.mark.parametrize(("cpu", "lanes"), FORMS)
def test_exp2_is_accurate_over_normal_results(cpu, lanes):
    values = np.linspace(-126, 127, N, dtype=np.float32)
    got, assembly = run(exp2, values, cpu, lanes)
    expected = np.exp2(values.astype(np.float64))
    assert np.max(np.abs(got / expected - 1)) < 2e-7
    assert "exp2f" not in assembly


@pytest.mark.parametrize(("cpu", "lanes"), FORMS)
def test_exp2_at_the_edges(cpu, lanes):
    values = np.array([0.0, -0.0, -np.inf, np.nan, -200.0, 1.0, -1.0, 10.0], np.float32)
    got, _ = run(exp2, np.resize(values, 64), cpu, lanes)
    expected = np.array([1.0, 1.0, 0.0, np.nan, 0.0, 2.0, 0.5, 1024.0], np.float32)
    exact = [0, 1, 2, 4]
    np.testing.assert_array_equal(got[exact], expected[exact])
    assert np.isnan(got[3])
    np.testing.assert_allclose(got[5:8], expected[5:8], rtol=2e-7)


@pytest.mark.parametrize(("cpu", "lanes"), FORMS)
def test_tanh_is_accurate_near_zero_and_beyond(cpu, lanes):
    near = np.concatenate([np.geomspace(1e-30, 1, N // 4), np.linspace(0, 12, N // 4)])
    values = np.concatenate([near, -near]).astype(np.float32)
    got, assembly = run(tanh, values, cpu, lanes)
    expected = np.tanh(values.astype(np.float64))
    error = np.abs(got - expected) / np.maximum(np.abs(expected), 1e-37)
    assert np.max(error) < 3e-7
    assert "tanhf" not in assembly


@pytest.mark.parametrize(("cpu", "lanes"), FORMS)
def test_tanh_at_the_edges(cpu, lanes):
    values = np.array([0.0, np.inf, -np.inf, np.nan, 100.0, -100.0, 0.0, 0.0], np.float32)
    got, _ = run(tanh, np.resize(values, 64), cpu, lanes)
    expected = np.array([0.0, 1.0, -1.0, np.nan, 1.0, -1.0, 0.0, 0.0], np.float32)
    np.testing.assert_array_equal(got[:8], expected)


def test_other_targets_keep_the_operators():
    from attentune.vector_math import lower_vector_math

    cuda = tvm.target.Target({"kind": "cuda", "arch": "sm_80"})
    mod = tvm.IRModule({"exp2": exp2.with_attr("target", cuda)})
    assert "exp2" in lower_vector_math(mod)["exp2"].script()
