"""Memory that the processes of one host share, so that a gradient crosses none of them twice.

An anonymous file of memory (memfd_create(2)) that children inherit: it has no name, needs no room
in /dev/shm, and is gone with the last process that maps it, however that one ends. The file is as
large as an address space allows and has pages where something was put alone. One process hands
out its parts; all others are told where they lie.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

try:
    import fcntl
except ImportError:  # another system than Linux, which has no such memory either
    fcntl = None  # type: ignore[assignment]

from protocol.base.errors import OutOfPlace, SharedMemoryFull
from protocol.host.memory import read_memory

_SPAN_BYTES: Final = 1 << 40
"""Of addresses, not of memory."""
_PAGE_BYTES: Final = mmap.PAGESIZE


class Extent(NamedTuple):
    """Where something lies in a shared memory, in bytes."""

    offset: int
    length: int


class SharedMemory:
    """One file of memory, mapped here.

    Attributes:
        fd: To be inherited by a child, which maps it as `SharedMemory(fd)`.

    Args:
        fd: Of one that is there already; None makes a new one.
        writable: Whether this process may write to it.
        sealed: Whether nobody may make it shorter: what lay behind its end would be mapped still,
            and to read it there would end the process.
        keep_bytes: Of parts that nobody uses; more goes back to the system.
    """

    def __init__(
        self,
        fd: int | None = None,
        *,
        writable: bool = True,
        sealed: bool = False,
        keep_bytes: int = _SPAN_BYTES,
    ) -> None:
        if fd is None:
            fd = os.memfd_create("samestep", os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING * sealed))
            try:
                os.ftruncate(fd, _SPAN_BYTES)
            except OSError:  # a limit of files, such as that of ulimit -f
                os.close(fd)
                raise
        if sealed:
            stays = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, stays)
        self.fd = fd
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        try:
            self._map = mmap.mmap(fd, _SPAN_BYTES, mmap.MAP_SHARED, access)
        except OSError:  # a limit of addresses, such as that of ulimit -v
            os.close(fd)
            raise
        self._map.madvise(mmap.MADV_DONTDUMP)
        self._writable = writable
        self._whole = np.frombuffer(self._map, np.uint8)
        self._start = self._whole.ctypes.data
        self._lock = threading.Lock()
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._given_back: deque[Extent] = deque()
        self._once: set[int] = set()
        self._keep_bytes = keep_bytes
        self._free_bytes = 0

    def new(self, length: int) -> Extent:
        """A part of the memory for so many bytes, which nobody uses.

        Raises:
            SharedMemoryFull: There is no more memory.
        """
        size = max(1, -(-length // _PAGE_BYTES)) * _PAGE_BYTES
        with self._lock:
            self._sort_out()
            if self._free.get(size):
                self._free_bytes -= size
                return Extent(self._free[size].pop(), length)
            _reserve(self.fd, self._end, size)
            offset, self._end = self._end, self._end + size
        return Extent(offset, length)

    def trim(self) -> None:
        """The system has back the pages of all parts that nobody uses."""
        with self._lock:
            self._sort_out()
            for length, offsets in self._free.items():
                for offset in offsets:
                    self._map.madvise(mmap.MADV_REMOVE, offset, length)
            self._free.clear()
            self._free_bytes = 0

    def _sort_out(self) -> None:
        """What finalizers have given back: they may run anywhere, and so take no lock."""
        while self._given_back:
            old = self._given_back.popleft()
            if old.offset in self._once or self._free_bytes + old.length > self._keep_bytes:
                self._once.discard(old.offset)
                self._map.madvise(mmap.MADV_REMOVE, old.offset, old.length)
            else:
                self._free_bytes += old.length
                self._free.setdefault(old.length, []).append(old.offset)

    def give_back(self, place: Extent) -> None:
        """Nobody uses this part any more. Any thread may say so, at any time."""
        size = max(1, -(-place.length // _PAGE_BYTES)) * _PAGE_BYTES
        self._given_back.append(Extent(place.offset, size))

    def check(self, place: Extent) -> None:
        """See whether a place that another process has told may be one.

        Raises:
            OutOfPlace: It lies outside, or no float32 can lie there.
        """
        if place.offset % 4 or place.offset + place.length > _SPAN_BYTES:
            raise OutOfPlace(f"expected a place in shared memory, got {place}")

    def forget(self, place: Extent) -> None:
        """This process has read it: its pages stay where they are and count for it no more."""
        start = -(-place.offset // _PAGE_BYTES) * _PAGE_BYTES
        length = (place.offset + place.length - start) // _PAGE_BYTES * _PAGE_BYTES
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def close(self) -> None:
        """No child is to inherit it any more; it stays mapped as long as it is used."""
        os.close(self.fd)

    def array(self, place: Extent, dtype: type[np.generic] = np.float32) -> NDArray[Any]:
        """The part as a flat array; who has it given back is another matter."""
        found: NDArray[Any] = self._whole[place.offset : place.offset + place.length].view(dtype)
        return found

    def leased(
        self, place: Extent, give_back: Any, dtype: type[np.generic] = np.float32
    ) -> NDArray[Any]:
        """The part as a flat array; `give_back(place)` is called once no view of it is left."""
        return np.asarray(_Lease(self._start, place, give_back, dtype, self))

    def new_array(self, elements: int, *, once: bool = False) -> NDArray[np.float32]:
        """Flat float32 in a part of its own, which is given back with the last view of it."""
        return self.leased(self._new(4 * elements, once=once), self.give_back)

    def _new(self, length: int, *, once: bool) -> Extent:
        place = self.new(length)
        if once:
            self._once.add(place.offset)
        return place

    def place_of(self, values: NDArray[Any]) -> Extent | None:
        """Where a contiguous array lies in it; None if it lies elsewhere."""
        offset = values.ctypes.data - self._start
        inside = 0 <= offset < _SPAN_BYTES and values.flags.c_contiguous
        return Extent(offset, values.nbytes) if inside else None

    def put(self, values: NDArray[Any], *, once: bool = False) -> Extent:
        """A copy of a flat array; `once`: the system is to have its memory back afterwards."""
        place = self._new(values.nbytes, once=once)
        np.copyto(self.array(place, values.dtype.type), values)
        return place


class _Lease:
    """What all views of a part have as their base."""

    def __init__(
        self,
        start: int,
        place: Extent,
        give_back: Any,
        dtype: type[np.generic],
        owner: SharedMemory,
    ) -> None:
        self._place = place
        self._give_back = give_back
        self._owner = owner  # the mapping outlives its views
        kind = np.dtype(dtype)
        self.__array_interface__ = {
            "data": (start + place.offset, not owner._writable),  # noqa: SLF001 -- one file, one idea
            "shape": (place.length // kind.itemsize,),
            "typestr": kind.str,
            "version": 3,
        }

    def __del__(self) -> None:
        self._give_back(self._place)


def _reserve(fd: int, offset: int, size: int) -> None:
    """Have the kernel give the pages now: later, a write would end the process instead."""
    try:
        free = read_memory().most
    except (OSError, ValueError):
        free = size
    # Reserving more than there is would have the kernel end some process of this machine.
    if size > free:
        raise SharedMemoryFull(offset + size, free)
    try:
        os.posix_fallocate(fd, offset, size)
    except OSError:
        raise SharedMemoryFull(offset + size, free) from None
