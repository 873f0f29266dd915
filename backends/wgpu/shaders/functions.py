"""Functions that WGSL lacks, or that differ from torch's.

Drivers may assume that NaN does not occur: `min`, `max` and `clamp` drop NaN, `x != 0` is false for
NaN, and a product with a literal zero is zero. These functions detect NaN by its bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from backends.wgpu.graph import threefry

_EXPM1_TERMS: Final = 9
_LOG1P_TERMS: Final = 9


def _series(variable: str, coefficients: list[float]) -> str:
    """Return a polynomial by Horner's rule; the constant coefficient comes first."""
    text = f"{coefficients[-1]!r}"
    for coefficient in reversed(coefficients[:-1]):
        text = f"fma({text}, {variable}, {coefficient!r})"
    return text


def _factorials(count: int) -> list[float]:
    factors = [1.0]
    for number in range(2, count + 1):
        factors.append(factors[-1] / number)
    return factors


def to_float16(name: str) -> str:
    """Return WGSL of a function that rounds to float16: nearest, ties to even, with subnormals."""
    return f"""\
fn {name}(x: f32) -> f32 {{
  let bits = bitcast<u32>(x);
  if ((bits & 0x7fffffffu) >= 0x7f800000u) {{ return x; }}
  if (abs(x) < 0x1p-14f) {{ return round(x * 0x1p24f) * 0x1p-24f; }}
  let rounded = (bits + 0xfffu + ((bits >> 13u) & 1u)) & 0xffffe000u;
  let past = (rounded & 0x7fffffffu) > 0x477fe000u;
  return bitcast<f32>(select(rounded, 0x7f800000u | (bits & 0x80000000u), past));
}}
"""


FUNCTIONS: Final[Mapping[str, str]] = {
    "infinity": "fn infinity(sign: u32) -> f32 { return bitcast<f32>(0x7f800000u | sign); }",
    "not_a_number": """\
fn not_a_number(bits: u32) -> f32 { return bitcast<f32>(0x7fc00000u | bits); }""",
    "is_nan": """\
fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }""",
    "is_finite": """\
fn is_finite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) < 0x7f800000u; }""",
    "larger": """\
fn larger(a: f32, b: f32) -> f32 {
  return select(max(a, b), not_a_number(0u), is_nan(a) || is_nan(b));
}""",
    "smaller": """\
fn smaller(a: f32, b: f32) -> f32 {
  return select(min(a, b), not_a_number(0u), is_nan(a) || is_nan(b));
}""",
    "times_zero": """\
fn times_zero(x: f32) -> f32 {
  return select(not_a_number(0u), bitcast<f32>(bitcast<u32>(x) & 0x80000000u), is_finite(x));
}""",
    "floor_div": """\
fn floor_div(a: i32, b: i32) -> i32 {
  let q = a / b;
  return select(q, q - 1, (a % b != 0) && ((a < 0) != (b < 0)));
}""",
    "int_power": """\
fn int_power(base: i32, exponent: i32) -> i32 {
  if (exponent < 0) {
    if (base == 1) { return 1; }
    return select(0, select(1, -1, (exponent & 1) != 0), base == -1);
  }
  var result = 1; var factor = base; var rest = exponent;
  while (rest > 0) {
    if ((rest & 1) != 0) { result *= factor; }
    factor *= factor; rest >>= 1u;
  }
  return result;
}""",
    # C's fmod by long division, bit by bit: every difference is exact. A divisor below the smallest
    # normal number gives NaN.
    "float_mod": """\
fn float_mod(a: f32, b: f32) -> f32 {
  let y = abs(b);
  if (!is_finite(a) || is_nan(b) || y < 0x1p-126f) { return not_a_number(0u); }
  var rest = abs(a);
  for (var e = i32(bitcast<u32>(rest) >> 23u) - i32(bitcast<u32>(y) >> 23u); e >= 0; e--) {
    let part = bitcast<f32>(bitcast<u32>(y) + (u32(e) << 23u));
    if (rest >= part) { rest -= part; }
  }
  return bitcast<f32>(bitcast<u32>(rest) | (bitcast<u32>(a) & 0x80000000u));
}""",
    "remainder": """\
fn remainder(a: f32, b: f32) -> f32 {
  let rest = float_mod(a, b);
  return select(rest, rest + b, rest != 0.0 && !is_nan(rest) && ((rest < 0.0) != (b < 0.0)));
}""",
    # Computed from the remainder, as in torch, since a / b may round up to a whole number.
    "float_floor_div": """\
fn float_floor_div(a: f32, b: f32) -> f32 {
  if (b == 0.0) { return a / b; }
  let rest = float_mod(a, b);
  if (is_nan(rest)) { return rest; }
  var quotient = (a - rest) / b;
  if (rest != 0.0 && ((b < 0.0) != (rest < 0.0))) { quotient -= 1.0; }
  if (quotient == 0.0) { return select(0.0, -0.0, (a < 0.0) != (b < 0.0)); }
  return round(quotient);
}""",
    "trunc_div": """\
fn trunc_div(a: f32, b: f32) -> f32 {
  let quotient = a / b;
  let whole = round(quotient);
  return select(trunc(quotient), whole, whole * b == a);
}""",
    "power": """\
fn power(x: f32, y: f32) -> f32 {
  if (y == 0.0 || x == 1.0) { return 1.0; }
  if (is_nan(x) || is_nan(y)) { return not_a_number(0u); }
  if (abs(x) == 1.0 && !is_finite(y)) { return 1.0; }
  var size = exp2(y * log2(abs(x)));  // drivers make it one operator, which knows no edges
  if (x == 0.0 || !is_finite(x)) { size = select(0.0, infinity(0u), (x == 0.0) == (y < 0.0)); }
  if ((bitcast<u32>(x) & 0x80000000u) == 0u) { return size; }
  if (floor(y) != y) { return select(size, not_a_number(0u), is_finite(x) && x != 0.0); }
  return select(size, -size, abs(y) < 16777216.0 && (i32(y) & 1) != 0);
}""",
    "exp_minus_1": f"""\
fn exp_minus_1(x: f32) -> f32 {{
  if (abs(x) < 0.5) {{ return x * {_series("x", _factorials(_EXPM1_TERMS))}; }}
  return exp(x) - 1.0;
}}""",
    # log((1 + s) / (1 - s)) = 2 (s + s^3 / 3 + ...) for s = x / (2 + x).
    "log_1_plus": f"""\
fn log_1_plus(x: f32) -> f32 {{
  if (abs(x) >= 0.5 || is_nan(x)) {{ return log(1.0 + x); }}
  let s = x / (2.0 + x);
  let t = s * s;
  return 2.0 * s * {_series("t", [1 / (2 * n + 1) for n in range(_LOG1P_TERMS)])};
}}""",
    # Drivers' logarithms are inexact near 1.
    "logarithm": """\
fn logarithm(x: f32) -> f32 {
  if (x > 0.5 && x < 1.5) { return log_1_plus(x - 1.0); }
  return log(x);
}""",
    # Beyond 15 the result is 1 in float32, and exp would overflow.
    "hyperbolic_tangent": """\
fn hyperbolic_tangent(x: f32) -> f32 {
  if (is_nan(x)) { return x; }
  let e = exp_minus_1(2.0 * min(abs(x), 15.0));
  return bitcast<f32>(bitcast<u32>(e / (e + 2.0)) | (bitcast<u32>(x) & 0x80000000u));
}""",
    # Rational approximation on [-4, 4], beyond which erf is 1 in float32, as in Eigen
    # (MathFunctionsImpl.h).
    "erf": """\
fn erf(argument: f32) -> f32 {
  if (is_nan(argument)) { return argument; }
  let x = clamp(argument, -4.0, 4.0);
  let s = x * x;
  var p = -2.72614225801306e-10;
  p = fma(p, s, 2.77068142495902e-08);
  p = fma(p, s, -2.10102402082508e-06);
  p = fma(p, s, -5.69250639462346e-05);
  p = fma(p, s, -7.34990630326855e-04);
  p = fma(p, s, -2.95459980854025e-03);
  p = fma(p, s, -1.60960333262415e-02);
  var q = -1.45660718464996e-05;
  q = fma(q, s, -2.13374055278905e-04);
  q = fma(q, s, -1.68282697438203e-03);
  q = fma(q, s, -7.37332916720468e-03);
  q = fma(q, s, -1.42647390514189e-02);
  return x * p / q;
}""",
    "to_float16": to_float16("to_float16"),
    "to_bfloat16": """\
fn to_bfloat16(x: f32) -> f32 {
  if (!is_finite(x)) { return x; }
  let bits = bitcast<u32>(x);
  return bitcast<f32>((bits + 0x7fffu + ((bits >> 16u) & 1u)) & 0xffff0000u);
}""",
    "threefry": threefry.SHADER,
}
"""Source of each function, by name."""
_CALL: Final = re.compile(r"\b([a-z_0-9]+)\(")


def called_functions(text: str) -> list[str]:
    """Return the sources of all functions that a kernel calls, directly or indirectly."""
    needed_names: set[str] = set()
    new_names = {*_CALL.findall(text)} & FUNCTIONS.keys()
    while new_names:
        needed_names |= new_names
        calls = (_CALL.findall(FUNCTIONS[name]) for name in new_names)
        new_names = {name for names in calls for name in names} & FUNCTIONS.keys() - needed_names
    return [source for name, source in FUNCTIONS.items() if name in needed_names]
