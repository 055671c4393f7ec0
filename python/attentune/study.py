"""Two questions about the search itself, answered by measuring.

Regret: a record is tuned at one corner of its bucket and serves all of it; how much slower is its
kernel at other members than the best candidate would be there? Strategies: what does evolution
find that random draws do not find in as many trials, and what does the search cost beside building
and measuring?
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from attentune import api
from attentune.bench import contestant, interleave
from attentune.database import Database
from attentune.key import AttentionKey
from attentune.problem import AttentionProblem
from attentune.search.bucket import members, resized
from attentune.search.inputs import random_inputs
from attentune.target import Target

REGRET_PROBLEMS = (
    "1,12,12,384,384,64,64:float32:mask=padding",
    "1,8,8,512,512,64,64:float32:causal",
    "1,32,8,512,512,128,128:float32:causal",
    "1,8,8,512,512,64,64:bfloat16",
)
STRATEGY_PROBLEMS = (
    "1,8,8,512,512,64,64:float32",
    "1,16,4,256,1024,128,128:float32:causal",
)
# Places in a bucket, from just above the next smaller one to its upper end.
PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)
CHECKPOINTS = (16, 32, 64)


def _corner(problem: AttentionProblem) -> AttentionProblem:
    """Return a problem with its lengths at the upper end of their buckets."""
    key = AttentionKey.from_problem(problem)
    return resized(problem, problem.batch, problem.q_heads, problem.kv_heads, key.seq_q, key.seq_kv)


def regret(
    problems: Sequence[AttentionProblem],
    target: Target,
    database: Database | None = None,
    trials: int = 64,
    rounds: int = 3,
) -> Iterator[dict[str, Any]]:
    """Yield, for each member of each problem's bucket, how a record's kernel does there.

    Yields
    ------
    dict
        problem (the member), key, seconds (of the record's kernel), best (seconds of the best
        candidate), regret (the one over the other), and winner and best_candidate, named.
    """
    for problem in problems:
        (record,) = api.tune(problem, target, database, trials=trials)
        kernels = api.candidates(record)
        for member in members(_corner(problem), PLACES):
            inputs = random_inputs(member)
            turns = [
                contestant(kernel, member, inputs, True, name=str(place))
                for place, kernel in enumerate(kernels)
            ]
            timings = interleave(turns, rounds=rounds, block_seconds=0.03, gap_seconds=0.0)
            seconds = {name: timing.seconds for name, timing in timings.items()}
            best = min(seconds, key=lambda name: seconds[name])
            yield {
                "problem": str(member),
                "key": str(record.key),
                "seconds": seconds["0"],
                "best": seconds[best],
                # Both medians are of the same rounds.
                "regret": seconds["0"] / seconds[best],
                "winner": turns[0].how,
                "best_candidate": turns[int(best)].how,
            }


def strategies(
    problems: Sequence[AttentionProblem],
    target: Target,
    trials: int = 64,
    seeds: Sequence[int] = (0, 1, 2),
) -> Iterator[dict[str, Any]]:
    """Yield what each search strategy finds in a number of trials, over some seeds.

    Yields
    ------
    dict
        problem, strategy, trials, found (the median over the seeds of the best time in seconds
        after each of `CHECKPOINTS`), candidates (how many there are) and wall (seconds a search).
    """
    from attentune.search.measure import STRATEGIES, search
    from attentune.search.workload import Workload

    for problem in problems:
        key = AttentionKey.from_problem(problem)
        workloads = [
            Workload(variant, structure, key, key.representative(), target)
            for variant in api.supported(key, target)
            for structure in variant.structures(key, target)
        ]
        size = sum(1 for w in workloads for _ in w.variant.points(key, target, w.structure))
        for strategy in STRATEGIES:
            curves, walls = [], []
            for seed in seeds:
                start = time.perf_counter()
                measured = search(
                    workloads, trials=trials, seed=seed, run_seconds=20.0, strategy=strategy
                )
                walls.append(time.perf_counter() - start)
                times = [one.seconds or float("inf") for one in measured]
                curves.append([min(times[:count]) for count in CHECKPOINTS if count <= trials])
            yield {
                "problem": str(problem),
                "strategy": strategy,
                "trials": trials,
                "found": [statistics.median(column) for column in zip(*curves, strict=True)],
                "candidates": size,
                "wall": statistics.median(walls),
            }


def overhead(problem: AttentionProblem, target: Target, trials: int = 64) -> dict[str, Any]:
    """Return what share of tuning a problem is neither building nor measuring.

    Returns
    -------
    dict
        problem, trials, wall (seconds), busy (seconds of building, measuring and the final) and
        overhead (the share of the rest).
    """
    from tvm.s_tir.meta_schedule import Profiler

    marks: dict[str, float] = {}

    def mark(event: Any) -> None:
        marks[event["event"]] = time.perf_counter()

    start = time.perf_counter()
    with Profiler() as profiler:
        api.tune(problem, target, trials=trials, on_event=mark)
    wall = time.perf_counter() - start
    spent = {name: float(seconds) for name, seconds in profiler.get().items()}
    final = marks["record"] - marks["measured"]
    busy = final + sum(
        spent.get(name, 0.0) for name in ("SendToBuilder", "SendToRunner", "JoinRunnerFutures")
    )
    return {
        "problem": str(problem),
        "trials": trials,
        "wall": wall,
        "busy": busy,
        "overhead": 1 - busy / wall,
    }
