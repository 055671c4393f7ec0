"""The decorator kernels are written with.

TVMScript's ``T.jit`` parses a function anew for each set of compile-time arguments and lets
optional parameters be absent, which is what one source for every combination of options needs.
In TVM 0.27 it takes the s_tir flag as ``is_stir`` while its parser looks for ``s_tir`` among the
decorator's own keywords, so a kernel with sblocks is rejected; a decorator whose keyword has the
name that the parser looks for is all it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from attentune.kernels.spec import KernelSpec


def jit(*, s_tir: bool) -> Callable[..., Any]:
    """Decorate a TensorIR kernel with compile-time and optional parameters.

    Parameters
    ----------
    s_tir : bool
        Whether the body holds sblocks, which schedules work on. Kernels here always do.

    Returns
    -------
    Callable
        A decorator. What it returns has ``specialize(**constants)``, giving a PrimFunc.
    """
    return T.jit(is_stir=s_tir)


def absent(spec: KernelSpec) -> dict[str, None]:
    """Return the optional parameters that a spec does without, as ``specialize`` takes them."""
    present = {
        "mask_handle": spec.mask != "none",
        "bias_handle": spec.bias != "none",
        "softcap": spec.softcap,
        "lower": spec.lower,
        "upper": spec.upper,
    }
    return {name: None for name, needed in present.items() if not needed}


def strided(handle: Any, shape: tuple[Any, ...], dtype: str, *, unit_innermost: bool = True) -> Any:
    """Bind a parameter to a buffer with strides of its own.

    Parameters
    ----------
    handle : Any
        The parameter.
    shape : tuple
        Extents, constants or symbolic.
    dtype : str
        Element type.
    unit_innermost : bool
        Whether the innermost stride is known to be 1.

    Returns
    -------
    Buffer
        A buffer whose strides, in elements, come from the caller's tensor; 0 broadcasts.
    """
    strides = [tirx.Var("stride", "int64") for _ in shape]
    if unit_innermost:
        strides[-1] = 1
    return T.match_buffer(handle, shape, dtype, strides=strides)
