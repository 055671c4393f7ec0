"""Code for CPUs that this machine may not be: vector multiply-adds, and no call of a scalar exp."""

import re

import pytest

from attentune import AttentionKey, AttentionProblem
from attentune.compile import compile_module
from attentune.schedules import VARIANTS
from attentune.target import Target

TARGETS = {
    "neon": ("aarch64-unknown-linux-gnu", "generic", ["+neon"], r"fmla\s+v\d+\.4s"),
    "avx2": ("x86_64-unknown-linux-gnu", "x86-64-v3", [], r"vfmadd\d+ps\s.*%ymm"),
    "avx512": ("x86_64-unknown-linux-gnu", "x86-64-v4", [], r"vfmadd\d+ps\s.*%zmm"),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_assembly_has_vector_multiply_adds_and_calls_no_exponential(variant, name, dtype):
    triple, cpu, features, multiply_add = TARGETS[name]
    config = {"kind": "llvm", "mtriple": triple, "mcpu": cpu, "num-cores": 4}
    target = Target.parse({**config, **({"mattr": features} if features else {})})
    key = AttentionKey.from_problem(AttentionProblem.parse(f"1,8,2,8,512,64,64:{dtype}:causal"))
    module = variant.scheduled(key, target, variant.defaults(key, target))
    assembly = compile_module(module, target).inspect_source("s")
    assert re.search(multiply_add, assembly)
    assert not re.search(r"\bexp2?f?\b", assembly)
