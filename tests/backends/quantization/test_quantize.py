"""Quantized weights: their values after dequantizing, rounding errors, sizes and layout."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from backends.quantization.quantize import NF4, dequantize, group_size, quantize, stored_bytes
from protocol.base.errors import DataError

LARGEST_CODES = {"int8": 127, "int4": 7}
matrices = st.tuples(st.integers(1, 4), st.sampled_from([8, 24, 64, 128])).flatmap(
    lambda shape: arrays(np.float32, shape, elements=st.floats(-(2.0**100), 2.0**100, width=32))
)


@given(matrices, st.sampled_from(["int8", "int4"]))
def test_rounding_error_is_at_most_half_a_step_of_the_group(values, storage):
    quantized = quantize(values, storage)
    grouped = values.reshape(-1, quantized.group)
    largest = np.abs(grouped).max(axis=1, keepdims=True)
    error = np.abs(dequantize(quantized).reshape(grouped.shape).astype(np.float64) - grouped)
    step = largest.astype(np.float64) / LARGEST_CODES[storage]
    # 0.5001: scale and product are rounded to float32; 1e-36: a group too small for a scale.
    assert (error <= 0.5001 * step + 1e-36).all()


@given(matrices)
def test_bfloat16_rounds_to_the_nearest_value(values):
    rounded = dequantize(quantize(values, "bf16"))
    # The spacing of bfloat16 is at most 2**-7 of a value; 1e-40: of a subnormal, a constant.
    assert (np.abs(rounded.astype(np.float64) - values) <= np.abs(values) * 2.0**-8 + 1e-40).all()
    assert (rounded.view(np.uint32) & 0xFFFF == 0).all()


def test_bfloat16_ties_go_to_even():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000, 0, 0, 0, 0], np.uint32)
    rounded = dequantize(quantize(bits.view(np.float32)[None], "bf16")).view(np.uint32)[0]
    assert [hex(b) for b in rounded[:4]] == ["0x3f800000", "0x3f820000", "0x3f810000", "0xbf800000"]


def test_float16_equals_numpy():
    values = np.linspace(-3, 3, 64, dtype=np.float32).reshape(2, 32)
    assert (dequantize(quantize(values, "f16")) == values.astype(np.float16)).all()


@pytest.mark.parametrize("storage", ["bf16", "f16", "int8", "int4", "q4_0"])
def test_representable_integers_are_preserved_and_sizes_are_predicted(storage):
    integers = np.arange(-7, 9, dtype=np.float32).clip(-7, 7).reshape(2, 8)
    if storage == "q4_0":  # the value of largest magnitude becomes code -8
        integers[:, 0] = [-8, 8]
    quantized = quantize(integers, storage)
    if storage != "int8":  # whose step is 7 / 127, so that it rounds most integers
        assert (dequantize(quantized) == integers).all()
    assert quantized.nbytes == stored_bytes(2, 8, storage)


@given(matrices)
def test_nf4_rounds_to_the_nearest_of_its_values(values):
    quantized = quantize(values, "nf4")
    assert quantized.nbytes == stored_bytes(values.shape[0], values.shape[1], "nf4")
    grouped = values.reshape(-1, quantized.group).astype(np.float64)
    normalized = grouped / np.maximum(np.abs(grouped).max(axis=1, keepdims=True), 1e-300)
    nearest = np.abs(normalized[..., None] - NF4).min(axis=-1)
    codes = dequantize(quantized).reshape(grouped.shape) / np.maximum(
        np.abs(grouped).max(axis=1, keepdims=True), 1e-300
    )
    assert (np.abs(codes - normalized) <= nearest + 1e-6).all()


def test_nf4_code_values_are_preserved():
    values = np.float32(3) * np.concatenate([NF4, NF4]).reshape(1, 32)
    assert np.array_equal(dequantize(quantize(values, "nf4")), values)


@pytest.mark.parametrize("storage", ["q8_0", "q4_0"])
def test_gguf_types_equal_the_gguf_library(storage):
    gguf = pytest.importorskip("gguf")
    gguf_type = gguf.GGMLQuantizationType[storage.upper()]
    values = np.random.default_rng(0).standard_normal((16, 96)).astype(np.float32)
    values[3, :32] = 0
    values[4] *= np.float32(1e-4)  # scales that are subnormal in float16
    reference = gguf.dequantize(gguf.quantize(values, gguf_type), gguf_type)
    quantized = quantize(values, storage)
    assert quantized.group == 32
    assert quantized.nbytes == stored_bytes(16, 96, storage)
    assert np.array_equal(dequantize(quantized).view(np.uint32), reference.view(np.uint32))
    assert np.array_equal(dequantize(quantize(reference, storage)), reference)


def test_int4_layout_has_the_first_element_in_the_lowest_bits():
    values = np.array([[-7, -1, 0, 1, 2, 3, 6, 7]], np.float32)
    quantized = quantize(values, "int4")
    assert f"{quantized.words[0]:08x}" == "feba9871"
    assert quantized.scales.tolist() == [1.0]


def test_a_group_of_zeros_stays_zero():
    assert not dequantize(quantize(np.zeros((2, 64), np.float32), "int4")).any()


@pytest.mark.parametrize(
    ("value", "storage"),
    [(np.inf, "int8"), (np.nan, "bf16"), (1e5, "f16"), (3.4e38, "bf16")],
)
def test_unsupported_weights_are_refused(value, storage):
    values = np.zeros((1, 8), np.float32)
    values[0, 3] = value
    with pytest.raises(DataError, match="expected"):
        quantize(values, storage)


@pytest.mark.parametrize(
    ("columns", "group"),
    [(64, 64), (384, 64), (96, 32), (8, 8), (12, 0), (7, 0)],  # 0: none of at least 8
)
def test_group_is_the_largest_power_of_two_up_to_64_that_divides_a_row(columns, group):
    assert group_size(columns) == group
