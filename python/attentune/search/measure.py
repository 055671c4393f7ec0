"""MetaSchedule's search over the workloads of one batch."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.support.popen_pool import PopenPoolExecutor, StatusKind
from tvm.support.tar import tar

from attentune import arguments
from attentune.compile import compile_module
from attentune.errors import CorruptDatabase
from attentune.interrupt import uninterrupted
from attentune.kernels.spec import KernelSpec
from attentune.problem import AttentionProblem
from attentune.search import remote
from attentune.search.child import CandidateFailed, Child, limit_memory, stop
from attentune.search.failure import Failure, classify
from attentune.search.inputs import aligned, random_inputs
from attentune.search.remote import Tracker
from attentune.search.workload import Workload
from attentune.threads import use_cores

BUILD_SECONDS = 60.0
# TVM's build processes grow; they are replaced after this many candidates.
BUILDS_PER_PROCESS = 200
EVALUATOR = ms.runner.EvaluatorConfig(number=1, repeat=3, min_repeat_ms=5)
# Largest round of one workload; and about what a candidate takes to build and measure.
MAX_ROUND = 16
TRIAL_SECONDS = 0.6
# XGBoost guesses at random until it has seen this many candidates.
WARM_UP = 16
# MetaSchedule's guess of a kernel is a sum over its stores, each of which learns the whole error: a
# rate above 2 / stores diverges, as its default of 0.2 does with the 20 stores of flash attention.
LEARNING_RATE = 0.02
# How candidates are proposed. The populations are small since the spaces are: a few hundred
# points, of which replaying each takes tens of milliseconds.
STRATEGIES: dict[str, Callable[[], Any]] = {
    "evolutionary": lambda: ms.search_strategy.EvolutionarySearch(
        population_size=16, init_min_unmeasured=8, genetic_num_iters=2
    ),
    "random": lambda: ms.search_strategy.ReplayTrace(max_fail_count=100),
}
_INTRINSICS = "tvm.s_tir.tensor_intrin"


@dataclass(frozen=True)
class Measured:
    """A candidate that MetaSchedule measured, or failed to.

    Attributes
    ----------
    workload : Workload
        Variant, structure and problem.
    parameters : Mapping
        All parameters by name.
    seconds : float or None
        Median time at the representative; None if it failed.
    failure : Failure or None
        Why it failed.
    trace : Any
        The schedule's trace, as JSON.
    guess : float or None
        The cost model's score before it was measured, the greater the faster; None while the model
        is not trained.
    """

    workload: Workload
    parameters: Mapping[str, int]
    seconds: float | None
    failure: Failure | None
    trace: Any
    guess: float | None = None


def search(
    workloads: Sequence[Workload],
    *,
    trials: int,
    seed: int,
    run_seconds: float,
    memory_bytes: int | None = None,
    deadline: float = math.inf,
    cost_model: Path | None = None,
    tracker: Tracker | None = None,
    strategy: str = "evolutionary",
    on_measured: Callable[[Measured], None] = lambda measured: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> list[Measured]:
    """Measure up to ``trials`` candidates of the workloads of one batch.

    MetaSchedule's task scheduler shares the trials between the workloads.

    Parameters
    ----------
    workloads : sequence of Workload
        All with the same key and problem.
    trials : int
        Candidates to build and measure, at most.
    seed : int
        Of the search. The same seed proposes the same candidates until the cost model is trained;
        from then on they depend on the times that were measured.
    run_seconds : float
        Time after which a measurement counts as hung.
    memory_bytes : int, optional
        Address space that a child process may use.
    deadline : float
        Time of the monotonic clock after which no candidate is built any more.
    cost_model : Path, optional
        File that the cost model is read from, where it exists, and kept in.
    tracker : Tracker, optional
        Whose machines measure; by default a child process of this one does.
    strategy : str
        One of `STRATEGIES`.
    on_measured : Callable
        Told of each candidate as it is measured.
    interrupted : Callable
        Whether Ctrl-C was pressed, which ends the search.

    Returns
    -------
    list of Measured
        In the order of measurement.
    """
    problem, key, target = workloads[0].problem, workloads[0].key, workloads[0].target
    limit = partial(limit_memory, memory_bytes)
    builder = _Builder(min(target.num_cores, 4), limit, deadline, interrupted)
    spec = KernelSpec.from_key(key)
    if tracker is None:
        runner = _Runner(spec, problem, target.num_cores, run_seconds, memory_bytes)
        end_runner = runner._inst.child.close
    else:
        runner = remote.runner(tracker, spec, problem, EVALUATOR, run_seconds)
        end_runner = partial(_shut_down, runner._inst.pool)
    measured: list[Measured] = []

    def keep(one: Measured) -> None:
        measured.append(one)
        on_measured(one)

    with _no_intrinsics(), _numpy_seed(seed), tempfile.TemporaryDirectory() as work_dir:
        contexts = [
            ms.TuneContext(
                workload.module(),
                target=target.to_tvm(),
                space_generator=workload.space(seed + index),
                search_strategy=STRATEGIES[strategy](),
                task_name=workload.name,
                rand_state=seed + index + 1,
                num_threads=1,
                logger=_silent(),
            )
            for index, workload in enumerate(workloads)
        ]
        model = _CostModel(cost_model)
        with _interruptible(builder, end_runner), _no_tables():
            ms.tune.tune_tasks(
                tasks=contexts,
                task_weights=[1.0] * len(contexts),
                work_dir=work_dir,
                max_trials_global=trials,
                num_trials_per_iter=round_size(trials, len(contexts), deadline - time.monotonic()),
                builder=builder,
                runner=runner,
                database=ms.database.MemoryDatabase(),
                cost_model=model.model,
                measure_callbacks=[
                    # Before the model learns from the same candidates.
                    _Collect(list(workloads), contexts, model, keep),
                    ms.measure_callback.AddToDatabase(),
                    ms.measure_callback.UpdateCostModel(),
                    ms.measure_callback.RemoveBuildArtifact(),
                ],
                task_scheduler=ms.task_scheduler.GradientBased(seed=seed + 1),
            )
        model.save()
    return measured


def round_size(trials: int, workloads: int, seconds: float) -> int:
    """Return how many candidates of a workload are measured before the next one's turn.

    MetaSchedule rounds the trials up to whole rounds, so that a round must divide them; and it
    reports nothing until every workload had a round, so that these must fit in the time.
    """
    most = min(MAX_ROUND, max(trials // workloads, 1))
    if math.isfinite(seconds):
        most = min(most, max(int(seconds / (2 * workloads * TRIAL_SECONDS)), 1))
    return next(size for size in range(most, 0, -1) if trials % size == 0)


@derived_object
class _Builder(ms.builder.PyBuilder):
    """TVM's pool of build processes, kept from one round of the search to the next.

    `LocalBuilder` starts its processes anew each round, and each imports TVM first: with the few
    candidates that a round has here, that takes longer than building them.
    """

    def __init__(
        self,
        workers: int,
        initializer: Callable[[], None],
        deadline: float,
        interrupted: Callable[[], bool],
    ) -> None:
        super().__init__()
        self.deadline = deadline
        self.interrupted = interrupted
        self.stopped = False
        self.pool = PopenPoolExecutor(
            max_workers=workers,
            timeout=BUILD_SECONDS,
            initializer=initializer,
            maximum_process_uses=BUILDS_PER_PROCESS,
        )

    def build(self, inputs: Sequence[Any]) -> list[Any]:
        if self.interrupted():
            raise KeyboardInterrupt
        if time.monotonic() > self.deadline:
            self.stopped = True
            raise TimeoutError("the time for this search is over")
        results = []
        for result in self.pool.map_with_error_catching(
            build_candidate, [(one.mod, one.target) for one in inputs]
        ):
            if result.status == StatusKind.COMPLETE:
                results.append(ms.builder.BuilderResult(result.value, None))
            elif result.status == StatusKind.TIMEOUT:
                message = str(
                    Failure("timeout", f"it took longer than {BUILD_SECONDS:g} s to build")
                )
                results.append(ms.builder.BuilderResult(None, message))
            else:
                error = result.value
                message = f"{type(error).__name__}: {error}"
                results.append(ms.builder.BuilderResult(None, message))
        return results


@derived_object
class _Runner(ms.runner.PyRunner):
    """Measures candidates one after another, in a child process that none shares with a failed one.

    `LocalRunner` goes on in the process in which a candidate ran out of memory, where the next one
    then does as well.
    """

    def __init__(
        self,
        spec: KernelSpec,
        problem: AttentionProblem,
        cores: int,
        seconds: float,
        memory_bytes: int | None,
    ) -> None:
        super().__init__()
        self.task = (spec, problem, cores)
        self.seconds = seconds
        self.child = Child(memory_bytes)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        return [self.measure(str(one.artifact_path)) for one in inputs]

    def measure(self, path: str) -> Any:
        try:
            times = self.child.call("crash", self.seconds, run_candidate, path, *self.task)
        except CandidateFailed as error:
            return ms.runner.LocalRunnerFuture(error_message=str(error.failure))
        return ms.runner.LocalRunnerFuture(res=times)


@contextlib.contextmanager
def _interruptible(builder: Any, end_runner: Callable[[], None]) -> Iterator[None]:
    """End a search in the middle: MetaSchedule has no other way out than an error.

    The processes end here, however the search does; left to the garbage collector, TVM's pools
    may wait for themselves.
    """
    try:
        yield
    except Exception:
        if not builder._inst.stopped:
            raise
    finally:
        with uninterrupted():
            _shut_down(builder._inst.pool)
            end_runner()


def _shut_down(pool: PopenPoolExecutor) -> None:
    """End a pool's processes, those too that its threads are about to start."""
    threads = pool._threadpool
    threads.shutdown(wait=False, cancel_futures=True)
    while any(thread.is_alive() for thread in threads._threads):
        for worker in list(pool._worker_map.values()):
            stop(worker)
        time.sleep(0.01)
    pool.shutdown(wait=False)


class _CostModel:
    """MetaSchedule's XGBoost model, kept in a file so that the next key starts warm."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.model = ms.cost_model.XGBModel(
            config=ms.cost_model.xgb_model.XGBConfig(eta=LEARNING_RATE),
            num_warmup_samples=WARM_UP,
            num_tuning_cores=1,
        )
        if path is not None and path.exists():
            try:
                with _quiet():
                    self.model._inst.load(str(path))
            except Exception as error:  # whatever tar, NumPy and XGBoost raise for a damaged file
                raise CorruptDatabase(
                    f"The cost model {path} cannot be read ({type(error).__name__}); delete it, "
                    "and the next search starts without one."
                ) from error

    def guesses(self, context: Any, candidates: Sequence[Any]) -> list[float | None]:
        """Return what the model expects of candidates; an untrained one would draw at random."""
        inner = self.model._inst
        if inner.booster is None or inner.data_size < WARM_UP:
            return [None] * len(candidates)
        return [float(score) for score in self.model.predict(context, candidates)]

    def save(self) -> None:
        """Keep the model. Another process may do the same: the last one's stays, whole."""
        if self.path is None or self.model._inst.booster is None:
            return
        # Its own name ends in .tar, which decides the format.
        partial_path = self.path.with_name(f".{os.getpid()}-{self.path.name}")
        with _quiet():
            self.model._inst.save(str(partial_path))
        os.replace(partial_path, self.path)


def build_candidate(task: tuple[Any, Any]) -> str:
    """Build a candidate, in a child process, and return the path of its archive."""
    module, target = task
    path = str(Path(tempfile.mkdtemp(prefix="attentune-")) / f"candidate.{tar.output_format}")
    compile_module(module, target).export_library(path, fcompile=tar)
    return path


def run_candidate(
    path: str, spec: KernelSpec, problem: AttentionProblem, cores: int
) -> list[float]:
    """Return seconds of a built candidate, in a child process."""
    use_cores(cores)
    module = tvm.runtime.load_module(path)
    timed = module.time_evaluator(
        "main", tvm.cpu(), number=EVALUATOR.number, repeat=EVALUATOR.repeat,
        min_repeat_ms=EVALUATOR.min_repeat_ms,
    )  # fmt: skip
    return [float(seconds) for seconds in timed(*allocate(spec, problem)).results]


def allocate(spec: KernelSpec, problem: AttentionProblem) -> list[Any]:
    """Return arguments of a specialized kernel: masks and biases with the strides they have."""
    inputs: dict[str, Any] = random_inputs(problem)
    shape = (problem.batch, problem.q_heads, problem.seq_q, problem.value_dim)
    out = aligned(np.empty(shape, inputs["query"].dtype))
    if problem.layout == "bhsd":
        inputs |= {name: aligned(inputs[name]) for name in ("query", "key", "value")}
    return arguments.tensors(spec, problem, inputs, out)


@derived_object
class _Collect(ms.measure_callback.PyMeasureCallback):
    """Keep every result with its error's text, which MetaSchedule's database drops."""

    def __init__(
        self,
        workloads: list[Workload],
        contexts: list[Any],
        model: _CostModel,
        keep: Callable[[Measured], None],
    ) -> None:
        super().__init__()
        self.workloads = workloads
        self.contexts = contexts
        self.model = model
        self.keep = keep

    def apply(
        self,
        _scheduler: Any,
        task_id: int,
        candidates: Sequence[Any],
        builds: Sequence[Any],
        runs: Sequence[Any],
    ) -> None:
        workload = self.workloads[task_id]
        guesses = self.model.guesses(self.contexts[task_id], candidates)
        for candidate, build, run, guess in zip(candidates, builds, runs, guesses, strict=True):
            failure = None
            seconds = None
            if build.error_msg is not None:
                failure = classify(str(build.error_msg), "build")
            elif run.error_msg is not None:
                failure = classify(str(run.error_msg), "crash")
            else:
                times = sorted(float(t) for t in run.run_secs)
                seconds = times[len(times) // 2]
            trace = candidate.sch.trace
            parameters = workload.parameters(trace)
            self.keep(Measured(workload, parameters, seconds, failure, trace.as_json(), guess))


@contextlib.contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """Seed NumPy's global generator, which the cost model guesses from until it is trained."""
    state = np.random.get_state()
    np.random.seed(seed % (1 << 32))
    try:
        yield
    finally:
        np.random.set_state(state)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep XGBoost from remarking on the file names that MetaSchedule chooses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="tvm.s_tir.meta_schedule.cost_model")
        yield


def _silent() -> logging.Logger:
    logger = logging.getLogger("attentune.search.metaschedule")
    logger.setLevel(logging.CRITICAL)
    logger.propagate = False
    return logger


@contextlib.contextmanager
def _no_tables() -> Iterator[None]:
    """Keep MetaSchedule from printing its tables in a notebook, past its logger and with pandas."""
    name = "s_tir.meta_schedule.using_ipython"
    asked = tvm.get_global_func(name)
    tvm.register_global_func(name, lambda: False, override=True)
    try:
        yield
    finally:
        tvm.register_global_func(name, asked, override=True)


@contextlib.contextmanager
def _no_intrinsics() -> Iterator[None]:
    """Keep `TuneContext` from importing every tensor intrinsic of TVM, which takes 20 s.

    Variants register the intrinsics they use themselves. The module that is put in the place of
    the real one goes away afterwards, so that whoever wants the real one still gets it.
    """
    if _INTRINSICS in sys.modules:
        yield
        return
    placeholder = types.ModuleType(_INTRINSICS)
    sys.modules[_INTRINSICS] = placeholder
    try:
        yield
    finally:
        if sys.modules.get(_INTRINSICS) is placeholder:
            del sys.modules[_INTRINSICS]
            if vars(tvm.s_tir).get("tensor_intrin") is placeholder:
                del tvm.s_tir.tensor_intrin
