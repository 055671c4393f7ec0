"""The arguments of a kernel, in the order of its parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attentune import arrays
from attentune.kernels.spec import KernelSpec
from attentune.problem import AttentionProblem


def scalars(spec: KernelSpec, problem: AttentionProblem) -> tuple[float | int, ...]:
    """Return the scalar arguments of a call: scale, softcap and bounds, where there are any.

    A bound that a problem lacks although its kernel has one is given as one that hides nothing.
    """
    values: list[float | int] = [problem.scale_value]
    if spec.softcap:
        values.append(problem.softcap if problem.softcap is not None else math.inf)
    lower, upper = problem.bounds
    if spec.lower:
        values.append(-(1 << 40) if lower is None else lower)
    if spec.upper:
        values.append(1 << 40 if upper is None else upper)
    return tuple(values)


def tensors(
    spec: KernelSpec, problem: AttentionProblem, values: Mapping[str, Any], out: Any
) -> list[Any]:
    """Return a kernel's tensor arguments.

    Parameters
    ----------
    spec : KernelSpec
        What the kernel was compiled for.
    problem : AttentionProblem
        The call.
    values : Mapping
        Arrays by the names query, key, value, mask and bias.
    out : Any
        Where the result goes.
    """
    full = (problem.batch, problem.q_heads, problem.seq_q, problem.seq_kv)
    result = [arrays.as_tensor(values[name]) for name in ("query", "key", "value")]
    if spec.mask != "none":
        result.append(arrays.as_tensor(arrays.broadcast(values["mask"], full)))
    if spec.bias != "none":
        result.append(arrays.as_tensor(arrays.broadcast(values["bias"], full)))
    result.append(arrays.as_tensor(out))
    return result
