"""Whether a device keeps float16 as it is given: a probe before the first model in it.

Kernels round to float16 by whole numbers, so the device's own conversions meet nothing that they
could round; but infinities and NaN must pass, for a step that overflowed is told by them. Vulkan
promises neither. So every float16 there is goes to float32 and back, and is compared. A device may
take subnormals for zeros.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from backends.wgpu.device.target import ComputeTarget, Copy
from backends.wgpu.shaders.dispatch import Dispatch, Shader

_COUNT: Final = 2**16
_WORKGROUP: Final = 64
_CONVERT: Final = """\
@group(0) @binding(0) var<storage, read> given: array<{}>;
@group(0) @binding(1) var<storage, read_write> out: array<{}>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {{ out[id.x] = {}(given[id.x]); }}
"""
_WIDEN: Final = Shader(_CONVERT.format("f16", "f32", "f32"), 2)
_NARROW: Final = Shader(_CONVERT.format("f32", "f16", "f16"), 2)


def changed_halves(device: ComputeTarget) -> int:
    """How many of all float16 come back as something else from float32, or are it there."""
    bits = np.arange(_COUNT, dtype=np.uint16)
    values = bits.view(np.float16)
    with np.errstate(all="ignore"):
        wide = values.astype(np.float32)
    buffers = [device.buffer(nbytes) for nbytes in (bits.nbytes, wide.nbytes, wide.nbytes)]
    buffers.append(device.buffer(bits.nbytes))
    device.upload(buffers[0], bits)
    device.upload(buffers[2], wide)
    grid = (_COUNT // _WORKGROUP, 1, 1)
    dispatches = [
        Dispatch(_WIDEN, (0, 1), grid, "widen"),
        Dispatch(_NARROW, (2, 3), grid, "narrow"),
    ]
    copies = [Copy(buffers[1], wide.nbytes), Copy(buffers[3], bits.nbytes)]
    widened, narrowed = device.run(device.prepare(dispatches, buffers), copies).result()
    back = narrowed.view(np.float16).astype(np.float32)
    return int(np.count_nonzero(_differ(widened, wide) | _differ(back, wide)))


def _differ(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> NDArray[np.bool_]:
    small = np.abs(wanted) < np.finfo(np.float16).smallest_normal
    both_none = np.isnan(got) & np.isnan(wanted)
    return np.asarray(~((got == wanted) | both_none | (small & (got == 0))))
