"""Gradients in bfloat16, rounded to nearest, ties to even, by integer arithmetic alone.

With `exchange.precision: bfloat16`, rounding is part of the sum along the tree: every leaf and
every merge is rounded, wherever it is computed. So the sum has the same bits for any number of
workers, at half the bytes. In memory a rounded value is a float32 whose lower 16 bits are zero; its
upper 16 bits are sent.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.exact.kernels.library import library_for, library_for_bytes
from protocol.exact.reduction.average import Array, is_finite
from protocol.spec.sections.exchange import Precision

_CHUNK_ELEMENTS: Final = 32_768
"""A chunk and its temporaries fit a level-2 cache. No bit depends on the size."""
_UPPER: Final = np.uint32(0xFFFF0000)
_HALF_BELOW: Final = np.uint32(0x7FFF)
_ONE: Final = np.uint32(1)
_SIXTEEN: Final = np.uint32(16)

ELEMENT_BYTES: Final[dict[Precision, int]] = {"float32": 4, "bfloat16": 2}
"""Bytes of a value on the wire."""


def round_to_bfloat16(values: Array) -> Array:
    """Round a flat float32 array in place, and return it.

    Values that are too large become infinite, NaN stays NaN.
    """
    if (library := library_for(writes=(values,))) is not None:
        library.round_bfloat16(values)
        return values
    for lo in range(0, values.size, _CHUNK_ELEMENTS):
        part = values[lo : lo + _CHUNK_ELEMENTS]
        nan = None if is_finite(part) else np.isnan(part)
        bits = part.view(np.uint32)
        carry = np.right_shift(bits, _SIXTEEN)
        np.bitwise_and(carry, _ONE, out=carry)
        np.add(carry, _HALF_BELOW, out=carry)
        np.add(bits, carry, out=bits)
        np.bitwise_and(bits, _UPPER, out=bits)
        if nan is not None:
            part[nan] = np.nan
    return values


def pack(values: Array, precision: Precision) -> NDArray[Any]:
    """Encode a flat array that is already rounded to this precision.

    Returns:
        The array itself, or its upper halves as little-endian uint16 of the same shape.
    """
    if precision == "float32":
        return values
    if (library := library_for(values)) is not None:
        return library.pack_bfloat16(values)
    return np.right_shift(values.view(np.uint32), _SIXTEEN).astype("<u2")


def unpack(raw: NDArray[np.uint8], precision: Precision) -> Array:
    """Decode to float32; float32 bytes are viewed, not copied."""
    if precision == "float32":
        return raw.view("<f4")
    if (library := library_for_bytes(raw, raw.size // 2 * 2)) is not None:
        return library.unpack_bfloat16(raw)
    bits = raw.view("<u2").astype(np.uint32)
    return np.left_shift(bits, _SIXTEEN, out=bits).view(np.float32)
