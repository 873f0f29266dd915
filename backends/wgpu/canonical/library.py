"""The functions of canonical arithmetic, with one definition for all targets.

They are written in WGSL with +, -, *, fma, comparisons and integers, whose results IEEE 754 and the
convention fix. Division and square root are correctly rounded: a CPU rounds them so, and the result
of another device is corrected with integer arithmetic. The errors of the other functions are
measured by tests/backends/wgpu/canonical and listed in docs/canonical.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Final

from backends.wgpu.canonical.c_text import (
    add_library_names,
    c_functions,
    expressions,
    rewrite_statements,
    walk,
)
from backends.wgpu.canonical.tree import (
    Application,
    Expression,
    Function,
    Index,
    Literal,
    Module,
    Name,
    Return,
    read_functions,
    size_of,
)

BUILT_IN: Final = {
    "exp": "exponential",
    "exp2": "power_of_2",
    "log": "logarithm",
    "log2": "logarithm_to_2",
    "sin": "sine",
    "cos": "cosine",
    "sign": "sign_of",
    "max": "max_float",
    "min": "min_float",
    "clamp": "clamp_float",
    "dot": "dot_product",
    "unpack2x16float": "widen_halves",
    "unpack4xI8": "widen_bytes",
}
"""Built-in functions of WGSL, and the library functions that replace them."""

# exp: Cephes (expf), with the power of two in two factors, so that subnormals are rounded once.
# log, log1p: fdlibm. erf: Juffa. tanh, sin, cos: Cephes. Powers: fdlibm's e_powf.
_TEXT: Final = """
fn infinity(sign: u32) -> f32 { return bitcast<f32>(0x7f800000u | sign); }
fn not_a_number(bits: u32) -> f32 { return bitcast<f32>(0x7fc00000u | bits); }
fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }
fn is_finite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) < 0x7f800000u; }
fn max_float(a: f32, b: f32) -> f32 { return select(b, a, a > b); }
fn min_float(a: f32, b: f32) -> f32 { return select(b, a, a < b); }
fn clamp_float(x: f32, low: f32, high: f32) -> f32 { return min_float(max_float(x, low), high); }
fn larger(a: f32, b: f32) -> f32 {
  return select(select(b, a, a > b), not_a_number(0u), is_nan(a) || is_nan(b));
}
fn smaller(a: f32, b: f32) -> f32 {
  return select(select(b, a, a < b), not_a_number(0u), is_nan(a) || is_nan(b));
}
fn sign_of(x: f32) -> f32 { return select(select(0.0, -1.0, x < 0.0), 1.0, x > 0.0); }
// The magnitude of `size` with the sign of `sign`.
fn copy_sign(size: f32, sign: f32) -> f32 {
  return bitcast<f32>((bitcast<u32>(size) & 0x7fffffffu) | (bitcast<u32>(sign) & 0x80000000u));
}
// 2^n for n from -126 to 127.
fn two_to(n: i32) -> f32 { return bitcast<f32>(u32(n + 127) << 23u); }
// x * 2^n in two factors, each of which is a normal number.
fn times_two_to(x: f32, n: i32) -> f32 {
  let half = n >> 1u;
  return (x * two_to(half)) * two_to(n - half);
}
// The float32 value of a float16's bits.
fn widen_half(h: u32) -> f32 {
  let sign = (h & 0x8000u) << 16u;
  let rest = h & 0x7fffu;
  let small = f32(i32(rest)) * 0x1p-24f;
  var bits = (rest << 13u) + 0x38000000u;
  bits = select(bits, bits + 0x38000000u, rest >= 0x7c00u);
  return bitcast<f32>(select(bits, bitcast<u32>(small), rest < 0x400u) | sign);
}
fn widen_halves(w: u32) -> vec2f {
  return vec2f(widen_half(w & 0xffffu), widen_half(w >> 16u));
}
fn widen_bytes(w: u32) -> vec4i {
  return vec4i(extractBits(i32(w), 0u, 8u), extractBits(i32(w), 8u, 8u),
    extractBits(i32(w), 16u, 8u), extractBits(i32(w), 24u, 8u));
}
fn dot_product(a: vec4f, b: vec4f) -> f32 {
  return fma(a[3], b[3], fma(a[2], b[2], fma(a[1], b[1], a[0] * b[0])));
}
// e^r - 1 for |r| up to about ln(2) / 2: a polynomial.
fn exp_minus_1_near_0(r: f32) -> f32 {
  var p = 1.9875691500e-4;
  p = fma(p, r, 1.3981999507e-3);
  p = fma(p, r, 8.3334519073e-3);
  p = fma(p, r, 4.1665795894e-2);
  p = fma(p, r, 1.6666665459e-1);
  p = fma(p, r, 5.0000001201e-1);
  return fma(p, r * r, r);
}
// e^x = 2^n * e^r with n = round(x / ln(2)); r subtracts ln(2) in two parts.
fn exponential(x: f32) -> f32 {
  let near = clamp_float(x, -104.0, 89.0);
  let n = round(near * 1.44269504088896341);
  let r = fma(n, -1.428606765330187e-6, fma(n, -0.693145751953125, near));
  let size = times_two_to(1.0 + exp_minus_1_near_0(r), i32(n));
  return select(size, x, is_nan(x));
}
fn power_of_2(x: f32) -> f32 {
  let near = clamp_float(x, -151.0, 129.0);
  let n = round(near);
  let size = times_two_to(1.0 + exp_minus_1_near_0((near - n) * 0.69314718055994531), i32(n));
  return select(size, x, is_nan(x));
}
fn exp_minus_1(x: f32) -> f32 {
  let near = clamp_float(x, -20.0, 89.0);
  let n = select(round(near * 1.44269504088896341), 0.0, abs(near) < 0.45);
  let r = fma(n, -1.428606765330187e-6, fma(n, -0.693145751953125, near));
  let rest = exp_minus_1_near_0(r);
  let one = i32(n);
  let scale = two_to(select(one, 0, one > 24));
  let small = fma(rest, scale, scale - 1.0);
  let large = times_two_to(1.0 + rest, one);
  let size = select(small, large, one > 24);
  return select(select(size, x, abs(x) < 0x1p-25f), x, is_nan(x));
}
// log(1 + f) + k * ln(2) + c, where c corrects the rounding of 1 + f.
fn logarithm_of(f: f32, k: f32, c: f32) -> f32 {
  let s = f / (2.0 + f);
  let z = s * s;
  let w = z * z;
  let t1 = w * fma(w, 0.24279078841, 0.40000972152);
  let t2 = z * fma(w, 0.28498786688, 0.66666662693);
  let half = (0.5 * f) * f;
  let low = fma(s, half + (t2 + t1), fma(k, 9.0580006145e-6, c));
  return fma(k, 0.69313812256, f - (half - low));
}
// x = 2^k * m with m between sqrt(1/2) and sqrt(2).
fn logarithm(x: f32) -> f32 {
  let small = x < 0x1p-126f;
  let whole = bitcast<u32>(select(x, x * 0x1p24f, small)) + 0x004afb0du;
  let k = i32(whole >> 23u) - 127 - select(0, 24, small);
  let m = bitcast<f32>((whole & 0x007fffffu) + 0x3f3504f3u);
  var result = logarithm_of(m - 1.0, f32(k), 0.0);
  result = select(result, infinity(0x80000000u), x == 0.0);
  result = select(result, not_a_number(0u), x < 0.0);
  return select(result, x, is_nan(x) || bitcast<u32>(x) == 0x7f800000u);
}
fn logarithm_to_2(x: f32) -> f32 { return logarithm(x) * 1.44269504088896341; }
fn log_1_plus(x: f32) -> f32 {
  let near = x > -0.29289 && x < 0.41421;
  let u = 1.0 + x;
  let whole = bitcast<u32>(u) + 0x004afb0du;
  let k = i32(whole >> 23u) - 127;
  let m = bitcast<f32>((whole & 0x007fffffu) + 0x3f3504f3u);
  var c = select(x - (u - 1.0), 1.0 - (u - x), k >= 2) / u;
  c = select(c, 0.0, near || k >= 25);
  var result = logarithm_of(select(m - 1.0, x, near), select(f32(k), 0.0, near), c);
  result = select(result, x, abs(x) < 0x1p-25f);
  result = select(result, infinity(0x80000000u), x == -1.0);
  result = select(result, not_a_number(0u), x < -1.0);
  return select(result, x, is_nan(x) || bitcast<u32>(x) == 0x7f800000u);
}
fn hyperbolic_tangent(x: f32) -> f32 {
  let size = abs(x);
  let z = x * x;
  var p = -5.70498872745e-3;
  p = fma(p, z, 2.06390887954e-2);
  p = fma(p, z, -5.37397155531e-2);
  p = fma(p, z, 1.33314422036e-1);
  p = fma(p, z, -3.33332819422e-1);
  let small = fma(p * z, x, x);
  let e = exponential(2.0 * min_float(size, 15.0));
  let large = copy_sign(1.0 - 2.0 / (e + 1.0), x);
  return select(select(large, small, size < 0.625), x, is_nan(x));
}
fn erf(x: f32) -> f32 {
  let t = abs(x);
  let s = x * x;
  var r = fma(-1.72853470e-5, t, 3.83197126e-4);
  let u = fma(-3.88396438e-3, t, 2.42546219e-2);
  r = fma(r, s, u);
  r = fma(r, t, -1.06777877e-1);
  r = fma(r, t, -6.34846687e-1);
  r = fma(r, t, -1.28717512e-1);
  r = fma(r, t, -t);
  let large = copy_sign(1.0 - exponential(r), x);
  var p = -5.96761703e-4;
  p = fma(p, s, 4.99119423e-3);
  p = fma(p, s, -2.67681349e-2);
  p = fma(p, s, 1.12819925e-1);
  p = fma(p, s, -3.76125336e-1);
  p = fma(p, s, 1.28379166e-1);
  let small = fma(p, x, x);
  let far = copy_sign(1.0, x);
  return select(select(select(large, far, t > 4.0), small, t <= 0.927734375), x, is_nan(x));
}
// The upper 32 bits of a * b.
fn high_word(a: u32, b: u32) -> u32 {
  let a0 = a & 0xffffu; let a1 = a >> 16u; let b0 = b & 0xffffu; let b1 = b >> 16u;
  let low = a0 * b0;
  let middle = a1 * b0 + (low >> 16u);
  let other = a0 * b1 + (middle & 0xffffu);
  return a1 * b1 + (middle >> 16u) + (other >> 16u);
}
// 32 binary digits of 2 / pi; word 0 is the integer part, which is 0.
fn word_of_two_over_pi(word: u32) -> u32 {
  var result = 0u;
  result = select(result, 0xa2f9836eu, word == 1u);
  result = select(result, 0x4e441529u, word == 2u);
  result = select(result, 0xfc2757d1u, word == 3u);
  result = select(result, 0xf534ddc0u, word == 4u);
  result = select(result, 0xdb629599u, word == 5u);
  result = select(result, 0x3c439041u, word == 6u);
  return select(result, 0xfe5163abu, word == 7u);
}
// 32 binary digits of 2 / pi from digit 32 * word + shift.
fn bits_of_two_over_pi(word: u32, shift: u32) -> u32 {
  let low = select(0u, word_of_two_over_pi(word + 1u) >> (32u - max(shift, 1u)), shift > 0u);
  return (word_of_two_over_pi(word) << shift) | low;
}
// sin(x + quarter * pi / 2). x is reduced to r in [-pi/4, pi/4] by a product with the digits of
// 2 / pi in integers, which is exact enough for every float (Payne and Hanek).
fn sine_with_phase(x: f32, quarter: u32) -> f32 {
  let bits = bitcast<u32>(x) & 0x7fffffffu;
  let near = bits < 0x3f490fdbu;
  let m = (bits & 0x007fffffu) | 0x00800000u;
  let e = max(bits >> 23u, 120u) - 120u;
  let word = e >> 5u;
  let shift = e & 31u;
  let w0 = bits_of_two_over_pi(word, shift);
  let w1 = bits_of_two_over_pi(word + 1u, shift);
  let w2 = bits_of_two_over_pi(word + 2u, shift);
  let t1 = m * w1;
  let low = t1 + high_word(m, w2);
  let high = m * w0 + high_word(m, w1) + select(0u, 1u, low < t1);
  let top = high + 0x20000000u;
  let turn = top >> 30u;
  let rest = (top & 0x3fffffffu);
  let minus = rest < 0x20000000u;
  var a = rest - 0x20000000u;
  var b = low;
  let nb = 0u - b;
  a = select(a, 0u - a - select(0u, 1u, b != 0u), minus);
  b = select(b, nb, minus);
  let zeros = min(countLeadingZeros(a), 31u);
  let first = (a << zeros) | select(0u, b >> (32u - max(zeros, 1u)), zeros > 0u);
  let second = b << zeros;
  let h = f32(i32(first >> 8u));
  let h_low = f32(i32((first >> 8u) & 0xfffu));
  let h_high = f32(i32((first >> 20u) << 12u));
  let l = f32(i32(((first & 0xffu) << 15u) | (second >> 17u)));
  let scale = two_to(-22 - i32(zeros));
  // 1.5703125 has 8 bits, so the product with h_high is exact, and `tail` is small beside it.
  let tail = h_low * 1.5703125 + (h * 4.838267948966e-4 + (l * 0x1p-23f) * 1.57079637050628662);
  let size = (h_high * 1.5703125 + tail) * scale;
  let r = select(select(size, -size, minus != (bitcast<u32>(x) >= 0x80000000u)), x, near);
  let signed = select(turn, 0u - turn, bitcast<u32>(x) >= 0x80000000u);
  let q = (select(signed, 0u, near) + quarter) & 3u;
  let z = r * r;
  var s = fma(-1.9515295891e-4, z, 8.3321608736e-3);
  s = fma(s, z, -1.6666654611e-1);
  let sine_of = fma(s * z, r, r);
  var c = fma(2.443315711809948e-5, z, -1.388731625493765e-3);
  c = fma(c, z, 4.166664568298827e-2);
  let cosine_of = fma(c, z * z, fma(-0.5, z, 1.0));
  let result = select(sine_of, cosine_of, (q & 1u) == 1u);
  return select(select(result, -result, q >= 2u), not_a_number(0u), bits >= 0x7f800000u);
}
fn sine(x: f32) -> f32 { return sine_with_phase(x, 0u); }
fn cosine(x: f32) -> f32 { return sine_with_phase(x, 1u); }
// Fewer bits, so that products of two such numbers are exact.
fn clear_12_bits(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) & 0xfffff000u); }
fn clear_15_bits(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) & 0xffff8000u); }
// size^y for a positive size: y * log2(size) as a sum of two floats, then a power of 2.
fn size_of_power(size: f32, y: f32) -> f32 {
  let small = size < 0x1p-126f;
  let bits = bitcast<u32>(select(size, size * 0x1p24f, small));
  let j = bits & 0x007fffffu;
  let wide = j >= 0x005db3d7u;
  let around = j > 0x001cc471u && !wide;
  let n = i32(bits >> 23u) - 127 - select(0, 24, small) + select(0, 1, wide);
  let m = bitcast<u32>(bitcast<f32>(j | select(0x3f800000u, 0x3f000000u, wide)));
  let ax = bitcast<f32>(m);
  let bp = select(1.0, 1.5, around);
  let u = ax - bp;
  let v = 1.0 / (ax + bp);
  let ss = u * v;
  let s_h = clear_12_bits(ss);
  let top = (((m >> 1u) & 0xfffff000u) | 0x20000000u) + 0x00400000u;
  let t_h = bitcast<f32>(top + select(0u, 0x00200000u, around));
  let t_l = ax - (t_h - bp);
  let s_l = v * ((u - s_h * t_h) - s_h * t_l);
  let s2 = ss * ss;
  var p = fma(s2, 2.0697501302e-1, 2.3066075146e-1);
  p = fma(s2, p, 2.7272811532e-1);
  p = fma(s2, p, 3.3333334327e-1);
  p = fma(s2, p, 4.2857143283e-1);
  p = fma(s2, p, 6.0000002384e-1);
  let r = (s2 * s2) * p + s_l * (s_h + ss);
  let sq = s_h * s_h;
  let h = clear_12_bits((3.0 + sq) + r);
  let l = r - ((h - 3.0) - sq);
  let uu = s_h * h;
  let vv = s_l * h + l * ss;
  let p_h = clear_12_bits(uu + vv);
  let p_l = vv - (p_h - uu);
  let z_h = 9.6191406250e-1 * p_h;
  let z_l = (-1.1736857402e-4 * p_h + p_l * 9.6179670095e-1) + select(0.0, 1.56322085e-6, around);
  let k = f32(n);
  let d = select(0.0, 5.84960938e-1, around);
  let l_h = clear_12_bits(((z_h + z_l) + d) + k);
  let l_l = z_l - (((l_h - k) - d) - z_h);
  let y_h = clear_12_bits(y);
  let small_part = (y - y_h) * l_h + y * l_l;
  let large_part = y_h * l_h;
  let z = clamp_float(small_part + large_part, -160.0, 160.0);
  let whole = round(z);
  let is_far = abs(small_part + large_part) >= 160.0;
  let t = clear_15_bits(select(small_part + (large_part - whole), 0.0, is_far));
  let tail = select(small_part - (t - (large_part - whole)), 0.0, is_far);
  let e_h = t * 0.693145752;
  let e_l = tail * 0.69314718246 + t * 1.42860654e-6;
  let e = e_h + e_l;
  let w = e_l - (e - e_h);
  let rest = exp_minus_1_near_0(e);
  let result = 1.0 + (rest + fma(w, rest, w));
  let near = i32(clamp_float(whole, -155.0, 155.0));
  let third = near / 3;
  return ((result * two_to(third)) * two_to(third)) * two_to(near - 2 * third);
}
// x^y with the special cases of IEEE 754.
fn power(x: f32, y: f32) -> f32 {
  let a = abs(x);
  let is_edge = x == 0.0 || !is_finite(x);
  let edge = select(0.0, infinity(0u), (x == 0.0) == (y < 0.0));
  let finite = size_of_power(select(a, 1.0, is_edge), select(y, 1.0, !is_finite(y)));
  var size = select(finite, edge, is_edge);
  let grows = (a > 1.0) == (y > 0.0);
  size = select(size, select(0.0, infinity(0u), grows), !is_finite(y) && a != 1.0 && !is_edge);
  size = select(size, 1.0, !is_finite(y) && a == 1.0);
  let is_whole = floor(y) == y;
  let odd = is_whole && abs(y) < 16777216.0 && (i32(y) & 1) != 0;
  let below = bitcast<u32>(x) >= 0x80000000u;
  var result = select(size, -size, below && odd);
  result = select(result, not_a_number(0u), below && !is_whole && is_finite(x) && x != 0.0);
  result = select(result, not_a_number(0u), is_nan(x) || is_nan(y));
  return select(result, 1.0, y == 0.0 || x == 1.0);
}
"""


@cache
def functions() -> dict[str, Function]:
    """Return the parsed library functions by name."""
    return {function.name: function for function in read_functions(_TEXT, {})}


@cache
def c_library() -> str:
    """Print the library as C; needs the prelude."""
    return c_functions(list_functions())


def list_functions() -> Iterator[Function]:
    """Yield the functions, and vec4f versions of those that kernels call on vectors."""
    library = functions()
    for function in library.values():
        yield replace(function, body=tuple(rewrite_statements(function.body, _library_call)))
    for name in ("exponential", "max_float", "min_float"):
        yield _make_vector_version(library[name])


def _make_vector_version(function: Function) -> Function:
    names = [name for name, _ in function.parameters]
    parts: list[Expression] = []
    for i in range(4):
        at = Literal(i, "u32")
        arguments = tuple(Index(Name(name, "vec4f"), at, "f32") for name in names)
        parts.append(Application(function.name, arguments, "f32"))
    result = Return(Application("vec4f", tuple(parts), "vec4f"))
    return Function(f"{function.name}_4", tuple((n, "vec4f") for n in names), "vec4f", (result,))


def use_library(module: Module) -> Module:
    """Replace a kernel's built-in and local functions by the library's."""
    library = functions()
    kernel_functions = [function for function in module.functions if function.name not in library]
    return replace(
        module,
        functions=tuple(
            replace(x, body=tuple(rewrite_statements(x.body, _library_call)))
            for x in kernel_functions
        ),
        body=tuple(rewrite_statements(module.body, _library_call)),
    )


def _library_call(node: Expression) -> Expression | None:
    """Return the call of the library function that replaces a built-in call; None if the node is no
    such call."""
    if not isinstance(node, Application) or node.name not in BUILT_IN:
        return None
    first_type = node.arguments[0].type
    if node.name in {"max", "min", "clamp"} and first_type not in {"f32", "vec4f"}:
        return None
    name = BUILT_IN[node.name] + ("_4" if size_of(first_type) == 4 and node.name != "dot" else "")
    arguments = tuple(_replace_calls(x) for x in node.arguments)
    return Application(name, arguments, node.type)


def _replace_calls(node: Expression) -> Expression:
    from backends.wgpu.canonical.c_text import rewrite_expression  # noqa: PLC0415

    return rewrite_expression(node, _library_call)


def called_functions(module: Module) -> list[Function]:
    """Return the library functions that a kernel needs, directly or indirectly, callees first."""
    all_of = {function.name: function for function in list_functions()}
    names: set[str] = set()
    missing = {*_calls(module.body)}.union(
        *(_calls(x.body) for x in module.functions)
    ) & all_of.keys()
    while missing:
        names |= missing
        missing = (
            set().union(*(_calls(all_of[name].body) for name in missing)) & all_of.keys() - names
        )
    return [function for name, function in all_of.items() if name in names]


def _calls(body: object) -> set[str]:
    return {
        part.name
        for expression in expressions(body)  # type: ignore[arg-type]
        for part in walk(expression)
        if isinstance(part, Application)
    }


add_library_names(function.name for function in list_functions())
