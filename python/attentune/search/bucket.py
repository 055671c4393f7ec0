"""Members of a key's bucket: what a record tuned at one corner has to be good at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attentune.problem import AttentionProblem

# Where a candidate is timed beside the corner: just above the next smaller bucket, where a block
# of queries or keys may be almost empty, and in the middle.
PROBES = (0.0, 0.5)


def members(corner: AttentionProblem, places: Sequence[float]) -> list[AttentionProblem]:
    """Return problems of the bucket that a problem is the upper corner of.

    Parameters
    ----------
    corner : AttentionProblem
        The representative of a key at level balanced; at other levels the bucket's lower end is
        taken to be where balanced has it.
    places : sequence of float
        0 for the lower end, 1 for the corner. Where the numbers of queries and keys differ, they
        are varied against each other.
    """
    result = []
    for place in places:
        other = place if corner.seq_q == corner.seq_kv else 1.0 - place
        result.append(
            resized(
                corner, corner.batch, corner.q_heads, corner.kv_heads,
                _within(corner.seq_q, place), _within(corner.seq_kv, other),
            )
        )  # fmt: skip
    return result


def _within(top: int, place: float) -> int:
    """Return a length in the bucket that ends at ``top``."""
    if top <= 2:  # a bucket of one length
        return top
    low = top // 2 + 1
    return low + round(place * (top - low))


def resized(
    problem: AttentionProblem, batch: int, q_heads: int, kv_heads: int, seq_q: int, seq_kv: int
) -> AttentionProblem:
    """Return a problem with other extents; axes that mask or bias broadcast stay broadcast."""
    full = (batch, q_heads, seq_q, seq_kv)

    def fit(stored: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if stored is None:
            return None
        return tuple(1 if old == 1 else new for old, new in zip(stored, full, strict=True))

    return replace(
        problem,
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        seq_q=seq_q,
        seq_kv=seq_kv,
        mask=fit(problem.mask),
        bias=fit(problem.bias),
    )
