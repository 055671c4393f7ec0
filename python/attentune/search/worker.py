"""The child process in which finalists are built, checked and timed.

A candidate may crash, hang or take all memory; the process that does goes down alone and is
started again for the next one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.support.popen_pool import PopenWorker

from attentune import arguments, arrays, reference
from attentune.accuracy import mismatch
from attentune.compile import compile_module
from attentune.kernels.spec import KernelSpec
from attentune.problem import AttentionProblem
from attentune.search.failure import Failure, classify
from attentune.search.inputs import random_inputs
from attentune.search.measure import limit_memory
from attentune.target import Target
from attentune.threads import use_cores

# A sample is repeated within itself until it is this long: the clock's and a call's own cost
# then stay below a hundredth.
SAMPLE_SECONDS = 0.002


class CandidateFailed(Exception):
    """A candidate failed in the child process; ``failure`` says how."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.outcome}: {failure.reason}")
        self.failure = failure


@dataclass(frozen=True)
class Check:
    """One problem of the correctness gate.

    Attributes
    ----------
    problem : AttentionProblem
        What is computed.
    seed : int
        Of its inputs.
    amplitude : float
        Of its queries; see `random_inputs`.
    """

    problem: AttentionProblem
    seed: int
    amplitude: float = 1.0


class Worker:
    """Runs candidates in a child process, each call within a time limit.

    Parameters
    ----------
    seconds : float
        Limit of a call.
    memory_bytes : int, optional
        Address space that the child may use.
    """

    def __init__(self, seconds: float, memory_bytes: int | None = None) -> None:
        self.seconds = seconds
        self._process = PopenWorker(initializer=limit_memory, initargs=(memory_bytes,))
        self._sources: dict[str, tuple[str, str, KernelSpec]] = {}
        self._loaded: set[str] = set()

    def load(self, name: str, module: tvm.IRModule, target: Target, spec: KernelSpec) -> None:
        """Build a scheduled symbolic kernel in the child."""
        self._sources[name] = (tvm.ir.save_json(module), str(target), spec)
        self._ensure(name)

    def check(self, name: str, checks: Sequence[Check]) -> None:
        """Compare a loaded kernel with the reference.

        Raises
        ------
        CandidateFailed
            With the outcome "wrong" where it differs.
        """
        self._ensure(name)
        for check in checks:
            difference = self._call("crash", _check, name, check)
            if difference is not None:
                raise CandidateFailed(Failure("wrong", f"at {check.problem} it gave {difference}"))

    def time(self, name: str, problem: AttentionProblem) -> float:
        """Return the seconds that one call of a loaded kernel took."""
        self._ensure(name)
        return float(self._call("crash", _time, name, problem))

    def close(self) -> None:
        """End the child."""
        self._process.kill()

    def _ensure(self, name: str) -> None:
        """Build a kernel unless the process that runs now has done so."""
        if name not in self._loaded:
            self._call("build", _load, name, *self._sources[name])
            self._loaded.add(name)

    def _call(self, stage: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            self._process.send(function, args, timeout=self.seconds)
            return self._process.recv()
        except TimeoutError:
            self._loaded.clear()
            failure = Failure("timeout", f"it took longer than {self.seconds:g} s")
        except ChildProcessError:
            self._loaded.clear()
            failure = Failure("crash", "it brought its process down")
        except Exception as error:  # whatever a candidate raised in the child
            failure = classify(f"{type(error).__name__}: {error}", stage)
        raise CandidateFailed(failure)


@contextlib.contextmanager
def worker(seconds: float, memory_bytes: int | None = None) -> Iterator[Worker]:
    """Yield a `Worker` whose child ends with the block."""
    child = Worker(seconds, memory_bytes)
    try:
        yield child
    finally:
        child.close()


# What follows runs in the child.

_KERNELS: dict[str, tuple[Any, KernelSpec]] = {}
_CALLS: dict[tuple[str, AttentionProblem], tuple[Any, list[Any], int]] = {}


def _load(name: str, module_json: str, target_json: str, spec: KernelSpec) -> None:
    module = tvm.ir.load_json(module_json)
    target = Target.parse(target_json)
    use_cores(target.num_cores)
    built = compile_module(module, target)
    _KERNELS[name] = (built["main"], spec)


def _arguments(
    spec: KernelSpec, problem: AttentionProblem, inputs: dict[str, Any]
) -> tuple[list[Any], Any]:
    shape = (problem.batch, problem.q_heads, problem.seq_q, problem.value_dim)
    out = arrays.empty_like(inputs["query"], shape)
    out[...] = float("nan")
    tensors = arguments.tensors(spec, problem, inputs, out)
    return [*tensors, *arguments.scalars(spec, problem)], out


def _check(name: str, check: Check) -> str | None:
    kernel, spec = _KERNELS[name]
    problem = check.problem
    inputs = random_inputs(problem, check.seed, check.amplitude)
    args, out = _arguments(spec, problem, inputs)
    kernel(*args)
    expected = reference.attention(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        mask=inputs.get("mask"),
        bias=inputs.get("bias"),
        is_causal=problem.is_causal,
        causal_alignment=problem.causal_alignment,
        window=problem.window,
        scale=problem.scale,
        softcap=problem.softcap,
    )
    magnitude = float(abs(inputs["value"].astype("float32")).max(initial=0.0))
    return mismatch(out, expected, problem.dtype, magnitude)


def _time(name: str, problem: AttentionProblem) -> float:
    kernel, spec = _KERNELS[name]
    call = (name, problem)
    if call not in _CALLS:
        args, out = _arguments(spec, problem, random_inputs(problem))
        start = time.perf_counter()
        kernel(*args)
        once = time.perf_counter() - start
        _CALLS[call] = (out, args, max(1, round(SAMPLE_SECONDS / max(once, 1e-7))))
    _, args, number = _CALLS[call]
    start = time.perf_counter()
    for _ in range(number):
        kernel(*args)
    return (time.perf_counter() - start) / number
