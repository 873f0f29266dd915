"""A kernel as WGSL again, so that a driver finds nothing to contract, reorder or do its own way.

A driver may take `a * b + c` for one operation or for two, `0.0 * x` and `x - x` for 0 also where
x is infinite, and `x + 0.0` for x also where that is -0. So the result of every product, sum,
difference and negation, every zero, and whatever is taken from something, passes through whole
numbers on its way to the next operator: the sum with a zero that lies in memory, of which a
compiler knows nothing. So does every number that gets a name: what is known to a compiler it
computes itself, and then fuses what the device does not. `fma` is left: what it means is the
convention; a running sum of such passes through where it is read. Quotients and roots are corrected
to the nearest by whole numbers, and functions are the library's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from backends.wgpu.canonical import tree
from backends.wgpu.canonical.convention import Convention
from backends.wgpu.canonical.library import called, with_library

_KEPT: Final = """\
@group(0) @binding({binding}) var<uniform> unknown_zeros: array<vec4u, 4>;
var<private> unknown_zero: u32;
fn kept(x: f32) -> f32 {{ return bitcast<f32>(bitcast<u32>(x) + unknown_zero); }}
fn kept4(x: vec4f) -> vec4f {{ return bitcast<vec4f>(bitcast<vec4u>(x) + vec4u(unknown_zero)); }}
fn to_whole(x: f32) -> i32 {{
  if (!(x >= -2147483648.0)) {{ return select(0, i32(-2147483647 - 1), x < 0.0); }}
  if (x >= 2147483648.0) {{ return 2147483647; }}
  return i32(x);
}}
fn to_natural(x: f32) -> u32 {{
  if (!(x > 0.0)) {{ return 0u; }}
  if (x >= 4294967296.0) {{ return 4294967295u; }}
  return u32(x);
}}
"""
_PLACE: Final = "local_invocation_index"
_CORRECTED: Final = """\
struct Parts { mantissa: u32, exponent: i32 }
fn nearest_parts(bits: u32) -> Parts {
  let rest = bits & 0x7fffffu;
  if ((bits & 0x7f800000u) != 0u) { return Parts(rest | 0x800000u, i32((bits >> 23u) & 255u)); }
  let up = countLeadingZeros(rest | 1u) - 8u;
  return Parts(rest << up, 1 - i32(up));
}
fn nearest_packed(sign: u32, exponent: i32, given: u32, inexact: bool) -> f32 {
  // given: 25 bits, the last below those that stay.
  if (exponent >= 1) {
    let up = (given & 1u) & select((given >> 1u) & 1u, 1u, inexact);
    let bits = (u32(min(exponent, 255)) << 23u) + ((given >> 1u) - 0x800000u) + up;
    return bitcast<f32>(sign | min(bits, 0x7f800000u));
  }
  if (FLUSHES) {
    let last = given >= 0x1ffffffu && exponent == 0;
    return bitcast<f32>(sign | select(0u, 0x800000u, last));
  }
  let shift = u32(min(2 - exponent, 26));
  let whole = given >> shift;
  let below = given & ((1u << shift) - 1u);
  let half = 1u << (shift - 1u);
  let up = below > half || (below == half && (inexact || (whole & 1u) == 1u));
  return bitcast<f32>(sign | (whole + select(0u, 1u, up)));
}
fn nearest_taken(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  return select(bits, bits & 0x80000000u, FLUSHES && (bits & 0x7f800000u) == 0u);
}
fn quotient(x: f32, y: f32) -> f32 {
  let x_bits = nearest_taken(x);
  let y_bits = nearest_taken(y);
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
  let one = nearest_parts(x_size);
  let two = nearest_parts(y_size);
  let less = one.mantissa < two.mantissa;
  let m = select(one.mantissa, one.mantissa << 1u, less);
  let n = two.mantissa;
  let near = u32((f32(m) / f32(n)) * 16777216.0);
  // From eight below on: nothing else is taken of the device's own quotient.
  var q = near - 8u;
  var rest = (m << 24u) - q * n;
  if (rest >= n << 3u) { rest -= n << 3u; q += 8u; }
  if (rest >= n << 2u) { rest -= n << 2u; q += 4u; }
  if (rest >= n << 1u) { rest -= n << 1u; q += 2u; }
  if (rest >= n) { rest -= n; q += 1u; }
  return nearest_packed(sign, one.exponent - two.exponent + select(127, 126, less), q, rest != 0u);
}
fn quotient4(x: vec4f, y: vec4f) -> vec4f {
  return vec4f(quotient(x[0], y[0]), quotient(x[1], y[1]), quotient(x[2], y[2]),
    quotient(x[3], y[3]));
}
fn square_root(x: f32) -> f32 {
  let x_bits = nearest_taken(x);
  if ((x_bits & 0x7fffffffu) == 0u || x_bits == 0x7f800000u) { return bitcast<f32>(x_bits); }
  if (x_bits >= 0x7f800000u) { return not_a_number(0u); }
  let one = nearest_parts(x_bits);
  let odd = (one.exponent & 1) == 0;
  let m = select(one.mantissa, one.mantissa << 1u, odd);
  var s = u32(sqrt(f32(m)) * 5792.61875148) - 16u;
  var rest = (m << 25u) - s * s;
  if (rest >= 32u * s + 256u) { rest -= 32u * s + 256u; s += 16u; }
  if (rest >= 16u * s + 64u) { rest -= 16u * s + 64u; s += 8u; }
  if (rest >= 8u * s + 16u) { rest -= 8u * s + 16u; s += 4u; }
  if (rest >= 4u * s + 4u) { rest -= 4u * s + 4u; s += 2u; }
  if (rest >= 2u * s + 1u) { rest -= 2u * s + 1u; s += 1u; }
  return nearest_packed(0u, (one.exponent + select(127, 126, odd)) >> 1u, s, rest != 0u);
}
"""
"""What a quotient and a square root are made from beside the device's own: whole numbers. Without
loops, of whose rounds Mesa's software Vulkan has no more than 65,535 for a whole kernel."""


def canonical_wgsl(source: str, convention: Convention) -> tuple[str, bool]:
    """The kernel's text, and whether it reads the zero: that is its last binding, a uniform.

    Raises:
        NotRead: The kernel has what is not known here.
    """
    module = with_library(tree.read_module(source))
    text = _Text()
    functions = [text.function(each) for each in (*called(module), *module.functions)]
    body = text.main(module.body)
    needs_zero = "kept" in "\n".join([*functions, body])
    inputs = dict(module.inputs)
    if needs_zero:
        names = {built_in: name for name, built_in in inputs.items()}
        place = names.get(_PLACE, "place_of_zero")
        inputs.setdefault(place, _PLACE)
        # Not one for all invocations: Mesa compiles anew for values that conditions hang on.
        body = f"unknown_zero = unknown_zeros[{place} & 3u].x;\n{body}"
    listed = ", ".join(
        f"@builtin({built_in}) {name}: {_built_in_type(built_in)}"
        for name, built_in in inputs.items()
    )
    main = f"@compute @workgroup_size({module.workgroup})\nfn main({listed}) {{\n{body}\n}}\n"
    whole = "\n".join([*functions, main])
    bindings = sum(array.binding >= 0 for array in module.arrays.values())
    helpers = []
    if "quotient" in whole or "square_root(" in whole:
        helpers.append(_CORRECTED.replace("FLUSHES", str(convention.flushes).lower()))
        for name, one in (("infinity", _INFINITY), ("not_a_number", _NOT_A_NUMBER)):
            if f"fn {name}(" not in whole:
                helpers.append(one)
    kept = _KEPT.format(binding=bindings)
    if needs_zero:
        helpers.append(kept)
    elif "to_whole(" in whole or "to_natural(" in whole:
        helpers.append(kept[kept.index("fn to_whole") :])
    declared = [_declared(array) for array in module.arrays.values()]
    return "\n".join([*declared, *helpers, whole]), needs_zero


_INFINITY: Final = "fn infinity(sign: u32) -> f32 { return bitcast<f32>(0x7f800000u | sign); }"
_NOT_A_NUMBER: Final = "fn not_a_number(b: u32) -> f32 { return bitcast<f32>(0x7fc00000u | b); }"


def _built_in_type(name: str) -> str:
    scalars = {"local_invocation_index", "subgroup_invocation_id", "subgroup_size"}
    return "u32" if name in scalars else "vec3u"


def _type(kind: str) -> str:
    return f"vec{kind[3]}<bool>" if kind.startswith("vec") and kind[4] == "b" else kind


def _declared(array: tree.Array) -> str:
    if array.binding < 0:
        return f"var<workgroup> {array.name}: array<{_type(array.element)}, {array.elements}>;"
    access = "read_write" if array.writes else "read"
    return (
        f"@group(0) @binding({array.binding}) var<storage, {access}> {array.name}: "
        f"array<{_type(array.element)}>;"
    )


_UNNAMED: Final = frozenset({"select", "max", "min", "clamp", "fma"})
"""Functions of WGSL's own, whose numbers meet others at once."""


class _Text:
    def __init__(self) -> None:
        self._running: frozenset[tree.Expression] = frozenset()

    def main(self, body: tuple[tree.Statement, ...]) -> str:
        """Of a function's body."""
        self._running = frozenset(_running_sums(body))
        return "\n".join(self.statements(body))

    def function(self, given: tree.Function) -> str:
        """A function of the module."""
        listed = ", ".join(f"{name}: {_type(kind)}" for name, kind in given.parameters)
        body = self.main(given.body)
        return f"fn {given.name}({listed}) -> {_type(given.type)} {{\n{body}\n}}"

    def statements(self, body: Iterable[tree.Statement]) -> Iterator[str]:
        for statement in body:
            match statement:
                case tree.Declare() | tree.Assignment():
                    yield self.simple(statement) + ";"
                case tree.If(condition, then, otherwise):
                    yield f"if ({self.of(condition)}) {{"
                    yield from self.statements(then)
                    if otherwise:
                        yield "} else {"
                        yield from self.statements(otherwise)
                    yield "}"
                case tree.For(None, condition, _, inner):
                    yield f"while ({self.of(condition)}) {{"
                    yield from self.statements(inner)
                    yield "}"
                case tree.For(first, condition, step, inner):
                    assert first is not None
                    assert step is not None
                    head = f"{self.simple(first)}; {self.of(condition)}; {self.simple(step)}"
                    yield f"for ({head}) {{"
                    yield from self.statements(inner)
                    yield "}"
                case tree.Return(value):
                    yield "return;" if value is None else f"return {self.named(value)};"
                case tree.Scope(inner):
                    yield "{"
                    yield from self.statements(inner)
                    yield "}"
                case tree.Barrier():
                    yield "workgroupBarrier();"

    def simple(self, given: tree.Declare | tree.Assignment) -> str:
        if isinstance(given, tree.Assignment):
            target = self.place(given.target)
            if (sums := _added_product(given)) is not None:
                # Nothing that a running sum meets has a factor in common.
                one, two = map(self.of, sums.arguments[:2])
                return f"{target} = fma({one}, {two}, {target})"
            return f"{target} = {self.named(given.value)}"
        word = "var" if given.changes else "let"
        value = "" if given.value is None else f" = {self.named(given.value)}"
        return f"{word} {given.name}: {_type(given.type)}{value}"

    def named(self, given: tree.Expression) -> str:
        """The text of a value that has a name from then on."""
        if isinstance(given, tree.Literal) and _is_float(given):
            return f"kept({_literal(given)})"
        return self.of(given)

    def of(self, given: tree.Expression) -> str:
        """The text of a value."""
        match given:
            case tree.Literal():
                text = _literal(given)
                return f"kept({text})" if _is_float(given) and given.value == 0 else text
            case tree.Unary("-", of, kind) if kind in tree.FLOATS:
                return _kept(f"-{self.of(of)}", kind)
        text = self.place(given)
        return _kept(text, given.type) if given in self._running else text

    def place(self, given: tree.Expression) -> str:
        """The same, or of what is written to."""
        match given:
            case tree.Literal():
                return _literal(given)
            case tree.Name(name):
                return name
            case tree.Unary(sign, of):
                return f"({sign}{self.of(of)})"
            case tree.Binary():
                return self.binary(given)
            case tree.Application():
                return self.call(given)
            case tree.Index(of, at):
                return f"{self.of(of)}[{self.of(at)}]"
            case tree.Component(of, name):
                return f"{self.of(of)}.{name}"

    def binary(self, given: tree.Binary) -> str:
        sides = given.left, given.right
        if given.sign in tree.COMPARISONS:
            left, right = (
                _literal(x) if isinstance(x, tree.Literal) else self.of(x) for x in sides
            )
            return f"({left} {given.sign} {right})"
        left, right = map(self.of, sides)
        if given.type not in tree.FLOATS:
            return f"({left} {given.sign} {right})"
        four = "4" if tree.size_of(given.type) == 4 else ""
        if given.sign == "/":
            if four:
                left, right = (
                    side if tree.size_of(x.type) == 4 else f"vec4f({side})"
                    for side, x in ((left, given.left), (right, given.right))
                )
            return f"quotient{four}({left}, {right})"
        if given.sign == "-":
            right = _kept(right, given.right.type)
        return _kept(f"{left} {given.sign} {right}", given.type)

    def call(self, given: tree.Application) -> str:
        text = self.of if given.name in _UNNAMED else self.named
        listed = ", ".join(map(text, given.arguments))
        first = given.arguments[0].type if given.arguments else ""
        if given.name == "bitcast":
            return f"bitcast<{_type(given.type)}>({listed})"
        if given.name == "sqrt":
            return f"square_root({listed})"
        if first == "f32" and given.name in {"i32", "u32"}:
            return f"{'to_whole' if given.name == 'i32' else 'to_natural'}({listed})"
        if given.name == "fma":
            return _kept(f"fma({listed})", given.type)
        if given.name == "vec4b":
            return f"vec4<bool>({listed})"
        return f"{given.name}({listed})"


def _kept(text: str, kind: str) -> str:
    return f"kept{'4' if tree.size_of(kind) == 4 else ''}({text})"


def _is_float(given: tree.Literal) -> bool:
    return tree.element_of(given.type) in {"f32", "float"}


def _added_product(given: tree.Assignment) -> tree.Application | None:
    """The `fma` of `x = fma(a, b, x)`."""
    sums = given.value
    if not isinstance(sums, tree.Application) or sums.name != "fma":
        return None
    return sums if sums.arguments[2] == given.target else None


def _running_sums(body: Iterable[tree.Statement]) -> Iterator[tree.Expression]:
    """What products are added to."""
    for statement in body:
        match statement:
            case tree.Assignment(target):
                if _added_product(statement) is not None:
                    yield target
            case tree.If(_, then, otherwise):
                yield from _running_sums((*then, *otherwise))
            case tree.For(_, _, _, inner) | tree.Scope(inner):
                yield from _running_sums(inner)


def _literal(given: tree.Literal) -> str:
    if given.type == "bool":
        return str(bool(given.value)).lower()
    kind = tree.element_of(given.type)
    if kind in {"f32", "float"}:
        number = np.float32(given.value)
        if 0 < abs(number) < np.float32(2.0**-126):
            return f"bitcast<f32>({int(number.view(np.uint32))}u)"
        return f"f32({float(number)!r})"
    if kind == "u32":
        return f"{given.value}u"
    return f"i32({given.value})"
