"""Rounding to bfloat16 against its definition, and the encoding of values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.exact.reduction.bfloat16 import ELEMENT_BYTES, pack, round_to_bfloat16, unpack
from tests import reference_bfloat16

BITS = st.one_of(
    st.integers(0, 2**32 - 1),
    # Near rounding decisions: ties, their neighbors, and the ends of exponents.
    st.builds(
        lambda upper, lower: upper << 16 | lower,
        st.integers(0, 2**16 - 1),
        st.sampled_from([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]),
    ),
)


def floats(bits):
    return np.array(bits, np.uint32).view(np.float32)


@given(st.lists(BITS, max_size=40))
def test_values_round_to_the_nearest(bits):
    values = floats(bits)
    result = round_to_bfloat16(values.copy())
    is_finite = np.isfinite(values)
    expected = reference_bfloat16.round_to_bfloat16(values[is_finite])
    assert result[is_finite].tobytes() == expected.tobytes()
    non_finite = np.where(np.isnan(values), np.float32("nan"), values)[~is_finite]
    assert result[~is_finite].tobytes() == non_finite.tobytes()
    assert not (result.view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize(
    ("bits", "expected_bits"),
    [
        (0x3F808000, 0x3F80),  # a tie goes to the even value, down
        (0x3F818000, 0x3F82),  # and up
        (0x3F808001, 0x3F81),
        (0x00008001, 0x0001),  # subnormal
        (0x80000001, 0x8000),  # to minus zero
        (0x7F7FFFFF, 0x7F80),  # too large: infinite
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
        (0x7FFFFFFF, 0x7FC0),  # NaN stays NaN, whatever its bits
        (0x7F800001, 0x7FC0),
    ],
)
def test_rounded_bits_match_the_definition(bits, expected_bits):
    assert pack(round_to_bfloat16(floats([bits])), "bfloat16").tolist() == [expected_bits]


def test_a_long_array_is_rounded_everywhere_in_place():
    values = np.random.default_rng(0).standard_normal(100_003).astype(np.float32)
    expected = reference_bfloat16.round_to_bfloat16(values)
    assert round_to_bfloat16(values) is values
    assert values.tobytes() == expected.tobytes()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_rounded_values_are_encoded_without_loss(precision):
    values = round_to_bfloat16(np.random.default_rng(1).standard_normal(1001).astype(np.float32))
    body = pack(values, precision)
    assert body.nbytes == ELEMENT_BYTES[precision] * values.size
    raw = np.frombuffer(body.tobytes(), np.uint8).copy()
    assert unpack(raw, precision).tobytes() == values.tobytes()
    assert unpack(raw, precision).flags.writeable


def test_bytes_are_little_endian():
    assert pack(floats([0x3F800000]), "bfloat16").tobytes() == b"\x80\x3f"
