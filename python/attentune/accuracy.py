"""Comparing an output with the float64 reference: one table of tolerances for every check."""

from __future__ import annotations

from typing import Any

import numpy as np

# Error allowed, as a multiple of the largest value: what is left of an element type after its own
# rounding of inputs' products (float32, with logits up to +-100) or of the output (16 bits).
TOLERANCE = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}


def mismatch(actual: Any, expected: Any, dtype: str, magnitude: float) -> str | None:
    """Say how an output differs from the reference.

    Parameters
    ----------
    actual, expected : array_like
        Output of a kernel and of the reference, any shape.
    dtype : str
        Element type of the output.
    magnitude : float
        Largest absolute value of the values that were averaged; errors are relative to it.

    Returns
    -------
    str or None
        None if they agree; else one clause with the worst element. NaN agrees only with NaN.
    """
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        return f"shape {actual.shape} instead of {expected.shape}"
    if actual.size == 0:
        return None
    one_sided = np.isnan(actual) != np.isnan(expected)
    if one_sided.any():
        where = tuple(int(i) for i in np.argwhere(one_sided)[0])
        return f"{actual[where]} instead of {expected[where]} at {where}"
    with np.errstate(invalid="ignore"):
        error = np.abs(actual - expected)
    error[np.isnan(expected) | (actual == expected)] = 0.0
    allowed = TOLERANCE[dtype] * max(magnitude, float(np.finfo(np.float32).tiny))
    worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(error)), error.shape))
    if not error[worst] <= allowed:
        return (
            f"{actual[worst]:.6g} instead of {expected[worst]:.6g} at {worst}, an error of "
            f"{error[worst]:.2e} where {allowed:.2e} is allowed"
        )
    return None
