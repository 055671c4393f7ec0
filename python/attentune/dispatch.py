"""From a call to a kernel: the key's record, or a heuristic, compiled once and kept.

A call is described by its arrays' shapes, types and strides and by its options. What follows from
that description alone (the problem, its key, the kernel, the scalars) is worked out at the first
such call; later ones only look it up.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from attentune import arguments, arrays
from attentune.compile import compile_module
from attentune.database import Database
from attentune.errors import (
    AttentuneError,
    InvalidParameters,
    InvalidProblem,
    RecordNotFound,
    Unsupported,
)
from attentune.group import Policy
from attentune.kernels.spec import KernelSpec
from attentune.key import AttentionKey
from attentune.plan import make_plan, memory_budget
from attentune.problem import AttentionProblem
from attentune.record import Record, stale_reason
from attentune.target import Target
from attentune.threads import use_cores
from attentune.variant import Variant
from attentune.versions import current_versions

logger = logging.getLogger("attentune.dispatch")

ON_MISS = ("heuristic", "tune", "error")
LAST_RESORT = "flash_unit"
MAX_CALLS = 4096  # descriptions of calls that are kept


class Kernel:
    """A compiled candidate, callable on arrays of every problem in its key's bucket.

    Parameters
    ----------
    key : AttentionKey
        What it serves.
    target : Target
        What it is compiled for.
    variant : Variant
        Its variant.
    parameters : Mapping
        Its parameters.
    problem : AttentionProblem, optional
        Where scale, cap and window come from when a call does not give them.
    """

    def __init__(
        self,
        key: AttentionKey,
        target: Target,
        variant: Variant,
        parameters: Mapping[str, int],
        problem: AttentionProblem | None = None,
    ) -> None:
        self.key = key
        self.target = target
        self.problem = problem
        self.spec = KernelSpec.from_key(key)
        self._variant = variant
        self._parameters = variant.check(key, target, parameters)
        self._module = variant.scheduled(key, target, self._parameters)
        self._built = compile_module(self._module, target)
        self._run = self._built["main"]
        use_cores(target.num_cores)

    @property
    def variant(self) -> str:
        """Name of the variant."""
        return self._variant.name

    @property
    def parameters(self) -> dict[str, int]:
        """The parameters by name."""
        return dict(self._parameters)

    @property
    def source(self) -> str:
        """The scheduled kernel as TVMScript."""
        return str(self._module.script())

    @property
    def assembly(self) -> str:
        """The machine code that LLVM made of it, as assembly."""
        return str(self._built.inspect_source("s"))

    def serving(
        self, key: AttentionKey | None = None, problem: AttentionProblem | None = None
    ) -> Kernel:
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
        return self.run(problem, {"query": query, "key": key, "value": value, "mask": mask,
                                  "bias": bias}, arguments.scalars(self.spec, problem))  # fmt: skip

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
        self._run(*arguments.tensors(self.spec, problem, values, out), *scalars)
        return out

    def workspace(self, problem: AttentionProblem) -> int:
        """Return the bytes that a call needs beside its arrays."""
        return self._variant.workspace(problem, self.target, self._parameters)


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


@dataclass(frozen=True)
class _Call:
    """What follows from a call's description."""

    kernel: Kernel | None  # None where there is nothing to compute
    problem: AttentionProblem
    scalars: tuple[float | int, ...] = ()


class Dispatcher:
    """Chooses and keeps kernels for one target, database and miss policy.

    Parameters
    ----------
    target : Target
        What kernels are compiled for.
    variants : Mapping
        Variants by name, in the order of registration.
    policy : Policy
        Whose plan is followed where no record is.
    database : Database, optional
        Where records are looked up.
    on_miss : str
        "heuristic", "tune" or "error".
    tune : Callable, optional
        Tunes a problem and returns its record; needed for "tune".
    memory_bytes : int, optional
        What a kernel may take as workspace; a share of this machine's memory by default.
    extra : tuple of str
        Variants beside those that the policy names.
    """

    def __init__(
        self,
        target: Target,
        variants: Mapping[str, Variant],
        policy: Policy,
        database: Database | None = None,
        on_miss: str = "heuristic",
        tune: Callable[[AttentionProblem], Record] | None = None,
        memory_bytes: int | None = None,
        extra: tuple[str, ...] = (),
    ) -> None:
        if on_miss not in ON_MISS:
            raise InvalidParameters(
                f"on_miss is {on_miss!r}; it must be one of {', '.join(ON_MISS)}."
            )
        self.target = target
        self.variants = variants
        self.policy = policy
        self.database = database
        self.on_miss = on_miss
        self.memory_bytes = memory_bytes
        self.extra = extra
        self.steps: Counter[str] = Counter()
        self._tune = tune
        self._calls: dict[Any, _Call] = {}
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        self._lock = threading.RLock()

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        bias: Any,
        options: tuple[Any, ...],
    ) -> Any:
        """Compute attention; ``options`` are `OPTIONS`' values in their order."""
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
        if call.kernel is None:
            return nothing(query, call.problem)
        values = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias}
        return call.kernel.run(call.problem, values, call.scalars)

    def kernel_for_key(self, key: AttentionKey) -> Kernel:
        """Return the kernel of a key, for calls that bring their own scale, cap and window."""
        return self._choose(key, key.representative())

    def forget(self) -> None:
        """Look records up anew at the next calls. Kernels that were compiled are kept."""
        self._calls.clear()

    def _resolve(
        self, query: Any, key: Any, value: Any, mask: Any, bias: Any, options: tuple[Any, ...]
    ) -> _Call:
        named = dict(zip(OPTIONS, options, strict=True))
        problem = describe(query, key, value, mask, bias, **named)
        if problem.is_empty or problem.seq_kv == 0:
            return _Call(None, problem)
        kernel = self._choose(AttentionKey.from_problem(problem), problem)
        return _Call(kernel, problem, arguments.scalars(kernel.spec, problem))

    def kernel(self, problem: AttentionProblem) -> Kernel:
        """Return the kernel that serves a problem, compiled.

        Raises
        ------
        RecordNotFound
            With ``on_miss="error"``, where the database has no record that is not stale.
        Unsupported
            Where no variant can serve the problem.
        """
        return self._choose(AttentionKey.from_problem(problem), problem).serving(problem=problem)

    def _choose(self, key: AttentionKey, problem: AttentionProblem) -> Kernel:
        with self._lock:
            for position, (name, parameters) in enumerate(self._candidates(key, problem)):
                try:
                    return self._launchable(key, problem, name, parameters)
                except (AttentuneError, RuntimeError) as error:
                    self.steps[f"{name}: {type(error).__name__}"] += 1
                    logger.warning(
                        "stepping down from candidate %d, %s, for %s: %s",
                        position, name, key, error,
                    )  # fmt: skip
        raise Unsupported(
            f"No variant can serve {problem} on {self.target.kind}; the log says why each was "
            "refused, and a variant of your own can be added."
        )

    def _candidates(
        self, key: AttentionKey, problem: AttentionProblem
    ) -> list[tuple[str, Mapping[str, int] | None]]:
        """Return what to try in order: the record, its runners-up, the last resort."""
        record = self._record(key)
        if record is None and self.on_miss == "error":
            raise RecordNotFound(
                f"The database has no record for {key} on {self.target}; tune it, or pass "
                "on_miss='heuristic'."
            )
        if record is None and self.on_miss == "tune" and self._tune is not None:
            record = self._tune(problem)
        if record is not None:
            runners_up = sorted(
                (loser for loser in record.losers if loser.seconds is not None),
                key=lambda loser: loser.seconds or math.inf,
            )
            chain: list[tuple[str, Mapping[str, int] | None]] = [
                (record.variant, record.parameters)
            ]
            chain += [
                (loser.variant, loser.parameters)
                for loser in runners_up
                if loser.variant != record.variant
            ]
            return [*chain[:2], (LAST_RESORT, None)]
        plan = make_plan(problem, self.target, self.policy, self.extra, self.memory_bytes)
        supported = [
            name
            for batch in plan.batches
            for name in sorted(
                (one for one in batch if self._supports(one, key)),
                key=lambda one: self._default_workspace(one, key, problem),
            )
        ]
        return [*((name, None) for name in supported), (LAST_RESORT, None)]

    def _supports(self, name: str, key: AttentionKey) -> bool:
        variant = self.variants.get(name)
        return variant is not None and variant.supports(key, self.target) is None

    def _default_workspace(self, name: str, key: AttentionKey, problem: AttentionProblem) -> int:
        """Return what decides between variants that tie where nothing was measured: memory.

        As in a ranking within noise; names of equal memory stay in the plan's order.
        """
        variant = self.variants[name]
        return variant.workspace(problem, self.target, variant.defaults(key, self.target))

    def _record(self, key: AttentionKey) -> Record | None:
        if self.database is None:
            return None
        fingerprints = {name: v.fingerprint() for name, v in self.variants.items()}
        return self.database.get(
            key,
            str(self.target),
            stale=lambda record: stale_reason(record, fingerprints, current_versions()),
        )

    def _launchable(
        self,
        key: AttentionKey,
        problem: AttentionProblem,
        name: str,
        parameters: Mapping[str, int] | None,
    ) -> Kernel:
        variant = self.variants.get(name)
        if variant is None:
            raise Unsupported(f"{name} is not among the variants of this version")
        reason = variant.supports(key, self.target)
        if reason is not None:
            raise Unsupported(f"{name} is unsupported: {reason}")
        chosen = variant.defaults(key, self.target) if parameters is None else parameters
        needed = variant.workspace(problem, self.target, chosen)
        allowed = memory_budget() if self.memory_bytes is None else self.memory_bytes
        if needed > allowed:
            raise Unsupported(f"{name} needs {needed} bytes of workspace, and {allowed} are free")
        identity = (name, KernelSpec.from_key(key), tuple(sorted(chosen.items())))
        if identity not in self._kernels:
            self._kernels[identity] = Kernel(key, self.target, variant, chosen)
        return self._kernels[identity].serving(key=key)


OPTIONS = ("is_causal", "causal_alignment", "window", "scale", "softcap", "precision")
