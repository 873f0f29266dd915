"""A Vulkan device whose kernels are written so that they mean the same on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.wgpu.canonical.convention import Convention
from backends.wgpu.canonical.wgsl_text import canonical_wgsl
from backends.wgpu.device.adapters import Adapter
from backends.wgpu.device.device import Device
from backends.wgpu.device.target import Buffer, Copy, Prepared, Readback
from backends.wgpu.shaders.dispatch import Dispatch, Shader


class CanonicalDevice:
    """The same device, for programs whose arithmetic is canonical."""

    def __init__(self, device: Device, convention: Convention) -> None:
        self.device = device
        self.convention = convention
        self._zero = device.uniform()
        self._written: dict[str, tuple[Shader, bool]] = {}

    @property
    def adapter(self) -> Adapter:
        """What it is."""
        return self.device.adapter

    @property
    def largest_buffer_bytes(self) -> int:
        """Of one buffer."""
        return self.device.largest_buffer_bytes

    def buffer(self, nbytes: int) -> Buffer:
        """Zeroed memory of at least so many bytes."""
        return self.device.buffer(nbytes)

    def upload(self, buffer: Buffer, values: NDArray[Any]) -> None:
        """Fill the buffer from its start."""
        self.device.upload(buffer, values)

    def prepare(self, dispatches: Sequence[Dispatch], buffers: Sequence[Buffer]) -> Prepared:
        """The dispatches with their kernels written anew."""
        given = []
        for dispatch in dispatches:
            shader, needs_zero = self._canonical(dispatch.shader)
            bound = (*dispatch.buffers, len(buffers)) if needs_zero else dispatch.buffers
            given.append(replace(dispatch, shader=shader, buffers=bound))
        return self.device.prepare(given, [*buffers, self._zero])

    def run(self, prepared: Prepared, copies: Sequence[Copy] = ()) -> Readback:
        """Begin the dispatches, then copy these buffers back."""
        return self.device.run(prepared, copies)

    def _canonical(self, shader: Shader) -> tuple[Shader, bool]:
        if shader.source not in self._written:
            text, needs_zero = canonical_wgsl(shader.source, self.convention)
            made = Shader(text, shader.bindings + needs_zero, in_bounds=shader.in_bounds)
            self._written[shader.source] = made, needs_zero
        return self._written[shader.source]


def float_bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Bits to compare: what is no number is one."""
    bits = values.view(np.uint32)
    return np.where(np.isnan(values), np.uint32(0x7FC00000), bits)
