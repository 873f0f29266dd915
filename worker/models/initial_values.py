"""A copy of a model's initial values, for a restart of the run from its initial state.

A worker needs these values when its run begins, and again only if the coordinator restarts that run
from the beginning. Large values are stored in an unnamed temporary file: in main memory, a model
that is trained in full would take 4 more bytes per parameter for the whole run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from backends.base.interface import Array
from protocol.base import limits
from protocol.base.errors import StorageFailed
from protocol.datasets.disk_texts import DiskFile

_IN_MEMORY_BYTES: Final = 64 * limits.MIB


class InitialValues:
    """Initial values, one flat float32 array per block.

    Args:
        arrays: The values, which the caller must not change.
        in_memory_bytes: Size above which the values move to disk. If the disk has no space, they
            stay in memory.
    """

    def __init__(self, arrays: Sequence[Array], in_memory_bytes: int = _IN_MEMORY_BYTES) -> None:
        self._arrays = list(arrays)
        self._elements = [array.size for array in arrays]
        self._file: DiskFile | None = None
        if sum(array.nbytes for array in arrays) > in_memory_bytes:
            self._move_to_disk()

    def read(self) -> list[Array]:
        """Return a copy of each array.

        Raises:
            StorageFailed: The temporary file cannot be read.
        """
        if self._file is None:
            return [array.copy() for array in self._arrays]
        copies, lo = [], 0
        for elements in self._elements:
            hi = lo + 4 * elements
            copies.append(np.frombuffer(self._file.read(lo, hi), np.float32).copy())
            lo = hi
        return copies

    def _move_to_disk(self) -> None:
        try:
            file = DiskFile()
            for array in self._arrays:
                file.append(array.data.cast("B"))
            file.flush()
        except StorageFailed:
            return
        self._file = file
        self._arrays.clear()
