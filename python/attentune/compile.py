"""From a scheduled PrimFunc to machine code: TVM's own pipeline with vector math in it."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import IRModule, tirx
from tvm.tirx.compilation_pipeline import register_tir_pipeline

from attentune.target import Target
from attentune.vector_math import lower_vector_math

PIPELINE = "attentune"


def _pipeline() -> tuple[Any, Any, Any]:
    """Return TVM's schedule pipeline, followed by the expansion of vector math."""
    lower, finalize_host, finalize_device = tirx.get_tir_pipeline("s_tir")

    @tvm.transform.module_pass(opt_level=0, name="attentune.Lower")
    def lower_with_math(mod: IRModule, _context: Any) -> IRModule:
        return lower_vector_math(lower(mod))

    return lower_with_math, finalize_host, finalize_device


register_tir_pipeline(PIPELINE, _pipeline)


def compile_module(mod: IRModule, target: Target | tvm.target.Target) -> tvm.runtime.Module:
    """Compile scheduled functions.

    Parameters
    ----------
    mod : IRModule
        Functions after scheduling.
    target : Target
        What to compile for.

    Returns
    -------
    tvm.runtime.Module
        Callable by function name.
    """
    resolved = target.to_tvm() if isinstance(target, Target) else target
    return tirx.build(mod, target=resolved, pipeline=PIPELINE)
