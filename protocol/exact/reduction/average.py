"""Average a float32 sum, compute a sum of squares, or check finiteness, each in one pass.

Each function is defined in numpy, and has the same bits in C (`protocol/exact/kernels/sums.c`).
"""

from __future__ import annotations

import math
import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.exact.kernels.library import library_for
from protocol.exact.reduction.absent import keep_absent

Array = NDArray[np.float32]

SQUARE_SUM_CHUNK_ELEMENTS: Final = 65_536
"""Part of the definition of `square_sum`: another size can give other bits."""

_FLOAT32: Final = struct.Struct("<f")


def is_finite(array: Array) -> bool:
    """Return whether all values are finite, without the temporary array of numpy.isfinite."""
    if (library := library_for(array)) is not None:
        return library.is_finite(array)
    return not array.size or bool(array.min() > -np.inf and array.max() < np.inf)


def copy_finite(values: Array, out: Array) -> bool:
    """Copy values to `out`, and return whether all are finite: one pass over memory, not two.

    The bits of finite values do not change; those of a NaN may.
    """
    if (library := library_for(values, writes=(out,))) is not None:
        return library.scale(values, 1.0, out)
    np.copyto(out, values)
    return is_finite(out)


def square_sum(array: Array) -> float:
    """Return the sum of squares of an array, in float64.

    Each square is exact. Chunks of `SQUARE_SUM_CHUNK_ELEMENTS` are summed by `np.add.reduce`, and
    their sums are added in order. BLAS is not used: its bits depend on the number of threads.
    """
    flat = array.reshape(-1)
    total = 0.0
    if (library := library_for(flat)) is not None:
        for chunk in library.square_sums(flat).tolist():  # `sum` compensates from Python 3.12 on
            total += chunk
        return total
    scratch = np.empty(min(flat.size, SQUARE_SUM_CHUNK_ELEMENTS), np.float64)
    with np.errstate(all="ignore"):
        for lo in range(0, flat.size, SQUARE_SUM_CHUNK_ELEMENTS):
            part = flat[lo : lo + SQUARE_SUM_CHUNK_ELEMENTS]
            squares = scratch[: part.size]
            np.copyto(squares, part)
            np.multiply(squares, squares, out=squares)
            total += float(np.add.reduce(squares))
    return total


def average(sums: Array, total_weight: float, out: Array) -> bool:
    """Divide gradient sums by their weight and write the averages to `out`, which may be `sums`.

    The sums are multiplied by the reciprocal of the weight, computed in float64 and rounded to
    float32. A step without weight (no sample, no token) has a gradient of zero. Absent gradients
    stay absent.

    Returns:
        Whether all averages are finite.
    """
    assert math.isfinite(total_weight)
    assert total_weight >= 0
    if total_weight == 0:
        keep_absent(sums, out)
        return True
    with np.errstate(all="ignore"):
        factor = np.float32(1.0 / total_weight)
        if (library := library_for(sums, writes=(out,))) is not None:
            return library.scale(sums, float(factor), out)
        np.multiply(sums, factor, out=out)
    return is_finite(out)


def nearest_float32(value: float) -> float:
    """Round to the nearest float32; out of range gives infinity, which validation refuses.

    Ten times as fast as `np.float32(value)`: reading a commit rounds at least twelve values.
    """
    try:
        (rounded,) = _FLOAT32.unpack(_FLOAT32.pack(value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(rounded)
