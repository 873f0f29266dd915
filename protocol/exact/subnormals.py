"""Check that this thread keeps subnormal numbers, as IEEE 754 requires.

A thread can flush float32 numbers below 2^-126 to zero: because of `torch.set_flush_denormal`, or
because of a library built with -ffast-math, which affects the thread that loads it and all threads
that this thread starts. The exact update would then have different bits.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from protocol.base.errors import SubnormalsFlushed

INPUT_BITS: Final = (0x00800000, 0x00000001)
"""2^-126 and 2^-149 as bits, since a thread that flushes subnormals could not write them as
numbers."""
FACTORS: Final = (0.5, 2.0)
EXPECTED_BITS: Final = (0x00400000, 0x00000002)

_INPUTS: Final = np.array(INPUT_BITS, np.uint32).view(np.float32)
_FACTORS: Final = np.array(FACTORS, np.float32)
_EXPECTED: Final = np.array(EXPECTED_BITS, np.uint32)


def subnormals_are_kept() -> bool:
    """Return whether this thread keeps subnormal numbers both as operands and as results."""
    return bool(np.array_equal((_INPUTS * _FACTORS).view(np.uint32), _EXPECTED))


def check_subnormals(purpose: str) -> None:
    """Refuse to compute in a thread that flushes subnormal numbers.

    Args:
        purpose: The purpose of the thread, for the error.

    Raises:
        SubnormalsFlushed: The thread flushes subnormal numbers.
    """
    if not subnormals_are_kept():
        raise SubnormalsFlushed(purpose)
