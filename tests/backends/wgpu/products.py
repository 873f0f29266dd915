"""Matrix products with their expected results, for tests of the kernels."""

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
"""Quick to compile: for tests that need a card's kernels of any size."""


def small_tiles(problem: MatmulProblem) -> tuple[Shader, tuple[int, int, int]]:
    """Compute a product with small tiles."""
    return matmul_shader(problem, SMALL_TILES)


@dataclass
class Product:
    """A problem with its operands, and the expected result."""

    problem: MatmulProblem
    bindings: list[Any]
    expected: np.ndarray

    def on(self, device, choice=None):
        shape = self.expected.shape
        buffers = [device.buffer(array.nbytes) for array in self.bindings]
        for buffer, array in zip(buffers, self.bindings, strict=True):
            device.upload(buffer, array)
        out = device.buffer(self.expected.size * 4)
        device.upload(out, np.full(self.expected.size, np.nan, np.float32))
        buffers.append(out)
        numbers = tuple(range(len(buffers)))
        parts = [matmul_shader(part, choice) for part in split_into_dispatches(self.problem)]
        dispatches = [Dispatch(shader, numbers, grid, "product") for shader, grid in parts]
        commands = device.prepare(dispatches, buffers)
        (values,) = device.run(commands, [Copy(out, self.expected.size * 4)]).result()
        return values.reshape(shape)

    def error(self, values):
        return np.abs(values - self.expected).max() / np.abs(self.expected).max()


def product(batch, m, k, n, *, a_turned=False, b_turned=False, offset=0, seed=0):
    """Make random operands, each either as written or with its two dimensions transposed in memory.

    All terms of the first output are -0: their sum from zero is +0, so it must be +0 in every
    kernel.
    """
    draw = np.random.default_rng(seed)
    a = draw.standard_normal((batch, m, k)).astype(np.float32)
    b = draw.standard_normal((batch, k, n)).astype(np.float32)
    a[:, 0], b[:, :, 0] = 0, -np.abs(b[:, :, 0])
    buffers = []
    for values, is_transposed in ((a, a_turned), (b, b_turned)):
        laid = values.swapaxes(1, 2) if is_transposed else values
        buffers.append(np.concatenate([np.zeros(offset, np.float32), laid.reshape(-1)]))
    strides_a = (m * k, 1, m) if a_turned else (m * k, k, 1)
    strides_b = (k * n, 1, k) if b_turned else (k * n, n, 1)
    problem = MatmulProblem(batch, m, k, n, Operand(strides_a, offset), Operand(strides_b, offset))
    return Product(problem, buffers, a.astype(np.float64) @ b)


def same_bits(one, other):
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


def stored_product(storage, tokens, columns, rows, *, backward):
    """Make x @ W^T forward or g @ W backward, with W (rows, columns) quantized and with its
    dequantized values."""
    draw = np.random.default_rng(3)
    quantized = quantize(draw.standard_normal((rows, columns)).astype(np.float32), storage)
    weight = dequantize(quantized)
    k, n = (rows, columns) if backward else (columns, rows)
    x = draw.standard_normal((tokens, k)).astype(np.float32)
    b = Operand((0, columns, 1) if backward else (0, 1, columns))
    a = Operand((0, k, 1))
    expected = x.astype(np.float64) @ (weight if backward else weight.T)
    quantized_problem = MatmulProblem(1, tokens, k, n, a, b, QuantizedLayout.of(quantized))
    wide = MatmulProblem(1, tokens, k, n, a, b)
    return Product(quantized_problem, [x, quantized.pack()], expected), Product(
        wide, [x, weight], expected
    )


_CARD = MatmulTraits(workgroup_bytes=2**15, invocations=1024)
TILES = tuple(
    choice for choice in candidates(product(1, 1, 1, 1).problem, _CARD) if isinstance(choice, Tiles)
)
"""All kernels that a card may use."""
