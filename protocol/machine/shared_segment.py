"""Exchange gradients between two processes of one user on one machine through shared memory.

A connection has two memory files, one for each direction: the sender writes and sends the offset,
the receiver reads and returns the offset when it is done. The listening side creates both files and
passes their descriptors over the Unix socket (unix(7), SCM_RIGHTS). The files have no name, cannot
be truncated, and disappear with the last process that maps them. The coordinator's file is
read-only for workers.

A process that dies while writing has not sent the offset yet. The data behind the offsets that it
has sent is complete, and stays as long as the other side maps it.
"""

from __future__ import annotations

import os
import socket
from collections import Counter, deque
from contextlib import suppress
from typing import Final
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from protocol.base import limits
from protocol.base.errors import OutOfOrder
from protocol.machine.shared_memory import Extent, SharedMemory

Bytes = NDArray[np.uint8]
MIN_SHARED_BYTES: Final = 32 * 1024
"""Minimum length of a body in shared memory; shorter bodies are cheaper to send over the socket."""
_MAX_OFFSETS: Final = 64
"""Maximum number of offsets returned in one message."""


def new_segment_owner() -> SegmentOwner | None:
    """Create the coordinator's memory file; None if the system lacks memory files or addresses."""
    if not (hasattr(os, "memfd_create") and hasattr(socket, "send_fds")):
        return None
    try:
        return SegmentOwner()
    except OSError:
        return None


class SharedSegment:
    """One side of a connection with shared memory.

    Attributes:
        min_shared_bytes: Minimum length of a body in shared memory; shorter bodies use the socket.

    Args:
        send_memory: Memory that this side writes and the other side reads.
        receive_memory: Memory that the other side writes and this side reads.
        max_copied_bytes: Maximum size of the copies that wait to be read.
    """

    def __init__(
        self, send_memory: SharedMemory, receive_memory: SharedMemory, max_copied_bytes: int
    ) -> None:
        self.min_shared_bytes = MIN_SHARED_BYTES
        self._send_memory = send_memory
        self._receive_memory = receive_memory
        self._max_copied_bytes = max_copied_bytes
        self._mapped: dict[int, int] = {}
        self._mapped_bytes = 0
        self._copied_bytes = 0
        self._lent: dict[int, Bytes] = {}
        self._lend_counts: Counter[int] = Counter()
        self._unneeded: deque[Extent] = deque()

    def copy(self, raw: memoryview) -> Bytes | None:
        """Copy bytes into memory that the other side can read; freed with the last view.

        Returns:
            The copy; None if too many copies wait to be read already.

        Raises:
            SharedMemoryFull: There is not enough memory.
        """
        if self._copied_bytes + len(raw) > self._max_copied_bytes:
            return None
        self._copied_bytes += len(raw)
        extent = self._send_memory.store(np.frombuffer(raw, np.uint8))
        return self._send_memory.lease(extent, self._give_back_copy, np.uint8)

    def _give_back_copy(self, extent: Extent) -> None:
        self._copied_bytes -= extent.length
        self._send_memory.give_back(extent)

    def lend(self, values: Bytes) -> int | None:
        """Return the offset of an array in this side's memory, and keep it until the other side
        returns it; None for an array elsewhere."""
        extent = self._send_memory.extent_of(values)
        if extent is None:
            return None
        self._lent[extent.offset] = values
        self._lend_counts[extent.offset] += 1
        return extent.offset

    def release(self, offsets: tuple[int, ...]) -> None:
        """Release arrays that the other side has read.

        Raises:
            OutOfOrder: An offset was not lent.
        """
        for offset in offsets:
            if offset not in self._lent:
                raise OutOfOrder(f"memory at {offset} was not lent")
            self._lend_counts[offset] -= 1
            if not self._lend_counts[offset]:
                del self._lent[offset], self._lend_counts[offset]

    def borrow(self, offset: int, length: int) -> Bytes:
        """Return an array in the other side's memory; `collect_unneeded` reports it after its last
        view.

        Raises:
            OutOfOrder: The extent is outside the memory.
        """
        extent = Extent(offset, length)
        self._receive_memory.check(extent)
        return self._receive_memory.lease(extent, self._on_last_view, np.uint8)

    def _on_last_view(self, extent: Extent) -> None:
        if not self._keep_mapped(extent):
            self._receive_memory.drop_pages(extent)
        self._unneeded.append(extent)

    def _keep_mapped(self, extent: Extent) -> bool:
        """Count an extent that has been read as mapped; return False if that exceeds the limit."""
        unmapped_bytes = extent.length - self._mapped.get(extent.offset, 0)
        if unmapped_bytes <= 0:
            return True
        if self._mapped_bytes + unmapped_bytes > limits.SEGMENT_MAPPED_BYTES:
            return False
        self._mapped[extent.offset] = extent.length
        self._mapped_bytes += unmapped_bytes
        return True

    def collect_unneeded(self, at_least: int = 1) -> tuple[int, ...]:
        """Return, once each, the offsets of borrowed arrays that are no longer used.

        Empty if there are fewer than `at_least`.
        """
        if len(self._unneeded) < at_least:
            return ()
        offsets: list[int] = []
        with suppress(IndexError):
            while len(offsets) < _MAX_OFFSETS:
                offsets.append(self._unneeded.popleft().offset)
        return tuple(offsets)


class SegmentOwner:
    """The coordinator's memory file, which all its workers on this machine map."""

    def __init__(self) -> None:
        self._send_memory = SharedMemory(is_sealed=True, keep_bytes=limits.SEGMENT_AVERAGES_BYTES)
        self._averages_bytes = 0
        self._readable = os.open(
            f"/proc/self/fd/{self._send_memory.fd}", os.O_RDONLY | os.O_CLOEXEC
        )

    def new_worker_segment(self) -> tuple[SharedSegment, list[int]]:
        """Create the segment of a connection to a worker.

        Returns:
            The segment, and the descriptors to send to the worker: of the memory that the worker
            may read, and of the memory that it may write. Close the second once it is sent.

        Raises:
            OSError: There are no more descriptors.
        """
        copies = SharedMemory(is_sealed=True)
        memory = SharedSegment(self._send_memory, copies, limits.SEGMENT_COPIES_BYTES)
        return memory, [self._readable, copies.fd]

    def allocate(self, elements: int) -> NDArray[np.float32] | None:
        """Allocate a flat float32 array that is sent without a copy; None if the limit is reached.

        Raises:
            SharedMemoryFull: There is not enough memory.
        """
        if self._averages_bytes + 4 * elements > limits.SEGMENT_AVERAGES_BYTES:
            return None
        extent = self._send_memory.allocate(4 * elements)
        self._averages_bytes += extent.length
        return self._send_memory.lease(extent, self._give_back)

    def _give_back(self, extent: Extent) -> None:
        self._averages_bytes -= extent.length
        self._send_memory.give_back(extent)

    def trim(self) -> None:
        """Return unused memory to the system, for arrays of other sizes."""
        self._send_memory.trim()

    def close(self) -> None:
        """Close the descriptors; mapped memory stays mapped."""
        os.close(self._readable)
        self._send_memory.close()


def open_segment(descriptors: list[int]) -> SharedSegment | None:
    """Create a worker's segment from received descriptors; None if there are not two.

    Raises:
        OSError: The address space is too small.
    """
    if len(descriptors) != 2:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    read_descriptor, write_descriptor = descriptors
    try:
        receive_memory = SharedMemory(read_descriptor, is_writable=False)
    except OSError:
        os.close(write_descriptor)
        raise
    receive_memory.close()
    send_memory = SharedMemory(write_descriptor)
    segment = SharedSegment(send_memory, receive_memory, limits.SEGMENT_SUMS_BYTES)
    finalize(segment, send_memory.close)
    return segment
