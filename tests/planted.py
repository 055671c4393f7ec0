"""Variants with faults: what a search has to survive, and a gate to catch."""

from dataclasses import replace

import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad
from tvm.tirx import BufferStore

from attentune.kernels.flash import flash
from attentune.schedules.flash_unit import FLASH_UNIT


def small(name, kernel=None, **changes):
    """Return a variant with the template of flash_unit and a space of two candidates."""
    return replace(
        FLASH_UNIT,
        name=name,
        structure=lambda key, target: {"block_q": (32,), "block_kv": (64,)},
        space=lambda key, target, structure: {
            "score_rows": (4, 2), "score_columns": (1,), "out_rows": (1,), "out_columns": (1,),
            "softmax_columns": (1,),
        },
        kernel=kernel or (lambda spec, p: flash(spec, p["block_q"], p["block_kv"])),
        **changes,
    )  # fmt: skip


def mutated(name, change):
    """Return a variant whose kernel is flash attention after a change."""
    return small(name, lambda spec, p: change(flash(spec, p["block_q"], p["block_kv"])))


def rewrite(func, kind, change):
    """Return a function with every node of a kind replaced by what ``change`` gives."""
    return func.with_body(tvm_ffi.structural_map(func.body, (kind, change), order="post"))


def in_store(func, wrap):
    """Return a function whose final stores of the output are wrapped."""

    def change(store):
        if store.buffer.name == "out":
            return BufferStore(store.buffer, wrap(store.value), store.indices)
        return store

    return rewrite(func, BufferStore, change)


def calling(symbol):
    """Return a change by which the kernel calls a function of the C library in each store."""

    def wrap(value):
        called = tirx.call_extern("int32", symbol)
        return value + called.astype("float32") * tirx.FloatImm("float32", 1e-30)

    return lambda func: in_store(func, wrap)


def block_variable(func, name):
    """Return the block iterator of a name."""
    found = []

    def visit(var):
        if var.name == name:
            found.append(var)
        return var

    tvm_ffi.structural_map(func.body, (tirx.Var, visit), order="post")
    return found[0]


def shape_variable(func, parameter, axis):
    """Return the symbolic extent of a parameter's axis."""
    return next(p for p in func.params if p.name == parameter).ty.shape[axis]


def when(condition):
    """Return a change by which the output is 1.5 times too large where a condition holds."""

    def change(func):
        factor = tirx.Select(
            condition(func), tirx.FloatImm("float32", 1.5), tirx.FloatImm("float32", 1.0)
        )
        return in_store(func, lambda value: value * factor)

    return change


def without_tail(func):
    """Let keys beyond the last take part."""

    def change(node):
        if isinstance(node.b, Call) or not str(node.a.ty.dtype).startswith("int32"):
            return node
        return tirx.const(True, "bool") if isinstance(node.a, tirx.Var) else node

    return rewrite(func, tirx.LT, change)


def without_mask(func):
    """Take every key for visible."""

    def change(load):
        return tirx.const(True, "bool") if load.source.name == "mask" else load

    return rewrite(func, TensorLoad, change)


def without_maximum(func):
    """Subtract nothing before the exponential: right until logits are large."""

    def change(call):
        if getattr(call.op, "name", "") != "tirx.exp2":
            return call
        difference = call.args[0]
        return tirx.exp2(difference.a) if isinstance(difference, tirx.Sub) else call

    return rewrite(func, Call, change)


UNSUPPORTED = small("unsupported", supports=lambda key, target: "it was planted")
CRASHES = mutated("crashes", calling("abort"))
HANGS = mutated("hangs", calling("pause"))
# Its block of keys is so long that the scores of one block alone take 4 GiB.
TAKES_ALL_MEMORY = replace(
    small("takes_all_memory"),
    structure=lambda key, target: {"block_q": (32,), "block_kv": (1 << 25,)},
)
HIDES_ITS_MEMORY = replace(
    TAKES_ALL_MEMORY,
    name="hides_its_memory",
    workspace=lambda problem, target, parameters: 0,
)
DOES_NOT_BUILD = mutated(
    "does_not_build",
    lambda func: in_store(
        func, lambda value: tirx.call_intrin("float32", "tirx.tvm_warp_shuffle", 0, value, 0, 1, 1)
    ),
)


def _raise(sch, spec, target, parameters):
    raise ValueError("this template was planted to fail")


TEMPLATE_RAISES = small("template_raises", schedule=_raise)
WRONG = mutated("wrong", when(lambda func: tirx.const(True, "bool")))
WRONG_ON_TAILS = mutated("wrong_on_tails", without_tail)
WRONG_WHEN_MASKED = mutated("wrong_when_masked", without_mask)
WRONG_AT_LARGE_LOGITS = mutated("wrong_at_large_logits", without_maximum)
WRONG_AT_ONE_QUERY = mutated(
    "wrong_at_one_query", when(lambda func: shape_variable(func, "query", 2) == 1)
)
WRONG_FOR_ONE_HEAD = mutated(
    "wrong_for_one_head", when(lambda func: block_variable(func, "vh") % 2 == 1)
)
