"""Every generated shader is valid WGSL, and hides none of its own names."""

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
from tests.backends.wgpu.products import SMALL_TILES, TILES, product

KERNELS: tuple[AttentionKernel, ...] = ("queries", "keys")
READ = 20
"""More buffers than any product in a model reads in its epilogue."""


def assert_valid(device, shader: Shader) -> None:
    assert not hidden_names(shader.source)
    device._device.create_shader_module(code=shader.module)


def finish(*, is_stored: bool) -> Epilogue:
    """Read as many buffers as a shader may bind."""
    body = [f"let t{i} = b{i}[i];" for i in range(READ)]
    body.append(f"e0[i] = product + {' + '.join(f't{i}' for i in range(READ))};")
    return Epilogue(("array<f32>",) * READ, "", ("f32",), "\n".join(body), is_stored)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("storage", ["", "bf16", "int8", "nf4"])
@pytest.mark.parametrize("columns", [64, 63])
def test_a_product_continues_with_any_number_of_buffers(device, columns, storage, stored):
    """As vectors of four and one by one."""
    form = QuantizedLayout.of_shape(64, columns + 1, storage) if storage else None
    problem = replace(
        product(1, 9, 64, columns).problem, b_form=form, finish=finish(is_stored=stored)
    )
    for tiles in (SMALL_TILES, TILES[0]):
        shader, _ = matmul_shader(problem, tiles)
        assert shader.bindings == 3 + READ + stored
        assert_valid(device, shader)


def gradients_of_one_projection(
    kernel: AttentionKernel, *, masked: bool
) -> tuple[Shader, tuple[int, int, int]]:
    """Attention whose queries, keys and values share one buffer."""
    sizes = AttentionSizes(1, 1, 1, 40, 40, 8)
    query, key, value = (View((960, 8, 24, 1), 8 * n) for n in range(3))
    mask = View((1600, 1600, 40, 1), 0) if masked else None
    grad_output, delta = View((320, 8, 8, 1), 0), View((40, 40, 1), 0)
    return attention_shader(
        AttentionProblem(
            kernel, sizes, query, key, value, mask, False, grad_output, delta, 1.0, False
        )
    )


@pytest.mark.parametrize("masked", [True, False])
def test_kernels_side_by_side_read_their_buffers(device, masked):
    """The scores of a block once had the names of the buffers: a wrong number, and no error."""
    shaders = [gradients_of_one_projection(kernel, masked=masked) for kernel in KERNELS]
    read = [0, 0, 0, *range(1, 4 + masked)]
    bound = [[*read, max(read) + 1 + n] for n in range(2)]
    shader, _ = merged_shader(shaders, bound, 2)
    assert_valid(device, shader)
