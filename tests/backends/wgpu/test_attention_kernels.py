"""Attention kernels, in each layout of workgroup memory."""

from __future__ import annotations

import pytest

from backends.wgpu.shaders.attention.barriers import Steps
from backends.wgpu.shaders.attention.layout import choose_layout
from backends.wgpu.shaders.attention.problem import AttentionSizes
from backends.wgpu.shaders.attention.tiles import attention_shader
from benchmarks.shader_counts import counts_of
from tests.backends.wgpu.attention_kernels import (
    KERNELS,
    Operands,
    binding_nbytes,
    contiguous_problem,
)
from tests.backends.wgpu.checked_indices import assert_valid_accesses

SMALLEST_BYTES, COMMON_BYTES = 16_384, 32_768
"""The workgroup memory that every adapter has, and the most that a layout uses."""
BARRIER = "workgroupBarrier();"

# Single rows, partial tiles and vectors, key heads that several query heads share, and vectors that
# workgroup memory stores in two parts.
QUICK = (AttentionSizes(2, 2, 2, 33, 70, 20), "boolean", False, COMMON_BYTES)
SIZES = [
    (AttentionSizes(1, 2, 1, 1, 1, 4), "", False),
    QUICK[:3],
    (AttentionSizes(1, 2, 1, 70, 97, 64), "", False),
    (AttentionSizes(1, 1, 1, 65, 65, 36), "additive", True),
    (AttentionSizes(1, 2, 1, 600, 600, 64), "", True),
    (AttentionSizes(1, 4, 2, 599, 600, 32), "boolean", False),
    (AttentionSizes(1, 2, 1, 130, 131, 128), "", False),
    (AttentionSizes(1, 2, 2, 131, 70, 96), "additive", False),
    (AttentionSizes(1, 1, 1, 20, 520, 80), "boolean", True),
]
CASES = [
    (*sizes, workgroup_bytes)
    for sizes in SIZES
    for workgroup_bytes in (SMALLEST_BYTES, COMMON_BYTES)
]


@pytest.mark.parametrize(
    ("sizes", "mask", "causal", "workgroup_bytes"),
    [pytest.param(*case, marks=() if case == QUICK else pytest.mark.slow) for case in CASES],
)
def test_kernels_equal_float64_in_every_layout(device, sizes, mask, causal, workgroup_bytes):
    operands = Operands.random(sizes, mask, causal=causal)
    for actual, expected in zip(
        operands.run_on(device, workgroup_bytes), operands.reference_results(), strict=True
    ):
        assert float((actual - expected).norm()) <= 3e-6 * max(float(expected.norm()), 1e-3)


@pytest.mark.slow
def test_layouts_do_not_change_bits(device):
    """Layouts store vectors whole or in parts, and tiles in separate arrays or in a reused one."""
    operands = Operands.random(AttentionSizes(1, 2, 1, 45, 70, 32), "boolean", causal=True)
    smallest_results, common_results = (
        operands.run_on(device, nbytes) for nbytes in (SMALLEST_BYTES, COMMON_BYTES)
    )
    for smallest, common in zip(smallest_results, common_results, strict=True):
        assert smallest.numpy().tobytes() == common.numpy().tobytes()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("size", "mask", "causal", "workgroup_bytes"),
    [
        (32, "additive", False, COMMON_BYTES),
        (36, "", True, SMALLEST_BYTES),
        pytest.param(80, "boolean", False, COMMON_BYTES, marks=pytest.mark.slow),
        pytest.param(128, "boolean", False, SMALLEST_BYTES, marks=pytest.mark.slow),
    ],
)
def test_accesses_are_in_range_and_free_of_races(kernel, size, mask, causal, workgroup_bytes):
    sizes = AttentionSizes(2, 2, 1, 70, 70, size)
    problem = contiguous_problem(kernel, sizes, mask, causal=causal)
    shader, grid = attention_shader(problem, workgroup_bytes)
    assert shader.in_bounds
    assert_valid_accesses(shader, grid, binding_nbytes(problem))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [32, pytest.param(128, marks=pytest.mark.slow)])
def test_workgroup_memory_accesses_have_no_bank_conflicts(kernel, size):
    problem = contiguous_problem(kernel, AttentionSizes(1, 1, 1, 128, 128, size), "boolean")
    for workgroup_bytes in (SMALLEST_BYTES, COMMON_BYTES):
        counts = counts_of(*attention_shader(problem, workgroup_bytes))
        assert counts.served_accesses == counts.accesses


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [4, 32, 36, 64, 80, 128])
@pytest.mark.parametrize("workgroup_bytes", [SMALLEST_BYTES, COMMON_BYTES, 49_152])
def test_layouts_fit_the_workgroup_memory(kernel, size, workgroup_bytes):
    for rows in (1, 33):
        layout = choose_layout(kernel, AttentionSizes(1, 1, 1, rows, rows, size), workgroup_bytes)
        assert layout.nbytes <= min(workgroup_bytes, COMMON_BYTES)
        assert layout.invocations == (64 if rows == 1 else 128)
        assert sum(4 * layout.fours(part) for part in layout.parts) == size


# Limits by kernel and head size, for 32 KiB of workgroup memory and a block of 64 rows and 32
# columns.
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("size", "limits"), [(32, (3, 3, 5)), (64, (4, 6, 8)), (128, (8, 12, 16))])
def test_number_of_barriers_per_block_is_limited(kernel, size, limits):
    shader, _ = attention_shader(
        contiguous_problem(kernel, AttentionSizes(1, 1, 1, 64, 64, size)), COMMON_BYTES
    )
    _, _, block_loop = shader.source.partition("for (var first_column")
    block_loop, _, _ = block_loop.partition("let subtotal0")
    assert block_loop.count(BARRIER) <= limits[KERNELS.index(kernel)]


def test_barrier_separates_writes_from_reads():
    steps = Steps()
    steps.add(["a = 1"], writes=["a"])
    steps.add(["b = 1"], writes=["b"])
    steps.add(["x = a"], reads=["a"])
    steps.add(["x = b"], reads=["b"])
    steps.add(["b = 2"], writes=["b"])
    assert steps.lines == ["a = 1", "b = 1", BARRIER, "x = a", "x = b", BARRIER, "b = 2"]


def test_loop_iteration_waits_for_the_previous_iteration():
    steps = Steps()
    steps.add(["c = 1"], writes=["c"])

    def body(inner: Steps) -> None:
        inner.add(["x = c"], reads=["c"])
        inner.add(["a = 1"], writes=["a"])
        inner.add(["x = a"], reads=["a"])

    steps.loop("for {", body)
    steps.add(["a = 2"], writes=["a"])
    loop_lines = ["for {", BARRIER, "x = c", "a = 1", BARRIER, "x = a", "}"]
    assert steps.lines == ["c = 1", *loop_lines, BARRIER, "a = 2"]


def test_barrier_in_a_branch_does_not_replace_one_after_it():
    steps = Steps()
    steps.add(["x = a"], reads=["a"])

    def body(inner: Steps) -> None:
        inner.add(["b = 1"], writes=["b"])
        inner.add(["x = b"], reads=["b"])

    steps.branch("if {", body)
    steps.add(["a = 1"], writes=["a"])
    assert steps.lines == ["x = a", "if {", "b = 1", BARRIER, "x = b", "}", BARRIER, "a = 1"]
