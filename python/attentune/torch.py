"""PyTorch's scaled dot product attention, computed by our kernels on CPUs.

`scaled_dot_product_attention` has the signature and the meaning of PyTorch's own: a boolean mask
keeps where it is True, ``is_causal`` begins at the first key, and axes before the heads are free.
It is one operator of PyTorch's, so that ``torch.compile`` and ``torch.export`` take it as it is.
What it does not serve, PyTorch's own does, with one warning for each reason.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attentune import api
from attentune.errors import RecordNotFound, Unsupported
from attentune.problem import DTYPES

_pytorch = torch.nn.functional.scaled_dot_product_attention
_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
_lock = threading.Lock()
_serving: list[Callable[..., Any]] = []  # the innermost of `enabled` last
_warned: set[str] = set()


@torch.library.custom_op(
    "attentune::attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, bool is_causal, "
    "float? scale) -> Tensor",
)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    serve = _serving[-1] if _serving else api.attention
    try:
        result: Tensor = serve(
            query, key, value, mask=mask, bias=bias, is_causal=is_causal,
            causal_alignment="top_left", scale=scale,
        )  # fmt: skip
    except (RecordNotFound, Unsupported) as error:
        _warn(f"no kernel serves a call ({type(error).__name__})")
        result = _pytorch(
            query, key, value, mask if bias is None else bias, 0.0, is_causal, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        ).contiguous()  # fmt: skip
    return result


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_options: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention as ``torch.nn.functional.scaled_dot_product_attention`` does.

    Parameters
    ----------
    query : Tensor
        ``[..., q_heads, seq_q, head_dim]``; float32, float16 or bfloat16, on the CPU.
    key, value : Tensor
        ``[..., kv_heads, seq_kv, head_dim]`` and ``[..., kv_heads, seq_kv, value_dim]``.
    attn_mask : Tensor, optional
        Broadcasts over ``[..., q_heads, seq_q, seq_kv]``: boolean, True where a key takes part, or
        of a float type and added to the scores.
    dropout_p : float
        Above 0, PyTorch computes.
    is_causal : bool
        Whether query i sees the keys up to i.
    scale : float, optional
        ``1 / sqrt(head_dim)`` by default.
    enable_gqa : bool
        Whether there may be fewer KV heads than query heads.

    Returns
    -------
    Tensor
        ``[..., q_heads, seq_q, value_dim]``. A query that sees no key gives 0.

    Warns
    -----
    UserWarning
        Once for each reason why PyTorch computes: dropout, gradients, other devices and types,
        shapes that only broadcast.
    """
    reason = _unserved(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if reason is not None:
        _warn(reason)
        return _pytorch(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    mask = attn_mask if attn_mask is not None and attn_mask.dtype == torch.bool else None
    bias = attn_mask if mask is None else None
    leading = query.shape[:-3]
    result: Tensor = _attention(
        *(_rank4(tensor) for tensor in (query, key, value)),
        *(_rank4_mask(tensor, query) for tensor in (mask, bias)),
        is_causal,
        scale,
    )
    if query.dim() == 4:
        return result
    return result.reshape(*leading, *query.shape[-3:-1], value.shape[-1])


@contextlib.contextmanager
def enabled(serve: Callable[..., Any] | None = None) -> Iterator[None]:
    """Have the whole process's ``scaled_dot_product_attention`` served by our kernels.

    Models that call PyTorch's function through ``torch.nn.functional`` need not be changed.

    Parameters
    ----------
    serve : Callable, optional
        A library, or anything callable like `attentune.attention`, which is the default.

    Examples
    --------
    >>> import attentune, attentune.torch
    >>> with attentune.torch.enabled(attentune.load_library("a.so")):  # doctest: +SKIP
    ...     model(**batch)
    """
    one = api.attention if serve is None else serve
    with _lock:
        _serving.append(one)
        torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        with _lock:
            # The last of its kind: blocks of other threads may have begun since.
            _serving.reverse()
            _serving.remove(one)
            _serving.reverse()
            if not _serving:
                torch.nn.functional.scaled_dot_product_attention = _pytorch


def _unserved(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> str | None:
    """Say why PyTorch has to compute a call, None if we do."""
    tensors = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    if dropout_p > 0:
        return "dropout"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "gradients"
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return "tensors on another device than the CPU"
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        return "element types other than float32, float16 and bfloat16"
    if attn_mask is not None and (is_causal or attn_mask.dtype not in (torch.bool, *_DTYPES)):
        return "a mask of another type, or beside is_causal"
    # PyTorch says what is wrong with shapes, and broadcasts some that we do not.
    rank = query.dim()
    if rank < 2 or not rank == key.dim() == value.dim():
        return "shapes that broadcast or do not fit"
    heads = (query.shape[-3], key.shape[-3]) if rank > 2 else (1, 1)
    grouped = enable_gqa and rank > 3 and heads[1] > 0 and heads[0] % heads[1] == 0
    if (
        query.shape[:-3] != key.shape[:-3]
        or key.shape[:-1] != value.shape[:-1]
        or query.shape[-1] != key.shape[-1]
        or not (heads[0] == heads[1] or grouped)
        or 0 in (query.shape[-1], value.shape[-1])
        or not _broadcasts(attn_mask, query, key)
    ):
        return "shapes that broadcast or do not fit"
    return None


def _broadcasts(mask: Tensor | None, query: Tensor, key: Tensor) -> bool:
    if mask is None:
        return True
    full = (*query.shape[:-1], key.shape[-2])
    own = (1,) * (len(full) - mask.dim()) + tuple(mask.shape)
    return len(own) == len(full) and all(
        extent in (1, whole) for extent, whole in zip(own, full, strict=True)
    )


def _rank4(tensor: Tensor) -> Tensor:
    """Return a view with one axis before the heads, where strides allow it."""
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() < 4:
        return tensor[(None,) * (4 - tensor.dim())]
    return tensor.flatten(0, -4)


def _rank4_mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    if mask is None or (query.dim() <= 4 and mask.dim() == 4):
        return mask
    rank = max(query.dim(), 4)
    mask = mask[(None,) * (rank - mask.dim())]
    if rank == 4:
        return mask
    if all(extent == 1 for extent in mask.shape[: rank - 3]):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*query.shape[: rank - 3], *mask.shape[-3:]).flatten(0, -4)


def _warn(reason: str) -> None:
    if torch.compiler.is_compiling() or reason in _warned:
        return
    _warned.add(reason)
    warnings.warn(
        f"attentune leaves attention to PyTorch here: {reason}.", UserWarning, stacklevel=3
    )
