"""Rules of operators that compute each element from elements at the same place."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import fx

from backends.wgpu.graph import threefry
from backends.wgpu.graph.index import linear, plain
from backends.wgpu.graph.opaque import KEEP, UNIFORM
from backends.wgpu.graph.values import NoRule, Scalar, converted, literal, scalar_of
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
_BINARY_OF_WHOLE: Final[dict[Any, str]] = {
    _aten.maximum.default: "max({0}, {1})",
    _aten.minimum.default: "min({0}, {1})",
}
_BINARY_OF_TRUTH: Final[dict[Any, str]] = {
    _aten.add.Tensor: "({0} || {1})",
    _aten.mul.Tensor: "({0} && {1})",
    _aten.maximum.default: "({0} || {1})",
    _aten.minimum.default: "({0} && {1})",
}
_MULTIPLIED: Final = frozenset({_aten.mul.Tensor, _aten.mul.Scalar})
_DIVIDED: Final = frozenset({_aten.div.Tensor, _aten.div.Scalar})
_ADDED: Final = frozenset({_aten.add.Tensor, _aten.add.Scalar})
_SUBTRACTED: Final = frozenset({_aten.sub.Tensor, _aten.sub.Scalar})
_RULES_OF_TRUTH: Final[dict[Any, str]] = {
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
    _aten.round.default: "round({0})",  # halves to even ones, as torch does
    _aten.sign.default: "sign({0})",
    _aten.exp2.default: "exp2({0})",
    _aten.log2.default: f"(logarithm({{0}}) * {1 / math.log(2)!r})",
    _aten.log1p.default: "log_1_plus({0})",
    _aten.expm1.default: "exp_minus_1({0})",
}
_POWERS: Final[dict[Scalar, str]] = {"f32": "power", "i32": "int_power", "bool": "power"}
_MULTIPLIED_POWER: Final = 64
"""Whole exponents up to it are products, which lose less than a logarithm."""
_COMPARISONS: Final = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _binary(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    scalar = scalar_of(node)
    one, two = (k.argument(x, at, scalar) for x in node.args[:2])
    if scalar == "bool":
        if node.target not in _BINARY_OF_TRUTH:
            raise NoRule(node, "of truth values")
        return _BINARY_OF_TRUTH[node.target].format(one, two)
    alpha: Any = node.kwargs.get("alpha", 1)
    if alpha != 1:
        two = f"({literal(alpha, scalar)} * {two})"
    if scalar == "i32":
        return _BINARY_OF_WHOLE.get(node.target, _BINARY[node.target]).format(one, two)
    written = _of_written_zeros(node.target, one, two)
    return written or _not_cancelled(k, node.target, one, two)


def _not_cancelled(k: KernelText, target: Any, one: str, two: str) -> str:
    """The operator; of `x + (y - x)` a driver may make `y`, also where x is infinite or no number.

    What is there with both signs then has its say once more: the sum is no number either.
    """
    text = _BINARY[target].format(one, two)
    if target not in _ADDED and target not in _SUBTRACTED:
        return text
    ours, theirs = k.terms_of(one), k.terms_of(two, turned=target in _SUBTRACTED)
    both = {name for sign, name in theirs if (-sign, name) in ours and name.isidentifier()}
    if both:
        finite = " && ".join(f"is_finite({name})" for name in sorted(both))
        text = f"select(not_a_number(0u), {text}, {finite})"
    return k.let_sum(text, frozenset(term for term in ours | theirs if term[1] not in both))


def _of_written_zeros(target: Any, one: str, two: str) -> str:
    """What a compiler would take for zero, though an operand may be infinite or no number; and a
    division by zero, of which some make the dividend."""
    zeros = {literal(zero, "f32"): zero for zero in (0.0, -0.0)}
    if target in _MULTIPLIED and (one in zeros or two in zeros):
        x, zero = (two, one) if one in zeros else (one, two)
        return f"times_zero({'-' if math.copysign(1, zeros[zero]) < 0 else ''}{x})"
    if target in _SUBTRACTED and one == two:
        return f"times_zero(abs({one}))"
    if target in _DIVIDED and two in zeros:
        return f"({one} * {literal(math.copysign(math.inf, zeros[two]), 'f32')})"
    return ""


def _negative(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    x = k.argument(node.args[0], at, scalar_of(node))
    return k.let_sum(f"(-{x})", k.terms_of(x, turned=True))


def _unary(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    return _UNARY[node.target].format(k.argument(node.args[0], at, scalar_of(node)))


def _truth(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    return _RULES_OF_TRUTH[node.target].format(*(k.argument(x, at, "bool") for x in node.args))


def _bitwise(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    scalar = scalar_of(node)
    form = _BITWISE[node.target][scalar != "bool"]
    return form.format(*(k.argument(x, at, scalar) for x in node.args))


def _comparison(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    scalar = _compared_as(node)
    one, two = (k.argument(x, at, scalar) for x in node.args)
    name = str(node.target).split(".")[1]
    if name == "ne":  # WGSL's is false of what is no number
        return f"!({one} == {two})"
    return f"({one} {_COMPARISONS[name]} {two})"


def _compared_as(node: fx.Node) -> Scalar:
    first, second = node.args
    assert isinstance(first, fx.Node)
    kinds = {scalar_of(first)}
    if isinstance(second, fx.Node):
        kinds.add(scalar_of(second))
    elif isinstance(second, float):
        kinds.add("f32")
    return "f32" if "f32" in kinds else "i32"


def _power(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    scalar = scalar_of(node)
    x, power = k.argument(node.args[0], at, scalar), node.args[1]
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
        if float(power).is_integer() and abs(power) <= _MULTIPLIED_POWER:
            product = _multiplied(k, x, abs(int(power)))
            return product if power > 0 else f"(1.0 / {product})"
    return f"{_POWERS[scalar]}({x}, {k.argument(power, at, scalar)})"


def _multiplied(k: KernelText, x: str, power: int) -> str:
    """By squaring."""
    product = ""
    while power:
        if power % 2:
            product = f"({product} * {x})" if product else x
        power //= 2
        x = k.let(f"{x} * {x}") if power else x
    return product


def _power_of_number(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    scalar = scalar_of(node)
    one, two = literal(node.args[0], scalar), k.argument(node.args[1], at, scalar)
    return f"{_POWERS[scalar]}({one}, {two})"


def _divide_rounding(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    scalar = scalar_of(node)
    one, two = (k.argument(x, at, scalar) for x in node.args[:2])
    floor = node.kwargs.get("rounding_mode") == "floor" or "floor" in str(node.target)
    if scalar == "i32":
        return f"floor_div({one}, {two})" if floor else f"({one} / {two})"
    return f"{'float_floor_div' if floor else 'trunc_div'}({one}, {two})"


def _remainder(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    scalar = scalar_of(node)
    one, two = (k.argument(x, at, scalar) for x in node.args[:2])
    if scalar == "i32":
        return f"({one} - {two} * floor_div({one}, {two}))"
    return f"remainder({one}, {two})"


def _where(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    scalar = scalar_of(node)
    chosen, yes, no = node.args
    one, other = k.argument(yes, at, scalar), k.argument(no, at, scalar)
    if one == other:
        return one  # a compiler would see as much, and a zero in it
    return f"select({other}, {one}, {k.argument(chosen, at, 'bool')})"


def _clamp(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    scalar = scalar_of(node)
    low = node.args[1] if len(node.args) > 1 else node.kwargs.get("min")
    high = node.args[2] if len(node.args) > 2 else node.kwargs.get("max")
    text = k.argument(node.args[0], at, scalar)
    least, most = ("larger", "smaller") if scalar == "f32" else ("max", "min")
    if low is not None:
        text = f"{least}({text}, {k.argument(low, at, scalar)})"
    if high is not None:
        text = f"{most}({text}, {k.argument(high, at, scalar)})"
    return text


def _relu(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    scalar = scalar_of(node)
    name = "larger" if scalar == "f32" else "max"
    return f"{name}({k.argument(node.args[0], at, scalar)}, {literal(0, scalar)})"


def _converted(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return converted(k.element(source, at), scalar_of(source), scalar_of(node))


def _is_nan(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    x = k.argument(node.args[0], at, "f32")
    return f"is_nan({x})"


def _is_infinite(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    x = k.argument(node.args[0], at, "f32")
    return f"((bitcast<u32>({x}) & 0x7fffffffu) == 0x7f800000u)"


def _filled(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    del k, at
    return literal(
        node.args[0 if node.target is _aten.scalar_tensor.default else 1], scalar_of(node)
    )


def _arange(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    scalar = scalar_of(node)
    first, step = node.args[0], node.args[2] if len(node.args) > 2 else 1
    if node.target is _aten.arange.default:
        first, step = 0, 1
    elif node.target is _aten.arange.start:
        step = 1
    del k
    return f"({literal(first, scalar)} + {scalar}({at[0]}) * {literal(step, scalar)})"


def _keep(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    """Zero with the probability of being dropped, else what makes up for it."""
    seed, _shape, drop, site = node.args
    assert isinstance(drop, float)
    scale = literal(1.0 / (1.0 - drop), "f32")
    return f"select({scale}, 0.0, {_word(k, seed, at, site)} < {threefry.threshold(drop)}u)"


def _uniform(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    seed, _shape, site = node.args
    return f"(f32({_word(k, seed, at, site)} >> 8u) * {literal(2.0**-24, 'f32')})"


def _word(k: KernelText, seed: object, at: Coordinates, site: object) -> str:
    """The random word of an element."""
    assert isinstance(seed, fx.Node)
    one, two = (k.let(f"u32({k.element(seed, [plain(f'{i}u', 2)])})") for i in (0, 1))
    return f"threefry({one}, {two}, {linear(at)}, {site}u)"


ELEMENTWISE: Final[dict[Any, Rule]] = {
    **dict.fromkeys(_BINARY, _binary),
    **dict.fromkeys(_UNARY, _unary),
    _aten.neg.default: _negative,
    **dict.fromkeys(_RULES_OF_TRUTH, _truth),
    **dict.fromkeys(_BITWISE, _bitwise),
    **{
        getattr(getattr(_aten, name), overload): _comparison
        for name in _COMPARISONS
        for overload in ("Tensor", "Scalar")
    },
    _aten.pow.Tensor_Scalar: _power,
    _aten.pow.Tensor_Tensor: _power,
    _aten.pow.Scalar: _power_of_number,
    _aten.div.Tensor_mode: _divide_rounding,
    _aten.div.Scalar_mode: _divide_rounding,
    _aten.floor_divide.default: _divide_rounding,
    _aten.remainder.Scalar: _remainder,
    _aten.remainder.Tensor: _remainder,
    _aten.where.self: _where,
    _aten.clamp.default: _clamp,
    _aten.clamp.Tensor: _clamp,
    _aten.relu.default: _relu,
    _aten._to_copy.default: _converted,  # noqa: SLF001
    _aten.isnan.default: _is_nan,
    _aten.isinf.default: _is_infinite,
    _aten.full.default: _filled,
    _aten.full_like.default: _filled,
    _aten.scalar_tensor.default: _filled,
    _aten.arange.default: _arange,
    _aten.arange.start: _arange,
    _aten.arange.start_step: _arange,
    KEEP: _keep,
    UNIFORM: _uniform,
}
