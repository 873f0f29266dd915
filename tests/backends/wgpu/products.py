"""Matrix products with their expected results, for tests of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from backends.quantization.quantize import dequantize, quantize
from backends.wgpu.device.target import Copy
from backends.wgpu.shaders.dispatch import Dispatch, Shader
from backends.wgpu.shaders.matmul.shader import (
    MatmulProblem,
    MatmulTraits,
    Operand,
    Tiles,
    candidates,
    matmul_shader,
    split_into_dispatches,
)
from backends.wgpu.shaders.quantized_layout import QuantizedLayout

SMALL_TILES = Tiles(16, 32, 8, 4, 4)
"""Tiles that compile quickly, for tests that need a GPU kernel of any tile size."""


def small_tiles(problem: MatmulProblem) -> tuple[Shader, tuple[int, int, int]]:
    """Return the kernel of a product with small tiles, and its grid."""
    return matmul_shader(problem, SMALL_TILES)


@dataclass
class Product:
    """A problem with its operands, and the result in float64."""

    problem: MatmulProblem
    bindings: list[Any]
    expected: np.ndarray

    def run_on(self, device, choice=None):
        """Return the device's result, by the default kernel or the chosen one."""
        buffers = [device.buffer(array.nbytes) for array in self.bindings]
        for buffer, array in zip(buffers, self.bindings, strict=True):
            device.upload(buffer, array)
        out = device.buffer(self.expected.size * 4)
        device.upload(out, np.full(self.expected.size, np.nan, np.float32))
        buffers.append(out)
        bindings = tuple(range(len(buffers)))
        kernels = [matmul_shader(part, choice) for part in split_into_dispatches(self.problem)]
        dispatches = [Dispatch(shader, bindings, grid, "product") for shader, grid in kernels]
        commands = device.prepare(dispatches, buffers)
        (values,) = device.run(commands, [Copy(out, self.expected.size * 4)]).result()
        return values.reshape(self.expected.shape)

    def relative_error(self, values):
        """Return the largest error, relative to the largest expected value."""
        return np.abs(values - self.expected).max() / np.abs(self.expected).max()


def random_product(
    batch, m, k, n, *, a_is_transposed=False, b_is_transposed=False, offset=0, seed=0
):
    """Return a (batch, m, k) by (batch, k, n) product of random operands.

    A transposed operand has its last two dimensions swapped in memory. `offset` is the number of
    unused elements before each operand. All terms of element [0, 0] of each result are -0; since a
    sum starts from +0, every kernel must return +0 there.
    """
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((batch, m, k)).astype(np.float32)
    b = rng.standard_normal((batch, k, n)).astype(np.float32)
    a[:, 0], b[:, :, 0] = 0, -np.abs(b[:, :, 0])
    buffers = []
    for values, is_transposed in ((a, a_is_transposed), (b, b_is_transposed)):
        in_memory = values.swapaxes(1, 2) if is_transposed else values
        buffers.append(np.concatenate([np.zeros(offset, np.float32), in_memory.reshape(-1)]))
    strides_a = (m * k, 1, m) if a_is_transposed else (m * k, k, 1)
    strides_b = (k * n, 1, k) if b_is_transposed else (k * n, n, 1)
    problem = MatmulProblem(batch, m, k, n, Operand(strides_a, offset), Operand(strides_b, offset))
    return Product(problem, buffers, a.astype(np.float64) @ b)


def have_same_bits(first, second):
    return np.array_equal(first.view(np.uint32), second.view(np.uint32))


def quantized_products(storage, tokens, columns, rows, *, backward):
    """Return two products: with a quantized weight, and with its dequantized values in float32.

    The weight has shape (rows, columns). The product is x @ weight.T, or in backward
    grad_output @ weight.
    """
    rng = np.random.default_rng(3)
    quantized = quantize(rng.standard_normal((rows, columns)).astype(np.float32), storage)
    weight = dequantize(quantized)
    k, n = (rows, columns) if backward else (columns, rows)
    x = rng.standard_normal((tokens, k)).astype(np.float32)
    b = Operand((0, columns, 1) if backward else (0, 1, columns))
    a = Operand((0, k, 1))
    expected = x.astype(np.float64) @ (weight if backward else weight.T)
    quantized_problem = MatmulProblem(1, tokens, k, n, a, b, QuantizedLayout.of(quantized))
    float32_problem = MatmulProblem(1, tokens, k, n, a, b)
    return (
        Product(quantized_problem, [x, quantized.pack()], expected),
        Product(float32_problem, [x, weight], expected),
    )


_GPU_TRAITS = MatmulTraits(workgroup_bytes=2**15, invocations=1024)
TILES = tuple(
    choice
    for choice in candidates(random_product(1, 1, 1, 1).problem, _GPU_TRAITS)
    if isinstance(choice, Tiles)
)
"""All tile sizes that the tuner may choose on a GPU."""
