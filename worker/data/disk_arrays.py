"""Arrays one after the other on disk, in a file of their own without a name, as tokens are kept."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from protocol.data.disk_texts import DiskFile
from protocol.exact.digest import Streamed


class DiskArrays(Sequence[NDArray[Any]]):
    """Flat arrays in the order in which they were appended.

    Args:
        kept: The type on disk, little-endian.
        given: The type in which they are read.
    """

    def __init__(self, kept: DTypeLike, given: DTypeLike) -> None:
        self._kept = np.dtype(kept)
        self._given = np.dtype(given)
        self._file = DiskFile()
        self._ends = array("q", [0])

    def append(self, values: NDArray[Any]) -> None:
        """Keep one more, of values that the type on disk holds."""
        self._file.append(values.astype(self._kept).tobytes())
        self._ends.append(self._ends[-1] + len(values))

    def extend(self, values: NDArray[Any]) -> None:
        """Add these to the one that was appended last."""
        self._file.append(values.astype(self._kept).tobytes())
        self._ends[-1] += len(values)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def elements(self) -> int:
        """Of all together."""
        return self._ends[-1]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Of each."""
        ends = np.array(self._ends, np.int64)
        return ends[1:] - ends[:-1]

    @property
    def highest(self) -> int:
        """Of all elements, of which there is one."""
        return max(int(piece.max()) for piece in self.pieces())

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each begins among all."""
        return np.array(self._ends[:-1], np.int64)

    def read(self, lo: int, hi: int) -> NDArray[Any]:
        """The elements [lo, hi) of all, as if they were one array; the caller's own."""
        size = self._kept.itemsize
        return np.frombuffer(self._file.read(lo * size, hi * size), self._kept).astype(self._given)

    def pieces(self) -> Iterator[NDArray[Any]]:
        """All of them, in order, some at a time."""
        step = 1 << 18
        for lo in range(0, self.elements, step):
            yield self.read(lo, min(lo + step, self.elements))

    @overload
    def __getitem__(self, number: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[NDArray[Any]]: ...
    def __getitem__(self, number: int | slice) -> NDArray[Any] | Sequence[NDArray[Any]]:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        at = range(len(self))[number]
        return self.read(self._ends[at], self._ends[at + 1])


def joined(arrays: Sequence[DiskArrays]) -> Streamed:
    """All of these, one after the other, for a digest."""
    elements = sum(each.elements for each in arrays)
    pieces = (piece.astype(np.int64) for each in arrays for piece in each.pieces())
    return Streamed(np.dtype(np.int64), (elements,), pieces)
