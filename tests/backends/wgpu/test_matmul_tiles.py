"""All kernels of products for GPUs, which the tuner does not choose on software Vulkan."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from backends.eager.eager import EagerBackend
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.program import CompiledProgram
from backends.wgpu.shaders.matmul.shader import MatmulProblem, matmul_shader
from tests.backends.wgpu.products import (
    SMALL_TILES,
    TILES,
    have_same_bits,
    quantized_products,
    random_product,
)
from tests.backends.wgpu.small_models import (
    gradients,
    next_token_loss,
    qwen3_with_lora,
    token_batch,
    trainable,
)

STORAGE_CASES = [
    (storage, backward) for storage in ("bf16", "f16", "int8", "int4") for backward in (False, True)
]
WIDTH = 192
"""Three quantization groups per row."""


def test_there_are_eight_tiles():
    """The other tests here rely on this number."""
    assert len({*TILES}) == len(STORAGE_CASES) == 8


@pytest.mark.parametrize("number", range(8))
def test_tiles_compute_odd_shapes_in_any_layout(device, number):
    """Sizes exceed every tile and are multiples of none; the last step along k is partial."""
    case = random_product(
        2,
        131,
        45,
        134,
        a_is_transposed=number % 2 == 0,
        b_is_transposed=number % 4 < 2,
        offset=number,
    )
    values = case.run_on(device, TILES[number])
    assert case.relative_error(values) < 1e-5
    assert have_same_bits(values, case.run_on(device, SMALL_TILES))


@pytest.mark.parametrize(
    ("number", "storage", "backward"),
    [
        pytest.param(number, storage, backward, marks=() if number == index else pytest.mark.slow)
        for number in range(8)
        for index, (storage, backward) in enumerate(STORAGE_CASES)
    ],
)
def test_tiles_compute_quantized_weights_of_several_groups(device, number, storage, backward):
    """Without slow tests, each tile and each storage type runs once."""
    quantized, float32 = quantized_products(storage, 131, WIDTH, 77, backward=backward)
    values = quantized.run_on(device, TILES[number])
    assert quantized.relative_error(values) < 1e-5
    assert have_same_bits(values, float32.run_on(device, SMALL_TILES))


@pytest.mark.slow
@pytest.mark.parametrize("base_dtype", ["int8", "bfloat16"])
def test_a_whole_model_runs_on_tiled_kernels(device, base_dtype):
    """All kernels are those of a GPU; each product uses the next tile in turn."""
    has_quantized_weight: list[bool] = []

    def next_shader(problem: MatmulProblem) -> Any:
        has_quantized_weight.append(problem.b_form is not None)
        return matmul_shader(problem, TILES[len(has_quantized_weight) % len(TILES)])

    module = qwen3_with_lora(hidden_size=WIDTH, attn_implementation="sdpa")
    job = trainable(module, next_token_loss, base_dtype=base_dtype)
    reference = EagerBackend("cpu").compile(copy.deepcopy(job), token_batch())
    program = CompiledProgram(
        device, job, KernelOptions(cooperative=True, matmul=next_shader), adds_on_device=True
    )
    program.check(token_batch())
    first, repeat = (gradients(program, token_batch(), seed) for seed in (0, 5))
    for block, values in gradients(reference, token_batch()).items():
        assert np.linalg.norm(first[block] - values) <= 1e-5 * np.linalg.norm(values)
    assert all(first[block].tobytes() == repeat[block].tobytes() for block in first)
    program.close()
    assert sum(has_quantized_weight) >= len(TILES)
    assert not all(has_quantized_weight)
