"""Absent gradients: those of tensors that a backward does not reach (`grad is None` in torch).

torch's optimizers skip such a parameter: its weights, moments and step count do not change. Here
an absent gradient is an array of negative zeros. In IEEE 754, -0.0 is the identity of addition:
x + -0.0 is x, bit for bit, and a sum is -0.0 only if both terms are. So the sums along the
reduction tree show which tensors a step has reached, without a mask that could be lost or forged: a
tensor's average is absent if and only if no microbatch of the step reached the tensor. Averaging,
bfloat16, slices and the gradient log preserve the sign of zero.

The first value of a present gradient is never -0.0: `mark_present` replaces it by +0.0 where the
gradient is computed. Rounding can undo this only if every value of a tensor rounds to -0.0, which
takes values below 2^-149 times the step's weight (2^-134 with bfloat16).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.exact.kernels.library import library_for
from protocol.spec.manifest import Block

Array = NDArray[np.float32]

ABSENT: Final = np.float32(-0.0)
_ABSENT_BITS: Final = np.uint32(0x80000000)


def absent_gradient(elements: int) -> Array:
    """Return a new absent gradient, flat float32."""
    return np.full(elements, ABSENT)


def mark_present(gradient: Array) -> Array:
    """Mark a gradient as present: replace -0.0 as its first value by +0.0.

    Args:
        gradient: Flat float32, of one tensor; it is not changed.

    Returns:
        The same array, or a changed copy.
    """
    if not gradient.size or gradient.view(np.uint32)[0] != _ABSENT_BITS:
        return gradient
    changed = gradient.copy()
    changed[0] = 0.0
    return changed


def is_absent(gradient: Array) -> bool:
    """Return whether a tensor's gradient, flat float32, is absent; an empty gradient never is."""
    bits = gradient.view(np.uint32)
    if not bits.size or bits[0] != _ABSENT_BITS:
        return False
    if (library := library_for(gradient)) is not None:
        return library.is_negative_zero(gradient)
    return bool(bits.min() == bits.max())


def mark_absent(block: Block, gradient: Array, names: Collection[str] = ()) -> Array:
    """Mark the gradients of some tensors as absent and the others as present, in place.

    Args:
        block: The block.
        gradient: The gradient of all tensors of the block, flat float32.
        names: Names of the tensors that backward did not reach.
    """
    for tensor, part in block.slices():
        if tensor.name in names:
            gradient[part] = ABSENT
        elif tensor.elements and gradient[part.start] == 0:
            gradient[part.start] = 0.0
    return gradient


def keep_absent(gradient: Array, out: Array) -> None:
    """Write zeros to `out`, negative where `gradient` is -0.0; both flat float32 of one shape."""
    np.copyto(out, np.where(gradient.view(np.uint32) == _ABSENT_BITS, ABSENT, np.float32(0.0)))
