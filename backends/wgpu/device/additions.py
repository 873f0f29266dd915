"""Whether a device's additions are exactly float32 additions: a probe at the start.

Node sums must have the same bits wherever they are added. IEEE 754 leaves a float32 addition one
result, but Vulkan lets a device flush subnormals to zero and round otherwise. So hard cases are
added by the very kernels of node sums and compared, bit by bit, with numpy: only if all agree may
a program add node sums there; else the host does. Cases of NaN are left out: a gradient with a NaN
ends its step.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from backends.wgpu.device.target import ComputeTarget, Copy
from backends.wgpu.shaders.sum_kernels import add, keep

_RANDOM_CASES: Final = 60_000
_EDGES: Final = (
    0x00000000,  # 0
    0x00000001,  # the smallest subnormal
    0x00000002,
    0x00400000,
    0x007FFFFF,  # the largest subnormal
    0x00800000,  # the smallest normal number
    0x00800001,
    0x00FFFFFF,
    0x01000000,
    0x33800000,  # 2^-24: half of the last place of 1
    0x33800001,
    0x34000000,
    0x3F7FFFFF,
    0x3F800000,  # 1
    0x3F800001,
    0x4B7FFFFF,
    0x4B800000,  # 2^24
    0x4B800001,
    0x7F000000,
    0x7F7FFFFF,  # the largest
    0x7F800000,  # infinity
)


def hard_cases() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Pairs to add: all pairs of edges with both signs, and random bits close in exponent."""
    edges = np.array([*_EDGES, *(edge | 0x80000000 for edge in _EDGES)], np.uint32)
    first, second = (grid.reshape(-1) for grid in np.meshgrid(edges, edges))
    draw = np.random.default_rng(0)
    bits = draw.integers(0, 2**32, _RANDOM_CASES, np.uint32)
    # The second's exponent is within 26 of the first's, where rounding happens.
    exponent = (bits >> np.uint32(23)) & np.uint32(0xFF)
    near = np.clip(exponent.astype(np.int64) + draw.integers(-26, 27, _RANDOM_CASES), 0, 254)
    rest = draw.integers(0, 2**32, _RANDOM_CASES, np.uint32) & np.uint32(0x807FFFFF)
    close = (near.astype(np.uint32) << np.uint32(23)) | rest
    a = np.concatenate([first, bits]).view(np.float32)
    b = np.concatenate([second, close]).view(np.float32)
    with np.errstate(all="ignore"):
        kept = ~np.isnan(a + b)
    return a[kept], b[kept]


def differing_additions(device: ComputeTarget) -> int:
    """How many of the hard cases the device adds otherwise than IEEE 754 demands; 0 is exact."""
    a, b = hard_cases()
    buffers = [device.buffer(values.nbytes) for values in (a, b, a)]
    device.upload(buffers[0], a)
    device.upload(buffers[1], b)
    nbytes = buffers[2].nbytes
    prepared = device.prepare([keep([0], [2], nbytes), add([1], [2], nbytes)], buffers)
    (sums,) = device.run(prepared, [Copy(buffers[2], a.nbytes)]).result()
    with np.errstate(all="ignore"):
        expected = a + b
    return int(np.count_nonzero(sums.view(np.uint32) != expected.view(np.uint32)))
