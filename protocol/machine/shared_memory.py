"""Memory that several processes of a machine map, so that gradients are not copied between them.

Child processes inherit an anonymous memory file (memfd_create(2)). It has no name, takes no space
in /dev/shm, and disappears with the last process that maps it, however that process ends. The file
spans a large address range, but only used parts have pages. One process allocates extents, and
sends their offsets to the others.
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
except ImportError:  # only Linux has such memory
    fcntl = None  # type: ignore[assignment]

from protocol.base.errors import OutOfOrder, SharedMemoryFull
from protocol.machine.memory import read_memory

_SPAN_BYTES: Final = 1 << 40
"""Size of the address range; only used pages take memory."""
_PAGE_BYTES: Final = mmap.PAGESIZE


class Extent(NamedTuple):
    """Offset and length of an allocation, in bytes."""

    offset: int
    length: int


class SharedMemory:
    """A memory file, mapped into this process.

    Attributes:
        fd: Descriptor for a child to inherit, which maps it as `SharedMemory(fd)`.

    Args:
        fd: Descriptor of an existing memory file; None creates one.
        is_writable: Whether this process may write to it.
        is_sealed: Whether to forbid truncation: reading past a truncated end kills the process.
        keep_bytes: Freed memory to keep for new arrays; the pages of the rest return to the system.
    """

    def __init__(
        self,
        fd: int | None = None,
        *,
        is_writable: bool = True,
        is_sealed: bool = False,
        keep_bytes: int = _SPAN_BYTES,
    ) -> None:
        if fd is None:
            fd = os.memfd_create("samestep", os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING * is_sealed))
            try:
                os.ftruncate(fd, _SPAN_BYTES)
            except OSError:  # a limit on file sizes, such as ulimit -f
                os.close(fd)
                raise
        if is_sealed:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        self.fd = fd
        access = mmap.PROT_READ | mmap.PROT_WRITE if is_writable else mmap.PROT_READ
        try:
            self._map = mmap.mmap(fd, _SPAN_BYTES, mmap.MAP_SHARED, access)
        except OSError:  # a limit on the address space, such as ulimit -v
            os.close(fd)
            raise
        self._map.madvise(mmap.MADV_DONTDUMP)
        self._is_writable = is_writable
        self._whole = np.frombuffer(self._map, np.uint8)
        self._start = self._whole.ctypes.data
        self._lock = threading.Lock()
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._freed_extents: deque[Extent] = deque()
        self._single_use_offsets: set[int] = set()
        self._keep_bytes = keep_bytes
        self._free_bytes = 0

    def allocate(self, length: int) -> Extent:
        """Allocate an unused extent of a number of bytes.

        Raises:
            SharedMemoryFull: There is not enough memory.
        """
        size = max(1, -(-length // _PAGE_BYTES)) * _PAGE_BYTES
        with self._lock:
            self._collect_freed()
            if self._free.get(size):
                self._free_bytes -= size
                return Extent(self._free[size].pop(), length)
            _reserve(self.fd, self._end, size)
            offset, self._end = self._end, self._end + size
        return Extent(offset, length)

    def trim(self) -> None:
        """Return the pages of all unused extents to the system."""
        with self._lock:
            self._collect_freed()
            for length, offsets in self._free.items():
                for offset in offsets:
                    self._map.madvise(mmap.MADV_REMOVE, offset, length)
            self._free.clear()
            self._free_bytes = 0

    def _collect_freed(self) -> None:
        """Process extents that finalizers have freed; a finalizer may run anywhere, so it takes no
        lock."""
        while self._freed_extents:
            freed = self._freed_extents.popleft()
            is_single_use = freed.offset in self._single_use_offsets
            if is_single_use or self._free_bytes + freed.length > self._keep_bytes:
                self._single_use_offsets.discard(freed.offset)
                self._map.madvise(mmap.MADV_REMOVE, freed.offset, freed.length)
            else:
                self._free_bytes += freed.length
                self._free.setdefault(freed.length, []).append(freed.offset)

    def give_back(self, extent: Extent) -> None:
        """Free an extent; thread-safe, and safe in finalizers."""
        size = max(1, -(-extent.length // _PAGE_BYTES)) * _PAGE_BYTES
        self._freed_extents.append(Extent(extent.offset, size))

    def check(self, extent: Extent) -> None:
        """Check an extent that another process has sent.

        Raises:
            OutOfOrder: The extent is outside the file, or not aligned to float32.
        """
        if extent.offset % 4 or extent.offset + extent.length > _SPAN_BYTES:
            raise OutOfOrder(f"expected an extent of shared memory, got {extent}")

    def drop_pages(self, extent: Extent) -> None:
        """Drop pages that this process has read, so that they no longer count as its memory."""
        start = -(-extent.offset // _PAGE_BYTES) * _PAGE_BYTES
        length = (extent.offset + extent.length - start) // _PAGE_BYTES * _PAGE_BYTES
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped while it is used."""
        os.close(self.fd)

    def array(self, extent: Extent, dtype: type[np.generic] = np.float32) -> NDArray[Any]:
        """Return an extent as a flat array; the caller frees the extent."""
        view: NDArray[Any] = self._whole[extent.offset : extent.offset + extent.length].view(dtype)
        return view

    def lease(
        self, extent: Extent, give_back: Any, dtype: type[np.generic] = np.float32
    ) -> NDArray[Any]:
        """Return an extent as a flat array; `give_back(extent)` is called once its last view is
        gone."""
        return np.asarray(_Lease(self._start, extent, give_back, dtype, self))

    def new_array(self, elements: int, *, is_single_use: bool = False) -> NDArray[np.float32]:
        """Allocate a flat float32 array that is freed with its last view.

        Args:
            elements: Length of the array.
            is_single_use: Whether its pages then return to the system, because no array of this
                size will follow.
        """
        extent = self.allocate(4 * elements)
        if is_single_use:
            self._single_use_offsets.add(extent.offset)
        return self.lease(extent, self.give_back)

    def extent_of(self, values: NDArray[Any]) -> Extent | None:
        """Return the extent of a contiguous array; None if it is elsewhere in memory."""
        offset = values.ctypes.data - self._start
        is_inside = 0 <= offset < _SPAN_BYTES and values.flags.c_contiguous
        return Extent(offset, values.nbytes) if is_inside else None

    def store(self, values: NDArray[Any]) -> Extent:
        """Copy a flat array into a new extent."""
        extent = self.allocate(values.nbytes)
        np.copyto(self.array(extent, values.dtype.type), values)
        return extent


class _Lease:
    """The base of all views of an extent; frees it when the last view is gone."""

    def __init__(
        self,
        start: int,
        extent: Extent,
        give_back: Any,
        dtype: type[np.generic],
        owner: SharedMemory,
    ) -> None:
        self._extent = extent
        self._give_back = give_back
        self._owner = owner  # the mapping outlives its views
        array_dtype = np.dtype(dtype)
        self.__array_interface__ = {
            "data": (start + extent.offset, not owner._is_writable),  # noqa: SLF001 -- of the same file
            "shape": (extent.length // array_dtype.itemsize,),
            "typestr": array_dtype.str,
            "version": 3,
        }

    def __del__(self) -> None:
        self._give_back(self._extent)


def _reserve(fd: int, offset: int, size: int) -> None:
    """Have the kernel allocate pages now: without memory for a page, a later write kills the
    process.

    Raises:
        SharedMemoryFull: There is not enough memory.
    """
    try:
        free = read_memory().available
    except (OSError, ValueError):
        free = size
    # Reserving more than is available would make the kernel kill some process of this machine.
    if size > free:
        raise SharedMemoryFull(offset + size, free)
    try:
        os.posix_fallocate(fd, offset, size)
    except OSError:
        raise SharedMemoryFull(offset + size, free) from None
