"""Matrix products on the device against float64, for all layouts, kernels and storage forms."""

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
from tests.backends.wgpu.products import SMALL_TILES, TILES, product, same_bits, stored_product


# 64 x 128 by 128 x 32, and shapes of MiniLM: 2 x 64 tokens forward, backward, weights, attention.
@pytest.mark.parametrize(
    ("shape", "a_turned", "b_turned"),
    [
        ((1, 64, 128, 32), False, False),
        ((1, 128, 384, 1536), False, True),
        pytest.param((1, 128, 1536, 384), False, False, marks=pytest.mark.slow),
        ((1, 384, 128, 384), True, False),
        ((24, 64, 32, 64), False, True),
    ],
)
def test_within_1e_4_of_the_cpu(device, shape, a_turned, b_turned):
    case = product(*shape, a_turned=a_turned, b_turned=b_turned)
    tuner = MatmulTuner(device)
    assert case.error(case.on(device, tuner.choice(case.problem))) < 1e-4


def test_the_quickest_and_the_default_kernel_give_the_same_bits(device):
    case = product(2, 40, 36, 24)
    traits = measure_matmul_traits(device)
    kernels = [None, SMALL_TILES, *candidates(case.problem, traits)[:2]]
    first, *others = [case.on(device, kernel) for kernel in kernels]
    assert case.error(first) < 1e-5
    assert all(same_bits(first, other) for other in others)


@examples(4)
@given(
    shape=st.tuples(st.integers(1, 3), *[st.integers(1, 20)] * 3),
    is_transposed=st.tuples(st.booleans(), st.booleans()),
    offset=st.sampled_from([0, 1, 2, 4]),
    data=st.data(),
)
def test_any_shape_layout_and_kernel(device, shape, is_transposed, offset, data):
    problem = product(*shape, a_turned=is_transposed[0], b_turned=is_transposed[1], offset=offset)
    lanes = measure_matmul_traits(device).subgroup
    kernels: list[Lanes | Tiles] = [SMALL_TILES, data.draw(st.sampled_from(TILES))]
    if lanes:
        rows, columns = (
            data.draw(st.sampled_from([4, 8, 16])),
            data.draw(st.sampled_from([1, 2, 4])),
        )
        kernels.append(Lanes(rows, columns, data.draw(st.booleans()), lanes))
    results = [problem.on(device, kernel) for kernel in kernels]
    assert (
        np.abs(results[0] - problem.expected) < 1e-5 * max(1.0, np.abs(problem.expected).max())
    ).all()
    assert all(same_bits(results[0], other) for other in results)
    assert not np.signbit(results[0][:, 0, 0]).any()


@pytest.mark.parametrize(
    ("shape", "is_transposed"),
    [
        ((1, 4, 140_000, 10), False),  # about the backward pass of a head with Qwen3's vocabulary
        pytest.param((2, 3, 70_001, 7), True, marks=pytest.mark.slow),
    ],
)
def test_sum_longer_than_a_lavapipe_loop(device, shape, is_transposed):
    case = product(*shape, b_turned=is_transposed)
    tiles, tuned = (
        case.on(device, kernel)
        for kernel in (SMALL_TILES, MatmulTuner(device).choice(case.problem))
    )
    assert case.error(tiles) < 1e-5
    assert same_bits(tiles, tuned)


def test_loop_iterations_stay_below_the_lavapipe_limit():
    """Counted from the sizes: one step along k, with four of its terms at a time."""
    traits = MatmulTraits(workgroup_bytes=2**20, invocations=1024)
    for tiles in (SMALL_TILES, *candidates(product(1, 1, 1, 1).problem, traits)):
        assert isinstance(tiles, Tiles)
        assert (MOST_TERMS // tiles.depth + 1) * (1 + tiles.depth // 4) < 60_000


@pytest.mark.parametrize(
    ("m", "n", "row", "offset"), [(9, 12, 40, 8), (7, 6, 34, 10), (5, 5, 11, 3)]
)
def test_product_accumulates_into_a_slice(device, m, n, row, offset):
    case = product(1, m, 8, n)
    before = np.random.default_rng(1).standard_normal((m, row)).astype(np.float32)
    bindings = [*case.bindings, before.copy()]
    expected = before.astype(np.float64)
    expected[:, offset : offset + n] += case.expected[0]
    problem = replace(case.problem, into=Result(row, offset, accumulates=True))
    first = None
    lanes = measure_matmul_traits(device).subgroup
    kernels: list[Lanes | Tiles] = [SMALL_TILES]
    if lanes:
        kernels += [Lanes(4, 2, False, lanes), Lanes(4, 2, True, lanes)]
    for choice in kernels:
        shader, grid = matmul_shader(problem, choice)
        buffers = [device.buffer(array.nbytes) for array in bindings]
        for buffer, array in zip(buffers, bindings, strict=True):
            device.upload(buffer, array)
        commands = device.prepare([Dispatch(shader, (0, 1, 2), grid, "product")], buffers)
        (values,) = device.run(commands, [Copy(buffers[2], before.nbytes)]).result()
        first = values if first is None else first
        assert np.abs(values.reshape(m, row) - expected).max() < 1e-5
        assert same_bits(values, first)


def test_a_stride_of_zero_repeats_an_operand(device):
    case = product(3, 8, 12, 8)
    one = case.problem.b.strides
    case.problem = MatmulProblem(3, 8, 12, 8, case.problem.a, Operand((0, *one[1:])))
    a = case.bindings[0].reshape(3, 8, 12).astype(np.float64)
    case.expected = a @ case.bindings[1].reshape(3, 12, 8)[0]
    assert case.error(case.on(device, SMALL_TILES)) < 1e-5
    assert case.error(case.on(device, MatmulTuner(device).choice(case.problem))) < 1e-5


@pytest.mark.parametrize("storage", ["bf16", "f16", "int8", "int4", "nf4", "q4_0"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shape", [pytest.param((20, 64, 24), marks=pytest.mark.slow), (7, 192, 9)])
def test_quantized_weight_has_the_bits_of_its_float32_values(device, storage, backward, shape):
    narrow, wide = stored_product(storage, *shape, backward=backward)
    values = narrow.on(device, MatmulTuner(device).choice(narrow.problem))
    assert narrow.error(values) < 1e-5
    assert same_bits(values, wide.on(device, SMALL_TILES))


def test_the_tuner_measures_once_per_adapter_and_shape(device, tmp_path, monkeypatch):
    """On a software adapter it does not measure, so the test claims another adapter type."""
    problem = product(1, 16, 8, 16).problem
    monkeypatch.setattr("backends.wgpu.device.matmul_tuning._MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(type(device.adapter), "software", property(lambda _: False))
    first = MatmulTuner(device, tmp_path)
    choice = first.choice(problem)
    assert choice in candidates(problem, first.traits)
    assert first.choice(problem) == choice
    second = MatmulTuner(device, tmp_path)
    assert second.choice(problem) == choice
    assert (first.measurement_count, second.measurement_count) == (1, 0)
    (path,) = tmp_path.iterdir()
    path.write_text("not JSON")
    assert MatmulTuner(device, tmp_path).choice(problem) in candidates(problem, first.traits)


def test_tiles_that_do_not_fit_are_no_candidates():
    problem = product(1, 512, 64, 512).problem
    small = candidates(problem, MatmulTraits(workgroup_bytes=9216, invocations=256))
    assert small
    assert all(isinstance(t, Tiles) and t.workgroup_bytes <= 9216 for t in small)
