"""Quantize frozen weights: bf16, f16, or 8 or 4 bits with one scale per group.

int8, int4: symmetric, round to nearest, ties to even (Dettmers et al. 2022, arXiv:2208.07339, with
groups along a row as in Frantar et al. 2023, arXiv:2210.17323): the largest magnitude of a group
becomes 127 or 7. nf4: the nearest of 16 quantiles of a normal distribution (Dettmers et al. 2023,
arXiv:2305.14314). q8_0, q4_0: llama.cpp's types, with a float16 scale for every 32 values, so that
a GGUF file's values are preserved. Plain numpy in a fixed order gives the same bits everywhere.

`dequantize` is the definition for all backends: an element of a type with scales is its number
times its group's scale, one float32 product. A device that dequantizes weights as it reads them
computes the same values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from backends.base.interface import Array
from protocol.base.errors import DataError
from protocol.spec.sections.model import BaseDtype

Storage = Literal["f32", "bf16", "f16", "int8", "int4", "nf4", "q8_0", "q4_0"]

STORAGE: Final[dict[BaseDtype, Storage]] = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "int8": "int8",
    "int4": "int4",
    "nf4": "nf4",
    "q8_0": "q8_0",
    "q4_0": "q4_0",
}

GROUP: Final = 64
"""Largest number of elements per scale, where a scale adds 0.5 bit to each weight."""

NF4: Final = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
"""The values of nf4's codes 0 to 15."""
BITS: Final[dict[Storage, int]] = {  # per weight, without scales
    "f32": 32, "bf16": 16, "f16": 16, "int8": 8, "q8_0": 8, "int4": 4, "nf4": 4, "q4_0": 4,
}  # fmt: skip

_NF4_BOUNDARIES: Final = (NF4[1:] + NF4[:-1]) / np.float32(2)
_LEAST_FLOAT16: Final = np.float32(2.0**-25)
"""Smaller magnitudes round to zero in float16."""
_GGUF_STORAGE: Final = ("q8_0", "q4_0")
_GGUF_GROUP: Final = 32
_LARGEST_CODES: Final[dict[Storage, int]] = {"int8": 127, "int4": 7}
_SMALLEST_GROUP: Final = 8


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A quantized matrix.

    Attributes:
        storage: The storage type; q8_0 is stored as int8 and q4_0 as int4.
        rows: Rows of the matrix.
        columns: Columns of the matrix, the contiguous dimension.
        words: uint32, little-endian, the first element of a row in the lowest bits. int4 stores
            the number plus 8, nf4 the index in `NF4`.
        scales: float32, shape (rows * columns / group,); empty for bf16 and f16.
        group: Number of neighbors in a row that share a scale; 0 for bf16 and f16.
    """

    storage: Storage
    rows: int
    columns: int
    words: NDArray[np.uint32]
    scales: Array
    group: int

    def pack(self) -> NDArray[np.uint32]:
        """Return words and scales in one buffer."""
        return np.concatenate([self.words, self.scales.view(np.uint32)])

    @property
    def nbytes(self) -> int:
        """Size of words and scales."""
        return self.words.nbytes + self.scales.nbytes


def group_size(columns: int, storage: Storage = "int4") -> int:
    """Return how many elements share a scale: the largest power of two that divides a row.

    At most 64 (GGUF types: 32); 0 if below 8.
    """
    group = _GGUF_GROUP if storage in _GGUF_STORAGE else GROUP
    while columns % group:
        group //= 2
    return group if group >= _SMALLEST_GROUP else 0


def quantize(values: Array, storage: Storage) -> QuantizedMatrix:
    """Quantize a float32 matrix.

    Args:
        values: float32, shape (rows, columns), with a multiple of 8 columns.
        storage: Any storage type except f32.

    Raises:
        DataError: A value is not finite, or out of range for f16 or bf16.
    """
    rows, columns = values.shape
    group = group_size(columns, storage)
    assert group, f"expected a multiple of {_SMALLEST_GROUP} columns, got {columns}"
    if not np.isfinite(values).all():
        raise DataError(f"expected finite weights to store in {storage}, got inf or nan")
    no_scales = np.zeros(0, np.float32)
    if storage in {"bf16", "f16"}:
        half_bits = _bfloat16(values) if storage == "bf16" else _float16(values)
        return QuantizedMatrix(
            storage, rows, columns, half_bits.reshape(-1).view(np.uint32), no_scales, 0
        )
    grouped = values.reshape(-1, group)
    if storage == "q8_0":
        codes, scales = _q8_0_codes(grouped)
    elif storage == "q4_0":
        codes, scales = _q4_0_codes(grouped)
    elif storage == "nf4":
        codes, scales = _nf4_codes(grouped)
    else:
        codes, scales = _symmetric_codes(grouped, _LARGEST_CODES[storage])
    if BITS[storage] == 8:
        words = np.ascontiguousarray(codes).reshape(-1).view(np.uint32)
        return QuantizedMatrix("int8", rows, columns, words, scales, group)
    four_bit_storage: Storage = "nf4" if storage == "nf4" else "int4"
    return QuantizedMatrix(four_bit_storage, rows, columns, _pack_nibbles(codes), scales, group)


_Codes = tuple[NDArray[np.int8], Array]
"""Codes, (groups, group), and the scale of each group."""


def _symmetric_codes(grouped: Array, largest_code: int) -> _Codes:
    scales = (np.abs(grouped).max(axis=1) / np.float32(largest_code)).astype(np.float32)
    # A group of zeros, or of values too small for a scale, is all zeros.
    divisors = np.where(scales > 0, scales, np.float32(1))[:, None]
    return np.clip(np.rint(grouped / divisors), -largest_code, largest_code).astype(np.int8), scales


def _nf4_codes(grouped: Array) -> _Codes:
    """Return codes minus 8, like the other 4-bit types."""
    scales = np.abs(grouped).max(axis=1)
    divisors = np.where(scales > 0, scales, np.float32(1))[:, None]
    codes = np.searchsorted(_NF4_BOUNDARIES, grouped / divisors)
    return (codes - 8).astype(np.int8), scales


def _q8_0_codes(grouped: Array) -> _Codes:
    """Round halves away from zero, like `gguf.quants`."""
    scales = np.abs(grouped).max(axis=1) / np.float32(127)
    scaled = grouped * _inverses(scales)
    floor = np.floor(np.abs(scaled))
    rounded_away = floor + np.floor(np.float32(2) * (np.abs(scaled) - floor))
    return (np.sign(scaled) * rounded_away).astype(np.int8), _float16_scales(scales)


def _q4_0_codes(grouped: Array) -> _Codes:
    """Map the largest magnitude to -8, whatever its sign, like `gguf.quants`."""
    positions = np.abs(grouped).argmax(axis=1)[:, None]
    scales = (np.take_along_axis(grouped, positions, axis=1) / np.float32(-8))[:, 0]
    scaled = np.trunc(grouped.astype(np.float64) * _inverses(scales).astype(np.float64) + 8.5)
    return (scaled.clip(0, 15) - 8).astype(np.int8), _float16_scales(scales)


def _inverses(scales: Array) -> Array:
    """Return each group's inverse scale, 0 if the scale rounds to zero in float16."""
    is_nonzero = np.abs(scales) >= _LEAST_FLOAT16
    divisors = np.where(is_nonzero, scales, np.float32(1))
    return np.where(is_nonzero, np.float32(1) / divisors, np.float32(0))[:, None]


def _float16_scales(scales: Array) -> Array:
    return _float16(scales).view(np.float16).astype(np.float32)


def _pack_nibbles(codes: NDArray[np.int8]) -> NDArray[np.uint32]:
    nibbles = (codes + np.int8(8)).astype(np.uint32).reshape(-1, 8)
    words = np.zeros(len(nibbles), np.uint32)
    for position in range(8):
        words |= nibbles[:, position] << np.uint32(4 * position)
    return words


def dequantize(stored: QuantizedMatrix) -> Array:
    """Return the float32 values of a stored matrix, shape (rows, columns)."""
    shape = stored.rows, stored.columns
    if stored.storage == "bf16":
        shifted = stored.words.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return shifted.view(np.float32).reshape(shape)
    if stored.storage == "f16":
        return stored.words.view(np.float16).astype(np.float32).reshape(shape)
    if stored.storage == "int8":
        numbers = stored.words.view(np.int8).astype(np.float32)
    else:
        shifts = np.arange(8, dtype=np.uint32) * np.uint32(4)
        nibbles = ((stored.words[:, None] >> shifts) & np.uint32(15)).reshape(-1)
        is_nf4 = stored.storage == "nf4"
        numbers = NF4[nibbles] if is_nf4 else nibbles.astype(np.float32) - np.float32(8)
    grouped = numbers.reshape(-1, stored.group) * stored.scales[:, None]
    return grouped.astype(np.float32, copy=False).reshape(shape)


def stored_bytes(rows: int, columns: int, storage: Storage) -> int:
    """Return the size of the result of `quantize` without computing it."""
    words = rows * columns * BITS[storage] // 8
    has_scales = BITS[storage] <= 8
    return words + (4 * rows * columns // group_size(columns, storage) if has_scales else 0)


def _bfloat16(values: Array) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; values are finite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    lowest_bit = (bits >> np.uint32(16)) & np.uint32(1)
    rounded_bits = (bits + np.uint32(0x7FFF) + lowest_bit) >> np.uint32(16)
    if (rounded_bits & np.uint32(0x7F80) == np.uint32(0x7F80)).any():
        raise DataError(
            "expected weights within the range of bfloat16, got larger ones; use float32 or int8"
        )
    return rounded_bits.astype(np.uint16)


def _float16(values: Array) -> NDArray[np.uint16]:
    if np.abs(values).max(initial=0) > float(np.finfo(np.float16).max):
        raise DataError(
            "expected weights within float16 (65504), got larger ones; use bfloat16 or int8"
        )
    return values.astype(np.float16).view(np.uint16)
