"""Probe a device's arithmetic: float32 additions, and float16 conversions.

Subtree sums must have the same bits on every device. IEEE 754 defines the result of a float32
addition, but Vulkan permits flushing subnormals and other roundings. So the kernels of subtree sums
add hard cases, and the sums are compared bit by bit with NumPy's. If any differs, the host adds
subtree sums. NaN is not tested, since a gradient with NaN halts the run.

Kernels round to float16 with integer operations, so the device's conversions never round. But they
must preserve infinities and NaN, which signal an overflow, and Vulkan does not guarantee that. So
every float16 value is converted to float32 and back, and compared. A device may flush subnormals.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from backends.wgpu.device.target import ComputeTarget, Copy
from backends.wgpu.shaders.dispatch import Dispatch, Shader
from backends.wgpu.shaders.sum_kernels import add, copy

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
_FLOAT16_COUNT: Final = 2**16
_WORKGROUP: Final = 64
_CONVERT: Final = """\
@group(0) @binding(0) var<storage, read> values: array<{}>;
@group(0) @binding(1) var<storage, read_write> out: array<{}>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {{ out[id.x] = {}(values[id.x]); }}
"""
_WIDENING: Final = Shader(_CONVERT.format("f16", "f32", "f32"), 2)
_NARROWING: Final = Shader(_CONVERT.format("f32", "f16", "f16"), 2)


def hard_cases() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return pairs to add: all pairs of edge values, and random bits with close exponents."""
    edges = np.array([*_EDGES, *(edge | 0x80000000 for edge in _EDGES)], np.uint32)
    first_edges, second_edges = (grid.reshape(-1) for grid in np.meshgrid(edges, edges))
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, _RANDOM_CASES, np.uint32)
    # The second exponent is within 26 of the first, where rounding happens.
    exponent = (bits >> np.uint32(23)) & np.uint32(0xFF)
    close_exponents = np.clip(
        exponent.astype(np.int64) + rng.integers(-26, 27, _RANDOM_CASES), 0, 254
    )
    mantissas = rng.integers(0, 2**32, _RANDOM_CASES, np.uint32) & np.uint32(0x807FFFFF)
    close = (close_exponents.astype(np.uint32) << np.uint32(23)) | mantissas
    a = np.concatenate([first_edges, bits]).view(np.float32)
    b = np.concatenate([second_edges, close]).view(np.float32)
    with np.errstate(all="ignore"):
        is_number = ~np.isnan(a + b)
    return a[is_number], b[is_number]


def count_wrong_additions(device: ComputeTarget) -> int:
    """Count the hard cases in which the device's sum differs from IEEE 754; 0 means exact."""
    a, b = hard_cases()
    buffers = [device.buffer(values.nbytes) for values in (a, b, a)]
    device.upload(buffers[0], a)
    device.upload(buffers[1], b)
    nbytes = buffers[2].nbytes
    commands = device.prepare([copy([0], [2], nbytes), add([1], [2], nbytes)], buffers)
    (sums,) = device.run(commands, [Copy(buffers[2], a.nbytes)]).result()
    with np.errstate(all="ignore"):
        expected = a + b
    return int(np.count_nonzero(sums.view(np.uint32) != expected.view(np.uint32)))


def count_changed_float16(device: ComputeTarget) -> int:
    """Count the float16 values that a conversion to float32 or back changes, except subnormals that
    become zero."""
    bits = np.arange(_FLOAT16_COUNT, dtype=np.uint16)
    values = bits.view(np.float16)
    with np.errstate(all="ignore"):
        expected = values.astype(np.float32)
    buffers = [device.buffer(nbytes) for nbytes in (bits.nbytes, expected.nbytes, expected.nbytes)]
    buffers.append(device.buffer(bits.nbytes))
    device.upload(buffers[0], bits)
    device.upload(buffers[2], expected)
    grid = (_FLOAT16_COUNT // _WORKGROUP, 1, 1)
    dispatches = [
        Dispatch(_WIDENING, (0, 1), grid, "widen"),
        Dispatch(_NARROWING, (2, 3), grid, "narrow"),
    ]
    copies = [Copy(buffers[1], expected.nbytes), Copy(buffers[3], bits.nbytes)]
    widened, narrowed = device.run(device.prepare(dispatches, buffers), copies).result()
    round_trip = narrowed.view(np.float16).astype(np.float32)
    return int(
        np.count_nonzero(_is_different(widened, expected) | _is_different(round_trip, expected))
    )


def _is_different(results: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.bool_]:
    is_subnormal = np.abs(expected) < np.finfo(np.float16).smallest_normal
    are_both_nan = np.isnan(results) & np.isnan(expected)
    return np.asarray(~((results == expected) | are_both_nan | (is_subnormal & (results == 0))))
