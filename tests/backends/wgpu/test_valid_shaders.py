"""Generated shaders with many buffers are valid WGSL, and hide none of their names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backends.wgpu.shaders.attention.problem import (
    AttentionKernel,
    AttentionProblem,
    AttentionSizes,
    View,
)
from backends.wgpu.shaders.attention.tiles import attention_shader
from backends.wgpu.shaders.dispatch import Shader
from backends.wgpu.shaders.matmul.shader import Epilogue, matmul_shader
from backends.wgpu.shaders.merged_shader import merged_shader
from backends.wgpu.shaders.quantized_layout import QuantizedLayout
from tests.backends.wgpu.checked_shaders import hidden_names
from tests.backends.wgpu.products import SMALL_TILES, TILES, random_product

BACKWARD_KERNELS: tuple[AttentionKernel, ...] = ("queries", "keys")
BUFFERS = 20
"""Buffers that an epilogue reads: more than in any model."""


def assert_valid(device, shader: Shader) -> None:
    assert not hidden_names(shader.source)
    device._device.create_shader_module(code=shader.module)


def summing_epilogue(*, is_stored: bool) -> Epilogue:
    """Return an epilogue that adds an element of each buffer to the product."""
    body = [f"let t{i} = b{i}[i];" for i in range(BUFFERS)]
    body.append(f"e0[i] = product + {' + '.join(f't{i}' for i in range(BUFFERS))};")
    return Epilogue(("array<f32>",) * BUFFERS, "", ("f32",), "\n".join(body), is_stored)


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("storage", ["", "bf16", "int8", "nf4"])
@pytest.mark.parametrize("columns", [64, 63])
def test_an_epilogue_may_read_any_number_of_buffers(device, columns, storage, is_stored):
    """64 columns are processed in vectors of four, 63 one by one."""
    layout = QuantizedLayout.of_shape(64, columns + 1, storage) if storage else None
    problem = replace(
        random_product(1, 9, 64, columns).problem,
        b_form=layout,
        finish=summing_epilogue(is_stored=is_stored),
    )
    for tiles in (SMALL_TILES, TILES[0]):
        shader, _ = matmul_shader(problem, tiles)
        assert shader.bindings == 3 + BUFFERS + is_stored
        assert_valid(device, shader)


def backward_shader(
    kernel: AttentionKernel, *, has_mask: bool
) -> tuple[Shader, tuple[int, int, int]]:
    """Return a backward kernel of attention whose queries, keys and values share one buffer."""
    sizes = AttentionSizes(1, 1, 1, 40, 40, 8)
    query, key, value = (View((960, 8, 24, 1), 8 * n) for n in range(3))
    mask = View((1600, 1600, 40, 1), 0) if has_mask else None
    grad_output, delta = View((320, 8, 8, 1), 0), View((40, 40, 1), 0)
    return attention_shader(
        AttentionProblem(
            kernel, sizes, query, key, value, mask, False, grad_output, delta, 1.0, False
        )
    )


@pytest.mark.parametrize("has_mask", [True, False])
def test_merged_attention_kernels_read_their_buffers(device, has_mask):
    """A local value with the name of a buffer would give wrong numbers without an error."""
    shaders = [backward_shader(kernel, has_mask=has_mask) for kernel in BACKWARD_KERNELS]
    inputs = [0, 0, 0, *range(1, 4 + has_mask)]
    bindings = [[*inputs, max(inputs) + 1 + n] for n in range(2)]
    shader, _ = merged_shader(shaders, bindings, 2)
    assert_valid(device, shader)
