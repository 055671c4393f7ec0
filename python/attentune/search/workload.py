"""A workload: one kernel of one variant at one problem, as MetaSchedule searches it.

MetaSchedule measures functions of static shape. The symbolic kernel is specialized to the
problem, its template searched there, and the winner's named parameters are applied to the
symbolic kernel again: the same source, scheduled by the same template.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import IRModule, tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from attentune import arguments
from attentune.kernels.spec import KernelSpec
from attentune.key import AttentionKey
from attentune.problem import AttentionProblem
from attentune.target import Target
from attentune.variant import Variant


@dataclass(frozen=True)
class Workload:
    """One structure of a variant at the problem that stands for a key.

    Attributes
    ----------
    variant : Variant
        Whose kernel and template.
    structure : Mapping
        Structural parameters.
    key : AttentionKey
        What is tuned.
    problem : AttentionProblem
        The representative that is measured.
    target : Target
        What it is measured on.
    expanded : bool
        Whether masks and biases are given without broadcasting: arrays on another machine have no
        strides.
    """

    variant: Variant
    structure: Mapping[str, int]
    key: AttentionKey
    problem: AttentionProblem
    target: Target
    expanded: bool = False

    @property
    def name(self) -> str:
        """The variant and its structure, for task lists."""
        return " ".join([self.variant.name, *(f"{k}={v}" for k, v in self.structure.items())])

    def module(self) -> IRModule:
        """Return the unscheduled kernel at the problem's extents.

        An attribute names variant and structure: two workloads never hash alike.
        """
        spec = KernelSpec.from_key(self.key)
        func = specialize(
            self.variant.kernel(spec, self.structure), spec, self.problem, self.expanded
        )
        return IRModule({"main": func.with_attr("attentune.workload", self.name)})

    def space(self, seed: int) -> Any:
        """Return MetaSchedule's space generator for the template."""
        return ms.space_generator.ScheduleFn(
            self.describe,
            sch_rules=[],
            postprocs=[_Allowed(self)],
            mutator_probs={_Redraw(seed): 1.0},
        )

    def describe(self, sch: Schedule) -> None:
        """Draw every schedule parameter, then apply the template to the draws."""
        domains = self.variant.space(self.key, self.target, self.structure)
        drawn = {
            name: sch.sample_categorical(list(domain), [1.0 / len(domain)] * len(domain))
            for name, domain in domains.items()
        }
        spec = KernelSpec.from_key(self.key)
        self.variant.schedule(sch, spec, self.target, {**self.structure, **drawn})

    def parameters(self, trace: Any) -> dict[str, int]:
        """Return the named parameters that a trace of this workload stands for."""
        names = self.variant.space(self.key, self.target, self.structure)
        values = [int(candidates[int(decision)]) for candidates, decision in draws(trace)]
        return {**self.structure, **dict(zip(names, values, strict=True))}


def draws(trace: Any) -> list[tuple[Any, int]]:
    """Return the candidates and the decision of each categorical draw of a trace, in order."""
    return [
        (inst.attrs[0], int(trace.decisions[inst]))
        for inst in trace.insts
        if inst.kind.name == "SampleCategorical"
    ]


def specialize(
    func: Any, spec: KernelSpec, problem: AttentionProblem, expanded: bool = False
) -> Any:
    """Return a kernel at a problem's extents, strides and scalars, as a static function."""
    shapes = tensor_layouts(problem, expanded)
    numbers = iter(arguments.scalars(spec, problem))
    binding = {}
    for param in func.params:
        if param.name in shapes:
            shape, strides = shapes[param.name]
            old = param.ty
            binding[param] = tirx.decl_buffer(
                [_like(e, n) for e, n in zip(old.shape, shape, strict=True)],
                str(old.dtype),
                param.name,
                strides=[_like(e, n) for e, n in zip(old.strides, strides, strict=True)],
                elem_offset=tirx.IntImm("int64", 0),
            )
        else:
            number = next(numbers)
            dtype = str(param.ty.dtype)
            immediate = tirx.FloatImm if dtype == "float32" else tirx.IntImm
            binding[param] = immediate(dtype, number)
    return func.specialize(binding)


def tensor_layouts(
    problem: AttentionProblem, expanded: bool = False
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return shape and strides, in elements, of each tensor argument of a problem.

    Expanded, every tensor is compact: nothing is broadcast, and the layout is always "bhsd".
    """
    p = problem
    shapes = {
        "query": (p.batch, p.q_heads, p.seq_q, p.head_dim),
        "key": (p.batch, p.kv_heads, p.seq_kv, p.head_dim),
        "value": (p.batch, p.kv_heads, p.seq_kv, p.value_dim),
        "out": (p.batch, p.q_heads, p.seq_q, p.value_dim),
    }
    layouts: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        name: (shape, _compact(shape)) for name, shape in shapes.items()
    }
    if p.layout == "bshd" and not expanded:
        for name in ("query", "key", "value"):
            _b, h, s, d = shapes[name]
            layouts[name] = (shapes[name], (s * h * d, d, h * d, 1))
    full = (p.batch, p.q_heads, p.seq_q, p.seq_kv)
    for name, stored in (("mask", p.mask), ("bias", p.bias)):
        if stored is not None:
            if expanded:
                layouts[name] = (full, _compact(full))
                continue
            strides = _compact(stored)
            layouts[name] = (
                full,
                tuple(s if e > 1 else 0 for e, s in zip(stored, strides, strict=True)),
            )
    return layouts


def _compact(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    return tuple(strides)


def _like(old: Any, number: int) -> Any:
    """Return an extent in the type of the one it takes the place of."""
    return old if not isinstance(old, tirx.Var) else tirx.IntImm(str(old.ty.dtype), number)


@derived_object
class _Allowed(ms.postproc.PyPostproc):
    """Reject a point of the space that the variant does not count among its candidates."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload

    def _initialize_with_tune_context(self, context: Any) -> None:
        pass

    def apply(self, sch: Schedule) -> bool:
        w = self.workload
        return w.variant.allows(w.key, w.target, w.parameters(sch.trace))

    def clone(self) -> _Allowed:
        return _Allowed(self.workload)


@derived_object
class _Redraw(ms.mutator.PyMutator):
    """Draw one decision anew: TVM's own mutators change nothing about a plain categorical draw."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.random = random.Random(seed)

    def _initialize_with_tune_context(self, context: Any) -> None:
        pass

    def apply(self, trace: Any, _random_state: Any = None) -> Any:
        choices = [
            inst
            for inst in trace.insts
            if inst.kind.name == "SampleCategorical" and len(inst.attrs[0]) > 1
        ]
        if not choices:
            return None
        inst = self.random.choice(choices)
        others = [i for i in range(len(inst.attrs[0])) if i != int(trace.decisions[inst])]
        return trace.with_decision(inst, self.random.choice(others), remove_postproc=True)

    def clone(self) -> _Redraw:
        return _Redraw(self.seed)
