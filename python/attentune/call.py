"""A call: what its arrays and options say, and the kernel that runs on them.

What follows from a call's description alone, its arrays' shapes, types and strides and its options
(the problem, its key, the kernel, the scalars) is worked out at the first such call; later ones
only look it up. Nothing here needs the compiler.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from attentune import arguments, arrays
from attentune.errors import InvalidProblem
from attentune.kernels.spec import KernelSpec
from attentune.key import AttentionKey
from attentune.problem import AttentionProblem
from attentune.threads import ensure_cores

OPTIONS = ("is_causal", "causal_alignment", "window", "scale", "softcap", "precision")
MAX_CALLS = 4096  # descriptions of calls that are kept
_Self = TypeVar("_Self", bound="CallableKernel")


class CallableKernel:
    """Machine code of a candidate, callable on arrays of every problem in its key's bucket.

    Parameters
    ----------
    key : AttentionKey
        What it serves.
    variant : str
        Name of its variant.
    parameters : Mapping
        Its parameters.
    function : Callable
        The code: tensors, then scalars, as `arguments` has them.
    cores : int
        Threads of a call, where the calling thread has not been given another number.
    problem : AttentionProblem, optional
        Where scale, cap and window come from when a call does not give them.
    """

    def __init__(
        self,
        key: AttentionKey,
        variant: str,
        parameters: Mapping[str, int],
        function: Callable[..., Any],
        cores: int,
        problem: AttentionProblem | None = None,
    ) -> None:
        self.key = key
        self.problem = problem
        self.spec = KernelSpec.from_key(key)
        self.variant = variant
        self._parameters = dict(parameters)
        self._run = function
        self._cores = cores

    @property
    def parameters(self) -> dict[str, int]:
        """The parameters by name."""
        return dict(self._parameters)

    def serving(
        self: _Self, key: AttentionKey | None = None, problem: AttentionProblem | None = None
    ) -> _Self:
        """Return this kernel, compiled once, for another key of the same code, or with a problem.

        Parameters
        ----------
        key : AttentionKey, optional
            A key with the same kernel and parameters.
        problem : AttentionProblem, optional
            Where scale, cap and window come from when a call does not give them.
        """
        other = copy.copy(self)
        other.key = key or self.key
        other.problem = problem or self.problem
        return other

    def __repr__(self) -> str:
        return f"<attentune kernel {self.variant} {self.parameters} for {self.key}>"

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Any = None,
        bias: Any = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        out: Any = None,
    ) -> Any:
        """Compute attention.

        Parameters
        ----------
        query : array
            ``[batch, q_heads, seq_q, head_dim]``.
        key, value : array
            ``[batch, kv_heads, seq_kv, head_dim]`` and ``[..., value_dim]``.
        mask, bias : array, optional
            Boolean mask (True takes part) and additive bias, broadcast from the right.
        scale, softcap, window
            In place of the problem's that the kernel was built for.
        out : array, optional
            Where the result goes; allocated by default.

        Returns
        -------
        array
            ``[batch, q_heads, seq_q, value_dim]``, of the query's kind.

        Raises
        ------
        InvalidProblem
            If the call is not in the kernel's bucket.
        """
        base = self.problem
        problem = describe(
            query,
            key,
            value,
            mask,
            bias,
            is_causal=self.key.causal,
            causal_alignment="bottom_right" if self.key.alignment == "none" else self.key.alignment,
            window=window if window is not None else (base.window if base else None),
            scale=scale if scale is not None else (base.scale if base else None),
            softcap=softcap if softcap is not None else (base.softcap if base else None),
            precision=self.key.precision,
        )
        called = AttentionKey.from_problem(problem)
        served = replace(
            called,
            total_batches=self.key.total_batches,
            layout=self.key.layout,
            seq_q=self.key.seq_q,
            seq_kv=self.key.seq_kv,
            window=self.key.window if _sides(called) == _sides(self.key) else called.window,
        )
        if served != self.key:
            raise InvalidProblem(
                f"The call is {called}, which this kernel, built for {self.key}, does not serve; "
                "build a kernel for this problem."
            )
        values = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias}
        check_out(out, problem, values)
        return self.run(problem, values, arguments.scalars(self.spec, problem), out)

    def run(
        self,
        problem: AttentionProblem,
        values: Mapping[str, Any],
        scalars: tuple[float | int, ...],
        out: Any = None,
    ) -> Any:
        """Run on arrays that are known to fit the kernel; ``out`` is allocated if None."""
        query = values["query"]
        shape = (problem.batch, problem.q_heads, problem.seq_q, problem.value_dim)
        if problem.is_empty or problem.seq_kv == 0:
            return nothing(query, problem, out)
        if out is None:
            out = arrays.empty_like(query, shape)
        values = dict(values)
        for name in ("query", "key", "value"):
            values[name] = arrays.readable(values[name])
        for name in ("mask", "bias"):
            if values[name] is not None:
                values[name] = arrays.readable(values[name], unit_innermost=False)
        ensure_cores(self._cores)
        self._run(*arguments.tensors(self.spec, problem, values, out), *scalars)
        return out


@dataclass(frozen=True)
class Call:
    """What follows from a call's description.

    Attributes
    ----------
    kernel : CallableKernel or None
        None where there is nothing to compute.
    problem : AttentionProblem
        What is computed.
    scalars : tuple
        The kernel's scalar arguments.
    """

    kernel: CallableKernel | None
    problem: AttentionProblem
    scalars: tuple[float | int, ...] = ()


class Caller:
    """Calls kernels, and remembers which one served a description.

    Parameters
    ----------
    choose : Callable
        ``choose(problem)`` gives the kernel that serves a problem.
    """

    def __init__(self, choose: Callable[[AttentionProblem], CallableKernel]) -> None:
        self._chooser = choose
        self._calls: dict[Any, Call] = {}

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        bias: Any,
        *options: Any,
        out: Any = None,
    ) -> Any:
        """Compute attention; ``options`` are `OPTIONS`' values in their order."""
        options = tuple(tuple(one) if isinstance(one, list) else one for one in options)
        try:
            signature = (
                type(query), query.shape, key.shape, value.shape,
                query.dtype, key.dtype, value.dtype,
                strides(query), strides(key), strides(value),
                None if mask is None else (type(mask), mask.shape, mask.dtype),
                None if bias is None else (type(bias), bias.shape, bias.dtype),
                options,
            )  # fmt: skip
            call = self._calls.get(signature)
        except (AttributeError, TypeError):
            # Something is no array, or an option no plain value: say what it is.
            describe(query, key, value, mask, bias, **dict(zip(OPTIONS, options, strict=True)))
            raise
        if call is None:
            call = self._resolve(query, key, value, mask, bias, options)
            if len(self._calls) >= MAX_CALLS:
                self._calls.clear()
            self._calls[signature] = call
        values = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias}
        check_out(out, call.problem, values)
        if call.kernel is None:
            return nothing(query, call.problem, out)
        return call.kernel.run(call.problem, values, call.scalars, out)

    def forget(self) -> None:
        """Choose anew at the next calls."""
        self._calls.clear()

    def _resolve(
        self, query: Any, key: Any, value: Any, mask: Any, bias: Any, options: tuple[Any, ...]
    ) -> Call:
        named = dict(zip(OPTIONS, options, strict=True))
        problem = describe(query, key, value, mask, bias, **named)
        if problem.is_empty or problem.seq_kv == 0:
            return Call(None, problem)
        kernel = self._chooser(problem)
        return Call(kernel, problem, arguments.scalars(kernel.spec, problem))


def check_out(out: Any, problem: AttentionProblem, values: Mapping[str, Any]) -> None:
    """Check the array that a result goes to, where a caller gave one.

    Raises
    ------
    InvalidProblem
        If its shape, element type or strides do not fit, or it overlaps what is read.
    """
    if out is None:
        return
    shape = (problem.batch, problem.q_heads, problem.seq_q, problem.value_dim)
    arrays.kind(out)
    if tuple(out.shape) != shape or arrays.dtype_name(out) != problem.dtype:
        raise InvalidProblem(
            f"out has shape {tuple(out.shape)} and the element type {arrays.dtype_name(out)}; the "
            f"result is {shape} of {problem.dtype}."
        )
    if arrays.readable(out) is not out:
        raise InvalidProblem(
            f"out has the strides {strides(out)}; its innermost axis must be contiguous."
        )
    begin, end = arrays.span(out)
    for name, array in values.items():
        if array is None:
            continue
        first, last = arrays.span(array)
        if begin < last and first < end:
            raise InvalidProblem(f"out overlaps {name} in memory; give it memory of its own.")


def nothing(query: Any, problem: AttentionProblem, out: Any = None) -> Any:
    """Return the result of a problem without queries or keys: empty, or zeros."""
    if out is None:
        shape = (problem.batch, problem.q_heads, problem.seq_q, problem.value_dim)
        out = arrays.empty_like(query, shape)
    if not problem.is_empty:
        arrays.clear(out)
    return out


def _sides(key: AttentionKey) -> tuple[bool, bool]:
    """Return which sides of a window are bounded: all of it that a kernel's code knows."""
    left, right = key.window or (None, None)
    return left is not None, right is not None


def describe(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    bias: Any = None,
    **options: Any,
) -> AttentionProblem:
    """Return the problem that a call on arrays is.

    Raises
    ------
    InvalidProblem
        Naming the array that does not fit.
    UnsupportedArray
        If an array is of a kind that is not known.
    """
    named = {"query": query, "key": key, "value": value}
    for name, array in named.items():
        arrays.kind(array)
        if len(array.shape) != 4:
            raise InvalidProblem(
                f"{name} has shape {tuple(array.shape)}; it must have four axes, "
                "[batch, heads, seq, dim]."
            )
        if arrays.dtype_name(array) not in arrays.KERNEL_DTYPES:
            raise InvalidProblem(
                f"{name} has the element type {arrays.dtype_name(array)}; convert it to one of "
                f"{', '.join(arrays.KERNEL_DTYPES)}."
            )
    _check_shapes(query, key, value)
    if mask is not None:
        arrays.kind(mask)
        if arrays.dtype_name(mask) != "bool":
            raise InvalidProblem(
                f"mask has the element type {arrays.dtype_name(mask)}; a mask is boolean, True "
                "where a key takes part: pass values to be added as bias."
            )
    bias_dtype = None
    if bias is not None:
        arrays.kind(bias)
        bias_dtype = arrays.dtype_name(bias)
        if bias_dtype not in arrays.KERNEL_DTYPES:
            raise InvalidProblem(
                f"bias has the element type {bias_dtype}; a bias is a float that is added to the "
                "scores: pass a boolean one as mask."
            )
    return AttentionProblem(
        batch=query.shape[0],
        q_heads=query.shape[1],
        kv_heads=key.shape[1],
        seq_q=query.shape[2],
        seq_kv=key.shape[2],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        dtype=arrays.dtype_name(query),
        mask=None if mask is None else tuple(mask.shape),
        bias=None if bias is None else tuple(bias.shape),
        bias_dtype=bias_dtype,
        layout=_layout(query, key, value),
        **options,
    )


def _check_shapes(query: Any, key: Any, value: Any) -> None:
    for name, array in (("key", key), ("value", value)):
        if arrays.dtype_name(array) != arrays.dtype_name(query):
            raise InvalidProblem(
                f"{name} has the element type {arrays.dtype_name(array)} and query "
                f"{arrays.dtype_name(query)}; convert them to one type."
            )
        if array.shape[0] != query.shape[0]:
            raise InvalidProblem(
                f"{name} has the batch size {array.shape[0]} and query {query.shape[0]}; "
                "they must be equal."
            )
    if key.shape[3] != query.shape[3]:
        raise InvalidProblem(
            f"key has the head_dim {key.shape[3]} and query {query.shape[3]}; they must be equal."
        )
    if tuple(value.shape[1:3]) != tuple(key.shape[1:3]):
        raise InvalidProblem(
            f"value has {value.shape[1]} heads of {value.shape[2]} keys and key {key.shape[1]} of "
            f"{key.shape[2]}; they must be equal."
        )


def strides(array: Any) -> tuple[int, ...]:
    """Return an array's strides, in the units of its own kind."""
    return tuple(array.stride() if callable(getattr(array, "stride", None)) else array.strides)


def _layout(*named: Any) -> str:
    """Return "bhsd", "bshd", or "strided" for arrays that are neither or not alike."""
    layouts = {_layout_of(array) for array in named}
    return layouts.pop() if len(layouts) == 1 else "strided"


def _layout_of(array: Any) -> str:
    _, h, s, d = array.shape
    unit = array.itemsize if arrays.kind(array) == "numpy" else 1
    own = [n // unit for n in strides(array)]
    compact = {"bhsd": (h * s * d, s * d, d, 1), "bshd": (s * h * d, d, h * d, 1)}
    for name, expected in compact.items():
        matches = zip(own, expected, array.shape, strict=True)
        if all(stride == wanted or extent <= 1 for stride, wanted, extent in matches):
            return name
    return "strided"
