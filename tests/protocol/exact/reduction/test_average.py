"""Averages, sums of squares and rounding: in one order, correctly rounded."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.exact.reduction.average import (
    SQUARE_SUM_CHUNK_ELEMENTS,
    average,
    nearest_float32,
    square_sum,
)

SMALLEST = 2.0**-149


@given(st.integers(0, 2**32), st.sampled_from([0, 1, 7, 65_535, 65_536, 65_537, 140_000]))
def test_square_sum_is_the_sum_of_exact_squares(seed, elements):
    array = np.random.default_rng(seed).standard_normal(elements).astype(np.float32)
    expected = math.fsum(float(x) ** 2 for x in array)
    assert square_sum(array) == pytest.approx(expected, rel=1e-13)


def test_square_sum_adds_chunks_from_first_to_last():
    array = np.random.default_rng(1).standard_normal(200_000).astype(np.float32)
    expected = 0.0
    for lo in range(0, array.size, SQUARE_SUM_CHUNK_ELEMENTS):
        part = array[lo : lo + SQUARE_SUM_CHUNK_ELEMENTS].astype(np.float64)
        expected += float(np.add.reduce(part * part))
    assert square_sum(array) == expected


def test_square_sum_neither_overflows_nor_underflows():
    assert square_sum(np.array([3e38, 3e38], np.float32)) == pytest.approx(1.8e77, rel=1e-6)
    assert square_sum(np.array([SMALLEST], np.float32)) == SMALLEST**2
    assert math.isnan(square_sum(np.array([math.nan], np.float32)))


@given(st.floats(1e-3, 1e9))
def test_an_average_is_one_product_with_the_rounded_reciprocal(weight):
    sums = np.array([1.0, -3.5, SMALLEST, 1e30], np.float32)
    expected = (sums.astype(np.float64) * np.float64(np.float32(1.0 / weight))).astype(np.float32)
    average(sums, weight, out=sums)
    assert sums.tobytes() == expected.tobytes()


def test_the_average_of_no_weight_is_zero():
    sums = np.array([1.0, math.nan], np.float32)
    average(sums, 0, out=sums)
    assert sums.tolist() == [0.0, 0.0]


@given(
    st.floats() | st.integers(0, 2**32 - 1).map(lambda bits: _float32_of_bits(bits) * (1 + 2**-30))
)
def test_a_number_is_rounded_as_numpy_rounds(value):
    with np.errstate(all="ignore"):
        expected = np.float32(value)
    assert np.float32(nearest_float32(value)).tobytes() == expected.tobytes() or np.isnan(expected)
    assert np.isnan(nearest_float32(value)) == np.isnan(expected)


def _float32_of_bits(bits: int) -> float:
    """Return the float32 with these bits, which may be subnormal."""
    return float(np.array(bits, np.uint32).view(np.float32))
