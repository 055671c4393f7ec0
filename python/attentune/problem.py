"""One exact attention call: shapes, element types and options."""

from __future__ import annotations

import difflib
import math
import numbers
from dataclasses import dataclass
from typing import Any

from attentune.errors import InvalidProblem

DTYPES = ("float32", "float16", "bfloat16")
ALIGNMENTS = ("bottom_right", "top_left")
PRECISIONS = ("strict", "relaxed")
LAYOUTS = ("bhsd", "bshd", "strided")

Shape = tuple[int, int, int, int]
Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class AttentionProblem:
    """One exact attention call.

    Scores are ``scale * Q K^T``, capped where `softcap` is set, masked to -inf, then `bias` is
    added; the softmax over the keys weights V. All extents are counts of elements.

    Parameters
    ----------
    batch, q_heads, kv_heads : int
        ``kv_heads`` divides ``q_heads``; query head h reads KV head ``h // (q_heads // kv_heads)``.
    seq_q, seq_kv : int
        Queries and keys; 0 is allowed.
    head_dim, value_dim : int
        Elements of a query or key, and of a value; at least 1.
    dtype : str
        "float32", "float16" or "bfloat16", of query, key, value and output.
    mask : None, True, "padding" or tuple of int
        Shape of the boolean mask, rank 1 to 4, broadcast from the right over
        ``[batch, q_heads, seq_q, seq_kv]``. True stands for ``(batch, 1, seq_q, seq_kv)``,
        "padding" for ``(batch, 1, 1, seq_kv)``. Kept with rank 4.
    bias : None, True or tuple of int
        Shape of the additive bias, likewise; True stands for ``(1, q_heads, seq_q, seq_kv)``.
    is_causal : bool
        Whether keys after the diagonal are hidden.
    causal_alignment : str
        "bottom_right": query i is at key ``i + seq_kv - seq_q``; "top_left": at key i.
    window : (int or None, int or None), optional
        Visible keys left and right of the diagonal; None for all.
    softcap : float, optional
        Positive bound that scores approach.
    scale : float, optional
        ``1 / sqrt(head_dim)`` if None; 0 and negative values are allowed.
    precision : str
        "strict" or "relaxed".
    layout : str
        How query, key and value lie in memory: "bhsd", "bshd", or "strided" for anything else.
    bias_dtype : str, optional
        Element type of the bias; `dtype` if None. None without a bias.

    Raises
    ------
    InvalidProblem
        Naming the field, its value and what it may be.

    Examples
    --------
    >>> str(AttentionProblem.parse("1,32,8,512,512,128,128:bfloat16:causal"))
    '1,32,8,512,512,128,128:bfloat16:causal'
    """

    batch: int
    q_heads: int
    kv_heads: int
    seq_q: int
    seq_kv: int
    head_dim: int
    value_dim: int
    dtype: str
    mask: Any = None
    bias: Any = None
    is_causal: bool = False
    causal_alignment: str = "bottom_right"
    window: Window | None = None
    softcap: float | None = None
    scale: float | None = None
    precision: str = "strict"
    layout: str = "bhsd"
    bias_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "q_heads", "kv_heads", "seq_q", "seq_kv"):
            self._set(name, _count(name, getattr(self, name), 0))
        for name in ("head_dim", "value_dim"):
            self._set(name, _count(name, getattr(self, name), 1))
        if (self.kv_heads == 0) != (self.q_heads == 0) or (
            self.kv_heads and self.q_heads % self.kv_heads
        ):
            raise InvalidProblem(
                f"q_heads is {self.q_heads} and kv_heads {self.kv_heads}; "
                "q_heads must be a multiple of kv_heads, and 0 only where kv_heads is."
            )
        _choice("dtype", self.dtype, DTYPES)
        _choice("causal_alignment", self.causal_alignment, ALIGNMENTS)
        _choice("precision", self.precision, PRECISIONS)
        _choice("layout", self.layout, LAYOUTS)
        if not isinstance(self.is_causal, bool):
            raise InvalidProblem(f"is_causal is {self.is_causal!r}; it must be True or False.")
        self._set("window", _window(self.window))
        self._set("softcap", _real("softcap", self.softcap, positive=True))
        self._set("scale", _real("scale", self.scale, positive=False))
        self._set("mask", self._broadcastable("mask", self._default_mask()))
        bias = (1, self.q_heads, self.seq_q, self.seq_kv) if self.bias is True else self.bias
        self._set("bias", self._broadcastable("bias", bias))
        if self.bias is None:
            if self.bias_dtype is not None:
                raise InvalidProblem(
                    f"bias_dtype is {self.bias_dtype!r} without a bias; give a bias or leave it "
                    "out."
                )
        else:
            self._set("bias_dtype", self.bias_dtype or self.dtype)
            _choice("bias_dtype", self.bias_dtype, DTYPES)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _default_mask(self) -> Any:
        if self.mask is True:
            return (self.batch, 1, self.seq_q, self.seq_kv)
        if isinstance(self.mask, str) and self.mask == "padding":
            return (self.batch, 1, 1, self.seq_kv)
        return self.mask

    def _broadcastable(self, name: str, shape: Any) -> Shape | None:
        if shape is None:
            return None
        full = (self.batch, self.q_heads, self.seq_q, self.seq_kv)
        if not isinstance(shape, (tuple, list)):
            named = ', "padding"' if name == "mask" else ""
            raise InvalidProblem(
                f"{name} is {shape!r}; it must be None, True{named} or a shape that broadcasts "
                f"over {full}."
            )
        extents = tuple(_count(name, extent, 0) for extent in shape)
        if not 1 <= len(extents) <= 4:
            raise InvalidProblem(
                f"{name} has shape {extents}, of rank {len(extents)}; its rank must be 1 to 4."
            )
        padded = (1,) * (4 - len(extents)) + extents
        if any(e not in (1, whole) for e, whole in zip(padded, full, strict=True)):
            raise InvalidProblem(
                f"{name} has shape {extents}; it must broadcast from the right over "
                f"[batch, q_heads, seq_q, seq_kv] = {list(full)}."
            )
        return padded  # type: ignore[return-value]

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q_heads // self.kv_heads if self.kv_heads else 1

    @property
    def scale_value(self) -> float:
        """The scale, ``1 / sqrt(head_dim)`` where none is given."""
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def diagonal_offset(self) -> int:
        """The key at which query 0 is."""
        return self.seq_kv - self.seq_q if self.causal_alignment == "bottom_right" else 0

    @property
    def bounds(self) -> Window:
        """Least and greatest ``key - query`` that are visible, None where unbounded."""
        left, right = self.window or (None, None)
        if self.is_causal:
            right = 0
        offset = self.diagonal_offset
        return (
            None if left is None else offset - left,
            None if right is None else offset + right,
        )

    @property
    def is_empty(self) -> bool:
        """Whether the output has no element."""
        return 0 in (self.batch, self.q_heads, self.seq_q)

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        extents = (
            self.batch, self.q_heads, self.kv_heads, self.seq_q, self.seq_kv, self.head_dim,
            self.value_dim,
        )  # fmt: skip
        options = [",".join(map(str, extents)), self.dtype]
        if self.is_causal:
            options.append("causal")
        if self.causal_alignment == "top_left":
            options.append("top_left")
        if self.mask is not None:
            named = {
                (self.batch, 1, self.seq_q, self.seq_kv): "mask",
                (self.batch, 1, 1, self.seq_kv): "mask=padding",
            }
            options.append(named.get(self.mask) or f"mask={_cross(self.mask)}")
        if self.bias is not None:
            default = self.bias == (1, self.q_heads, self.seq_q, self.seq_kv)
            same = self.bias_dtype == self.dtype
            text = "bias" if default and same else f"bias={_cross(self.bias)}"
            options.append(text if same else f"{text}@{self.bias_dtype}")
        if self.window is not None:
            left, right = ("" if side is None else str(side) for side in self.window)
            options.append(f"window={left}/{right}")
        for name, number in (("softcap", self.softcap), ("scale", self.scale)):
            if number is not None:
                options.append(f"{name}={number!r}")
        if self.precision == "relaxed":
            options.append("relaxed")
        if self.layout != "bhsd":
            options.append(self.layout)
        return ":".join(options)

    @classmethod
    def parse(cls, text: str) -> AttentionProblem:
        """Return the problem that a text describes.

        Parameters
        ----------
        text : str
            ``B,Hq,Hkv,Sq,Skv,D,Dv:dtype[:option...]`` with the options ``causal``, ``top_left``,
            ``mask``, ``mask=padding``, ``mask=1x1x384x384``, ``bias``, ``bias=1x8x64x64@float32``,
            ``softcap=50``, ``window=4095/0``, ``scale=0.1``, ``relaxed``, ``bshd``, ``strided``.

        Raises
        ------
        InvalidProblem
            Naming the part that is not understood.
        """
        parts = str(text).strip().split(":")
        if len(parts) < 2:
            raise InvalidProblem(
                f"The problem {text!r} has no element type; "
                "write it as B,Hq,Hkv,Sq,Skv,D,Dv:dtype[:option...]."
            )
        extents = [extent.strip() for extent in parts[0].split(",")]
        # Python refuses to convert thousands of digits, with an error of its own.
        if len(extents) != 7 or not all(e.isdecimal() and len(e) <= 18 for e in extents):
            raise InvalidProblem(
                f"The problem {text!r} begins with {parts[0]!r}; "
                "it must begin with seven counts, B,Hq,Hkv,Sq,Skv,D,Dv."
            )
        options: dict[str, Any] = {}
        for part in parts[2:]:
            name, _, value = part.strip().partition("=")
            for field, setting in _option(name, value, part).items():
                if field in options:
                    raise InvalidProblem(f"The option {part!r} says {field} twice; say it once.")
                options[field] = setting
        b, hq, hkv, sq, skv, d, dv = map(int, extents)
        return cls(b, hq, hkv, sq, skv, d, dv, dtype=parts[1].strip(), **options)


_FLAGS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "top_left": {"causal_alignment": "top_left"},
    "mask": {"mask": True},
    "bias": {"bias": True},
    "relaxed": {"precision": "relaxed"},
    "bshd": {"layout": "bshd"},
    "strided": {"layout": "strided"},
}
_FORMS = {
    **{name: name for name in _FLAGS},
    "mask": "mask, mask=padding or mask=1x1x384x384",
    "bias": "bias, bias=1x8x64x64 or bias=1x8x64x64@float32",
    "softcap": "softcap=50",
    "window": "window=4095/0",
    "scale": "scale=0.1",
}


def _option(name: str, value: str, part: str) -> dict[str, Any]:
    """Return the fields that one option of a problem's text sets."""
    try:
        if not value and name in _FLAGS and "=" not in part:
            return _FLAGS[name]
        if value and name == "mask":
            return {"mask": "padding" if value == "padding" else _extents(value)}
        if value and name == "bias":
            shape, _, dtype = value.partition("@")
            return {"bias": _extents(shape), **({"bias_dtype": dtype} if dtype else {})}
        if value and name == "window":
            left, slash, right = value.partition("/")
            if slash:
                return {"window": tuple(int(s) if s else None for s in (left, right))}
        if value and name in ("softcap", "scale"):
            return {name: float(value)}
    except ValueError:
        pass
    near = difflib.get_close_matches(name, _FORMS, n=1)
    if name in _FORMS:
        hint = f"write {_FORMS[name]}."
    elif near:
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"the options are {', '.join(_FORMS)}."
    raise InvalidProblem(f"The option {part!r} of a problem is not understood; {hint}")


def _extents(text: str) -> tuple[int, ...]:
    return tuple(int(extent) for extent in text.split("x"))


def _cross(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise InvalidProblem(f"{name} is {value!r}; it must be a whole number of at least {least}.")
    return int(value)


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"it must be one of {', '.join(allowed)}."
        raise InvalidProblem(f"{name} is {value!r}; {hint}")


def _real(name: str, value: Any, *, positive: bool) -> float | None:
    if value is None:
        return None
    wanted = "a finite number above 0" if positive else "a finite number"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidProblem(f"{name} is {value!r}; it must be None or {wanted}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or (positive and number <= 0):
        raise InvalidProblem(f"{name} is {value!r}; it must be None or {wanted}.")
    return number


def _window(window: Any) -> Window | None:
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InvalidProblem(
            f"window is {window!r}; it must be None or (left, right), each None or a count."
        )
    left, right = (None if side is None else _count("window", side, 0) for side in window)
    return None if left is None and right is None else (left, right)
