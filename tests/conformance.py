"""One way to check a candidate: run it on a problem and compare with the float64 reference."""

import numpy as np

from attentune import AttentionKey, reference
from attentune.accuracy import mismatch
from attentune.arguments import scalars
from attentune.dispatch import Kernel
from attentune.kernels.spec import KernelSpec
from attentune.search.inputs import random_inputs
from attentune.target import Target

NATIVE = Target.parse("native")
AVX2 = Target.parse(
    {"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}
)

_KERNELS = {}


def kernel(variant, problem, target=NATIVE, parameters=None):
    """Return the kernel of a variant for a problem, compiled once for all problems it serves."""
    key = AttentionKey.from_problem(problem)
    chosen = variant.defaults(key, target) if parameters is None else parameters
    identity = (variant.name, KernelSpec.from_key(key), target, tuple(sorted(chosen.items())))
    if identity not in _KERNELS:
        _KERNELS[identity] = Kernel(key, target, variant, chosen)
    return _KERNELS[identity]


def output(candidate, problem, inputs):
    """Run a kernel on inputs; its output is poisoned before."""
    shape = (problem.batch, problem.q_heads, problem.seq_q, problem.value_dim)
    out = np.full(shape, np.nan, inputs["query"].dtype)
    values = {"mask": None, "bias": None, **inputs}
    candidate.run(problem, values, scalars(candidate.spec, problem), out)
    return out


def check(candidate, problem, seed, amplitude=1.0):
    """Fail unless a kernel agrees with the reference on random inputs."""
    inputs = random_inputs(problem, seed, amplitude)
    magnitude = float(np.abs(inputs["value"].astype(np.float32)).max(initial=0.0))
    difference = mismatch(
        output(candidate, problem, inputs),
        reference.expected(problem, inputs),
        problem.dtype,
        magnitude,
    )
    assert difference is None, f"{candidate} at {problem}, seed {seed}: {difference}"
