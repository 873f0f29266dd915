"""Rounding to bfloat16 by its definition: to the nearer neighbor, ties to even."""

from __future__ import annotations

import numpy as np

from protocol.exact.reduction.average import Array


def round_to_bfloat16(values: Array) -> Array:
    """Return the nearest bfloat16 of each finite value, as float32, computed in float64."""
    inner = values.view(np.uint32) & np.uint32(0xFFFF0000)  # the neighbor towards zero
    # The neighbor away from zero; beyond the largest value these are the bits of infinity.
    outer = inner + np.uint32(0x10000)
    exact, inner_value, outer_value = (
        bits.view(np.float32).astype(np.float64) for bits in (values, inner, outer)
    )
    outer_value = np.where(np.isinf(outer_value), np.copysign(2.0**128, exact), outer_value)
    inner_distance, outer_distance = np.abs(exact - inner_value), np.abs(outer_value - exact)
    is_odd = (inner >> np.uint32(16)) & np.uint32(1) == 1
    return np.where(
        (outer_distance < inner_distance) | ((outer_distance == inner_distance) & is_odd),
        outer,
        inner,
    ).view(np.float32)
