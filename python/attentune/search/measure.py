"""MetaSchedule's search over the workloads of one batch."""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.support.popen_pool import PopenPoolExecutor, StatusKind
from tvm.support.tar import tar

from attentune import arguments, arrays
from attentune.compile import compile_module
from attentune.kernels.spec import KernelSpec
from attentune.problem import AttentionProblem
from attentune.search.failure import Failure, classify
from attentune.search.inputs import random_inputs
from attentune.search.workload import Workload
from attentune.threads import use_cores

BUILD_SECONDS = 60.0
# TVM's build processes grow; they are replaced after this many candidates.
BUILDS_PER_PROCESS = 200
# XGBoost guesses at random until it has seen this many candidates.
WARM_UP = 16
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
    """

    workload: Workload
    parameters: Mapping[str, int]
    seconds: float | None
    failure: Failure | None
    trace: Any


def search(
    workloads: Sequence[Workload],
    *,
    trials: int,
    seed: int,
    run_seconds: float,
    memory_bytes: int | None = None,
    runner: Any = None,
    on_measured: Callable[[Measured], None] = lambda measured: None,
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
        Of the search. The same seed proposes the same first candidates.
    run_seconds : float
        Time after which a measurement counts as hung.
    memory_bytes : int, optional
        Address space that a child process may use.
    runner : meta_schedule.Runner, optional
        Where to measure; by default a child process of this machine.
    on_measured : Callable
        Told of each candidate as it is measured.

    Returns
    -------
    list of Measured
        In the order of measurement.
    """
    problem, key, target = workloads[0].problem, workloads[0].key, workloads[0].target
    limit = partial(limit_memory, memory_bytes)
    builder = _Builder(min(target.num_cores, 4), limit)
    if runner is None:
        runner = ms.runner.LocalRunner(
            timeout_sec=run_seconds,
            evaluator_config=ms.runner.EvaluatorConfig(number=1, repeat=3, min_repeat_ms=5),
            f_alloc_argument=partial(allocate, KernelSpec.from_key(key), problem, target.num_cores),
            initializer=limit,
        )
    measured: list[Measured] = []

    def keep(one: Measured) -> None:
        measured.append(one)
        on_measured(one)

    with _no_intrinsics(), tempfile.TemporaryDirectory() as work_dir:
        contexts = [
            ms.TuneContext(
                workload.module(),
                target=target.to_tvm(),
                space_generator=workload.space(seed + index),
                search_strategy=ms.search_strategy.EvolutionarySearch(
                    population_size=32, init_min_unmeasured=16, genetic_num_iters=2
                ),
                task_name=workload.name,
                rand_state=seed + index + 1,
                num_threads=1,
                logger=_silent(),
            )
            for index, workload in enumerate(workloads)
        ]
        ms.tune.tune_tasks(
            tasks=contexts,
            task_weights=[1.0] * len(contexts),
            work_dir=work_dir,
            max_trials_global=trials,
            num_trials_per_iter=max(1, min(16, trials // len(contexts))),
            builder=builder,
            runner=runner,
            database=ms.database.MemoryDatabase(),
            cost_model=ms.cost_model.XGBModel(num_warmup_samples=WARM_UP, num_tuning_cores=1),
            measure_callbacks=[
                _Collect(list(workloads), keep),
                ms.measure_callback.AddToDatabase(),
                ms.measure_callback.UpdateCostModel(),
                ms.measure_callback.RemoveBuildArtifact(),
            ],
            task_scheduler=ms.task_scheduler.GradientBased(seed=seed + 1),
        )
    return measured


@derived_object
class _Builder(ms.builder.PyBuilder):
    """TVM's pool of build processes, kept from one round of the search to the next.

    `LocalBuilder` starts its processes anew each round, and each imports TVM first: with the few
    candidates that a round has here, that takes longer than building them.
    """

    def __init__(self, workers: int, initializer: Callable[[], None]) -> None:
        super().__init__()
        self.pool = PopenPoolExecutor(
            max_workers=workers,
            timeout=BUILD_SECONDS,
            initializer=initializer,
            maximum_process_uses=BUILDS_PER_PROCESS,
        )

    def build(self, inputs: Sequence[Any]) -> list[Any]:
        results = []
        for result in self.pool.map_with_error_catching(
            build_candidate, [(one.mod, one.target) for one in inputs]
        ):
            if result.status == StatusKind.COMPLETE:
                results.append(ms.builder.BuilderResult(result.value, None))
            elif result.status == StatusKind.TIMEOUT:
                message = f"timeout: it took longer than {BUILD_SECONDS:g} s to build"
                results.append(ms.builder.BuilderResult(None, message))
            else:
                error = result.value
                message = f"{type(error).__name__}: {error}"
                results.append(ms.builder.BuilderResult(None, message))
        return results


def build_candidate(task: tuple[Any, Any]) -> str:
    """Build a candidate, in a child process, and return the path of its archive."""
    module, target = task
    path = str(Path(tempfile.mkdtemp(prefix="attentune-")) / f"candidate.{tar.output_format}")
    compile_module(module, target).export_library(path, fcompile=tar)
    return path


def allocate(
    spec: KernelSpec,
    problem: AttentionProblem,
    cores: int,
    _device: Any,
    _info: Any,
    repeat: int,
) -> list[list[Any]]:
    """Return arguments of a specialized kernel: masks and biases with the strides they have."""
    use_cores(cores)
    inputs = random_inputs(problem)
    shape = (problem.batch, problem.q_heads, problem.seq_q, problem.value_dim)
    out = arrays.empty_like(inputs["query"], shape)
    return [arguments.tensors(spec, problem, inputs, out) for _ in range(repeat)]


def limit_memory(memory_bytes: int | None) -> None:
    """Keep this process, a child, from taking more address space than it was given."""
    if memory_bytes is None or sys.platform == "win32":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


@derived_object
class _Collect(ms.measure_callback.PyMeasureCallback):
    """Keep every result with its error's text, which MetaSchedule's database drops."""

    def __init__(self, workloads: list[Workload], keep: Callable[[Measured], None]) -> None:
        super().__init__()
        self.workloads = workloads
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
        for candidate, build, run in zip(candidates, builds, runs, strict=True):
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
            self.keep(
                Measured(workload, workload.parameters(trace), seconds, failure, trace.as_json())
            )


def _silent() -> logging.Logger:
    logger = logging.getLogger("attentune.search.metaschedule")
    logger.setLevel(logging.CRITICAL)
    logger.propagate = False
    return logger


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
