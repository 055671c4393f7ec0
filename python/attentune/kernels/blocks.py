"""Which blocks of keys a block of queries has to visit."""

from __future__ import annotations

from typing import Any

from tvm import tirx

Expr = Any
_ALL_QUERIES = 1 << 40  # more than there are: the block that holds every query


def first(block: Expr, lower: Expr | None, block_q: int, block_kv: int) -> Expr:
    """Return the index of the first block of keys that a block of queries can see.

    Parameters
    ----------
    block : Expr
        Index of the block of queries.
    lower : Expr or None
        Least ``key - query`` that is visible.
    block_q, block_kv : int
        Extents of the blocks.
    """
    if lower is None:
        return tirx.IntImm("int64", 0)
    return tirx.floordiv(tirx.max(block * tirx.IntImm("int64", block_q) + lower, 0), block_kv)


def count(
    block: Expr,
    seq_q: Expr,
    seq_kv: Expr,
    lower: Expr | None,
    upper: Expr | None,
    block_q: int,
    block_kv: int,
) -> Expr:
    """Return how many blocks of keys a block of queries can see, from `first` on.

    ``upper`` is the greatest ``key - query`` that is visible; the rest is as in `first`.
    """
    end = seq_kv
    if upper is not None:
        last_query = tirx.min((block + 1) * tirx.IntImm("int64", block_q), seq_q) - 1
        end = tirx.max(tirx.min(seq_kv, last_query + upper + 1), 0)
    end_block = tirx.floordiv(end + (block_kv - 1), block_kv)
    if lower is None:
        return end_block
    return tirx.max(end_block - first(block, lower, block_q, block_kv), 0)


def part_first(
    part: Expr,
    seq_q: Expr,
    seq_kv: Expr,
    lower: Expr | None,
    upper: Expr | None,
    block_kv: int,
    splits: int,
) -> Expr:
    """Return the first block of keys of one of the parts that the visible keys are cut into.

    All queries together are one block here, as there are few. The rest is as in `count`.
    """
    whole = count(0, seq_q, seq_kv, lower, upper, _ALL_QUERIES, block_kv)
    begin = first(0, lower, _ALL_QUERIES, block_kv)
    return begin + tirx.floordiv(whole * part, splits)


def part_count(
    part: Expr,
    seq_q: Expr,
    seq_kv: Expr,
    lower: Expr | None,
    upper: Expr | None,
    block_kv: int,
    splits: int,
) -> Expr:
    """Return how many blocks of keys one of the parts has; it may be none."""
    whole = count(0, seq_q, seq_kv, lower, upper, _ALL_QUERIES, block_kv)
    return tirx.floordiv(whole * (part + 1), splits) - tirx.floordiv(whole * part, splits)
