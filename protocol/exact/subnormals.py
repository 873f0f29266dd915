"""Whether this thread's arithmetic keeps subnormal numbers, as IEEE 754 has it.

A thread can be told to take float32 numbers below 2^-126 for zeros ("flush to zero"): by
`torch.set_flush_denormal`, or by a library that was built with -ffast-math, for the thread that
loads it and every thread that this one starts. The exact update would then have other bits.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from protocol.base.errors import SubnormalsFlushed

GIVEN_BITS: Final = (0x00800000, 0x00000001)
"""2^-126 and 2^-149: as bits, since a thread that flushes would also write them down as zeros."""
FACTORS: Final = (0.5, 2.0)
EXPECTED_BITS: Final = (0x00400000, 0x00000002)

_GIVEN: Final = np.array(GIVEN_BITS, np.uint32).view(np.float32)
_FACTORS: Final = np.array(FACTORS, np.float32)
_EXPECTED: Final = np.array(EXPECTED_BITS, np.uint32)


def subnormals_are_kept() -> bool:
    """Whether they are both given and taken as what they are, in this thread."""
    return bool(np.array_equal((_GIVEN * _FACTORS).view(np.uint32), _EXPECTED))


def check_subnormals(where: str) -> None:
    """Refuse a thread that takes them for zeros.

    Args:
        where: What the thread belongs to, for the text of the error.

    Raises:
        SubnormalsFlushed: It does.
    """
    if not subnormals_are_kept():
        raise SubnormalsFlushed(where)
