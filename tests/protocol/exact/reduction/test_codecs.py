import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from protocol.exact.reduction.codecs import body_bytes, pack, project, unpack
from tests import reference_bfloat16

CODECS = ("float32", "bfloat16", "int8", "int4", "topk")
FLOATS = st.floats(
    width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100
)
VALUES = st.integers(0, 150).flatmap(lambda n: arrays(np.float32, n, elements=FLOATS))


def round_by_group(values, group, largest):
    """Round to the codec's scaled integers, group by group, element by element."""
    numbers = []
    for lo in range(0, len(values), group):
        part = [float(value) for value in values[lo : lo + group]]
        limit, exponent = max(map(abs, part)), -126
        while limit > largest * 2.0**exponent:
            exponent += 1
        numbers += [round(value / 2.0**exponent) * 2.0**exponent for value in part]
    return np.array(numbers, np.float32)


def keep_largest(values):
    """Zero all but the largest elements; of equal magnitudes the first is kept."""
    result = np.zeros_like(values)
    for lo in range(0, len(values), 4096):
        part = values[lo : lo + 4096]
        candidates = list(range(len(part)))
        for _ in range(math.ceil(len(part) / 64)):
            largest = max(candidates, key=lambda index: (abs(part[index]), -index))
            candidates.remove(largest)
            result[lo + largest] = reference_bfloat16.round_to_bfloat16(
                part[largest : largest + 1]
            )[0]
    return result


NAIVE = {
    "float32": lambda values: values,
    "bfloat16": reference_bfloat16.round_to_bfloat16,
    "int8": lambda values: round_by_group(values, 64, 127),
    "int4": lambda values: round_by_group(values, 32, 7),
    "topk": keep_largest,
}


@pytest.mark.parametrize("codec", CODECS)
@given(values=VALUES)
def test_encoded_values_match_the_definition(codec, values):
    projection = project(values.copy(), codec)
    assert projection.tolist() == NAIVE[codec](values).tolist()
    raw = pack(projection, codec)
    assert raw.nbytes == body_bytes(codec, len(values))
    unpacked_values = unpack(np.ascontiguousarray(raw).view(np.uint8), codec, len(values))
    assert (
        unpacked_values.tobytes() == (projection + np.float32(0)).tobytes()
        or unpacked_values.tolist() == projection.tolist()
    )


@pytest.mark.parametrize("codec", CODECS)
def test_projection_is_idempotent(codec):
    values = np.random.default_rng(1).standard_normal(9001).astype(np.float32)
    first_projection = project(values.copy(), codec)
    assert project(first_projection.copy(), codec).tobytes() == first_projection.tobytes()
    assert body_bytes(codec, len(values)) <= 4 * len(values)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("special_value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_detected(codec, special_value):
    values = np.ones(200, np.float32)
    values[77] = special_value
    projection = project(values, codec)
    assert not np.isfinite(projection).all()
    assert np.isfinite(projection[:32]).all()


def test_ties_of_topk_go_to_the_first():
    values = np.full(4096, 2, np.float32)
    values[1::2] = -2
    assert np.flatnonzero(project(values, "topk")).tolist() == list(range(64))


@given(st.binary(min_size=66, max_size=66))
def test_forged_bytes_give_some_values(raw):
    body = np.frombuffer(raw, np.uint8)
    assert len(unpack(body[: body_bytes("int8", 64)], "int8", 64)) == 64
    assert len(unpack(body[: body_bytes("topk", 900)], "topk", 900)) == 900
