"""What a record is stored under: a problem with its batch and lengths anchored to buckets."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from typing import Any

from attentune.errors import InvalidKey
from attentune.problem import (
    ALIGNMENTS,
    DTYPES,
    LAYOUTS,
    PRECISIONS,
    AttentionProblem,
    Window,
)

# Base of the powers that counts are anchored to, as a fraction.
_BASES = {"minimal": (5, 2), "balanced": (2, 1), "extensive": (3, 2)}
LEVELS = (*_BASES, "full")
# Scores are tuned with this cap where a key says only that there is one.
REPRESENTATIVE_SOFTCAP = 50.0


def anchor(count: int, level: str = "balanced") -> int:
    """Return the upper end of the bucket that a count lies in.

    That is ``ceil(b^n)`` for the smallest n with ``b^n >= count``, in exact arithmetic, with
    b = 2.5, 2 and 1.5 at the levels minimal, balanced and extensive; 0 stays 0, and at the level
    full every count is its own bucket.

    Parameters
    ----------
    count : int
        At least 0.
    level : str
        One of `LEVELS`.

    Raises
    ------
    InvalidKey
        If the level is unknown.

    Examples
    --------
    >>> anchor(129), anchor(129, "minimal"), anchor(128, "extensive")
    (256, 245, 130)
    """
    if level not in LEVELS:
        near = difflib.get_close_matches(str(level), LEVELS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(LEVELS)}."
        raise InvalidKey(f"The level of anchoring is {level!r}; {hint}")
    if count <= 0 or level == "full":
        return count
    numerator, denominator = _BASES[level]
    above, below = 1, 1
    while above < count * below:
        above, below = above * numerator, below * denominator
    return -(-above // below)


@dataclass(frozen=True)
class AttentionKey:
    """The part of a problem that decides which kernel serves it and how fast.

    Each field is here because a kernel's code, its launch or its speed depends on it.

    Parameters
    ----------
    query_dtype, key_dtype, value_dtype, out_dtype : str
        Element types: they choose loads, fragments and conversions.
    total_batches : int
        ``batch * q_heads``, anchored: how many independent problems there are to spread.
    seq_q, seq_kv : int
        Lengths, anchored: the ratio of loading to computing, and what stays in cache.
    head_dim, value_dim : int
        Exact, since kernels are compiled for them.
    group : int
        Query heads for each KV head: how often a key that was loaded is used.
    mask : str
        "none", "dense", or "broadcast" where one row serves all queries, which costs no transpose.
    bias : str
        Likewise.
    bias_dtype : str
        Element type of the bias, "none" without one.
    causal : bool
        Half of the work, and blocks of unequal size.
    alignment : str
        Which corner a diagonal ends in, "none" without a causal mask or window: it moves the
        blocks that are visible where the lengths differ.
    window : (int or None, int or None), optional
        Sides of the window, anchored: how many blocks of keys a block of queries visits.
    softcap : bool
        A hyperbolic tangent for each score.
    precision : str
        Which fragments are allowed.
    layout : str
        Strides of query, key and value: how far rows lie apart.

    Examples
    --------
    >>> import attentune
    >>> problem = attentune.AttentionProblem.parse("2,8,8,100,300,64,64:float32:causal")
    >>> key = attentune.AttentionKey.from_problem(problem)
    >>> key.total_batches, key.seq_q, key.seq_kv
    (16, 128, 512)
    >>> attentune.AttentionKey.parse(str(key)) == key
    True
    """

    query_dtype: str
    key_dtype: str
    value_dtype: str
    out_dtype: str
    total_batches: int
    seq_q: int
    seq_kv: int
    head_dim: int
    value_dim: int
    group: int = 1
    mask: str = "none"
    bias: str = "none"
    bias_dtype: str = "none"
    causal: bool = False
    alignment: str = "none"
    window: Window | None = None
    softcap: bool = False
    precision: str = "strict"
    layout: str = "bhsd"

    @classmethod
    def from_problem(cls, problem: AttentionProblem, level: str = "balanced") -> AttentionKey:
        """Return the key of a problem.

        Parameters
        ----------
        problem : AttentionProblem
            What is to be computed.
        level : str
            How coarsely counts are anchored, one of `LEVELS`.
        """
        p = problem
        diagonal = p.is_causal or p.window is not None
        exact = cls(
            query_dtype=p.dtype,
            key_dtype=p.dtype,
            value_dtype=p.dtype,
            out_dtype=p.dtype,
            total_batches=p.batch * p.q_heads,
            seq_q=p.seq_q,
            seq_kv=p.seq_kv,
            head_dim=p.head_dim,
            value_dim=p.value_dim,
            group=p.group,
            mask=_kind(p.mask),
            bias=_kind(p.bias),
            bias_dtype=p.bias_dtype or "none",
            causal=p.is_causal,
            alignment=p.causal_alignment if diagonal else "none",
            window=p.window,
            softcap=p.softcap is not None,
            precision=p.precision,
            layout=p.layout,
        )
        return exact.anchored(level)

    def anchored(self, level: str = "balanced") -> AttentionKey:
        """Return the key with its counts anchored at a level: itself, if it is of that level."""
        window = self.window
        if window is not None:
            left, right = (None if side is None else anchor(side, level) for side in window)
            window = (left, right)
        return replace(
            self,
            total_batches=anchor(self.total_batches, level),
            seq_q=anchor(self.seq_q, level),
            seq_kv=anchor(self.seq_kv, level),
            window=window,
        )

    def representative(self, max_scores: int | None = 1 << 28) -> AttentionProblem:
        """Return the problem that is tuned for this key: the upper corner of its bucket.

        It does not depend on the call that asked for the key, so that the order of calls never
        changes a winner. All heads are in one batch, rounded down to whole groups: any problem of
        the key has whole groups, so that this is the greatest count in its bucket. Its key is
        this one again, for keys anchored at the levels balanced and full.

        Parameters
        ----------
        max_scores : int, optional
            Bound on ``heads * seq_q * seq_kv``: beyond it there are fewer heads, but never less
            than one group, so that tuning fits in memory and time. None for no bound.
        """
        groups = max(self.total_batches // self.group, 1)
        scores = max(self.group * self.seq_q * self.seq_kv, 1)
        if max_scores is not None:
            groups = max(min(groups, max_scores // scores), 1)
        heads = groups * self.group
        stored = {
            "none": None,
            "dense": (1, 1, self.seq_q, self.seq_kv),
            "broadcast": (1, 1, 1, self.seq_kv),
        }
        bias = {**stored, "dense": (1, heads, self.seq_q, self.seq_kv)}
        return AttentionProblem(
            batch=min(self.total_batches, 1),
            q_heads=heads,
            kv_heads=groups,
            seq_q=self.seq_q,
            seq_kv=self.seq_kv,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            dtype=self.query_dtype,
            mask=stored[self.mask],
            bias=bias[self.bias],
            bias_dtype=None if self.bias == "none" else self.bias_dtype,
            is_causal=self.causal,
            causal_alignment="bottom_right" if self.alignment == "none" else self.alignment,
            window=self.window,
            softcap=REPRESENTATIVE_SOFTCAP if self.softcap else None,
            precision=self.precision,
            layout=self.layout,
        )

    def __str__(self) -> str:
        """Return the canonical text, a list of names and values that `parse` reads."""
        return ", ".join(f"{f.name} {_write(getattr(self, f.name))}" for f in fields(self))

    @classmethod
    def parse(cls, text: str) -> AttentionKey:
        """Return the key of a canonical text.

        Raises
        ------
        InvalidKey
            Naming the part that is missing or not understood.
        """
        values: dict[str, str] = {}
        for part in str(text).split(","):
            name, _, value = part.strip().partition(" ")
            if name in values:
                raise InvalidKey(f"The key {text!r} has the field {name} twice; write it once.")
            values[name] = value.strip()
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"fields are {', '.join(known)}."
                raise InvalidKey(f"The key {text!r} has a field {name!r}; {hint}")
        missing = [name for name in known if name not in values]
        if missing:
            raise InvalidKey(f"The key {text!r} lacks {missing[0]}; write every field once.")
        return cls(**{f.name: _read(f.name, str(f.type), values[f.name]) for f in fields(cls)})


def _kind(shape: tuple[int, ...] | None) -> str:
    """Return the kind of a mask or bias. With a single query, dense and broadcast are one."""
    if shape is None:
        return "none"
    return "broadcast" if shape[2] == 1 else "dense"


def _write(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return "/".join("" if side is None else str(side) for side in value)
    return str(value)


def _read(name: str, kind: str, text: str) -> Any:
    try:
        if kind == "bool":
            return {"yes": True, "no": False}[text]
        if kind == "int":
            return _count(text, 1 if name in _AT_LEAST_ONE else 0)
        if name == "window":
            if text == "none":
                return None
            left, right = text.split("/")
            return (_count(left, 0) if left else None, _count(right, 0) if right else None)
    except (KeyError, ValueError):
        form = _FORMS["positive" if name in _AT_LEAST_ONE else kind if kind in _FORMS else name]
        raise InvalidKey(f"The field {name} of a key is {text!r}; write {form}.") from None
    if text not in _CHOICES[name]:
        raise InvalidKey(
            f"The field {name} of a key is {text!r}; write one of {', '.join(_CHOICES[name])}."
        )
    return text


def _count(text: str, least: int) -> int:
    count = int(text)
    if count < least:
        raise ValueError
    return count


_FORMS = {
    "bool": "yes or no",
    "int": "a whole number",
    "positive": "a whole number of at least 1",
    "window": "none, or left/right",
}
_AT_LEAST_ONE = ("head_dim", "value_dim", "group")
_CHOICES = {
    **dict.fromkeys(("query_dtype", "key_dtype", "value_dtype", "out_dtype"), DTYPES),
    **dict.fromkeys(("mask", "bias"), ("none", "dense", "broadcast")),
    "bias_dtype": ("none", *DTYPES),
    "alignment": ("none", *ALIGNMENTS),
    "precision": PRECISIONS,
    "layout": LAYOUTS,
}
