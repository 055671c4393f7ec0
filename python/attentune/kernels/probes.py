"""Kernels that find a machine's limits: they compute nothing of use, as fast as can be."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from attentune.kernels import script


def multiply_add(tasks: int, steps: int, chains: int, lanes: int) -> Any:
    """Return a PrimFunc of multiply-adds that stay in registers.

    Parameters
    ----------
    tasks : int
        Independent copies, to be spread over the cores.
    steps : int
        Multiply-adds of each accumulator.
    chains : int
        Accumulators of a task, independent of each other.
    lanes : int
        float32 values in an accumulator.
    """
    return _multiply_add.specialize(tasks=tasks, steps=steps, chains=chains, lanes=lanes)


def stream(tasks: int, steps: int, chains: int, lanes: int) -> Any:
    """Return a PrimFunc that sums ``[tasks, steps, chains, lanes]`` values, each read once."""
    return _stream.specialize(tasks=tasks, steps=steps, chains=chains, lanes=lanes)


@script.jit(s_tir=True)
def _multiply_add(
    factors: T.handle,
    sums: T.handle,
    *,
    tasks: T.constexpr,
    steps: T.constexpr,
    chains: T.constexpr,
    lanes: T.constexpr,
):
    T.func_attr({"global_symbol": "main", "tirx.noalias": True})
    x = T.match_buffer(factors, (lanes,), "float32")
    y = T.match_buffer(sums, (tasks, chains, lanes), "float32")
    for t in T.serial(tasks):
        with T.sblock("task"):
            vt = T.axis.spatial(tasks, t)
            total = T.sblock_alloc_buffer((chains, lanes), "float32", scope="local")
            for c in T.unroll(chains):
                for i in T.vectorized(lanes):
                    total[c, i] = T.float32(0)
            for _ in T.serial(steps):
                for c in T.unroll(chains):
                    for i in T.vectorized(lanes):
                        total[c, i] = total[c, i] * x[i] + x[i]
            for c in T.unroll(chains):
                for i in T.vectorized(lanes):
                    y[vt, c, i] = total[c, i]


@script.jit(s_tir=True)
def _stream(
    memory: T.handle,
    sums: T.handle,
    *,
    tasks: T.constexpr,
    steps: T.constexpr,
    chains: T.constexpr,
    lanes: T.constexpr,
):
    T.func_attr({"global_symbol": "main", "tirx.noalias": True})
    x = T.match_buffer(memory, (tasks, steps, chains, lanes), "float32")
    y = T.match_buffer(sums, (tasks, chains, lanes), "float32")
    for t in T.serial(tasks):
        with T.sblock("task"):
            vt = T.axis.spatial(tasks, t)
            total = T.sblock_alloc_buffer((chains, lanes), "float32", scope="local")
            for c in T.unroll(chains):
                for i in T.vectorized(lanes):
                    total[c, i] = T.float32(0)
            for s in T.serial(steps):
                for c in T.unroll(chains):
                    for i in T.vectorized(lanes):
                        total[c, i] = total[c, i] + x[vt, s, c, i]
            for c in T.unroll(chains):
                for i in T.vectorized(lanes):
                    y[vt, c, i] = total[c, i]
