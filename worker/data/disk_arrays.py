"""Arrays in an unnamed temporary file, because tokens may be larger than memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from protocol.datasets.disk_texts import DiskFile
from protocol.exact.digest import StreamedArray

_CHUNK_ELEMENTS: Final = 1 << 18


class DiskArrays(Sequence[NDArray[Any]]):
    """A sequence of flat arrays, in the order of `append`.

    Args:
        stored_dtype: The dtype on disk, little-endian.
        read_dtype: The dtype of the arrays that reads return.
    """

    def __init__(self, stored_dtype: DTypeLike, read_dtype: DTypeLike) -> None:
        self._stored_dtype = np.dtype(stored_dtype)
        self._read_dtype = np.dtype(read_dtype)
        self._file = DiskFile()
        self._ends = array("q", [0])

    def append(self, values: NDArray[Any]) -> None:
        """Append an array, whose values must be representable in the dtype on disk."""
        self._file.append(values.astype(self._stored_dtype).tobytes())
        self._ends.append(self._ends[-1] + len(values))

    def extend(self, values: NDArray[Any]) -> None:
        """Extend the last array by these values."""
        self._file.append(values.astype(self._stored_dtype).tobytes())
        self._ends[-1] += len(values)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def elements(self) -> int:
        """Return the total number of elements."""
        return self._ends[-1]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the length of each array."""
        ends = np.array(self._ends, np.int64)
        return ends[1:] - ends[:-1]

    @property
    def max_element(self) -> int:
        """Return the largest element; there must be at least one."""
        return max(int(chunk.max()) for chunk in self.chunks())

    @property
    def starts(self) -> NDArray[np.int64]:
        """Return the offset of each array in the concatenation."""
        return np.array(self._ends[:-1], np.int64)

    def read(self, lo: int, hi: int) -> NDArray[Any]:
        """Return a copy of the elements [lo, hi) of the concatenation."""
        size = self._stored_dtype.itemsize
        return np.frombuffer(self._file.read(lo * size, hi * size), self._stored_dtype).astype(
            self._read_dtype
        )

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Yield all elements, at most `_CHUNK_ELEMENTS` at a time."""
        for lo in range(0, self.elements, _CHUNK_ELEMENTS):
            yield self.read(lo, min(lo + _CHUNK_ELEMENTS, self.elements))

    @overload
    def __getitem__(self, number: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[NDArray[Any]]: ...
    def __getitem__(self, number: int | slice) -> NDArray[Any] | Sequence[NDArray[Any]]:
        if isinstance(number, slice):
            return [self[index] for index in range(len(self))[number]]
        index = range(len(self))[number]
        return self.read(self._ends[index], self._ends[index + 1])


def concatenate(stores: Sequence[DiskArrays]) -> StreamedArray:
    """Return the concatenated arrays of several stores, as an int64 stream for a digest."""
    elements = sum(store.elements for store in stores)
    chunks = (chunk.astype(np.int64) for store in stores for chunk in store.chunks())
    return StreamedArray(np.dtype(np.int64), (elements,), chunks)
