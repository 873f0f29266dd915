"""Release pages of mapped files from this process's memory once they have been read.

A model's file is mapped and read once, weight by weight. Its pages stay resident, and count as the
process's memory, until the system needs them for something else.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

_PAGEMAP: Final = Path("/proc/self/pagemap")
_MAPS: Final = Path("/proc/self/maps")
_ENTRY_BYTES: Final = 8
_RESIDENT_FILE_PAGE: Final = 1 << 63 | 1 << 61
"""Bits of an entry of proc_pid_pagemap(5): the page is resident, and belongs to a file or is shared
(it is not a private copy)."""


def release_mapped_pages(address: int, nbytes: int) -> int:
    """Release the pages of mapped files in a range; the next access reads them again.

    Other memory and private copies of changed pages stay. All pages stay if the system does not
    report which of them belong to files.

    Args:
        address: Address of the first byte.
        nbytes: Length of the range.

    Returns:
        The number of bytes released.
    """
    page_bytes = mmap.PAGESIZE
    first, end = -(-address // page_bytes), (address + nbytes) // page_bytes
    released_bytes = 0
    for lo, hi in _file_page_runs(_read_pagemap(first, end)):
        if _release((first + lo) * page_bytes, (hi - lo) * page_bytes):
            released_bytes += (hi - lo) * page_bytes
    return released_bytes


def release_mapped_files(directory: Path) -> None:
    """Release the pages of all mapped files below a directory; see `release_mapped_pages`."""
    prefix = f"{directory.resolve()}{os.sep}"
    for lo, hi, _, path in _mappings():
        if path.startswith(prefix):
            release_mapped_pages(lo, hi - lo)


def is_mapped_file(address: int) -> bool:
    """Return whether memory at an address is mapped from a file; False if the system does not
    report it."""
    return any(lo <= address < hi and inode for lo, hi, inode, _ in _mappings())


def _mappings() -> Iterator[tuple[int, int, int, str]]:
    """Yield the first address, the end, the inode (0 without a file) and the path of each mapping
    of this process."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        addresses, _, _, _, inode, *path = line.split(maxsplit=5)
        lo, _, hi = addresses.partition("-")
        yield int(lo, 16), int(hi, 16), int(inode), "".join(path)


def _read_pagemap(first: int, end: int) -> NDArray[np.uint64]:
    """Return the pagemap entries of pages [first, end); fewer if the system does not return all."""
    no_entries = np.zeros(0, np.uint64)
    if end <= first:
        return no_entries
    try:
        with _PAGEMAP.open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), (end - first) * _ENTRY_BYTES, first * _ENTRY_BYTES)
    except OSError:
        return no_entries
    return np.frombuffer(content, np.uint64, len(content) // _ENTRY_BYTES)


def _file_page_runs(entries: NDArray[np.uint64]) -> list[tuple[int, int]]:
    """Return the runs [lo, hi) of consecutive pages that are resident and belong to a file."""
    bits = np.uint64(_RESIDENT_FILE_PAGE)
    edges = np.flatnonzero(np.diff((entries & bits) == bits, prepend=False, append=False))
    return [(int(lo), int(hi)) for lo, hi in edges.reshape(-1, 2)]


def _release(address: int, nbytes: int) -> bool:
    try:
        advise = ctypes.CDLL(None, use_errno=True).madvise
    except (AttributeError, OSError, TypeError):
        return False
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(advise(address, nbytes, mmap.MADV_DONTNEED) == 0)
