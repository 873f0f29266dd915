"""Matrix products on the device against float64, for all layouts, kernels and storage types."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.wgpu.device.matmul_tuning import MatmulTuner
from backends.wgpu.device.subgroups import measure_matmul_traits
from backends.wgpu.device.target import Copy
from backends.wgpu.shaders.dispatch import Dispatch
from backends.wgpu.shaders.matmul.problem import MOST_TERMS
from backends.wgpu.shaders.matmul.shader import (
    Lanes,
    MatmulProblem,
    MatmulTraits,
    Operand,
    Result,
    Tiles,
    candidates,
    matmul_shader,
)
from tests.backends.wgpu.examples import examples
from tests.backends.wgpu.products import (
    SMALL_TILES,
    TILES,
    have_same_bits,
    quantized_products,
    random_product,
)


# A small product, and products of MiniLM for 2 x 64 tokens: forward, the gradients of inputs and
# weights, and attention.
@pytest.mark.parametrize(
    ("shape", "a_is_transposed", "b_is_transposed"),
    [
        ((1, 64, 128, 32), False, False),
        ((1, 128, 384, 1536), False, True),
        pytest.param((1, 128, 1536, 384), False, False, marks=pytest.mark.slow),
        ((1, 384, 128, 384), True, False),
        ((24, 64, 32, 64), False, True),
    ],
)
def test_products_are_within_1e_4_of_float64(device, shape, a_is_transposed, b_is_transposed):
    case = random_product(*shape, a_is_transposed=a_is_transposed, b_is_transposed=b_is_transposed)
    tuner = MatmulTuner(device)
    assert case.relative_error(case.run_on(device, tuner.choose_kernel(case.problem))) < 1e-4


def test_kernels_give_the_same_bits(device):
    case = random_product(2, 40, 36, 24)
    traits = measure_matmul_traits(device)
    kernels = [None, SMALL_TILES, *candidates(case.problem, traits)[:2]]
    first, *others = [case.run_on(device, kernel) for kernel in kernels]
    assert case.relative_error(first) < 1e-5
    assert all(have_same_bits(first, other) for other in others)


@examples(4)
@given(
    shape=st.tuples(st.integers(1, 3), *[st.integers(1, 20)] * 3),
    is_transposed=st.tuples(st.booleans(), st.booleans()),
    offset=st.sampled_from([0, 1, 2, 4]),
    data=st.data(),
)
def test_products_of_any_shape_layout_and_kernel(device, shape, is_transposed, offset, data):
    case = random_product(
        *shape, a_is_transposed=is_transposed[0], b_is_transposed=is_transposed[1], offset=offset
    )
    lanes = measure_matmul_traits(device).subgroup
    kernels: list[Lanes | Tiles] = [SMALL_TILES, data.draw(st.sampled_from(TILES))]
    if lanes:
        rows, columns = (
            data.draw(st.sampled_from([4, 8, 16])),
            data.draw(st.sampled_from([1, 2, 4])),
        )
        kernels.append(Lanes(rows, columns, data.draw(st.booleans()), lanes))
    first, *others = [case.run_on(device, kernel) for kernel in kernels]
    largest_error = np.abs(first - case.expected).max()
    assert largest_error < 1e-5 * max(1.0, np.abs(case.expected).max())
    assert all(have_same_bits(first, other) for other in others)
    assert not np.signbit(first[:, 0, 0]).any(), "a sum of -0 must be +0"


@pytest.mark.parametrize(
    ("shape", "is_transposed"),
    [
        (
            (1, 4, 140_000, 10),
            False,
        ),  # nearly the terms of a head's backward with Qwen3's vocabulary
        pytest.param((2, 3, 70_001, 7), True, marks=pytest.mark.slow),
    ],
)
def test_sums_may_exceed_the_iterations_of_a_lavapipe_loop(device, shape, is_transposed):
    case = random_product(*shape, b_is_transposed=is_transposed)
    tiled, tuned = (
        case.run_on(device, kernel)
        for kernel in (SMALL_TILES, MatmulTuner(device).choose_kernel(case.problem))
    )
    assert case.relative_error(tiled) < 1e-5
    assert have_same_bits(tiled, tuned)


def test_loop_iterations_stay_below_the_lavapipe_limit():
    """The outer loop has a step per tile depth, and the inner loop takes four terms at a time."""
    traits = MatmulTraits(workgroup_bytes=2**20, invocations=1024)
    for tiles in (SMALL_TILES, *candidates(random_product(1, 1, 1, 1).problem, traits)):
        assert isinstance(tiles, Tiles)
        assert (MOST_TERMS // tiles.depth + 1) * (1 + tiles.depth // 4) < 60_000


@pytest.mark.parametrize(
    ("m", "n", "row", "offset"), [(9, 12, 40, 8), (7, 6, 34, 10), (5, 5, 11, 3)]
)
def test_product_accumulates_into_a_slice(device, m, n, row, offset):
    case = random_product(1, m, 8, n)
    initial = np.random.default_rng(1).standard_normal((m, row)).astype(np.float32)
    bindings = [*case.bindings, initial.copy()]
    expected = initial.astype(np.float64)
    expected[:, offset : offset + n] += case.expected[0]
    problem = replace(case.problem, into=Result(row, offset, accumulates=True))
    first = None
    lanes = measure_matmul_traits(device).subgroup
    kernels: list[Lanes | Tiles] = [SMALL_TILES]
    if lanes:
        kernels += [Lanes(4, 2, False, lanes), Lanes(4, 2, True, lanes)]
    for kernel in kernels:
        shader, grid = matmul_shader(problem, kernel)
        buffers = [device.buffer(array.nbytes) for array in bindings]
        for buffer, array in zip(buffers, bindings, strict=True):
            device.upload(buffer, array)
        commands = device.prepare([Dispatch(shader, (0, 1, 2), grid, "product")], buffers)
        (values,) = device.run(commands, [Copy(buffers[2], initial.nbytes)]).result()
        first = values if first is None else first
        assert np.abs(values.reshape(m, row) - expected).max() < 1e-5
        assert have_same_bits(values, first)


def test_a_stride_of_zero_repeats_an_operand(device):
    case = random_product(3, 8, 12, 8)
    repeated = Operand((0, *case.problem.b.strides[1:]))
    case.problem = MatmulProblem(3, 8, 12, 8, case.problem.a, repeated)
    a = case.bindings[0].reshape(3, 8, 12).astype(np.float64)
    case.expected = a @ case.bindings[1].reshape(3, 12, 8)[0]
    assert case.relative_error(case.run_on(device, SMALL_TILES)) < 1e-5
    assert (
        case.relative_error(case.run_on(device, MatmulTuner(device).choose_kernel(case.problem)))
        < 1e-5
    )


@pytest.mark.parametrize("storage", ["bf16", "f16", "int8", "int4", "nf4", "q4_0"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shape", [pytest.param((20, 64, 24), marks=pytest.mark.slow), (7, 192, 9)])
def test_quantized_weight_has_the_bits_of_its_float32_values(device, storage, backward, shape):
    quantized, float32 = quantized_products(storage, *shape, backward=backward)
    values = quantized.run_on(device, MatmulTuner(device).choose_kernel(quantized.problem))
    assert quantized.relative_error(values) < 1e-5
    assert have_same_bits(values, float32.run_on(device, SMALL_TILES))


def test_the_tuner_measures_once_per_adapter_and_shape(device, tmp_path, monkeypatch):
    """The tuner does not measure on a software adapter, so the test claims another type.

    A corrupt cache file is ignored.
    """
    problem = random_product(1, 16, 8, 16).problem
    monkeypatch.setattr("backends.wgpu.device.matmul_tuning._MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(type(device.adapter), "software", property(lambda _: False))
    first = MatmulTuner(device, tmp_path)
    choice = first.choose_kernel(problem)
    assert choice in candidates(problem, first.traits)
    assert first.choose_kernel(problem) == choice
    second = MatmulTuner(device, tmp_path)
    assert second.choose_kernel(problem) == choice
    assert (first.measurement_count, second.measurement_count) == (1, 0)
    (path,) = tmp_path.iterdir()
    path.write_text("not JSON")
    assert MatmulTuner(device, tmp_path).choose_kernel(problem) in candidates(problem, first.traits)


def test_tiles_that_exceed_workgroup_memory_are_not_candidates():
    problem = random_product(1, 512, 64, 512).problem
    kernels = candidates(problem, MatmulTraits(workgroup_bytes=9216, invocations=256))
    assert kernels
    assert all(isinstance(each, Tiles) and each.workgroup_bytes <= 9216 for each in kernels)
