"""Tuning one key: the plan's batches in turn, until one of them holds a valid candidate."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from attentune.errors import NoValidCandidate
from attentune.interrupt import kept_apart
from attentune.kernels.spec import KernelSpec
from attentune.key import AttentionKey
from attentune.plan import Plan
from attentune.problem import AttentionProblem
from attentune.record import Loser, Record, counted
from attentune.search import gate
from attentune.search.bucket import PROBES, members
from attentune.search.child import CandidateFailed
from attentune.search.measure import Measured, search
from attentune.search.peaks import machine_peaks
from attentune.search.ranking import (
    WARM_UPS,
    Contender,
    MeasurementFailed,
    Ranking,
    rank,
)
from attentune.search.remote import Tracker
from attentune.search.roofline import SHARE, limit, reached, work
from attentune.search.worker import Worker, worker
from attentune.search.workload import Workload
from attentune.target import Target
from attentune.variant import Variant
from attentune.versions import current_versions, machine_name

# MetaSchedule's own order is no ranking: this many of its best are measured again, side by side.
FINALISTS = 10
# Of the time for a key, when the search ends and when the checks do.
SEARCH_SHARE = 0.7
CHECK_SHARE = 0.9

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """How to search.

    Attributes
    ----------
    trials : int
        Candidates to measure for a batch.
    seconds : float or None
        Time for a key: most of it for the search, the rest for checking and ranking.
    seed : int
        Of the search and of its inputs.
    run_seconds : float
        Time after which one call to a candidate counts as hung.
    memory_bytes : int or None
        Address space that a child process may use; None for no limit.
    level : str
        How close to the roofline is good enough; see `roofline.SHARE`.
    cost_model : Path or None
        File of the cost model.
    tracker : Tracker or None
        Whose machines measure; a child process of this one by default.
    """

    trials: int = 64
    seconds: float | None = None
    seed: int = 0
    run_seconds: float = 20.0
    memory_bytes: int | None = None
    level: str = "balanced"
    cost_model: Path | None = None
    tracker: Tracker | None = None


@dataclass(frozen=True)
class _Finalist:
    """A candidate that is measured again: a name for the child, and what it is."""

    name: str
    workload: Workload
    parameters: Mapping[str, int]
    trace: Any


@dataclass
class _Tuning:
    """The state of tuning one key."""

    key: AttentionKey
    problem: AttentionProblem
    target: Target
    variants: Mapping[str, Variant]
    options: Options
    emit: Callable[[Event], None]
    interrupted: Callable[[], bool]
    begun: float = field(default_factory=time.monotonic)
    losers: list[Loser] = field(default_factory=list)
    measured: int = 0
    corner_seconds: dict[str, list[float]] = field(default_factory=dict)

    @cached_property
    def limit(self) -> float | None:
        """Seconds that the problem takes at the share of the roofline that the level asks for."""
        here = self.target.is_cpu and self.options.tracker is None
        if not here or SHARE[self.options.level] is None:
            return None
        return limit(work(self.problem), machine_peaks(self.target), self.options.level)

    @property
    def budget(self) -> float:
        """Seconds for this key."""
        return math.inf if self.options.seconds is None else self.options.seconds

    def late(self, share: float = 1.0) -> bool:
        """Return whether a share of the time for this key is over."""
        return time.monotonic() > self.begun + share * self.budget

    def lose(
        self,
        variant: str,
        outcome: str,
        reason: str,
        parameters: Mapping[str, int] | None = None,
        samples: Sequence[float] = (),
    ) -> None:
        if self.interrupted():  # and that is what it failed of
            raise KeyboardInterrupt
        seconds = statistics.median(counted(samples)) if samples else None
        self.losers.append(
            Loser(variant, dict(parameters or {}), outcome, reason, seconds, tuple(samples))
        )
        self.emit(
            {"event": "lost", "variant": variant, "parameters": dict(parameters or {}),
             "outcome": outcome, "reason": reason}
        )  # fmt: skip

    def workloads(self, batch: Sequence[str]) -> list[Workload]:
        """Return what can be searched of a batch; note why the rest can not."""
        result: list[Workload] = []
        for name in batch:
            variant = self.variants.get(name)
            if variant is None:
                self.lose(
                    name, "unsupported",
                    f"this version has no kernel of it for {self.target.kind} targets",
                )  # fmt: skip
                continue
            reason = variant.supports(self.key, self.target)
            if reason is not None:
                self.lose(name, "unsupported", reason)
                continue
            result += self._structures(variant)
        return result

    def _structures(self, variant: Variant) -> list[Workload]:
        """Return a workload for each structure whose template applies."""
        result = []
        for structure in variant.structures(self.key, self.target):
            workload = Workload(
                variant, structure, self.key, self.problem, self.target,
                expanded=self.options.tracker is not None,
            )  # fmt: skip
            try:
                parameters = next(variant.points(self.key, self.target, structure), None)
                if parameters is None:
                    continue
                needed = variant.workspace(self.problem, self.target, parameters)
                if self.options.memory_bytes is not None and needed > self.options.memory_bytes:
                    reason = f"it needs {needed} bytes, and {self.options.memory_bytes} are allowed"
                    self.lose(variant.name, "memory", reason, structure)
                    continue
                variant.scheduled(self.key, self.target, parameters)
                workload.module()
            except Exception as error:  # a template may be anybody's, and raise anything
                reason = f"its template failed: {type(error).__name__}: {_first_line(error)}"
                self.lose(variant.name, "build", reason, structure)
            else:
                result.append(workload)
        return result

    def search(self, workloads: Sequence[Workload]) -> list[Measured]:
        """Let MetaSchedule measure candidates, and note those that failed."""

        def on_measured(one: Measured) -> None:
            self.measured += 1
            self.emit(
                {"event": "measured", "variant": one.workload.variant.name,
                 "parameters": dict(one.parameters), "seconds": one.seconds, "guess": one.guess,
                 "outcome": one.failure.outcome if one.failure else None}
            )  # fmt: skip
            if one.failure is not None:
                self.lose(
                    one.workload.variant.name, one.failure.outcome, one.failure.reason,
                    one.parameters,
                )  # fmt: skip

        return search(
            workloads,
            trials=self.options.trials,
            seed=self.options.seed,
            run_seconds=self.options.run_seconds,
            memory_bytes=self.options.memory_bytes,
            deadline=self.begun + SEARCH_SHARE * self.budget,
            cost_model=self.options.cost_model,
            tracker=self.options.tracker,
            on_measured=on_measured,
            interrupted=self.interrupted,
        )

    def finalists(
        self, workloads: Sequence[Workload], measured: Sequence[Measured]
    ) -> list[_Finalist]:
        """Return the best measured ones, each variant's best and each variant's default."""
        valid = sorted((m for m in measured if m.seconds is not None), key=_seconds)
        best_of_variant = {m.workload.variant.name: m for m in reversed(valid)}
        chosen = [*valid[:FINALISTS], *best_of_variant.values()]
        result: dict[tuple[Any, ...], _Finalist] = {}
        for one in chosen:
            self._add(result, one.workload, one.parameters, one.trace)
        searched = {w.variant.name: w for w in reversed(workloads)}
        for workload in searched.values():
            defaults = workload.variant.defaults(self.key, self.target)
            self._add(result, workload, defaults, None)
        return list(result.values())

    def _add(
        self,
        finalists: dict[tuple[Any, ...], _Finalist],
        workload: Workload,
        parameters: Mapping[str, int],
        trace: Any,
    ) -> None:
        identity = (workload.variant.name, *sorted(parameters.items()))
        if identity not in finalists:
            name = f"{workload.variant.name}#{len(finalists)}"
            finalists[identity] = _Finalist(name, workload, dict(parameters), trace)

    def rank(self, finalists: Sequence[_Finalist]) -> Ranking[_Finalist]:
        """Build, check and time the symbolic kernels of the finalists."""
        order = list(self.variants)
        with worker(
            self.options.run_seconds, self.options.memory_bytes, self.options.tracker
        ) as child:
            passed: list[_Finalist] = []
            for one in finalists:
                # Out of time: those that are left were slower, or are defaults.
                if passed and self.late(CHECK_SHARE):
                    break
                if self._passes(child, one):
                    passed.append(one)
            self.emit({"event": "final", "candidates": len(passed)})

            def measure(one: _Finalist) -> float:
                try:
                    return self.bucket_seconds(child, one)
                except CandidateFailed as error:
                    raise MeasurementFailed(error.failure.outcome, error.failure.reason) from None

            return rank(
                [
                    Contender(
                        one,
                        order.index(one.workload.variant.name),
                        one.workload.variant.workspace(self.problem, self.target, one.parameters),
                    )
                    for one in passed
                ],
                measure,
                enough=self.enough,
            )

    def bucket_seconds(self, child: Worker, one: _Finalist) -> float:
        """Return what a finalist is ranked by: its time over the bucket, at the corner's work.

        A record serves all of its bucket, and a block that divides the corner may be mostly empty
        elsewhere. Times at other members are scaled by the work they are for; the geometric mean
        is a time at the corner of a kernel that does as well there as everywhere.
        """
        corner = child.time(one.name, self.problem)
        self.corner_seconds.setdefault(one.name, []).append(corner)
        scaled = [corner] + [
            child.time(one.name, member) * work(self.problem).flops / max(work(member).flops, 1)
            for member in members(self.problem, PROBES)
            if member != self.problem
        ]
        return statistics.geometric_mean(scaled)

    def samples_at_corner(self, one: _Finalist) -> list[float]:
        """Return a finalist's times at the representative, without the warm-up."""
        return self.corner_seconds.get(one.name, [])[WARM_UPS:]

    def enough(self, samples: Sequence[float]) -> bool:
        """Return whether to stop sampling: out of time, or as close to the roofline as asked."""
        return self.late() or reached(samples, self.limit)

    def _passes(self, child: Worker, one: _Finalist) -> bool:
        variant = one.workload.variant
        try:
            module = variant.scheduled(self.key, self.target, one.parameters)
            child.load(one.name, module, self.target, KernelSpec.from_key(self.key))
            child.check(one.name, gate.checks(self.key, self.problem, self.options.seed))
        except CandidateFailed as error:
            self.lose(variant.name, error.failure.outcome, error.failure.reason, one.parameters)
            return False
        return True


def tune_key(
    key: AttentionKey,
    problem: AttentionProblem,
    plan: Plan,
    variants: Mapping[str, Variant],
    options: Options,
    emit: Callable[[Event], None] = lambda event: None,
) -> Record:
    """Find the best candidate for a key.

    Parameters
    ----------
    key : AttentionKey
        What to tune.
    problem : AttentionProblem
        The representative that is measured.
    plan : Plan
        The batches, and the target.
    variants : Mapping
        Variants by name, in the order of registration. A name of the plan that is missing here
        is unsupported.
    options : Options
        How long, how, and from which seed.
    emit : Callable
        Told of everything that happens, one event at a time.

    Returns
    -------
    Record
        The winner, with every loser and its reason.

    Raises
    ------
    NoValidCandidate
        If no batch holds a valid candidate.
    """
    with kept_apart() as interrupted:
        state = _Tuning(key, problem, plan.target, variants, options, emit, interrupted)
        return _first_valid(state, plan)


def _first_valid(state: _Tuning, plan: Plan) -> Record:
    """Return the record of the first batch that holds a valid candidate."""
    for index, batch in enumerate(plan.batches):
        state.emit({"event": "batch", "index": index, "variants": list(batch)})
        workloads = state.workloads(batch)
        if not workloads:
            continue
        finalists = state.finalists(workloads, state.search(workloads))
        ranking = state.rank(finalists)
        for standing in ranking.losers:
            one = standing.contender.candidate
            state.lose(
                one.workload.variant.name, str(standing.outcome), standing.reason,
                one.parameters, state.samples_at_corner(one),
            )  # fmt: skip
        if ranking.winner is not None:
            return _record(state, ranking, batch)
    raise NoValidCandidate(state.key, state.losers)


def _record(state: _Tuning, ranking: Ranking[_Finalist], batch: Sequence[str]) -> Record:
    winner = ranking.winner
    if winner is None or winner.score is None:
        raise NoValidCandidate(state.key, state.losers)
    one = winner.contender.candidate
    return Record(
        key=state.key,
        target=str(state.target),
        variant=one.workload.variant.name,
        parameters=dict(one.parameters),
        seconds_all=tuple(state.samples_at_corner(one)),
        score=winner.score,
        losers=tuple(state.losers),
        versions=current_versions(),
        fingerprint=one.workload.variant.fingerprint(),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        machine=machine_name(),
        batch=tuple(batch),
        trace=one.trace,
        workspace_bytes=winner.contender.memory_bytes,
    )


def _seconds(measured: Measured) -> float:
    return measured.seconds if measured.seconds is not None else float("inf")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
