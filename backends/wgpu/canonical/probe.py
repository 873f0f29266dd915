"""Find the conventions that a device follows: compare hard cases with the CPU's results.

The cases are random bits, signed zeros, subnormals, infinities, NaN, and sums and products halfway
between two floats, for every operator and function; random matrix products are compared as well. A
single differing bit excludes the device from runs with that convention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from backends.wgpu.canonical.convention import CONVENTIONS, Convention
from backends.wgpu.canonical.host import CpuTarget, product_shader
from backends.wgpu.canonical.vulkan import CanonicalDevice, float_bits
from backends.wgpu.device.device import Device
from backends.wgpu.device.target import ComputeTarget, Copy
from backends.wgpu.lowering.kernels import MatmulShader
from backends.wgpu.shaders.dispatch import Dispatch, Shader
from backends.wgpu.shaders.functions import called_functions
from backends.wgpu.shaders.matmul.shader import MatmulProblem, Operand
from protocol.base.errors import SamestepError

_CASES: Final = 2048
_EDGES: Final = (
    0x00000000, 0x00000001, 0x00000002, 0x00400000, 0x007FFFFF, 0x00800000, 0x00800001, 0x00FFFFFF,
    0x01000000, 0x33800000, 0x33800001, 0x34000000, 0x3F000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001,
    0x40490FDB, 0x42B17218, 0x42B17219, 0x4B7FFFFF, 0x4B800000, 0x4B800001, 0x7E800000, 0x7F000000,
    0x7F7FFFFF, 0x7F800000, 0x7FC00000,
)  # fmt: skip
_OPERATORS: Final = {
    "a multiply-add": "fma(x, y, z)",
    "a sum": "x + y",
    "a product": "x * y",
    "a product plus a term": "x * y + z",
    "a difference of products": "x * y - z * y",
    "a quotient": "x / y",
    "a square root": "sqrt(x)",
    "a maximum": "larger(x, y)",
    "a minimum": "smaller(x, y)",
    "a comparison": "select(0.0, 1.0, x < y)",
    "floor": "floor(x)",
    "round": "round(x)",
    "a conversion to i32": "f32(i32(x))",
    "exp": "exp(x)",
    "exp2": "exp2(x)",
    "log": "log(x)",
    "log1p": "log_1_plus(x)",
    "expm1": "exp_minus_1(x)",
    "tanh": "hyperbolic_tangent(x)",
    "erf": "erf(x)",
    "sin": "sin(x)",
    "cos": "cos(x)",
    "a power": "power(x, y)",
    "a multiply-add to zero": "fma(x, y, 0.0)",
    "a multiply-add of one": "fma(x, 1.0, y)",
    "a sum with zero": "x + 0.0",
    "a negation by subtraction": "0.0 - x",
    "a subtraction of zero": "x - 0.0",
    "a product with zero": "0.0 * x",
    "a product with one": "x * 1.0",
    "a product with minus one": "x * -1.0",
    "a quotient by one": "x / 1.0",
    "a negated sum": "-(x + y)",
    "a negated difference": "-(x - y)",
    "a negated multiply-add": "-fma(x, y, z)",
    "a number minus itself": "x - x",
    "a difference undone": "1.0 - (1.0 - x)",
    "a sum undone": "(x + y) - x",
    "a difference added back": "x + (y - x)",
    "a difference with a difference": "x - (x - y)",
    "a product undone": "x * 3.0 / 3.0",
    "powers of 2 and 10": "power(2.0, y) + power(10.0, y)",
}
_SIZES: Final = ((16, 65, 24), (8, 4, 16))
"""Rows, terms and columns of the products: a product that loops, and a product that a driver
unrolls."""


def _kernel() -> Shader:
    calls = called_functions(" ".join(_OPERATORS.values()))
    buffers = "".join(
        f"@group(0) @binding({i}) var<storage, read> {name}: array<f32>;\n"
        for i, name in enumerate(("x_values", "y_values", "z_values"))
    )
    lines = "\n".join(
        f"  out[i + {number * _CASES}u] = {text};"
        for number, text in enumerate(_OPERATORS.values())
    )
    functions = "\n".join(calls)
    return Shader(
        f"""{buffers}@group(0) @binding(3) var<storage, read_write> out: array<f32>;
{functions}
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {{
  let i = id.x;
  if (i >= {_CASES}u) {{ return; }}
  let x = x_values[i]; let y = y_values[i]; let z = z_values[i];
{lines}
}}
""",
        4,
    )


@cache
def hard_cases() -> tuple[NDArray[np.float32], ...]:
    """Return three operands per case, as three arrays."""
    rng = np.random.default_rng(0)
    edges = np.array([*_EDGES, *(edge | 0x80000000 for edge in _EDGES)], np.uint32)
    quarter = _CASES // 4
    bits = rng.integers(0, 2**32, (3, _CASES), np.uint32)
    bits[:, :quarter] = rng.choice(edges, (3, quarter))
    moderate = rng.normal(size=(3, quarter)).astype(np.float32) * np.float32(8)
    bits[:, quarter : 2 * quarter] = moderate.view(np.uint32)
    # Few bits in each factor: products and sums that lie halfway between two floats.
    halfway = rng.integers(0, 4096, (3, quarter)).astype(np.float32)
    halfway *= np.exp2(rng.integers(-20, 20, (3, quarter))).astype(np.float32)
    bits[:, 2 * quarter : 3 * quarter] = halfway.view(np.uint32)
    cases = bits.view(np.float32).copy()
    with np.errstate(all="ignore"):  # cancellation: only the last bits of a multiply-add remain
        cases[2, quarter : 2 * quarter] = -(cases[0] * cases[1])[quarter : 2 * quarter]
    return tuple(cases)


@dataclass(frozen=True, slots=True)
class Difference:
    """A case in which a device differs from the convention.

    Attributes:
        operator: The operator or function.
        operands: x, y and z of the case, as bits, whether or not the operator uses all of them. A
            matrix product has the number of the element.
        result: The device's result, as bits.
        expected: The convention's result, as bits.
    """

    operator: str
    operands: tuple[int, ...]
    result: int
    expected: int

    def __str__(self) -> str:
        operands = ", ".join(f"0x{bits:08x}" for bits in self.operands)
        return (
            f"{self.operator} of {operands} gives 0x{self.result:08x}, expected "
            f"0x{self.expected:08x}"
        )


def first_difference(
    target: CanonicalDevice, matmul: MatmulShader, convention: Convention
) -> Difference | None:
    """Return the first hard case in which the device differs from the CPU, if any."""
    cases = hard_cases()
    results = _operator_results(target)
    expected = _expected_results(convention)
    names = [*_OPERATORS]
    for number in np.flatnonzero(float_bits(results) != float_bits(expected[0]))[:1]:
        operator, case = divmod(int(number), _CASES)
        operands = tuple(int(x.view(np.uint32)[case]) for x in cases)
        bits = (int(values.view(np.uint32)[number]) for values in (results, expected[0]))
        return Difference(names[operator], operands, *bits)
    product = _product_results(target, matmul)
    for number in np.flatnonzero(float_bits(product) != float_bits(expected[1]))[:1]:
        bits = (int(values.view(np.uint32)[number]) for values in (product, expected[1]))
        return Difference("a matrix product", (int(number),), *bits)
    return None


@cache
def _expected_results(convention: Convention) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    host = CpuTarget(convention)
    try:
        return _operator_results(host), _product_results(host, product_shader)
    finally:
        host.close()


def _operator_results(target: ComputeTarget) -> NDArray[np.float32]:
    nbytes = 4 * _CASES * len(_OPERATORS)
    return _run_kernel(target, [Dispatch(_kernel(), (0, 1, 2, 3), (_CASES // 64, 1, 1), "probe")],
                     hard_cases(), nbytes)  # fmt: skip


def _product_results(target: ComputeTarget, matmul: MatmulShader) -> NDArray[np.float32]:
    return np.concatenate([_one_product_result(target, matmul, *sizes) for sizes in _SIZES])


def _one_product_result(
    target: ComputeTarget, matmul: MatmulShader, m: int, k: int, n: int
) -> NDArray[np.float32]:
    """Compute a product with a row of zeros, whose sums have terms of -0; all terms of its first
    sum are -0."""
    problem = MatmulProblem(1, m, k, n, Operand((0, k, 1)), Operand((0, n, 1)))
    shader, grid = matmul(problem)
    rng = np.random.default_rng(1)
    left, right = (rng.normal(size=size).astype(np.float32) for size in ((m, k), (k, n)))
    left[0], right[:, 0] = 0, -np.abs(right[:, 0])
    dispatches = [Dispatch(shader, (0, 1, 2), grid, "probe")]
    return _run_kernel(target, dispatches, [left, right], 4 * m * n)


def _run_kernel(
    target: ComputeTarget,
    dispatches: Sequence[Dispatch],
    inputs: Sequence[NDArray[Any]],
    nbytes: int,
) -> NDArray[np.float32]:
    buffers = [target.buffer(array.nbytes) for array in inputs] + [target.buffer(nbytes)]
    for buffer, values in zip(buffers, inputs, strict=False):
        target.upload(buffer, values)
    commands = target.prepare(dispatches, buffers)
    return target.run(commands, [Copy(buffers[-1], nbytes)]).result()[0]


def find_conventions(
    device: Device, matmul: MatmulShader
) -> tuple[list[Convention], dict[Convention, Difference]]:
    """Return the conventions that a device follows, and the first difference from each other
    convention."""
    conventions, differences = [], {}
    for convention in CONVENTIONS:
        difference = first_difference(CanonicalDevice(device, convention), matmul, convention)
        if difference is None:
            conventions.append(convention)
        else:
            differences[convention] = difference
    return conventions, differences


def refuse_other_convention(
    target: CanonicalDevice, matmul: MatmulShader, convention: Convention
) -> None:
    """Refuse a device that does not follow the run's convention.

    Raises:
        SamestepError: The device does not follow the convention.
    """
    difference = first_difference(target, matmul, convention)
    if difference is None:
        return
    device = target.device
    conventions, _ = find_conventions(device, matmul)
    advice = "it follows none: use a CPU, or arithmetic: native"
    if conventions:
        supported = conventions[0]
        advice = (
            f"it follows {supported}: set arithmetic.multiply_add="
            f"{'fused' if supported.fused else 'separate'} and arithmetic.subnormals="
            f"{'flushed' if supported.flushes else 'kept'} for the run"
        )
    raise SamestepError(
        f"expected {device.adapter.name!r} to follow the run's arithmetic ({convention}), got a "
        f"difference: {difference}; {advice}"
    )
