"""The oracle: attention in float64 on NumPy, written for clarity.

Every kernel is compared with it and with nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attentune.errors import InvalidProblem
from attentune.problem import AttentionProblem

Array = np.ndarray[Any, Any]

# Scores of this many elements are held at a time.
_BLOCK_SCORES = 1 << 22


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    is_causal: bool = False,
    causal_alignment: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute attention in float64.

    ``scores = scale * Q K^T``; capped, ``softcap * tanh(scores / softcap)``; -inf where masked,
    beyond the diagonal or outside the window; plus the bias; softmax over the keys; times V.

    Parameters
    ----------
    query : ndarray
        ``[batch, q_heads, seq_q, head_dim]``, any float type, ml_dtypes' bfloat16 among them.
    key, value : ndarray
        ``[batch, kv_heads, seq_kv, head_dim]`` and ``[batch, kv_heads, seq_kv, value_dim]``.
    mask : ndarray of bool, optional
        True where a key takes part; broadcasts from the right.
    bias : ndarray of float, optional
        Added to the scores; broadcasts from the right.
    is_causal, causal_alignment, window, scale, softcap
        As `attentune.attention` takes them.
    return_lse : bool
        Whether to return the logarithm of each row's sum of exponentials as well.

    Returns
    -------
    ndarray or (ndarray, ndarray)
        Output ``[batch, q_heads, seq_q, value_dim]`` in float64, 0 in rows that see no key; and the
        logarithms ``[batch, q_heads, seq_q]``, -inf in such rows.

    Raises
    ------
    InvalidProblem
        If the arguments do not fit together.

    Examples
    --------
    >>> import numpy as np, attentune
    >>> q, v = np.zeros((1, 1, 2, 4)), np.array([0.0, 1.0]).reshape(1, 1, 2, 1)
    >>> attentune.reference.attention(q, q, v, is_causal=True)[0, 0, :, 0].tolist()
    [0.0, 0.5]
    """
    q, k, v = (np.asarray(a) for a in (query, key, value))
    problem = _problem(q, k, v, mask, bias, is_causal, causal_alignment, window, scale, softcap)
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, problem.group, axis=1) for a in (k, v))
    full = (problem.batch, problem.q_heads, problem.seq_q, problem.seq_kv)
    visible = None if mask is None else np.broadcast_to(np.asarray(mask), full)
    added = None if bias is None else np.broadcast_to(np.asarray(bias).astype(np.float64), full)
    out = np.zeros((*full[:3], problem.value_dim))
    lse = np.full(full[:3], -np.inf)
    rows = max(_BLOCK_SCORES // max(full[0] * full[1] * full[3], 1), 1)
    for begin in range(0, problem.seq_q, rows):
        block = slice(begin, min(begin + rows, problem.seq_q))
        out[:, :, block], lse[:, :, block] = _rows(
            problem,
            q[:, :, block],
            k,
            v,
            None if visible is None else visible[:, :, block],
            None if added is None else added[:, :, block],
            np.arange(block.start, block.stop),
        )
    return (out, lse) if return_lse else out


def expected(problem: AttentionProblem, inputs: Mapping[str, Array]) -> Array:
    """Return the output of a problem in float64.

    Parameters
    ----------
    problem : AttentionProblem
        Whose options are taken.
    inputs : Mapping
        Arrays by the names query, key, value and, where the problem has them, mask and bias.
    """
    output: Array = attention(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        mask=inputs.get("mask"),
        bias=inputs.get("bias"),
        is_causal=problem.is_causal,
        causal_alignment=problem.causal_alignment,
        window=problem.window,
        scale=problem.scale,
        softcap=problem.softcap,
    )
    return output


def _rows(
    problem: AttentionProblem,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    bias: Array | None,
    queries: Array,
) -> tuple[Array, Array]:
    """Return output and log-sum-exp of some of the queries."""
    keys = np.arange(problem.seq_kv)
    # Infinite and NaN inputs give NaN by the rules of arithmetic, which is what is wanted.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scores = problem.scale_value * (q @ k.swapaxes(-1, -2))
        if problem.softcap is not None:
            scores = problem.softcap * np.tanh(scores / problem.softcap)
        offset = keys[None, :] - queries[:, None]
        lower, upper = problem.bounds
        if lower is not None:
            scores = np.where(offset >= lower, scores, -np.inf)
        if upper is not None:
            scores = np.where(offset <= upper, scores, -np.inf)
        if mask is not None:
            scores = np.where(mask, scores, -np.inf)
        if bias is not None:
            scores = scores + bias
        top = np.max(scores, axis=-1, initial=-np.inf, keepdims=True)
        shift = np.where(top == -np.inf, 0.0, top)
        weights = np.exp(scores - shift)
        total = weights.sum(axis=-1, keepdims=True)
        unseen = total == 0
        out = np.where(unseen, 0.0, (weights @ v) / np.where(unseen, 1.0, total))
        lse = np.where(unseen, -np.inf, shift + np.log(np.where(unseen, 1.0, total)))
    return out, lse[..., 0]


def _problem(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    bias: Array | None,
    is_causal: bool,
    causal_alignment: str,
    window: tuple[int | None, int | None] | None,
    scale: float | None,
    softcap: float | None,
) -> AttentionProblem:
    """Check the arguments and return them as a problem."""
    for name, array in (("query", q), ("key", k), ("value", v)):
        if array.ndim != 4:
            raise InvalidProblem(
                f"{name} has shape {array.shape}; it must have four axes, [batch, heads, seq, dim]."
            )
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or v.shape[:3] != k.shape[:3]:
        raise InvalidProblem(
            f"query, key and value have the shapes {q.shape}, {k.shape} and {v.shape}; batch must "
            "be equal, head_dim of query and key, and all but the last axis of key and value."
        )
    if mask is not None and np.asarray(mask).dtype != np.bool_:
        raise InvalidProblem(
            f"mask has the element type {np.asarray(mask).dtype}; a mask is boolean: pass values "
            "to be added as bias."
        )
    if bias is not None and np.asarray(bias).dtype.kind in "bui":
        raise InvalidProblem(
            f"bias has the element type {np.asarray(bias).dtype}; a bias is a float: pass a "
            "boolean one as mask."
        )
    return AttentionProblem(
        batch=q.shape[0],
        q_heads=q.shape[1],
        kv_heads=k.shape[1],
        seq_q=q.shape[2],
        seq_kv=k.shape[2],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        dtype="float32",
        mask=None if mask is None else tuple(np.asarray(mask).shape),
        bias=None if bias is None else tuple(np.asarray(bias).shape),
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        window=window,
        scale=scale,
        softcap=softcap,
    )
