"""Kernels that a device need not check: no index of theirs is outside, and no access in a race."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backends.wgpu.device.device import Device
from backends.wgpu.shaders.dispatch import Dispatch, Shader
from backends.wgpu.shaders.matmul.shader import Epilogue, Tiles, matmul_shader
from backends.wgpu.shaders.merged_shader import merged_shader
from tests.backends.wgpu.checked_indices import assert_right_accesses
from tests.backends.wgpu.products import SMALL_TILES, TILES, product, same_bits, stored_product

SHAPES = [(1, 70, 37, 33), (2, 129, 12, 132)]


@pytest.mark.parametrize("tiles", [SMALL_TILES, *TILES], ids=str)
def test_no_product_reads_or_writes_outside(tiles):
    for number, shape in enumerate(SHAPES):
        it = product(*shape, a_turned=number > 0, b_turned=number > 0, offset=4 * number)
        assert_in_place(it, tiles)


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_no_stored_weight_is_read_outside(storage):
    for backward in (False, True):
        narrow, _ = stored_product(storage, 7, 192, 9, backward=backward)
        assert_in_place(narrow, TILES[0])


def assert_in_place(it: Any, tiles: Tiles) -> None:
    shader, grid = matmul_shader(it.problem, tiles)
    assert shader.in_bounds
    out = 4 * it.problem.batch * it.problem.m * it.problem.n
    assert_right_accesses(shader, grid, [*(each.nbytes for each in it.bindings), out])


def kernel(body: str) -> Shader:
    return Shader(
        "@group(0) @binding(0) var<storage, read_write> out: array<f32>;\n"
        "var<workgroup> held: array<f32, 8>;\n"
        "@compute @workgroup_size(8)\n"
        f"fn main(@builtin(local_invocation_index) me: u32) {{\n{body}\n}}\n",
        1,
    )


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ("out[me + 1u] = 1.0;", r"out\[8\] of 8"),
        ("let at = u32(out[me]); held[at] = 1.0;", "depends on what a buffer holds"),
        ("held[me] = 1.0; out[me] = held[7u - me];", "was written by another"),
        ("out[me] = held[7u - me]; held[me] = 1.0;", "is still read"),
        ("held[me / 2u] = 1.0;", "written twice"),
        ("if (me < 4u) { workgroupBarrier(); }", "not all come to"),
    ],
)
def test_what_is_wrong_is_seen(body, wrong):
    with pytest.raises(AssertionError, match=wrong):
        assert_right_accesses(kernel(body), (1, 1, 1), [32])
    right = "held[me] = 1.0; workgroupBarrier(); out[me] = held[7u - me];"
    assert_right_accesses(kernel(right), (1, 1, 1), [32])


class Checked(Device):
    """Lets the device check all kernels."""

    def _module(self, shader: Shader, label: str) -> Any:
        return super()._module(replace(shader, in_bounds=False), label)


def test_checks_change_no_bit(device):
    it = product(2, 70, 37, 33)
    checked = Checked(device.adapter)
    assert same_bits(it.on(device, SMALL_TILES), it.on(checked, SMALL_TILES))
    checked.close()


def test_an_index_that_a_buffer_holds_is_checked():
    """Also where it is clamped by the text: only sizes are relied upon."""
    problem = product(1, 8, 8, 8).problem
    finish = Epilogue(("array<f32>",), "", ("f32",), "e0[i] = product + b0[i];", stored=False)
    shader, grid = matmul_shader(replace(problem, finish=finish))
    assert shader.in_bounds
    looks_up = replace(problem, finish=replace(finish, looks_up=True))
    other, _ = matmul_shader(looks_up)
    assert not other.in_bounds
    both, _ = merged_shader([(shader, grid), (other, grid)], [[0, 1, 2, 3], [0, 1, 2, 4]], 2)
    assert not both.in_bounds
    nf4, _ = stored_product("nf4", 7, 192, 9, backward=False)
    assert not matmul_shader(nf4.problem)[0].in_bounds


def test_what_is_no_shader_is_still_refused(device):
    shader = Shader("fn main( {", 0, in_bounds=True)
    with pytest.raises(Exception, match="Shader"):
        device.prepare([Dispatch(shader, (), (1, 1, 1), "broken")], [])
