"""What stands between the product of query and key and the softmax, as TensorIR expressions.

The order is the contract's: scale, cap, mask, bias. Keys beyond the end are masked like any
other, so a tail needs no code of its own.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx

from attentune.kernels.spec import KernelSpec

LOG2E = math.log2(math.e)

Expr = Any  # tvm.tirx expressions; TVM ships no stubs that say more


def minus_infinity() -> Expr:
    """Return float32 minus infinity."""
    return tirx.FloatImm("float32", -math.inf)


def float32(value: float) -> Expr:
    """Return a float32 constant."""
    return tirx.FloatImm("float32", value)


def query_factor(spec: KernelSpec, scale: Expr, softcap: Expr | None) -> Expr:
    """Return the factor that queries are multiplied by once, when they are loaded.

    It holds the scale, the division by the cap, and log2(e) where scores are in base 2.
    """
    if spec.softcap:
        return scale / softcap
    if spec.natural:
        return scale
    return scale * float32(LOG2E)


def score(
    spec: KernelSpec,
    product: Expr,
    query: Expr,
    key: Expr,
    first_query: Expr,
    first_key: Expr,
    seq_kv: Expr,
    *,
    softcap: Expr | None = None,
    mask: Expr | None = None,
    bias: Expr | None = None,
    lower: Expr | None = None,
    upper: Expr | None = None,
) -> Expr:
    """Return the score of one query and one key of a block.

    Indices within the block stay 32 bits wide: only what the whole block shares is 64.

    Parameters
    ----------
    spec : KernelSpec
        Says which options there are.
    product : Expr
        Query times key, with `query_factor` in it.
    query, key : Expr
        Indices within the block.
    first_query, first_key, seq_kv : Expr
        Where the block begins, and the number of keys.
    softcap, mask, bias, lower, upper : Expr
        The options' values for this query and key, where the spec has them.

    Returns
    -------
    Expr
        float32, in units of log2(e) unless ``spec.natural``; minus infinity where invisible.
    """
    value = product
    if spec.softcap:
        unit = 1.0 if spec.natural else LOG2E
        value = softcap * float32(unit) * tirx.tanh(value)
    visible = key < _narrow(seq_kv - first_key)
    if spec.lower:
        visible = tirx.all(visible, key - query >= _narrow(lower - (first_key - first_query)))
    if spec.upper:
        visible = tirx.all(visible, key - query <= _narrow(upper - (first_key - first_query)))
    if spec.mask != "none":
        visible = tirx.all(visible, mask)
    value = tirx.Select(visible, value, minus_infinity())
    return value if bias is None else value + bias.astype("float32")


def row(kind: str, query: Expr, seq_q: Expr) -> Expr:
    """Return the row of a mask or bias for a query, which may lie beyond the last."""
    return 0 if kind == "broadcast" else tirx.min(query, seq_q - 1)


def row_head(kv_head: Expr, row: Expr, seq_q: Expr, spec: KernelSpec) -> Expr:
    """Return the query head of a row of a group; rows beyond the last repeat it."""
    last = seq_q * spec.group - 1
    return kv_head * spec.group + tirx.floordiv(tirx.min(row, last), seq_q)


def row_query(row: Expr, seq_q: Expr, spec: KernelSpec) -> Expr:
    """Return the query of a row of a group; rows beyond the last repeat it."""
    return tirx.floormod(tirx.min(row, seq_q * spec.group - 1), seq_q)


def _narrow(offset: Expr) -> Expr:
    """Return an int64 offset as int32, held within what an index in a block can be compared to."""
    return tirx.max(tirx.min(offset, 1 << 24), -(1 << 24)).astype("int32")


def exponential(spec: KernelSpec, difference: Expr) -> Expr:
    """Return the exponential of a difference of two scores."""
    return tirx.exp2(difference * float32(LOG2E) if spec.natural else difference)


def finite(maximum: Expr) -> Expr:
    """Return a maximum that can be subtracted: 0 in place of minus infinity.

    A row that has seen no visible key has the maximum -inf, and -inf - -inf is NaN.
    """
    return tirx.Select(maximum == minus_infinity(), float32(0.0), maximum)
