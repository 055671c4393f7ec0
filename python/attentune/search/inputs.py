"""Random inputs for a problem, reproducible by seed, and arrays as TVM aligns them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attentune.problem import AttentionProblem

if TYPE_CHECKING:
    import tvm_ffi


def random_inputs(
    problem: AttentionProblem, seed: int = 0, amplitude: float = 1.0
) -> dict[str, np.ndarray[Any, Any]]:
    """Return arrays for a problem.

    Parameters
    ----------
    problem : AttentionProblem
        Shapes, element types and the shapes of mask and bias.
    seed : int
        Same seed, same values.
    amplitude : float
        Standard deviation of the queries; large ones make logits large.

    Returns
    -------
    dict
        query, key, value and, where the problem has them, mask (about two thirds visible; whole
        stretches of keys and now and then a whole row masked) and bias.
    """
    rng = np.random.default_rng(seed)
    element = _dtype(problem.dtype)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape, dtype=np.float32)

    p = problem
    inputs = {
        "query": (amplitude * normal(p.batch, p.q_heads, p.seq_q, p.head_dim)).astype(element),
        "key": normal(p.batch, p.kv_heads, p.seq_kv, p.head_dim).astype(element),
        "value": normal(p.batch, p.kv_heads, p.seq_kv, p.value_dim).astype(element),
    }
    if p.mask is not None:
        mask = rng.random(p.mask) > 0.25
        keys = p.mask[3]
        begin = int(rng.integers(0, keys)) if keys > 1 else 0
        mask[..., begin : begin + keys // 4] = False
        if p.mask[2] > 1:
            mask[..., int(rng.integers(0, p.mask[2])), :] = False
        inputs["mask"] = mask
    if p.bias is not None:
        inputs["bias"] = normal(*p.bias).astype(_dtype(str(p.bias_dtype)))
    if p.layout == "bshd":
        for name in ("query", "key", "value"):
            inputs[name] = inputs[name].swapaxes(1, 2).copy().swapaxes(1, 2)
    return inputs


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def aligned(array: np.ndarray[Any, Any]) -> tvm_ffi.Tensor:
    """Return a copy of an array where TVM would have put it.

    Code for fixed extents takes its buffers to be aligned as TVM's own are; code with symbolic
    strides makes no such assumption.
    """
    import tvm

    from attentune import arrays

    tensor = tvm.runtime.empty(array.shape, arrays.dtype_name(array))
    tensor.copyfrom(array)
    return tensor
