"""Tests of counted memory accesses of kernels; kernels for cards have no bank conflicts."""

from __future__ import annotations

import pytest

from backends.wgpu.shaders.dispatch import Shader
from backends.wgpu.shaders.matmul.shader import matmul_shader
from benchmarks.shader_counts import Counts, counts_of
from tests.backends.wgpu.products import TILES, product

STEPS, SIZE = 5, 128


def strided_reads(vectors: int) -> Shader:
    """Return a kernel in which eight invocations read vec4 values at this stride, ten times."""
    source = f"""\
@group(0) @binding(0) var<storage, read_write> out: array<vec4f>;
var<workgroup> held: array<vec4f, 64>;
@compute @workgroup_size(8)
fn main(@builtin(local_invocation_index) me: u32) {{
  for (var k = 0u; k < 10u; k++) {{
    let x = held[me * {vectors}u];
    workgroupBarrier();
    out[me / 4u] = x;
  }}
}}
"""
    return Shader(source, 1)


@pytest.mark.parametrize(("vectors", "conflicts"), [(0, 1), (1, 1), (2, 2), (4, 4), (8, 8), (5, 1)])
def test_bank_conflicts_are_serialized(vectors, conflicts):
    bytes_moved = 10 * 2 * 16
    assert counts_of(strided_reads(vectors), (3, 1, 1)) == Counts(
        10, bytes_moved, 10, 10 * conflicts
    ).times(3)


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_matmul_has_no_bank_conflicts_and_two_barriers_per_step(tiles):
    """This holds in every layout; at least three quarters of the invocations load something."""
    for transposed in range(4):
        case = product(
            1,
            SIZE,
            STEPS * tiles.depth,
            SIZE,
            a_turned=transposed % 2 == 1,
            b_turned=transposed > 1,
        )
        shader, grid = matmul_shader(case.problem, tiles)
        counts = counts_of(shader, grid)
        groups = SIZE // tiles.rows * (SIZE // tiles.columns)
        assert counts.served_accesses == counts.accesses
        assert counts.barriers == 2 * STEPS * groups
        operands = groups * STEPS * tiles.depth * (tiles.rows + tiles.columns)
        assert counts.bytes_moved == 4 * (operands + SIZE * SIZE)
    assert tiles.blocks % tiles.invocations in {0, tiles.invocations // 2} or (
        tiles.blocks >= 0.75 * tiles.invocations
    )
