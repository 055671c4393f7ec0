"""The least time that a problem can take on a machine, and when to stop looking for less.

Only arithmetic: the machine's peaks come from outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from attentune.errors import InvalidKey, InvalidParameters

if TYPE_CHECKING:
    from attentune.problem import AttentionProblem

# The share of the roofline that is good enough to stop the search, by level; None never stops it.
SHARE: dict[str, float | None] = {
    "minimal": 0.6,
    "balanced": 0.8,
    "extensive": 0.95,
    "full": None,
}
# One sample under the limit may be luck.
SAMPLES_UNDER_LIMIT = 2

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Work:
    """What any kernel has to do for a problem.

    Parameters
    ----------
    flops : int
        Multiplications and additions of the two products, over visible keys only.
    bytes : int
        Bytes that have to cross memory once.
    """

    flops: int
    bytes: int


@dataclass(frozen=True)
class Peaks:
    """What a machine can do at best.

    Parameters
    ----------
    flops_per_second : float
        Multiplications and additions, in the type the products are computed in, on all cores.
    bytes_per_second : float
        Memory bandwidth.
    launch_seconds : float
        From the call of an empty kernel to its end.

    Raises
    ------
    InvalidParameters
        If a rate is not positive, the launch is negative, or one is not finite.
    """

    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            too_low = value < 0 if field.name == "launch_seconds" else value <= 0
            if too_low or not math.isfinite(value):
                raise InvalidParameters(
                    f"{field.name} is {value!r}; measure the machine's peaks again"
                )


def work(problem: AttentionProblem) -> Work:
    """Return the operations and bytes that `problem` takes at least.

    With `visited` the query and key pairs that causality and the window leave, and `rows` the
    queries with a key among them, a pair costs 2 D - 1 operations of the first product and a row
    2 n - 1 for each of Dv values of the second, n being its keys. The softmax and what a mask
    hides are not counted: the one is a matter of the kernel, the other of the data.

    Query, output and every key and value that some query may see count once, mask and bias as they
    are stored, before broadcasting.
    """
    visited, rows, keys = _visible(problem)
    heads = problem.batch * problem.q_heads
    flops = heads * visited * (2 * problem.head_dim - 1)
    flops += heads * problem.value_dim * (2 * visited - rows)

    dims = problem.head_dim + problem.value_dim
    items = heads * problem.seq_q * dims + problem.batch * problem.kv_heads * keys * dims
    total = items * _ITEM_BYTES[problem.dtype]
    if problem.mask is not None:
        total += math.prod(problem.mask)
    if problem.bias is not None:
        total += math.prod(problem.bias) * _ITEM_BYTES[problem.bias_dtype or problem.dtype]
    return Work(flops, total)


def ideal(work: Work, peaks: Peaks) -> float:
    """Return the seconds that `work` takes on a machine at its peaks, the launch included."""
    return _bound(work, peaks) + peaks.launch_seconds


def limit(work: Work, peaks: Peaks, level: str) -> float | None:
    """Return the seconds under which a kernel is good enough to end a search.

    Parameters
    ----------
    work : Work
        See `work`.
    peaks : Peaks
        The machine's.
    level : str
        How thorough the search is, a key's level.

    Returns
    -------
    float or None
        None at level ``"full"``, which looks at everything.

    Raises
    ------
    InvalidKey
        If there is no such level.
    """
    if level not in SHARE:
        raise InvalidKey(f"level is {level!r}; choose one of {', '.join(SHARE)}")
    share = SHARE[level]
    return None if share is None else _bound(work, peaks) / share + peaks.launch_seconds


def reached(samples: Sequence[float], limit: float | None) -> bool:
    """Return whether two of `samples` are under `limit`, which ends the batch.

    Parameters
    ----------
    samples : sequence of float
        One candidate's times in seconds.
    limit : float or None
        From `limit`; None is never reached.
    """
    return limit is not None and sum(s < limit for s in samples) >= SAMPLES_UNDER_LIMIT


def _bound(work: Work, peaks: Peaks) -> float:
    return max(work.flops / peaks.flops_per_second, work.bytes / peaks.bytes_per_second)


def _visible(problem: AttentionProblem) -> tuple[int, int, int]:
    """Count the visible pairs, the queries that see a key, and the keys that a query sees."""
    queries, keys = problem.seq_q, problem.seq_kv
    if not keys:
        return 0, 0, 0
    lower, upper = problem.bounds
    # Wide enough to bind nobody.
    lower = -queries if lower is None else lower
    upper = keys if upper is None else upper
    # Query i sees keys max(i + lower, 0) to min(i + upper, keys - 1).
    pairs = _clamped_sum(queries, upper + 1, keys) - _clamped_sum(queries, lower, keys)
    first, last = max(0, -upper), min(queries - 1, keys - 1 - lower)
    rows = max(0, last - first + 1)
    seen = max(0, min(keys - 1, last + upper) - max(0, first + lower) + 1) if rows else 0
    return pairs, rows, seen


def _clamped_sum(count: int, offset: int, top: int) -> int:
    """Return the sum of i + offset, held between 0 and `top`, over i in range(count)."""

    def below(end: int) -> int:
        ramp = max(0, min(end, top))
        return ramp * (ramp - 1) // 2 + max(0, end - ramp) * top

    return below(count + offset) - below(offset)
