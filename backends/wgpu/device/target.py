"""The interface of a compute target: buffers, and lists of dispatches that run in order.

`device.Device` is a Vulkan device, in hardware or software; `canonical.host.CpuTarget` is the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from backends.wgpu.device.adapters import Adapter
from backends.wgpu.shaders.dispatch import Dispatch


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Memory on the device, a multiple of 16 bytes, or a part of a buffer from `offset`."""

    nbytes: int
    handle: Any
    offset: int = 0

    def part(self, offset: int, nbytes: int) -> Buffer:
        """Return a part of the buffer; the offset is a multiple of `SLICE_ALIGNMENT_BYTES`."""
        return Buffer(nbytes, self.handle, self.offset + offset)


@dataclass(frozen=True, slots=True)
class Copy:
    """A part of a buffer to read back; offset and size are multiples of 4."""

    buffer: Buffer
    nbytes: int
    offset: int = 0


class CommandList:
    """Encoded dispatches, ready to run on their target; the references keep their memory alive."""

    __slots__ = ("_references", "calls")

    def __init__(self, calls: list[Any], references: list[Any]) -> None:
        self.calls = calls
        self._references = references

    def __add__(self, other: CommandList) -> CommandList:
        return CommandList(self.calls + other.calls, self._references + other._references)


class Readback(Protocol):
    """The results of a submission."""

    def result(self) -> list[NDArray[np.float32]]:
        """Wait, and return one flat float32 array per copy; use `.view` for other types.

        Raises:
            DeviceError: The device was lost or is out of memory.
        """


class ComputeTarget(Protocol):
    """A device that runs programs. All methods are thread-safe."""

    @property
    def adapter(self) -> Adapter:
        """Description of the device."""

    @property
    def largest_buffer_bytes(self) -> int:
        """Largest size of a buffer that a kernel can bind."""

    def buffer(self, nbytes: int) -> Buffer:
        """Allocate zeroed memory of at least `nbytes` bytes.

        Raises:
            DeviceError: Out of memory.
        """

    def upload(self, buffer: Buffer, values: NDArray[Any]) -> None:
        """Fill the buffer from its start, before any later submission runs."""

    def prepare(self, dispatches: Sequence[Dispatch], buffers: Sequence[Buffer]) -> CommandList:
        """Encode dispatches, so that they can run repeatedly.

        Args:
            dispatches: Dispatches in order of execution.
            buffers: The plan's buffers by number.
        """

    def run(self, commands: CommandList, copies: Sequence[Copy] = ()) -> Readback:
        """Start the dispatches and then copy buffers back; returns immediately."""
