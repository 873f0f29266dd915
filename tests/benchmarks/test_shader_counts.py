"""Counts of a kernel's memory accesses and barriers; kernels for cards have no bank conflicts."""

from __future__ import annotations

import itertools
import math

import pytest

from backends.wgpu.shaders.dispatch import Shader
from backends.wgpu.shaders.matmul.shader import matmul_shader
from benchmarks.shader_counts import Counts, counts_of
from tests.backends.wgpu.products import TILES, random_product

STEPS, SIZE = 5, 128
"""Tiles that a product adds, and the rows and columns of its result."""


def strided_reads(vectors: int) -> Shader:
    """Return a kernel in which eight invocations read vec4 values at this stride, ten times.

    Eight vec4 values are 32 words, one for each bank.
    """
    source = f"""\
@group(0) @binding(0) var<storage, read_write> out: array<vec4f>;
var<workgroup> shared_values: array<vec4f, 64>;
@compute @workgroup_size(8)
fn main(@builtin(local_invocation_index) local_id: u32) {{
  for (var k = 0u; k < 10u; k++) {{
    let x = shared_values[local_id * {vectors}u];
    workgroupBarrier();
    out[local_id / 4u] = x;
  }}
}}
"""
    return Shader(source, 1)


@pytest.mark.parametrize(("vectors", "conflicts"), [(0, 1), (1, 1), (2, 2), (4, 4), (8, 8), (5, 1)])
def test_bank_conflicts_are_serialized(vectors, conflicts):
    workgroup_counts = Counts(
        barriers=10,
        bytes_moved=10 * 2 * 16,  # the eight invocations write to two vec4 values
        accesses=10,
        served_accesses=10 * conflicts,
    )
    assert counts_of(strided_reads(vectors), (3, 1, 1)) == workgroup_counts.times(3)


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_matmul_has_no_bank_conflicts_and_two_barriers_per_step(tiles):
    """With and without transposed operands."""
    for is_a_transposed, is_b_transposed in itertools.product((False, True), repeat=2):
        case = random_product(
            1,
            SIZE,
            STEPS * tiles.depth,
            SIZE,
            a_is_transposed=is_a_transposed,
            b_is_transposed=is_b_transposed,
        )
        shader, grid = matmul_shader(case.problem, tiles)
        counts = counts_of(shader, grid)
        groups = SIZE // tiles.rows * (SIZE // tiles.columns)
        assert counts.served_accesses == counts.accesses
        assert counts.barriers == 2 * STEPS * groups
        operands = groups * STEPS * tiles.depth * (tiles.rows + tiles.columns)
        assert counts.bytes_moved == 4 * (operands + SIZE * SIZE)


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_three_quarters_of_the_invocations_load_a_block_in_an_average_round(tiles):
    load_rounds = math.ceil(tiles.blocks / tiles.invocations)
    assert tiles.blocks >= 0.75 * load_rounds * tiles.invocations
