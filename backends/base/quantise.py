"""Frozen weights in fewer bits: bf16, f16, or whole numbers of 8 or 4 bits with scales by group.

Symmetric, round to nearest, ties to even (Dettmers et al. 2022, arXiv:2208.07339, with groups
along a row as in Frantar et al. 2023, arXiv:2210.17323): of a group's `group` neighbours in a row,
the largest in size becomes 127 or 7. Plain numpy in a fixed order: the same everywhere.

`dequantise` is the truth for all backends: element (r, c) is its whole number times its group's
scale, one float32 product. A device that widens weights as it reads them computes just that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from backends.base.interface import Array
from protocol.base.errors import DataError
from protocol.spec.run_spec import BaseDtype

Storage = Literal["f32", "bf16", "f16", "int8", "int4"]

STORAGE: Final[dict[BaseDtype, Storage]] = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "int8": "int8",
    "int4": "int4",
}

GROUP: Final = 64
"""Elements per scale: 0.5 bit per weight."""

_LARGEST: Final[dict[Storage, int]] = {"int8": 127, "int4": 7}
_SMALLEST_GROUP: Final = 8


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix in fewer bits.

    Attributes:
        storage: Which.
        rows: Of the matrix.
        columns: Of the matrix; the contiguous dimension.
        words: uint32, little-endian: the first element of a row in the lowest bits. int4 holds
            its number plus 8.
        scales: float32, (rows * columns / group); none for bf16 and f16.
        group: Neighbours in a row that share a scale; 0 for bf16 and f16.
    """

    storage: Storage
    rows: int
    columns: int
    words: NDArray[np.uint32]
    scales: Array
    group: int

    def packed(self) -> NDArray[np.uint32]:
        """Words, then scales: one buffer."""
        return np.concatenate([self.words, self.scales.view(np.uint32)])

    def part(self, first: int, end: int) -> Quantised:
        """Rows `first` to `end`."""
        words, scales = len(self.words) // self.rows, len(self.scales) // self.rows
        return Quantised(
            self.storage,
            end - first,
            self.columns,
            self.words[first * words : end * words],
            self.scales[first * scales : end * scales],
            self.group,
        )

    @property
    def nbytes(self) -> int:
        """Of words and scales together."""
        return self.words.nbytes + self.scales.nbytes


def group_of(columns: int) -> int:
    """The largest power of two, at most GROUP, that divides a row; 0 if it is below 8."""
    group = GROUP
    while columns % group:
        group //= 2
    return group if group >= _SMALLEST_GROUP else 0


def quantise(values: Array, storage: Storage) -> Quantised:
    """Store a matrix of float32 in fewer bits.

    Args:
        values: (rows, columns); a row is a multiple of 8 elements.
        storage: Any but f32.

    Raises:
        DataError: A value is not finite, or not within float16 for f16.
    """
    rows, columns = values.shape
    group = group_of(columns)
    assert group, f"{columns} columns are no multiple of {_SMALLEST_GROUP}"
    if not np.isfinite(values).all():
        raise DataError(f"expected finite weights to store in {storage}, got inf or nan")
    none = np.zeros(0, np.float32)
    if storage in {"bf16", "f16"}:
        half = _bfloat16(values) if storage == "bf16" else _float16(values)
        return Quantised(storage, rows, columns, half.reshape(-1).view(np.uint32), none, 0)
    largest = _LARGEST[storage]
    grouped = values.reshape(-1, group)
    scales = (np.abs(grouped).max(axis=1) / np.float32(largest)).astype(np.float32)
    # A group of zeros, or of values too small for a scale, is all zeros.
    divisors = np.where(scales > 0, scales, np.float32(1))[:, None]
    whole = np.clip(np.rint(grouped / divisors), -largest, largest).astype(np.int8).reshape(-1)
    if storage == "int8":
        return Quantised(storage, rows, columns, whole.view(np.uint32), scales, group)
    nibbles = (whole + 8).astype(np.uint32).reshape(-1, 8)
    words = np.zeros(len(nibbles), np.uint32)
    for place in range(8):
        words |= nibbles[:, place] << np.uint32(4 * place)
    return Quantised(storage, rows, columns, words, scales, group)


def dequantise(stored: Quantised) -> Array:
    """The values that a stored matrix stands for: (rows, columns), float32."""
    shape = stored.rows, stored.columns
    if stored.storage == "bf16":
        wide = stored.words.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).reshape(shape)
    if stored.storage == "f16":
        return stored.words.view(np.float16).astype(np.float32).reshape(shape)
    if stored.storage == "int8":
        whole = stored.words.view(np.int8).astype(np.float32)
    else:
        places = np.arange(8, dtype=np.uint32) * np.uint32(4)
        nibbles = (stored.words[:, None] >> places) & np.uint32(15)
        whole = nibbles.astype(np.float32).reshape(-1) - np.float32(8)
    grouped = whole.reshape(-1, stored.group) * stored.scales[:, None]
    return grouped.astype(np.float32, copy=False).reshape(shape)


def stored_bytes(rows: int, columns: int, storage: Storage) -> int:
    """What `quantise` would give, without doing it."""
    bits = {"f32": 32, "bf16": 16, "f16": 16, "int8": 8, "int4": 4}[storage]
    words = rows * columns * bits // 8
    return words + (4 * rows * columns // group_of(columns) if storage in _LARGEST else 0)


def _bfloat16(values: Array) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; values are finite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    if (rounded & np.uint32(0x7F80) == np.uint32(0x7F80)).any():
        raise DataError("expected weights within bfloat16, got larger ones")
    return rounded.astype(np.uint16)


def _float16(values: Array) -> NDArray[np.uint16]:
    if np.abs(values).max(initial=0) > float(np.finfo(np.float16).max):
        raise DataError("expected weights within float16 (65504), got larger ones: use bfloat16")
    return values.astype(np.float16).view(np.uint16)
