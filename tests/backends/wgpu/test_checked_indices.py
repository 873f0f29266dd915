"""Kernels that run without the device's bounds checks: no access is out of range or races."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backends.wgpu.device.device import Device
from backends.wgpu.shaders.dispatch import Dispatch, Shader
from backends.wgpu.shaders.matmul.shader import Epilogue, Tiles, matmul_shader
from backends.wgpu.shaders.merged_shader import merged_shader
from tests.backends.wgpu.checked_indices import assert_valid_accesses
from tests.backends.wgpu.products import (
    SMALL_TILES,
    TILES,
    Product,
    have_same_bits,
    quantized_products,
    random_product,
)

SHAPES = [(1, 70, 37, 33), (2, 129, 12, 132)]


@pytest.mark.parametrize("tiles", [SMALL_TILES, *TILES], ids=str)
def test_product_accesses_are_in_range(tiles):
    for number, shape in enumerate(SHAPES):
        assert_in_range(
            random_product(
                *shape, a_is_transposed=number > 0, b_is_transposed=number > 0, offset=4 * number
            ),
            tiles,
        )


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_quantized_weight_reads_are_in_range(storage):
    for backward in (False, True):
        quantized, _ = quantized_products(storage, 7, 192, 9, backward=backward)
        assert_in_range(quantized, TILES[0])


def assert_in_range(case: Product, tiles: Tiles) -> None:
    problem = case.problem
    shader, grid = matmul_shader(problem, tiles)
    assert shader.in_bounds
    output_bytes = 4 * problem.batch * problem.m * problem.n
    nbytes = [*(array.nbytes for array in case.bindings), output_bytes]
    assert_valid_accesses(shader, grid, nbytes)


def kernel(body: str) -> Shader:
    """Return a kernel of eight invocations, with an output of eight floats and a shared array."""
    return Shader(
        "@group(0) @binding(0) var<storage, read_write> out: array<f32>;\n"
        "var<workgroup> shared_values: array<f32, 8>;\n"
        "@compute @workgroup_size(8)\n"
        f"fn main(@builtin(local_invocation_index) me: u32) {{\n{body}\n}}\n",
        1,
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("out[me + 1u] = 1.0;", r"out\[8\] of 8"),
        ("let at = u32(out[me]); shared_values[at] = 1.0;", "depends on the contents of a buffer"),
        ("shared_values[me] = 1.0; out[me] = shared_values[7u - me];", "another wrote"),
        ("out[me] = shared_values[7u - me]; shared_values[me] = 1.0;", "another reads"),
        ("shared_values[me / 2u] = 1.0;", "several write"),
        ("if (me < 4u) { workgroupBarrier(); }", "some invocations do not reach"),
    ],
)
def test_invalid_access_is_detected(body, message):
    with pytest.raises(AssertionError, match=message):
        assert_valid_accesses(kernel(body), (1, 1, 1), [32])
    valid = "shared_values[me] = 1.0; workgroupBarrier(); out[me] = shared_values[7u - me];"
    assert_valid_accesses(kernel(valid), (1, 1, 1), [32])


class BoundsCheckedDevice(Device):
    """A device that checks the indices of every kernel."""

    def _module(self, shader: Shader, label: str) -> Any:
        return super()._module(replace(shader, in_bounds=False), label)


def test_bounds_checks_do_not_change_bits(device):
    operands = random_product(2, 70, 37, 33)
    checked = BoundsCheckedDevice(device.adapter)
    assert have_same_bits(
        operands.run_on(device, SMALL_TILES), operands.run_on(checked, SMALL_TILES)
    )
    checked.close()


def test_kernels_that_read_indices_from_buffers_keep_bounds_checks():
    """The codes of nf4 are such indices too."""
    problem = random_product(1, 8, 8, 8).problem
    finish = Epilogue(
        ("array<f32>",), "", ("f32",), "e0[i] = product + b0[i];", is_product_stored=False
    )
    shader, grid = matmul_shader(replace(problem, finish=finish))
    assert shader.in_bounds
    reads_indices = replace(problem, finish=replace(finish, reads_indices=True))
    reading_shader, _ = matmul_shader(reads_indices)
    assert not reading_shader.in_bounds
    merged, _ = merged_shader(
        [(shader, grid), (reading_shader, grid)], [[0, 1, 2, 3], [0, 1, 2, 4]], 2
    )
    assert not merged.in_bounds
    nf4, _ = quantized_products("nf4", 7, 192, 9, backward=False)
    assert not matmul_shader(nf4.problem)[0].in_bounds


def test_invalid_shader_is_refused(device):
    shader = Shader("fn main( {", 0, in_bounds=True)
    with pytest.raises(Exception, match="Shader"):
        device.prepare([Dispatch(shader, (), (1, 1, 1), "broken")], [])
