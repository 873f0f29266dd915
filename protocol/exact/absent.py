"""Absent gradients: of a tensor that a backward does not reach, where torch has `grad is None`.

torch's optimizers skip such a parameter: its weights, moments and step count stay as they are. Here
its gradient is an array of negative zeros. In IEEE 754 -0.0 is the identity of addition: x + -0.0
is x, bit for bit, and a sum is -0.0 only if both terms are. So the reduction tree itself joins what
the microbatches of a step have reached, on any machine and in any order, and no message or record
has a mask that could be lost or forged: a tensor's average is absent exactly if no microbatch of
the step has reached it. Averaging, bfloat16, slices and the gradient log keep the sign of zero.

The first value of a gradient that is not absent is never -0.0: `present` makes it +0.0 where the
gradient is computed. Rounding can undo that only if every value of a tensor rounds to -0.0, which
takes values below 2^-149 times the step's weight (2^-134 with bfloat16).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.spec.manifest import Block

Array = NDArray[np.float32]

ABSENT: Final = np.float32(-0.0)
_ABSENT_BITS: Final = np.uint32(0x80000000)


def absent(elements: int) -> Array:
    """The gradient of a tensor that is not reached: flat float32, the caller's own."""
    return np.full(elements, ABSENT)


def present(gradient: Array) -> Array:
    """A gradient that is not absent, with +0.0 as its first value instead of -0.0.

    Args:
        gradient: Flat float32, of one tensor; it is only read.

    Returns:
        The same array, or a copy where it differs.
    """
    if not gradient.size or gradient.view(np.uint32)[0] != _ABSENT_BITS:
        return gradient
    changed = gradient.copy()
    changed[0] = 0.0
    return changed


def is_absent(gradient: Array) -> bool:
    """Whether a tensor's gradient, flat float32, is absent. One without elements never is."""
    bits = gradient.view(np.uint32)
    return bool(bits.size and bits[0] == _ABSENT_BITS and bits.min() == bits.max())


def mark_absent(block: Block, gradient: Array, names: Collection[str] = ()) -> Array:
    """Make the gradients of these tensors absent and those of the others present, in place.

    Args:
        block: Of the manifest.
        gradient: Of all its tensors, flat float32.
        names: Of the tensors that were not reached.
    """
    for tensor, part in block.slices():
        if tensor.name in names:
            gradient[part] = ABSENT
        elif tensor.elements and gradient[part.start] == 0:
            gradient[part.start] = 0.0
    return gradient


def keep_absent(gradient: Array, out: Array) -> None:
    """Write zeros to `out`, -0.0 where `gradient` has that; both flat float32 of one shape."""
    np.copyto(out, np.where(gradient.view(np.uint32) == _ABSENT_BITS, ABSENT, np.float32(0.0)))
