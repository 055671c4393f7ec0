"""Vector exp2 and tanh for CPUs.

LLVM lowers an exponential over a vector to one call of the scalar libm per lane, which is several
times the cost of everything else in a softmax. `lower_vector_math` replaces those operators after
TVM has vectorized the loops, so that the expression sees the vectors that the target will run.

Accuracy, against float64: exp2 within 1.5e-7 relative for results that are normal numbers, zero
below 2^-127, exact at 0; tanh within 3e-7 relative. NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi
from tvm import IRModule, tirx
from tvm.ir import Call
from tvm.target import Target, codegen

Expr = Any

# 2^f on [0, 1), relative minimax, the constant term held at 1 so that exp2(0) is 1 exactly.
_EXP2 = (1.0, 0.693151312, 0.24016445, 0.0557999132, 0.00901703022, 0.00186713011)
# (tanh(x) - x) / x^3 in powers of x^2 on |x| < 0.625, relative minimax of tanh.
_TANH = (-0.333332819, 0.133314422, -0.053739715, 0.0206390872, -0.00570498693)
_TANH_SMALL = 0.625


def lower_vector_math(mod: IRModule) -> IRModule:
    """Replace float32 exp2 and tanh in every function compiled for LLVM.

    Parameters
    ----------
    mod : IRModule
        Lowered functions with their target attached.

    Returns
    -------
    IRModule
        The module with the operators expanded; functions for other targets are left alone.
    """
    return IRModule({name: _lower_function(f) for name, f in mod.functions.items()}, mod.attrs)


def _lower_function(func: Any) -> Any:
    target = func.attrs.get("target") if func.attrs else None
    if target is None or target.kind.name != "llvm":
        return func
    wide = _has_avx512(target)

    def replace(call: Call) -> Any:
        name = getattr(call.op, "name", "")
        if name not in ("tirx.exp2", "tirx.tanh"):
            return call
        lanes = _float32_lanes(call)
        if lanes is None:
            return call
        expand = _exp2_avx512 if wide and lanes == 16 else _exp2
        if name == "tirx.exp2":
            return expand(call.args[0], lanes)
        return _tanh(call.args[0], lanes, expand)

    return func.with_body(tvm_ffi.structural_map(func.body, (Call, replace), order="post"))


def _has_avx512(target: Target) -> bool:
    with target:
        return bool(codegen.target_has_features(["avx512f", "avx512dq"], target))


def _float32_lanes(expr: Expr) -> int | None:
    """Return the number of lanes of a float32 expression, None for other types."""
    name, _, lanes = str(expr.ty.dtype).partition("x")
    if name != "float32":
        return None
    return int(lanes) if lanes else 1


def _dtype(name: str, lanes: int) -> str:
    return name if lanes == 1 else f"{name}x{lanes}"


def _constant(value: float, lanes: int) -> Expr:
    scalar = tirx.FloatImm("float32", value)
    return scalar if lanes == 1 else tirx.Broadcast(scalar, lanes)


def _integer(value: int, lanes: int) -> Expr:
    scalar = tirx.IntImm("int32", value)
    return scalar if lanes == 1 else tirx.Broadcast(scalar, lanes)


def _let(value: Expr, body: Callable[[Expr], Expr]) -> Expr:
    """Bind a value to a name, so that an expression that uses it twice computes it once."""
    var = tirx.Var("t", str(value.ty.dtype))
    return tirx.Let(var, value, body(var))


def _polynomial(x: Expr, coefficients: Sequence[float], lanes: int) -> Expr:
    value = _constant(coefficients[-1], lanes)
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + _constant(coefficient, lanes)
    return value


def _exp2(x: Expr, lanes: int) -> Expr:
    """2^x as 2^f * 2^n with n = floor(x), 2^n made from its exponent bits."""

    def scaled(x: Expr, n: Expr) -> Expr:
        exponent = n.astype(_dtype("int32", lanes)) + _integer(127, lanes)
        power = tirx.reinterpret(
            _dtype("float32", lanes), tirx.shift_left(exponent, _integer(23, lanes))
        )
        return _polynomial(x - n, _EXP2, lanes) * power

    # Written so that NaN takes the branch that keeps it. At -127 the exponent bits are 0, and the
    # product is exactly 0; at 128 they are infinity's.
    low, high = _constant(-127.0, lanes), _constant(128.0, lanes)
    return _let(
        x,
        lambda x: _let(
            tirx.Select(x < low, low, tirx.Select(x > high, high, x)),
            lambda x: _let(tirx.floor(x), lambda n: scaled(x, n)),
        ),
    )


def _exp2_avx512(x: Expr, lanes: int) -> Expr:
    """2^x by vreduceps (x - floor(x)) and vscalefps (p * 2^floor(x)), which mind the edges."""
    dtype = _dtype("float32", lanes)
    every_lane, current_rounding = tirx.IntImm("int16", -1), tirx.IntImm("int32", 4)
    to_floor = tirx.IntImm("int32", 1)

    def intrinsic(name: str, a: Expr, b: Expr, passthrough: Expr) -> Expr:
        return tirx.call_llvm_pure_intrin(
            dtype,
            f"llvm.x86.avx512.mask.{name}.ps.512",
            a,
            b,
            passthrough,
            every_lane,
            current_rounding,
        )

    return _let(
        x,
        lambda x: _let(
            _let(
                intrinsic("reduce", x, to_floor, x),
                lambda fraction: _polynomial(fraction, _EXP2, lanes),
            ),
            lambda p: intrinsic("scalef", p, x, p),
        ),
    )


def _tanh(x: Expr, lanes: int, exp2: Callable[[Expr, int], Expr]) -> Expr:
    """tanh by a polynomial near 0, where (1 - t) / (1 + t) would cancel, and by exp2 beyond."""

    def both(x: Expr) -> Expr:
        square = x * x
        near = x + x * square * _polynomial(square, _TANH, lanes)
        return _let(
            tirx.Select(x < _constant(0.0, lanes), -x, x),
            lambda magnitude: tirx.Select(
                magnitude < _constant(_TANH_SMALL, lanes), near, far(x, magnitude)
            ),
        )

    def far(x: Expr, magnitude: Expr) -> Expr:
        one = _constant(1.0, lanes)
        decay = exp2(magnitude * _constant(-2.0 * math.log2(math.e), lanes), lanes)
        ratio = _let(decay, lambda t: (one - t) / (one + t))
        return _let(ratio, lambda r: tirx.Select(x < _constant(0.0, lanes), -r, r))

    return _let(x, both)
