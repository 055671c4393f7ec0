"""The child process in which finalists are built, checked and timed."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.support.tar import tar

from attentune import arguments, reference
from attentune.accuracy import mismatch
from attentune.compile import compile_module
from attentune.kernels.spec import KernelSpec
from attentune.problem import AttentionProblem
from attentune.search import remote
from attentune.search.child import CandidateFailed, Child
from attentune.search.failure import Failure
from attentune.search.inputs import random_inputs
from attentune.search.measure import BUILD_SECONDS
from attentune.search.remote import Tracker
from attentune.target import Target
from attentune.threads import use_cores

# A sample is repeated within itself until it is this long: the clock's and a call's own cost
# then stay below a hundredth.
SAMPLE_SECONDS = 0.002
# A session on a server lasts for this many calls of the longest kind.
SESSION_CALLS = 100


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
        Limit of a call to a kernel.
    memory_bytes : int, optional
        Address space that the child may use.
    tracker : Tracker, optional
        Whose servers run the kernels; the child itself by default.
    """

    def __init__(
        self, seconds: float, memory_bytes: int | None = None, tracker: Tracker | None = None
    ) -> None:
        self.seconds = seconds
        self.tracker = tracker
        self._child = Child(memory_bytes)
        self._sources: dict[str, tuple[str, str, KernelSpec]] = {}
        self._loaded: dict[str, int] = {}  # and in which process, by its number

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
            difference = self._run(name, _check, check)
            if difference is not None:
                raise CandidateFailed(Failure("wrong", f"at {check.problem} it gave {difference}"))

    def time(self, name: str, problem: AttentionProblem) -> float:
        """Return the seconds that one call of a loaded kernel took."""
        self._ensure(name)
        return float(self._run(name, _time, problem))

    def close(self) -> None:
        """End the child."""
        self._child.close()

    def _run(self, name: str, function: Callable[..., Any], argument: Any) -> Any:
        """Run a loaded kernel. On a server it is given two tries: the server may be what failed."""
        if self.tracker is not None:
            try:
                return self._child.call("crash", self.seconds, function, name, argument)
            except CandidateFailed:
                self._ensure(name)
        return self._child.call("crash", self.seconds, function, name, argument)

    def _ensure(self, name: str) -> None:
        """Build a kernel unless the process that runs now has done so."""
        if self._loaded.get(name) != self._child.restarts:
            self._child.call(
                "build", BUILD_SECONDS, _load,
                name, *self._sources[name], self.tracker, self.seconds,
            )  # fmt: skip
            self._loaded[name] = self._child.restarts


@contextlib.contextmanager
def worker(
    seconds: float, memory_bytes: int | None = None, tracker: Tracker | None = None
) -> Iterator[Worker]:
    """Yield a `Worker` whose child ends with the block."""
    child = Worker(seconds, memory_bytes, tracker)
    try:
        yield child
    finally:
        child.close()


# What follows runs in the child.


@dataclass(frozen=True)
class _Loaded:
    """A kernel in the child or on a server."""

    module: Any
    spec: KernelSpec
    device: Any  # None in the child itself

    def arguments(
        self, problem: AttentionProblem, inputs: dict[str, Any]
    ) -> tuple[list[Any], np.ndarray[Any, Any]]:
        """Return arguments for a problem, with a poisoned output, and that output here."""
        shape = (problem.batch, problem.q_heads, problem.seq_q, problem.value_dim)
        out = np.full(shape, np.nan, inputs["query"].dtype)
        if self.device is None:
            tensors = arguments.tensors(self.spec, problem, inputs, out)
        else:
            tensors = remote.tensors(self.spec, problem, inputs, out, self.device)
        return [*tensors, *arguments.scalars(self.spec, problem)], out


_KERNELS: dict[str, _Loaded] = {}
_CALLS: dict[tuple[str, AttentionProblem], tuple[Any, list[Any], int]] = {}
_SESSIONS: list[Any] = []


def _load(
    name: str,
    module_json: str,
    target_json: str,
    spec: KernelSpec,
    tracker: Tracker | None,
    seconds: float,
) -> None:
    module = tvm.ir.load_json(module_json)
    target = Target.parse(target_json)
    built = compile_module(module, target)
    if tracker is None:
        use_cores(target.num_cores)
        _KERNELS[name] = _Loaded(built, spec, None)
        return
    if not _SESSIONS:
        _SESSIONS.append(tracker.connect(SESSION_CALLS * seconds))
    session = _SESSIONS[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name.replace('#', '-')}.{tar.output_format}"
        built.export_library(str(path), fcompile=tar)
        session.upload(str(path))
    _KERNELS[name] = _Loaded(session.load_module(path.name), spec, session.cpu(0))


def _check(name: str, check: Check) -> str | None:
    kernel = _KERNELS[name]
    problem = check.problem
    inputs = random_inputs(problem, check.seed, check.amplitude)
    args, out = kernel.arguments(problem, inputs)
    kernel.module["main"](*args)
    if kernel.device is not None:
        out = args[len(args) - 1 - len(arguments.scalars(kernel.spec, problem))].numpy()
    expected = reference.expected(problem, inputs)
    magnitude = float(abs(inputs["value"].astype("float32")).max(initial=0.0))
    return mismatch(out, expected, problem.dtype, magnitude)


def _time(name: str, problem: AttentionProblem) -> float:
    kernel = _KERNELS[name]
    call = (name, problem)
    if call not in _CALLS:
        args, out = kernel.arguments(problem, random_inputs(problem))
        _CALLS[call] = (out, args, max(1, round(SAMPLE_SECONDS / max(_once(kernel, args), 1e-7))))
    _, args, number = _CALLS[call]
    return _once(kernel, args, number)


def _once(kernel: _Loaded, args: list[Any], number: int = 1) -> float:
    """Return the mean seconds of some calls in a row."""
    if kernel.device is not None:
        timed = kernel.module.time_evaluator("main", kernel.device, number=number)
        return float(timed(*args).mean)
    run = kernel.module["main"]
    start = time.perf_counter()
    for _ in range(number):
        run(*args)
    return (time.perf_counter() - start) / number
