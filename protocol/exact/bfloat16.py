"""Gradients in bfloat16: rounded to nearest, ties to even, by integer arithmetic alone.

Where a run spec asks for it (`exchange.precision`), the rounding is a part of the sum along the
tree: every leaf and every merge is rounded, wherever it is computed. So the sum has the same bits
for any number of workers, and half the bytes. In memory a rounded value stays a float32 whose lower
16 bits are zero; it travels as its upper 16.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.exact.update import Array, is_finite
from protocol.spec.run_spec import Precision

_CHUNK_ELEMENTS: Final = 32_768
"""A chunk and what it is computed with fit a level-2 cache. No bit depends on it."""
_UPPER: Final = np.uint32(0xFFFF0000)
_HALF_BELOW: Final = np.uint32(0x7FFF)
_ONE: Final = np.uint32(1)
_SIXTEEN: Final = np.uint32(16)

ELEMENT_BYTES: Final[dict[Precision, int]] = {"float32": 4, "bfloat16": 2}
"""Of a value on the wire."""


def rounded(values: Array) -> Array:
    """Round a flat float32 array in place; what is too large becomes infinite, NaN stays NaN."""
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


def packed(values: Array, precision: Precision) -> NDArray[Any]:
    """What travels of a flat array that is rounded to this precision already.

    Returns:
        The array itself, or uint16, little-endian, of its shape.
    """
    if precision == "float32":
        return values
    return np.right_shift(values.view(np.uint32), _SIXTEEN).astype("<u2")


def unpacked(raw: NDArray[np.uint8], precision: Precision) -> Array:
    """The float32 values of what has travelled; of float32 a view."""
    if precision == "float32":
        return raw.view("<f4")
    bits = raw.view("<u2").astype(np.uint32)
    return np.left_shift(bits, _SIXTEEN, out=bits).view(np.float32)
