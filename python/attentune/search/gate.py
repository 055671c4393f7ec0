"""The correctness gate: the problems on which a candidate must agree before it may win.

They lie in the key's bucket or below it, small enough to be quick: a tail in each length, one
query, few keys (where an error in a single one shows most), masked stretches and rows, logits of
about +-100, and every head of more than one group.
"""

from __future__ import annotations

from attentune.key import AttentionKey
from attentune.problem import AttentionProblem
from attentune.search.bucket import resized
from attentune.search.worker import Check

# Above this, the float64 reference of one check takes longer than building the candidate.
MAX_SCORES = 1 << 23


def checks(key: AttentionKey, representative: AttentionProblem, seed: int = 0) -> list[Check]:
    """Return the gate's problems for a key.

    Parameters
    ----------
    key : AttentionKey
        Whose kernel is to be checked.
    representative : AttentionProblem
        The problem that stands for the key; its options are the checks'.
    seed : int
        Of the inputs.
    """
    group = key.group
    heads = min(representative.kv_heads, 2)
    long_q, long_kv = representative.seq_q, representative.seq_kv
    while group * heads * long_q * long_kv > MAX_SCORES and max(long_q, long_kv) > 512:
        if long_q >= long_kv:
            long_q = long_q * 2 // 3
        else:
            long_kv = long_kv * 2 // 3
    tail_q, tail_kv = max(long_q - 3, 1), max(long_kv - 5, 1)
    lengths = [
        (1, long_q, long_kv, 1.0),
        (2, tail_q, tail_kv, 1.0),
        (1, min(long_q, 43), min(long_kv, 17), 1.0),
        (1, 1, min(tail_kv, 333), 1.0),
        (1, min(tail_q, 70), min(tail_kv, 197), 30.0),
    ]
    return [
        Check(
            resized(representative, batch, heads * group, heads, seq_q, seq_kv),
            seed + index,
            amplitude,
        )
        for index, (batch, seq_q, seq_kv, amplitude) in enumerate(lengths)
    ]
