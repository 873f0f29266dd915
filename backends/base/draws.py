"""Random numbers with the same bits on every machine, from hashed integers.

Neither numpy nor torch guarantees its random streams across versions, and torch's draws depend on
the instruction set. These numbers are SplitMix64 (Steele, Lea and Flood 2014,
doi:10.1145/2660193.2660195) of a key and a counter: integer arithmetic and one exact conversion to
float32.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

_GOLDEN_RATIO: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1


def derive_key(*parts: int | str) -> int:
    """Derive a 64-bit key from integers and names."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake3(text.encode()).digest(8), "little")


def hashes(key: int, count: int) -> NDArray[np.uint64]:
    """Return `count` 64-bit hashes: SplitMix64's stream that starts at `key`."""
    z = np.arange(1, count + 1, dtype=np.uint64)
    z *= np.uint64(_GOLDEN_RATIO)
    z += np.uint64(key & _MASK)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def uniforms(key: int, count: int) -> NDArray[np.float32]:
    """Draw uniform multiples of 2^-24 in [0, 1), exact in float32."""
    return (hashes(key, count) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def symmetric_uniforms(key: int, count: int, bound: float) -> NDArray[np.float32]:
    """Draw uniform float32 values in [-bound, bound), each rounded once."""
    return (uniforms(key, count) * np.float32(2) - np.float32(1)) * np.float32(bound)


def uniforms_with_deviation(key: int, count: int, deviation: float) -> NDArray[np.float32]:
    """Draw uniform values around zero with a standard deviation.

    A substitute for normal draws, whose logarithm and cosine differ between math libraries.
    """
    return symmetric_uniforms(key, count, math.sqrt(3.0) * deviation)
