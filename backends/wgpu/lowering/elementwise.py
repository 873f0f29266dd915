"""Rules of elementwise operators."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import fx

from backends.wgpu.graph import threefry
from backends.wgpu.graph.index import as_coordinate, linear_index
from backends.wgpu.graph.opaque import KEEP, UNIFORM
from backends.wgpu.graph.values import NoRule, Scalar, cast, literal, scalar_of
from backends.wgpu.graph.views import Coordinates
from backends.wgpu.shaders.kernel_text import KernelText, Rule

_aten = torch.ops.aten

_BINARY: Final[dict[Any, str]] = {
    _aten.add.Tensor: "({0} + {1})",
    _aten.add.Scalar: "({0} + {1})",
    _aten.sub.Tensor: "({0} - {1})",
    _aten.sub.Scalar: "({0} - {1})",
    _aten.mul.Tensor: "({0} * {1})",
    _aten.mul.Scalar: "({0} * {1})",
    _aten.div.Tensor: "({0} / {1})",
    _aten.div.Scalar: "({0} / {1})",
    _aten.maximum.default: "larger({0}, {1})",
    _aten.minimum.default: "smaller({0}, {1})",
}
_INTEGER_BINARY: Final[dict[Any, str]] = {
    _aten.maximum.default: "max({0}, {1})",
    _aten.minimum.default: "min({0}, {1})",
}
_BOOLEAN_BINARY: Final[dict[Any, str]] = {
    _aten.add.Tensor: "({0} || {1})",
    _aten.mul.Tensor: "({0} && {1})",
    _aten.maximum.default: "({0} || {1})",
    _aten.minimum.default: "({0} && {1})",
}
_MULTIPLICATIONS: Final = frozenset({_aten.mul.Tensor, _aten.mul.Scalar})
_DIVISIONS: Final = frozenset({_aten.div.Tensor, _aten.div.Scalar})
_ADDITIONS: Final = frozenset({_aten.add.Tensor, _aten.add.Scalar})
_SUBTRACTIONS: Final = frozenset({_aten.sub.Tensor, _aten.sub.Scalar})
_LOGICAL: Final[dict[Any, str]] = {
    _aten.logical_and.default: "({0} && {1})",
    _aten.logical_or.default: "({0} || {1})",
    _aten.logical_xor.default: "({0} != {1})",
    _aten.logical_not.default: "(!{0})",
}
_BITWISE: Final[dict[Any, tuple[str, str]]] = {
    _aten.bitwise_and.Tensor: ("({0} && {1})", "({0} & {1})"),
    _aten.bitwise_or.Tensor: ("({0} || {1})", "({0} | {1})"),
    _aten.bitwise_xor.Tensor: ("({0} != {1})", "({0} ^ {1})"),
    _aten.bitwise_and.Scalar: ("({0} && {1})", "({0} & {1})"),
    _aten.bitwise_or.Scalar: ("({0} || {1})", "({0} | {1})"),
    _aten.bitwise_not.default: ("(!{0})", "(~{0})"),
}
_UNARY: Final[dict[Any, str]] = {
    _aten.abs.default: "abs({0})",
    _aten.exp.default: "exp({0})",
    _aten.log.default: "logarithm({0})",
    _aten.sqrt.default: "sqrt({0})",
    _aten.rsqrt.default: "(1.0 / sqrt({0}))",  # inverseSqrt is less exact
    _aten.reciprocal.default: "(1.0 / {0})",
    _aten.sigmoid.default: "(1.0 / (1.0 + exp(-{0})))",
    _aten.tanh.default: "hyperbolic_tangent({0})",
    _aten.erf.default: "erf({0})",
    _aten.sin.default: "sin({0})",
    _aten.cos.default: "cos({0})",
    _aten.floor.default: "floor({0})",
    _aten.ceil.default: "ceil({0})",
    _aten.trunc.default: "trunc({0})",
    _aten.round.default: "round({0})",  # halves round to even, as in torch
    _aten.sign.default: "sign({0})",
    _aten.exp2.default: "exp2({0})",
    _aten.log2.default: f"(logarithm({{0}}) * {1 / math.log(2)!r})",
    _aten.log1p.default: "log_1_plus({0})",
    _aten.expm1.default: "exp_minus_1({0})",
}
_POWERS: Final[dict[Scalar, str]] = {"f32": "power", "i32": "int_power", "bool": "power"}
_LARGEST_MULTIPLIED_POWER: Final = 64
"""Integer exponents up to this are computed by multiplication, which is more accurate."""
_COMPARISONS: Final = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _binary(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    scalar = scalar_of(node)
    left, right = (k.argument(x, coords, scalar) for x in node.args[:2])
    if scalar == "bool":
        if node.target not in _BOOLEAN_BINARY:
            raise NoRule(node, "of booleans")
        return _BOOLEAN_BINARY[node.target].format(left, right)
    alpha: Any = node.kwargs.get("alpha", 1)
    if alpha != 1:
        right = f"({literal(alpha, scalar)} * {right})"
    if scalar == "i32":
        return _INTEGER_BINARY.get(node.target, _BINARY[node.target]).format(left, right)
    special = _with_literal_zero(node.target, left, right)
    return special or _without_cancellation(k, node.target, left, right)


def _without_cancellation(k: KernelText, target: Any, left: str, right: str) -> str:
    """Return a sum that is NaN if a term that cancels is not finite.

    A driver may simplify `x + (y - x)` to `y` even if x is infinite or NaN.
    """
    text = _BINARY[target].format(left, right)
    if target not in _ADDITIONS and target not in _SUBTRACTIONS:
        return text
    left_terms, right_terms = (
        k.terms_of(left),
        k.terms_of(right, is_negated=target in _SUBTRACTIONS),
    )
    cancelled = {
        name for sign, name in right_terms if (-sign, name) in left_terms and name.isidentifier()
    }
    if cancelled:
        is_finite = " && ".join(f"is_finite({name})" for name in sorted(cancelled))
        text = f"select(not_a_number(0u), {text}, {is_finite})"
    return k.let_sum(
        text, frozenset(term for term in left_terms | right_terms if term[1] not in cancelled)
    )


def _with_literal_zero(target: Any, left: str, right: str) -> str:
    """Return an operation with a literal zero in a form that compilers do not fold; else "".

    Compilers fold products with zero even if the operand is infinite or NaN, and some replace a
    division by zero by the dividend.
    """
    zeros = {literal(zero, "f32"): zero for zero in (0.0, -0.0)}
    if target in _MULTIPLICATIONS and (left in zeros or right in zeros):
        x, zero = (right, left) if left in zeros else (left, right)
        return f"times_zero({'-' if math.copysign(1, zeros[zero]) < 0 else ''}{x})"
    if target in _SUBTRACTIONS and left == right:
        return f"times_zero(abs({left}))"
    if target in _DIVISIONS and right in zeros:
        return f"({left} * {literal(math.copysign(math.inf, zeros[right]), 'f32')})"
    return ""


def _negative(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    x = k.argument(node.args[0], coords, scalar_of(node))
    return k.let_sum(f"(-{x})", k.terms_of(x, is_negated=True))


def _unary(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    return _UNARY[node.target].format(k.argument(node.args[0], coords, scalar_of(node)))


def _logical(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    return _LOGICAL[node.target].format(*(k.argument(x, coords, "bool") for x in node.args))


def _bitwise(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    scalar = scalar_of(node)
    form = _BITWISE[node.target][scalar != "bool"]
    return form.format(*(k.argument(x, coords, scalar) for x in node.args))


def _comparison(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    scalar = _comparison_type(node)
    left, right = (k.argument(x, coords, scalar) for x in node.args)
    name = str(node.target).split(".")[1]
    if name == "ne":  # WGSL's `!=` is false for NaN
        return f"!({left} == {right})"
    return f"({left} {_COMPARISONS[name]} {right})"


def _comparison_type(node: fx.Node) -> Scalar:
    left_operand, right_operand = node.args
    assert isinstance(left_operand, fx.Node)
    types = {scalar_of(left_operand)}
    if isinstance(right_operand, fx.Node):
        types.add(scalar_of(right_operand))
    elif isinstance(right_operand, float):
        types.add("f32")
    return "f32" if "f32" in types else "i32"


def _power(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    scalar = scalar_of(node)
    x, power = k.argument(node.args[0], coords, scalar), node.args[1]
    if isinstance(power, int | float):
        if scalar == "i32":
            return f"int_power({x}, {literal(power, scalar)})"
        if power in {2, 3, 4}:
            return "(" + " * ".join([x] * int(power)) + ")"
        if power == 0.5:
            return f"sqrt({x})"
        if power == -0.5:
            return f"(1.0 / sqrt({x}))"
        if power == -1:
            return f"(1.0 / {x})"
        if power == 0:
            return literal(1, scalar)
        if float(power).is_integer() and abs(power) <= _LARGEST_MULTIPLIED_POWER:
            product = _power_by_squaring(k, x, abs(int(power)))
            return product if power > 0 else f"(1.0 / {product})"
    return f"{_POWERS[scalar]}({x}, {k.argument(power, coords, scalar)})"


def _power_by_squaring(k: KernelText, x: str, power: int) -> str:
    """Return a power by repeated squaring."""
    product = ""
    while power:
        if power % 2:
            product = f"({product} * {x})" if product else x
        power //= 2
        x = k.let(f"{x} * {x}") if power else x
    return product


def _power_of_number(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    scalar = scalar_of(node)
    base, exponent = literal(node.args[0], scalar), k.argument(node.args[1], coords, scalar)
    return f"{_POWERS[scalar]}({base}, {exponent})"


def _rounded_division(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    scalar = scalar_of(node)
    left, right = (k.argument(x, coords, scalar) for x in node.args[:2])
    rounds_down = node.kwargs.get("rounding_mode") == "floor" or "floor" in str(node.target)
    if scalar == "i32":
        return f"floor_div({left}, {right})" if rounds_down else f"({left} / {right})"
    return f"{'float_floor_div' if rounds_down else 'trunc_div'}({left}, {right})"


def _remainder(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    scalar = scalar_of(node)
    left, right = (k.argument(x, coords, scalar) for x in node.args[:2])
    if scalar == "i32":
        return f"({left} - {right} * floor_div({left}, {right}))"
    return f"remainder({left}, {right})"


def _where(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    scalar = scalar_of(node)
    condition, true_value, false_value = node.args
    if_true, if_false = (
        k.argument(true_value, coords, scalar),
        k.argument(false_value, coords, scalar),
    )
    if if_true == if_false:
        return if_true  # a compiler would simplify a select and might fold zeros inside
    return f"select({if_false}, {if_true}, {k.argument(condition, coords, 'bool')})"


def _clamp(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    scalar = scalar_of(node)
    low = node.args[1] if len(node.args) > 1 else node.kwargs.get("min")
    high = node.args[2] if len(node.args) > 2 else node.kwargs.get("max")
    text = k.argument(node.args[0], coords, scalar)
    lower, upper = ("larger", "smaller") if scalar == "f32" else ("max", "min")
    if low is not None:
        text = f"{lower}({text}, {k.argument(low, coords, scalar)})"
    if high is not None:
        text = f"{upper}({text}, {k.argument(high, coords, scalar)})"
    return text


def _relu(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    scalar = scalar_of(node)
    name = "larger" if scalar == "f32" else "max"
    return f"{name}({k.argument(node.args[0], coords, scalar)}, {literal(0, scalar)})"


def _convert(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return cast(k.element(source, coords), scalar_of(source), scalar_of(node))


def _is_nan(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    x = k.argument(node.args[0], coords, "f32")
    return f"is_nan({x})"


def _is_infinite(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    x = k.argument(node.args[0], coords, "f32")
    return f"((bitcast<u32>({x}) & 0x7fffffffu) == 0x7f800000u)"


def _fill(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    del k, coords
    return literal(
        node.args[0 if node.target is _aten.scalar_tensor.default else 1], scalar_of(node)
    )


def _arange(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    scalar = scalar_of(node)
    first_value, step = node.args[0], node.args[2] if len(node.args) > 2 else 1
    if node.target is _aten.arange.default:
        first_value, step = 0, 1
    elif node.target is _aten.arange.start:
        step = 1
    del k
    return f"({literal(first_value, scalar)} + {scalar}({coords[0]}) * {literal(step, scalar)})"


def _keep(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    """Return a dropout mask's element: zero or 1 / (1 - drop)."""
    seed, _shape, drop, site = node.args
    assert isinstance(drop, float)
    scale = literal(1.0 / (1.0 - drop), "f32")
    return (
        f"select({scale}, 0.0, {_random_word(k, seed, coords, site)} < {threefry.threshold(drop)}u)"
    )


def _uniform(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    seed, _shape, site = node.args
    return f"(f32({_random_word(k, seed, coords, site)} >> 8u) * {literal(2.0**-24, 'f32')})"


def _random_word(k: KernelText, seed: object, coords: Coordinates, site: object) -> str:
    """Return an element's random word."""
    assert isinstance(seed, fx.Node)
    low, high = (k.let(f"u32({k.element(seed, [as_coordinate(f'{i}u', 2)])})") for i in (0, 1))
    return f"threefry({low}, {high}, {linear_index(coords)}, {site}u)"


ELEMENTWISE: Final[dict[Any, Rule]] = {
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_UNARY, _unary),
    _aten.neg.default: _negative,
    **dict.fromkeys(_LOGICAL, _logical),
    **dict.fromkeys(_BITWISE, _bitwise),
    **{
        getattr(getattr(_aten, name), overload): _comparison
        for name in _COMPARISONS
        for overload in ("Tensor", "Scalar")
    },
    _aten.pow.Tensor_Scalar: _power,
    _aten.pow.Tensor_Tensor: _power,
    _aten.pow.Scalar: _power_of_number,
    _aten.div.Tensor_mode: _rounded_division,
    _aten.div.Scalar_mode: _rounded_division,
    _aten.floor_divide.default: _rounded_division,
    _aten.remainder.Scalar: _remainder,
    _aten.remainder.Tensor: _remainder,
    _aten.where.self: _where,
    _aten.clamp.default: _clamp,
    _aten.clamp.Tensor: _clamp,
    _aten.relu.default: _relu,
    _aten._to_copy.default: _convert,  # noqa: SLF001
    _aten.isnan.default: _is_nan,
    _aten.isinf.default: _is_infinite,
    _aten.full.default: _fill,
    _aten.full_like.default: _fill,
    _aten.scalar_tensor.default: _fill,
    _aten.arange.default: _arange,
    _aten.arange.start: _arange,
    _aten.arange.start_step: _arange,
    KEEP: _keep,
    UNIFORM: _uniform,
}
