"""Rounding to bfloat16 by its definition: to the nearer neighbor, ties to the even one."""

from __future__ import annotations

import numpy as np

from protocol.exact.reduction.float32 import Array


def nearest(values: Array) -> Array:
    """Each finite value's nearest bfloat16, as float32; distances are taken in float64."""
    inner = values.view(np.uint32) & np.uint32(0xFFFF0000)  # towards zero
    outer = inner + np.uint32(0x10000)  # away from it; beyond the largest, infinity's bits
    exact, near, far = (bits.view(np.float32).astype(np.float64) for bits in (values, inner, outer))
    far = np.where(np.isinf(far), np.copysign(2.0**128, exact), far)
    below, above = np.abs(exact - near), np.abs(far - exact)
    odd = (inner >> np.uint32(16)) & np.uint32(1) == 1
    return np.where((above < below) | ((above == below) & odd), outer, inner).view(np.float32)
