"""All kernels of cards: on software Vulkan the tuner picks others."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from backends.eager.eager import EagerBackend
from backends.wgpu.lowering.lowering import Templates
from backends.wgpu.program import CompiledProgram
from backends.wgpu.shaders.matmul.shader import MatmulProblem, matmul_shader
from tests.backends.wgpu.products import (
    SMALL_TILES,
    TILES,
    product,
    same_bits,
    stored_product,
)
from tests.backends.wgpu.small_models import (
    gradients,
    next_token_loss,
    qwen3_with_lora,
    text,
    trainable,
)

FORMS = [
    (storage, backward) for storage in ("bf16", "f16", "int8", "int4") for backward in (False, True)
]
WIDTH = 192
"""Three groups per row."""


def test_there_are_eight_tiles():
    assert len({*TILES}) == len(FORMS) == 8


@pytest.mark.parametrize("number", range(8))
def test_odd_shapes_in_any_layout(device, number):
    """Larger than every tile, and a multiple of none; the last step of k is partial."""
    problem = product(
        2, 131, 45, 134, a_turned=number % 2 == 0, b_turned=number % 4 < 2, offset=number
    )
    values = problem.on(device, TILES[number])
    assert problem.error(values) < 1e-5
    assert same_bits(values, problem.on(device, SMALL_TILES))


@pytest.mark.parametrize(
    ("number", "storage", "backward"),
    [
        pytest.param(number, storage, backward, marks=() if number == index else pytest.mark.slow)
        for number in range(8)
        for index, (storage, backward) in enumerate(FORMS)
    ],
)
def test_stored_weights_of_several_groups(device, number, storage, backward):
    """By default each tile and each storage form runs once."""
    narrow, wide = stored_product(storage, 131, WIDTH, 77, backward=backward)
    values = narrow.on(device, TILES[number])
    assert narrow.error(values) < 1e-5
    assert same_bits(values, wide.on(device, SMALL_TILES))


@pytest.mark.slow
@pytest.mark.parametrize("base_dtype", ["int8", "bfloat16"])
def test_whole_model_on_tiled_kernels(device, base_dtype):
    """As on a card: a different tile for each product, workgroup sums, fused attention."""
    uses_narrow_weights: list[bool] = []

    def shader(problem: MatmulProblem) -> Any:
        uses_narrow_weights.append(problem.b_form is not None)
        return matmul_shader(problem, TILES[len(uses_narrow_weights) % len(TILES)])

    module = qwen3_with_lora(hidden_size=WIDTH, attn_implementation="sdpa")
    job = trainable(module, next_token_loss, base_dtype=base_dtype)
    reference = EagerBackend("cpu").compile(copy.deepcopy(job), text())
    program = CompiledProgram(
        device, job, Templates(cooperative=True, matmul=shader), adds_on_device=True
    )
    program.check(text())
    first, repeat = (gradients(program, text(), seed) for seed in (0, 5))
    for number, values in gradients(reference, text()).items():
        assert np.linalg.norm(first[number] - values) <= 1e-5 * np.linalg.norm(values)
    assert all(first[n].tobytes() == repeat[n].tobytes() for n in first)
    program.close()
    assert sum(uses_narrow_weights) >= len(TILES)
    assert not all(uses_narrow_weights)
