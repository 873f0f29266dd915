"""Frozen weights in fewer bits: what they stand for, and how far that is from what they were."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from backends.base.quantize import NF4, dequantize, group_of, quantize, stored_bytes
from protocol.base.errors import DataError

WHOLE = {"int8": 127, "int4": 7}
matrices = st.tuples(st.integers(1, 4), st.sampled_from([8, 24, 64, 128])).flatmap(
    lambda shape: arrays(np.float32, shape, elements=st.floats(-(2.0**100), 2.0**100, width=32))
)


@given(matrices, st.sampled_from(["int8", "int4"]))
def test_no_value_moves_by_more_than_half_a_step_of_its_group(values, storage):
    stored = quantize(values, storage)
    grouped = values.reshape(-1, stored.group)
    largest = np.abs(grouped).max(axis=1, keepdims=True)
    moved = np.abs(dequantize(stored).reshape(grouped.shape).astype(np.float64) - grouped)
    step = largest.astype(np.float64) / WHOLE[storage]
    assert (moved <= 0.5001 * step + 1e-36).all()


@given(matrices)
def test_bfloat16_is_the_nearest(values):
    near = dequantize(quantize(values, "bf16"))
    assert (np.abs(near.astype(np.float64) - values) <= np.abs(values) * 2.0**-8 + 1e-40).all()
    assert (near.view(np.uint32) & 0xFFFF == 0).all()


def test_bfloat16_ties_go_to_even():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000, 0, 0, 0, 0], np.uint32)
    near = dequantize(quantize(bits.view(np.float32)[None], "bf16")).view(np.uint32)[0]
    assert [hex(b) for b in near[:4]] == ["0x3f800000", "0x3f820000", "0x3f810000", "0xbf800000"]


def test_float16_is_numpys():
    values = np.linspace(-3, 3, 64, dtype=np.float32).reshape(2, 32)
    assert (dequantize(quantize(values, "f16")) == values.astype(np.float16)).all()


@pytest.mark.parametrize("storage", ["bf16", "f16", "int8", "int4", "q4_0"])
def test_what_is_stored_stands_for_itself(storage):
    """Values that a form can hold come back as they were, and sizes are as foretold."""
    whole = np.arange(-7, 9, dtype=np.float32).clip(-7, 7).reshape(2, 8)
    whole[:, 0] = [-8, 8] if storage == "q4_0" else whole[:, 0]
    stored = quantize(whole, storage)
    assert (dequantize(stored) == whole).all() or storage == "int8"
    assert stored.nbytes == stored_bytes(2, 8, storage)


@given(matrices)
def test_nf4_is_the_nearest_of_its_values(values):
    stored = quantize(values, "nf4")
    assert stored.nbytes == stored_bytes(values.shape[0], values.shape[1], "nf4")
    grouped = values.reshape(-1, stored.group).astype(np.float64)
    normalized = grouped / np.maximum(np.abs(grouped).max(axis=1, keepdims=True), 1e-300)
    nearest = np.abs(normalized[..., None] - NF4).min(axis=-1)
    found = dequantize(stored).reshape(grouped.shape) / np.maximum(
        np.abs(grouped).max(axis=1, keepdims=True), 1e-300
    )
    assert (np.abs(found - normalized) <= nearest + 1e-6).all()


def test_what_nf4_has_stays_as_it_is():
    values = np.float32(3) * np.concatenate([NF4, NF4]).reshape(1, 32)
    assert np.array_equal(dequantize(quantize(values, "nf4")), values)


@pytest.mark.parametrize("storage", ["q8_0", "q4_0"])
def test_gguf_s_forms_are_its_library_s_and_come_back_unchanged(storage):
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[storage.upper()]
    values = np.random.default_rng(0).standard_normal((16, 96)).astype(np.float32)
    values[3, :32], values[4] = 0, values[4] * np.float32(1e-4)
    theirs = gguf.dequantize(gguf.quantize(values, kind), kind)
    stored = quantize(values, storage)
    assert stored.group == 32
    assert stored.nbytes == stored_bytes(16, 96, storage)
    assert np.array_equal(dequantize(stored).view(np.uint32), theirs.view(np.uint32))
    assert np.array_equal(dequantize(quantize(theirs, storage)), theirs)


def test_the_layout_of_int4():
    values = np.array([[-7, -1, 0, 1, 2, 3, 6, 7]], np.float32)
    stored = quantize(values, "int4")
    assert f"{stored.words[0]:08x}" == "feba9871"
    assert stored.scales.tolist() == [1.0]


def test_a_group_of_zeros_stays_zero():
    assert not dequantize(quantize(np.zeros((2, 64), np.float32), "int4")).any()


@pytest.mark.parametrize(
    ("value", "storage"),
    [(np.inf, "int8"), (np.nan, "bf16"), (1e5, "f16"), (3.4e38, "bf16")],
)
def test_what_cannot_be_stored(value, storage):
    values = np.zeros((1, 8), np.float32)
    values[0, 3] = value
    with pytest.raises(DataError, match="expected"):
        quantize(values, storage)


@pytest.mark.parametrize(
    ("columns", "group"), [(64, 64), (384, 64), (96, 32), (8, 8), (12, 0), (7, 0)]
)
def test_groups_divide_a_row(columns, group):
    assert group_of(columns) == group
