"""What runs a plan: buffers, and lists of dispatches that run in the order they were given.

`device.Device` is a card, or what Vulkan makes of one in software; `canonical.host.CpuTarget` is
this CPU.
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
    """Memory on the device, of a whole number of 16 bytes; or a part of it, from `offset` on."""

    nbytes: int
    handle: Any
    offset: int = 0

    def part(self, offset: int, nbytes: int) -> Buffer:
        """So many bytes of it; the offset is a multiple of `SLICE_ALIGNMENT_BYTES`."""
        return Buffer(nbytes, self.handle, self.offset + offset)


@dataclass(frozen=True, slots=True)
class Copy:
    """A part of a buffer to bring back; offset and size are multiples of 4."""

    buffer: Buffer
    nbytes: int
    offset: int = 0


class Prepared:
    """Dispatches that are ready to run, as their target holds them."""

    __slots__ = ("_kept", "calls")

    def __init__(self, calls: list[Any], kept: list[Any]) -> None:
        self.calls = calls
        self._kept = kept

    def __add__(self, other: Prepared) -> Prepared:
        return Prepared(self.calls + other.calls, self._kept + other._kept)


class Readback(Protocol):
    """What a submission brings back, once it is done."""

    def result(self) -> list[NDArray[np.float32]]:
        """Wait, and give one flat float32 array of its own per copy; `.view` for other types.

        Raises:
            DeviceError: The device was lost or is out of memory.
        """


class ComputeTarget(Protocol):
    """Where a program runs. All methods may be called from any thread."""

    @property
    def adapter(self) -> Adapter:
        """What it is."""

    @property
    def largest_buffer_bytes(self) -> int:
        """Of one buffer that a kernel reads whole."""

    def buffer(self, nbytes: int) -> Buffer:
        """Zeroed memory of at least so many bytes.

        Raises:
            DeviceError: There is no more.
        """

    def upload(self, buffer: Buffer, values: NDArray[Any]) -> None:
        """Fill the buffer from its start; done before whatever is run after this call."""

    def prepare(self, dispatches: Sequence[Dispatch], buffers: Sequence[Buffer]) -> Prepared:
        """Make these ready.

        Args:
            dispatches: In the order they shall run.
            buffers: The plan's buffers by number.
        """

    def run(self, prepared: Prepared, copies: Sequence[Copy] = ()) -> Readback:
        """Begin the dispatches, then copy these buffers back; returns at once."""
