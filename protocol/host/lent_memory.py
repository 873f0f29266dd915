"""Gradients between two processes of one user on one machine: they lie in memory that both map.

A way has two such memories, each with one side that puts something there and says where it lies,
and another that reads it there and says when it needs it no more. Both are made by the side that
listens, and have no name: they are given away over the Unix socket (unix(7), SCM_RIGHTS), may not
be made shorter by anyone, and are gone with the last process that maps them. What the coordinator
lends may be read there and not written to.

A side that ends in the middle of writing has told nobody of what it wrote; what it has told of is
whole, and stays as long as the other side maps it.
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
from protocol.base.errors import OutOfPlace
from protocol.host.shared_memory import Extent, SharedMemory

Bytes = NDArray[np.uint8]
LEAST_BYTES: Final = 32 * 1024
"""What is shorter goes through the socket: that takes less than to say where it lies."""
_MOST_PLACES: Final = 64
"""That are told at once to be needed no more."""


def new_lender() -> Lender | None:
    """Memory to lend to others; None where this system has none, or no addresses for it."""
    if not (hasattr(os, "memfd_create") and hasattr(socket, "send_fds")):
        return None
    try:
        return Lender()
    except OSError:
        return None


class LentMemory:
    """One side of a way.

    Attributes:
        least_bytes: What is shorter goes through the socket.

    Args:
        own: Where this side puts what it sends.
        other: Where the other side does.
        most_copied_bytes: So much of what was copied there may wait to be read.
    """

    def __init__(self, own: SharedMemory, other: SharedMemory, most_copied_bytes: int) -> None:
        self.least_bytes = LEAST_BYTES
        self._own = own
        self._other = other
        self._most_copied_bytes = most_copied_bytes
        self._mapped: dict[int, int] = {}
        self._mapped_bytes = 0
        self._copied_bytes = 0
        self._lent: dict[int, Bytes] = {}
        self._times: Counter[int] = Counter()
        self._unneeded: deque[Extent] = deque()

    def copy(self, raw: memoryview) -> Bytes | None:
        """A copy of some bytes where the other side can read them, as long as there is a view.
        None if much waits to be read there already.

        Raises:
            SharedMemoryFull: There is no room.
        """
        if self._copied_bytes + len(raw) > self._most_copied_bytes:
            return None
        self._copied_bytes += len(raw)
        place = self._own.put(np.frombuffer(raw, np.uint8))
        return self._own.leased(place, self._give_back_copy, np.uint8)

    def _give_back_copy(self, place: Extent) -> None:
        self._copied_bytes -= place.length
        self._own.give_back(place)

    def lend(self, values: Bytes) -> int | None:
        """The place of what lies in this side's memory; it stays until the other side says that it
        needs it no more. None for what lies elsewhere."""
        place = self._own.place_of(values)
        if place is None:
            return None
        self._lent[place.offset] = values
        self._times[place.offset] += 1
        return place.offset

    def returned(self, offsets: tuple[int, ...]) -> None:
        """The other side needs these no more.

        Raises:
            OutOfPlace: It was not lent them.
        """
        for offset in offsets:
            if offset not in self._lent:
                raise OutOfPlace(f"memory at {offset} was not lent")
            self._times[offset] -= 1
            if not self._times[offset]:
                del self._lent[offset], self._times[offset]

    def borrow(self, offset: int, length: int) -> Bytes:
        """What the other side has put there; it is needed until no view of it is left.

        Raises:
            OutOfPlace: It lies outside of the memory.
        """
        place = Extent(offset, length)
        self._other.check(place)
        return self._other.leased(place, self._read, np.uint8)

    def _read(self, place: Extent) -> None:
        if not self._stays_mapped(place):
            self._other.forget(place)
        self._unneeded.append(place)

    def _stays_mapped(self, place: Extent) -> bool:
        more = place.length - self._mapped.get(place.offset, 0)
        if more <= 0:
            return True
        if self._mapped_bytes + more > limits.LENT_MAPPED_BYTES:
            return False
        self._mapped[place.offset] = place.length
        self._mapped_bytes += more
        return True

    def unneeded(self, at_least: int = 1) -> tuple[int, ...]:
        """What was borrowed and is needed no more, if that is so many places."""
        if len(self._unneeded) < at_least:
            return ()
        found: list[int] = []
        with suppress(IndexError):
            while len(found) < _MOST_PLACES:
                found.append(self._unneeded.popleft().offset)
        return tuple(found)


class Lender:
    """Lends one memory to many: what all are sent lies there once."""

    def __init__(self) -> None:
        self._own = SharedMemory(sealed=True, keep_bytes=limits.LENT_AVERAGES_BYTES)
        self._averages_bytes = 0
        self._readable = os.open(f"/proc/self/fd/{self._own.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def to_one(self) -> tuple[LentMemory, list[int]]:
        """This side of a new way, and the descriptors for the other side: of what it may read, and
        of what it may write; the second is to be closed once it is sent.

        Raises:
            OSError: There are no more descriptors.
        """
        theirs = SharedMemory(sealed=True)
        memory = LentMemory(self._own, theirs, limits.LENT_COPIES_BYTES)
        return memory, [self._readable, theirs.fd]

    def allocate(self, elements: int) -> NDArray[np.float32] | None:
        """Flat float32 that is lent without a copy; None if there is much of that already.

        Raises:
            SharedMemoryFull: There is no room.
        """
        if self._averages_bytes + 4 * elements > limits.LENT_AVERAGES_BYTES:
            return None
        place = self._own.new(4 * elements)
        self._averages_bytes += place.length
        return self._own.leased(place, self._give_back)

    def _give_back(self, place: Extent) -> None:
        self._averages_bytes -= place.length
        self._own.give_back(place)

    def trim(self) -> None:
        """What nobody uses now goes back to the system: other sizes are wanted from now on."""
        self._own.trim()

    def close(self) -> None:
        """Nobody is lent anything any more; what is mapped stays."""
        os.close(self._readable)
        self._own.close()


def borrowed(descriptors: list[int]) -> LentMemory | None:
    """The other side of a way, of the descriptors that were sent; None if they are not two.

    Raises:
        OSError: There are no addresses for so much.
    """
    if len(descriptors) != 2:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    readable, writable = descriptors
    try:
        other = SharedMemory(readable, writable=False)
    except OSError:
        os.close(writable)
        raise
    other.close()
    own = SharedMemory(writable)
    memory = LentMemory(own, other, limits.LENT_SUMS_BYTES)
    finalize(memory, own.close)
    return memory
