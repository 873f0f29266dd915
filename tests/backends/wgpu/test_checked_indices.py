"""Kernels that a device need not check: no index is out of range, and no access races."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backends.wgpu.device.device import Device
from backends.wgpu.shaders.dispatch import Dispatch, Shader
from backends.wgpu.shaders.matmul.shader import Epilogue, Tiles, matmul_shader
from backends.wgpu.shaders.merged_shader import merged_shader
from tests.backends.wgpu.checked_indices import assert_valid_accesses
from tests.backends.wgpu.products import SMALL_TILES, TILES, product, same_bits, stored_product

SHAPES = [(1, 70, 37, 33), (2, 129, 12, 132)]


@pytest.mark.parametrize("tiles", [SMALL_TILES, *TILES], ids=str)
def test_product_accesses_are_in_range(tiles):
    for number, shape in enumerate(SHAPES):
        problem = product(*shape, a_turned=number > 0, b_turned=number > 0, offset=4 * number)
        assert_in_range(problem, tiles)


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_quantized_weight_reads_are_in_range(storage):
    for backward in (False, True):
        operands, _ = stored_product(storage, 7, 192, 9, backward=backward)
        assert_in_range(operands, TILES[0])


def assert_in_range(case: Any, tiles: Tiles) -> None:
    shader, grid = matmul_shader(case.problem, tiles)
    assert shader.in_bounds
    output_bytes = 4 * case.problem.batch * case.problem.m * case.problem.n
    assert_valid_accesses(shader, grid, [*(each.nbytes for each in case.bindings), output_bytes])


def kernel(body: str) -> Shader:
    return Shader(
        "@group(0) @binding(0) var<storage, read_write> out: array<f32>;\n"
        "var<workgroup> held: array<f32, 8>;\n"
        "@compute @workgroup_size(8)\n"
        f"fn main(@builtin(local_invocation_index) me: u32) {{\n{body}\n}}\n",
        1,
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("out[me + 1u] = 1.0;", r"out\[8\] of 8"),
        ("let at = u32(out[me]); held[at] = 1.0;", "depends on the contents of a buffer"),
        ("held[me] = 1.0; out[me] = held[7u - me];", "was written by another"),
        ("out[me] = held[7u - me]; held[me] = 1.0;", "is still read"),
        ("held[me / 2u] = 1.0;", "written twice"),
        ("if (me < 4u) { workgroupBarrier(); }", "some invocations do not reach"),
    ],
)
def test_invalid_access_is_detected(body, message):
    with pytest.raises(AssertionError, match=message):
        assert_valid_accesses(kernel(body), (1, 1, 1), [32])
    right = "held[me] = 1.0; workgroupBarrier(); out[me] = held[7u - me];"
    assert_valid_accesses(kernel(right), (1, 1, 1), [32])


class Checked(Device):
    """Lets the device check all kernels."""

    def _module(self, shader: Shader, label: str) -> Any:
        return super()._module(replace(shader, in_bounds=False), label)


def test_checks_do_not_change_bits(device):
    problem = product(2, 70, 37, 33)
    checked = Checked(device.adapter)
    assert same_bits(problem.on(device, SMALL_TILES), problem.on(checked, SMALL_TILES))
    checked.close()


def test_an_index_that_a_buffer_holds_is_checked():
    """Even if the text clamps it: the check relies on sizes only."""
    problem = product(1, 8, 8, 8).problem
    finish = Epilogue(
        ("array<f32>",), "", ("f32",), "e0[i] = product + b0[i];", is_product_stored=False
    )
    shader, grid = matmul_shader(replace(problem, finish=finish))
    assert shader.in_bounds
    with_indices = replace(problem, finish=replace(finish, reads_indices=True))
    other, _ = matmul_shader(with_indices)
    assert not other.in_bounds
    merged, _ = merged_shader([(shader, grid), (other, grid)], [[0, 1, 2, 3], [0, 1, 2, 4]], 2)
    assert not merged.in_bounds
    nf4, _ = stored_product("nf4", 7, 192, 9, backward=False)
    assert not matmul_shader(nf4.problem)[0].in_bounds


def test_invalid_shader_is_refused(device):
    shader = Shader("fn main( {", 0, in_bounds=True)
    with pytest.raises(Exception, match="Shader"):
        device.prepare([Dispatch(shader, (), (1, 1, 1), "broken")], [])
