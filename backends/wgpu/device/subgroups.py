"""Measure the properties of a device that its matmul kernels depend on.

A software adapter runs one invocation per lane of a vector register. The number of lanes, and
whether they are consecutive invocations, is not among the adapter's limits, so a small shader
measures both.
"""

from __future__ import annotations

import os
from typing import Final

import numpy as np

from backends.wgpu.device.device import Device
from backends.wgpu.device.target import Copy
from backends.wgpu.shaders.dispatch import Dispatch, Shader
from backends.wgpu.shaders.matmul.shader import MatmulTraits

_INVOCATIONS: Final = 64
_SIZES: Final = (4, 8, 16)
_PROBE: Final = Shader(
    f"""\
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@compute @workgroup_size({_INVOCATIONS})
fn main(
  @builtin(local_invocation_id) id: vec3u,
  @builtin(subgroup_invocation_id) lane: u32,
  @builtin(subgroup_size) size: u32,
) {{
  out[id.x * 3u] = size;
  out[id.x * 3u + 1u] = lane;
  out[id.x * 3u + 2u] = subgroupBroadcast(id.x, 1u);
}}
""",
    1,
)


def measure_matmul_traits(device: Device) -> MatmulTraits:
    """Return the device's `MatmulTraits`."""
    return MatmulTraits(
        subgroup=_measure_subgroup_size(device) if device.adapter.software else 0,
        workgroup_bytes=device.limits["max-compute-workgroup-storage-size"],
        invocations=device.limits["max-compute-invocations-per-workgroup"],
        units=os.cpu_count() or 1,
    )


def _measure_subgroup_size(device: Device) -> int:
    """Return the subgroup size if its layout suits the kernel, else 0."""
    if not {"subgroup", "shader-int64"} <= device.features:
        return 0
    out = device.buffer(4 * 3 * _INVOCATIONS)
    commands = device.prepare([Dispatch(_PROBE, (0,), (1, 1, 1), "subgroups")], [out])
    (words,) = device.run(commands, [Copy(out, 4 * 3 * _INVOCATIONS)]).result()
    rows = words.view(np.uint32).reshape(_INVOCATIONS, 3)
    size = int(rows[0, 0])
    if size not in _SIZES:
        return 0
    indices = np.arange(_INVOCATIONS)
    is_in_order = np.array_equal(rows[:, 1], indices % size)
    is_broadcast_right = np.array_equal(rows[:, 2], indices // size * size + 1)
    return size if is_in_order and is_broadcast_right else 0
