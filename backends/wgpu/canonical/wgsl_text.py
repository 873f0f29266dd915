"""Print a kernel as WGSL that leaves a driver nothing to contract, reorder or fold.

A driver may evaluate `a * b + c` with one rounding or two, fold `0.0 * x` and `x - x` to 0 although
x may be infinite, and fold `x + 0.0` to x although x may be -0. Therefore the result of every
product, sum, difference and negation, every zero, and every subtrahend passes through an integer
addition of a zero that is read from memory and so unknown to the compiler. Named constants pass
through it as well, since constant folding could fuse operations that the device does not fuse.
`fma` is printed unchanged, because the convention defines it; a running sum of fmas becomes opaque
only where it is read. Quotients and square roots are corrected to the nearest float with integers;
other functions are the library's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from backends.wgpu.canonical import tree
from backends.wgpu.canonical.convention import Convention
from backends.wgpu.canonical.library import called_functions, use_library

_OPAQUE: Final = """\
@group(0) @binding({binding}) var<uniform> unknown_zeros: array<vec4u, 4>;
var<private> unknown_zero: u32;
fn make_opaque(x: f32) -> f32 {{ return bitcast<f32>(bitcast<u32>(x) + unknown_zero); }}
fn make_opaque4(x: vec4f) -> vec4f {{
  return bitcast<vec4f>(bitcast<vec4u>(x) + vec4u(unknown_zero));
}}
fn to_i32(x: f32) -> i32 {{
  if (!(x >= -2147483648.0)) {{ return select(0, i32(-2147483647 - 1), x < 0.0); }}
  if (x >= 2147483648.0) {{ return 2147483647; }}
  return i32(x);
}}
fn to_u32(x: f32) -> u32 {{
  if (!(x > 0.0)) {{ return 0u; }}
  if (x >= 4294967296.0) {{ return 4294967295u; }}
  return u32(x);
}}
"""
_LOCAL_INDEX: Final = "local_invocation_index"
_CORRECTED_FUNCTIONS: Final = """\
// A mantissa of 24 bits and the biased exponent; subnormals are normalized.
struct Parts { mantissa: u32, exponent: i32 }
fn split_float(bits: u32) -> Parts {
  let rest = bits & 0x7fffffu;
  if ((bits & 0x7f800000u) != 0u) { return Parts(rest | 0x800000u, i32((bits >> 23u) & 255u)); }
  let up = countLeadingZeros(rest | 1u) - 8u;
  return Parts(rest << up, 1 - i32(up));
}
fn round_and_pack(sign: u32, exponent: i32, mantissa_25: u32, inexact: bool) -> f32 {
  // mantissa_25 has 25 bits: the 24 bits of a float32 and one below them, for rounding.
  if (exponent >= 1) {
    let up = (mantissa_25 & 1u) & select((mantissa_25 >> 1u) & 1u, 1u, inexact);
    let bits = (u32(min(exponent, 255)) << 23u) + ((mantissa_25 >> 1u) - 0x800000u) + up;
    return bitcast<f32>(sign | min(bits, 0x7f800000u));
  }
  if (FLUSHES) {
    let last = mantissa_25 >= 0x1ffffffu && exponent == 0;
    return bitcast<f32>(sign | select(0u, 0x800000u, last));
  }
  let shift = u32(min(2 - exponent, 26));
  let whole = mantissa_25 >> shift;
  let below = mantissa_25 & ((1u << shift) - 1u);
  let half = 1u << (shift - 1u);
  let up = below > half || (below == half && (inexact || (whole & 1u) == 1u));
  return bitcast<f32>(sign | (whole + select(0u, 1u, up)));
}
// The bits of an operand, with subnormals flushed if the convention says so.
fn flush_input(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  return select(bits, bits & 0x80000000u, FLUSHES && (bits & 0x7f800000u) == 0u);
}
fn quotient(x: f32, y: f32) -> f32 {
  let x_bits = flush_input(x);
  let y_bits = flush_input(y);
  let sign = (x_bits ^ y_bits) & 0x80000000u;
  let x_size = x_bits & 0x7fffffffu;
  let y_size = y_bits & 0x7fffffffu;
  if (x_size > 0x7f800000u || y_size > 0x7f800000u) { return not_a_number(0u); }
  if (x_size == 0x7f800000u) {
    if (y_size == 0x7f800000u) { return not_a_number(0u); }
    return infinity(sign);
  }
  if (y_size == 0u) {
    if (x_size == 0u) { return not_a_number(0u); }
    return infinity(sign);
  }
  if (x_size == 0u || y_size == 0x7f800000u) { return bitcast<f32>(sign); }
  let one = split_float(x_size);
  let two = split_float(y_size);
  let less = one.mantissa < two.mantissa;
  let m = select(one.mantissa, one.mantissa << 1u, less);
  let n = two.mantissa;
  let near = u32((f32(m) / f32(n)) * 16777216.0);
  // The device's quotient is only an estimate: start 8 below it, and correct by the remainder.
  var q = near - 8u;
  var rest = (m << 24u) - q * n;
  if (rest >= n << 3u) { rest -= n << 3u; q += 8u; }
  if (rest >= n << 2u) { rest -= n << 2u; q += 4u; }
  if (rest >= n << 1u) { rest -= n << 1u; q += 2u; }
  if (rest >= n) { rest -= n; q += 1u; }
  return round_and_pack(sign, one.exponent - two.exponent + select(127, 126, less), q, rest != 0u);
}
fn quotient4(x: vec4f, y: vec4f) -> vec4f {
  return vec4f(quotient(x[0], y[0]), quotient(x[1], y[1]), quotient(x[2], y[2]),
    quotient(x[3], y[3]));
}
fn square_root(x: f32) -> f32 {
  let x_bits = flush_input(x);
  if ((x_bits & 0x7fffffffu) == 0u || x_bits == 0x7f800000u) { return bitcast<f32>(x_bits); }
  if (x_bits >= 0x7f800000u) { return not_a_number(0u); }
  let one = split_float(x_bits);
  let odd = (one.exponent & 1) == 0;
  let m = select(one.mantissa, one.mantissa << 1u, odd);
  var s = u32(sqrt(f32(m)) * 5792.61875148) - 16u;
  var rest = (m << 25u) - s * s;
  if (rest >= 32u * s + 256u) { rest -= 32u * s + 256u; s += 16u; }
  if (rest >= 16u * s + 64u) { rest -= 16u * s + 64u; s += 8u; }
  if (rest >= 8u * s + 16u) { rest -= 8u * s + 16u; s += 4u; }
  if (rest >= 4u * s + 4u) { rest -= 4u * s + 4u; s += 2u; }
  if (rest >= 2u * s + 1u) { rest -= 2u * s + 1u; s += 1u; }
  return round_and_pack(0u, (one.exponent + select(127, 126, odd)) >> 1u, s, rest != 0u);
}
"""
"""Correct the device's quotient and square root with integers. Without loops, because Mesa's
software Vulkan limits a kernel to 65,535 iterations in total."""


def canonical_wgsl(source: str, convention: Convention) -> tuple[str, bool]:
    """Return the kernel's canonical WGSL, and whether it reads the unknown zero, a uniform that is
    then its last binding.

    Raises:
        UnsupportedKernel: The kernel uses unsupported WGSL.
    """
    module = use_library(tree.read_module(source))
    text = _Printer()
    functions = [
        text.function(function) for function in (*called_functions(module), *module.functions)
    ]
    body = text.main(module.body)
    needs_zero = "make_opaque" in "\n".join([*functions, body])
    inputs = dict(module.inputs)
    if needs_zero:
        names = {built_in: name for name, built_in in inputs.items()}
        lane = names.get(_LOCAL_INDEX, "invocation_index")
        inputs.setdefault(lane, _LOCAL_INDEX)
        # The index differs by invocation, because Mesa recompiles a kernel for each value of a
        # uniform that is used in a condition.
        body = f"unknown_zero = unknown_zeros[{lane} & 3u].x;\n{body}"
    argument_list = ", ".join(
        f"@builtin({built_in}) {name}: {_built_in_type(built_in)}"
        for name, built_in in inputs.items()
    )
    main = (
        f"@compute @workgroup_size({module.workgroup})\nfn main({argument_list}) {{\n{body}\n}}\n"
    )
    code = "\n".join([*functions, main])
    bindings = sum(array.binding >= 0 for array in module.arrays.values())
    helpers = []
    if "quotient" in code or "square_root(" in code:
        helpers.append(_CORRECTED_FUNCTIONS.replace("FLUSHES", str(convention.flushes).lower()))
        for name, definition in (("infinity", _INFINITY), ("not_a_number", _NOT_A_NUMBER)):
            if f"fn {name}(" not in code:
                helpers.append(definition)
    opaque = _OPAQUE.format(binding=bindings)
    if needs_zero:
        helpers.append(opaque)
    elif "to_i32(" in code or "to_u32(" in code:
        helpers.append(opaque[opaque.index("fn to_i32") :])
    declarations = [_declaration(array) for array in module.arrays.values()]
    return "\n".join([*declarations, *helpers, code]), needs_zero


_INFINITY: Final = "fn infinity(sign: u32) -> f32 { return bitcast<f32>(0x7f800000u | sign); }"
_NOT_A_NUMBER: Final = "fn not_a_number(b: u32) -> f32 { return bitcast<f32>(0x7fc00000u | b); }"


def _built_in_type(name: str) -> str:
    scalars = {"local_invocation_index", "subgroup_invocation_id", "subgroup_size"}
    return "u32" if name in scalars else "vec3u"


def _type(kind: str) -> str:
    return f"vec{kind[3]}<bool>" if kind.startswith("vec") and kind[4] == "b" else kind


def _declaration(array: tree.Array) -> str:
    if array.binding < 0:
        return f"var<workgroup> {array.name}: array<{_type(array.element)}, {array.elements}>;"
    access = "read_write" if array.is_writable else "read"
    return (
        f"@group(0) @binding({array.binding}) var<storage, {access}> {array.name}: "
        f"array<{_type(array.element)}>;"
    )


_UNNAMED: Final = frozenset({"select", "max", "min", "clamp", "fma"})
"""Built-in functions whose constant arguments need not be opaque."""


class _Printer:
    def __init__(self) -> None:
        self._sums_in_progress: frozenset[tree.Expression] = frozenset()

    def main(self, body: tuple[tree.Statement, ...]) -> str:
        """Print a function's body."""
        self._sums_in_progress = frozenset(_running_sums(body))
        return "\n".join(self.statements(body))

    def function(self, node: tree.Function) -> str:
        """Print a function."""
        argument_list = ", ".join(f"{name}: {_type(kind)}" for name, kind in node.parameters)
        body = self.main(node.body)
        return f"fn {node.name}({argument_list}) -> {_type(node.type)} {{\n{body}\n}}"

    def statements(self, body: Iterable[tree.Statement]) -> Iterator[str]:
        for statement in body:
            match statement:
                case tree.Declare() | tree.Assignment():
                    yield self.simple(statement) + ";"
                case tree.If(condition, then, otherwise):
                    yield f"if ({self.expression(condition)}) {{"
                    yield from self.statements(then)
                    if otherwise:
                        yield "} else {"
                        yield from self.statements(otherwise)
                    yield "}"
                case tree.For(None, condition, _, inner):
                    yield f"while ({self.expression(condition)}) {{"
                    yield from self.statements(inner)
                    yield "}"
                case tree.For(first, condition, step, inner):
                    assert first is not None
                    assert step is not None
                    head = (
                        f"{self.simple(first)}; {self.expression(condition)}; {self.simple(step)}"
                    )
                    yield f"for ({head}) {{"
                    yield from self.statements(inner)
                    yield "}"
                case tree.Return(value):
                    yield "return;" if value is None else f"return {self.assigned_value(value)};"
                case tree.Scope(inner):
                    yield "{"
                    yield from self.statements(inner)
                    yield "}"
                case tree.Barrier():
                    yield "workgroupBarrier();"

    def simple(self, node: tree.Declare | tree.Assignment) -> str:
        if isinstance(node, tree.Assignment):
            target = self.term(node.target)
            if (sums := _added_product(node)) is not None:
                # Safe without opaque values: no two terms of a running sum share a factor.
                factor, other_factor = map(self.expression, sums.arguments[:2])
                return f"{target} = fma({factor}, {other_factor}, {target})"
            return f"{target} = {self.assigned_value(node.value)}"
        keyword = "var" if node.is_mutable else "let"
        value = "" if node.value is None else f" = {self.assigned_value(node.value)}"
        return f"{keyword} {node.name}: {_type(node.type)}{value}"

    def assigned_value(self, node: tree.Expression) -> str:
        """Print a value that is assigned to a name."""
        if isinstance(node, tree.Literal) and _is_float(node):
            return f"make_opaque({_literal(node)})"
        return self.expression(node)

    def expression(self, node: tree.Expression) -> str:
        """Print a value."""
        match node:
            case tree.Literal():
                text = _literal(node)
                return f"make_opaque({text})" if _is_float(node) and node.value == 0 else text
            case tree.Unary("-", operand, kind) if kind in tree.FLOATS:
                return _opaque(f"-{self.expression(operand)}", kind)
        text = self.term(node)
        return _opaque(text, node.type) if node in self._sums_in_progress else text

    def term(self, node: tree.Expression) -> str:
        """Print a value or the target of an assignment."""
        match node:
            case tree.Literal():
                return _literal(node)
            case tree.Name(name):
                return name
            case tree.Unary(sign, operand):
                return f"({sign}{self.expression(operand)})"
            case tree.Binary():
                return self.binary(node)
            case tree.Application():
                return self.call(node)
            case tree.Index(operand, at):
                return f"{self.expression(operand)}[{self.expression(at)}]"
            case tree.Component(operand, name):
                return f"{self.expression(operand)}.{name}"

    def binary(self, node: tree.Binary) -> str:
        sides = node.left, node.right
        if node.sign in tree.COMPARISONS:
            left, right = (
                _literal(x) if isinstance(x, tree.Literal) else self.expression(x) for x in sides
            )
            return f"({left} {node.sign} {right})"
        left, right = map(self.expression, sides)
        if node.type not in tree.FLOATS:
            return f"({left} {node.sign} {right})"
        four = "4" if tree.size_of(node.type) == 4 else ""
        if node.sign == "/":
            if four:
                left, right = (
                    side if tree.size_of(x.type) == 4 else f"vec4f({side})"
                    for side, x in ((left, node.left), (right, node.right))
                )
            return f"quotient{four}({left}, {right})"
        if node.sign == "-":
            right = _opaque(right, node.right.type)
        return _opaque(f"{left} {node.sign} {right}", node.type)

    def call(self, node: tree.Application) -> str:
        text = self.expression if node.name in _UNNAMED else self.assigned_value
        argument_list = ", ".join(map(text, node.arguments))
        first_type = node.arguments[0].type if node.arguments else ""
        if node.name == "bitcast":
            return f"bitcast<{_type(node.type)}>({argument_list})"
        if node.name == "sqrt":
            return f"square_root({argument_list})"
        if first_type == "f32" and node.name in {"i32", "u32"}:
            return f"{'to_i32' if node.name == 'i32' else 'to_u32'}({argument_list})"
        if node.name == "fma":
            return _opaque(f"fma({argument_list})", node.type)
        if node.name == "vec4b":
            return f"vec4<bool>({argument_list})"
        return f"{node.name}({argument_list})"


def _opaque(text: str, kind: str) -> str:
    return f"make_opaque{'4' if tree.size_of(kind) == 4 else ''}({text})"


def _is_float(node: tree.Literal) -> bool:
    return tree.element_of(node.type) in {"f32", "float"}


def _added_product(node: tree.Assignment) -> tree.Application | None:
    """Return the `fma` of `x = fma(a, b, x)`, else None."""
    sums = node.value
    if not isinstance(sums, tree.Application) or sums.name != "fma":
        return None
    return sums if sums.arguments[2] == node.target else None


def _running_sums(body: Iterable[tree.Statement]) -> Iterator[tree.Expression]:
    """Yield the targets of running sums."""
    for statement in body:
        match statement:
            case tree.Assignment(target):
                if _added_product(statement) is not None:
                    yield target
            case tree.If(_, then, otherwise):
                yield from _running_sums((*then, *otherwise))
            case tree.For(_, _, _, inner) | tree.Scope(inner):
                yield from _running_sums(inner)


def _literal(node: tree.Literal) -> str:
    if node.type == "bool":
        return str(bool(node.value)).lower()
    kind = tree.element_of(node.type)
    if kind in {"f32", "float"}:
        number = np.float32(node.value)
        if 0 < abs(number) < np.float32(2.0**-126):
            return f"bitcast<f32>({int(number.view(np.uint32))}u)"
        return f"f32({float(number)!r})"
    if kind == "u32":
        return f"{node.value}u"
    return f"i32({node.value})"
