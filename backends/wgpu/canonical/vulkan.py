"""A Vulkan device that runs canonical kernels."""

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
from backends.wgpu.device.target import Buffer, CommandList, Copy, Readback
from backends.wgpu.shaders.dispatch import Dispatch, Shader


class CanonicalDevice:
    """A wrapped device that runs canonical versions of kernels."""

    def __init__(self, device: Device, convention: Convention) -> None:
        self.device = device
        self.convention = convention
        self._zero = device.uniform_buffer()
        self._rewritten: dict[str, tuple[Shader, bool]] = {}

    @property
    def adapter(self) -> Adapter:
        """The wrapped device's adapter."""
        return self.device.adapter

    @property
    def largest_buffer_bytes(self) -> int:
        """Largest size of a buffer."""
        return self.device.largest_buffer_bytes

    def buffer(self, nbytes: int) -> Buffer:
        """Allocate zeroed memory of at least `nbytes` bytes."""
        return self.device.buffer(nbytes)

    def upload(self, buffer: Buffer, values: NDArray[Any]) -> None:
        """Fill the buffer from its start."""
        self.device.upload(buffer, values)

    def prepare(self, dispatches: Sequence[Dispatch], buffers: Sequence[Buffer]) -> CommandList:
        """Encode the dispatches with canonical kernels."""
        rewritten = []
        for dispatch in dispatches:
            shader, needs_zero = self._rewrite(dispatch.shader)
            buffer_numbers = (*dispatch.buffers, len(buffers)) if needs_zero else dispatch.buffers
            rewritten.append(replace(dispatch, shader=shader, buffers=buffer_numbers))
        return self.device.prepare(rewritten, [*buffers, self._zero])

    def run(self, commands: CommandList, copies: Sequence[Copy] = ()) -> Readback:
        """Start the dispatches, then copy buffers back."""
        return self.device.run(commands, copies)

    def _rewrite(self, shader: Shader) -> tuple[Shader, bool]:
        if shader.source not in self._rewritten:
            text, needs_zero = canonical_wgsl(shader.source, self.convention)
            rewritten = Shader(text, shader.bindings + needs_zero, in_bounds=shader.in_bounds)
            self._rewritten[shader.source] = rewritten, needs_zero
        return self._rewritten[shader.source]


def float_bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return bits that can be compared: every NaN becomes the same NaN."""
    bits = values.view(np.uint32)
    return np.where(np.isnan(values), np.uint32(0x7FC00000), bits)
