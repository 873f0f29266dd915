"""Random numbers as a function of a seed, the number of the draw in the model, and an element's
index.

Threefry 2x32 with 13 rounds: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC'11. It only adds, rotates and xors 32-bit words, which WGSL supports. Backward can
therefore recompute a mask instead of storing it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

ROUNDS: Final = 13
_ROTATIONS: Final = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY: Final = 0x1BD11BDA

Words = NDArray[np.uint32]


def words(key: tuple[int, int], site: int, count: int) -> Words:
    """Return the first word of each of `count` blocks, as uint32. Tests compare the shader with it.

    Args:
        key: Two 32-bit words, the seed.
        site: Number of the draw in the model.
        count: Elements; element i is block (i, site).
    """
    keys = (np.uint32(key[0]), np.uint32(key[1]), np.uint32(key[0] ^ key[1] ^ _PARITY))
    with np.errstate(over="ignore"):
        x0 = np.arange(count, dtype=np.uint32) + keys[0]
        x1 = np.full(count, site, np.uint32) + keys[1]
        for number in range(ROUNDS):
            rotation = _ROTATIONS[number % 8]
            x0 = x0 + x1
            x1 = (x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))
            x1 ^= x0
            if number % 4 == 3:
                injection = number // 4 + 1
                x0 = x0 + keys[injection % 3]
                x1 = x1 + keys[(injection + 1) % 3] + np.uint32(injection)
    return x0


def threshold(probability: float) -> int:
    """Return the bound below which a random word falls with this probability, to 2**-32."""
    return min(round(probability * 2**32), 2**32 - 1)


def _shader() -> str:
    lines = ["fn threefry(k0: u32, k1: u32, counter: u32, site: u32) -> u32 {"]
    lines.append(f"  let k2 = k0 ^ k1 ^ {_PARITY}u;")
    lines.append("  var x0 = counter + k0; var x1 = site + k1;")
    for number in range(ROUNDS):
        rotation = _ROTATIONS[number % 8]
        rotated = f"(x1 << {rotation}u) | (x1 >> {32 - rotation}u)"
        lines.append(f"  x0 += x1; x1 = ({rotated}) ^ x0;")
        if number % 4 == 3:
            injection = number // 4 + 1
            first_key, second_key = injection % 3, (injection + 1) % 3
            lines.append(f"  x0 += k{first_key}; x1 += k{second_key} + {injection}u;")
    return "\n".join([*lines, "  return x0;", "}"])


SHADER: Final = _shader()
"""`threefry(k0, k1, counter, site) -> u32` in WGSL."""
