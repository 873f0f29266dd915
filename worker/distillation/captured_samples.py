"""Read the samples of a capture, one row group of a file at a time.

Only a few row groups are in memory, whatever the size of the capture. A file may be missing at
first, but must arrive before one of its samples is read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.base.errors import DataError
from protocol.datasets.capture_index import CaptureIndex, read_index
from protocol.datasets.logits_file import LogitsFile, Records, record_dtype

_GROUPS_IN_MEMORY: Final = 4
"""A microbatch may end in the next row group, and evaluation reads other row groups between
microbatches."""


class CapturedSamples:
    """The samples of a capture, numbered from 0 in the order of its files.

    Attributes:
        index: The capture's index.

    Raises:
        DataError: There is no capture in the directory.
    """

    def __init__(self, directory: Path) -> None:
        self.index: CaptureIndex = read_index(directory)
        self._directory = directory
        groups = [n for file in self.index.files for n in file.row_groups]
        self._group_starts = np.cumsum([0, *groups])
        self._group_locations = [
            (number, group)
            for number, file in enumerate(self.index.files)
            for group in range(len(file.row_groups))
        ]
        self._current_file: tuple[int, LogitsFile] | None = None
        self._cached_groups: OrderedDict[int, Records] = OrderedDict()

    def read(self, samples: Sequence[int]) -> Records:
        """Return the records of these samples.

        Raises:
            DataError: A file is missing, damaged, or belongs to another capture.
        """
        indices = np.asarray(samples, np.int64)
        groups = self._groups_of(indices)
        records = np.empty(len(indices), record_dtype(self.index.facts.layout))
        for group in dict.fromkeys(groups.tolist()):
            is_in_group = groups == group
            records[is_in_group] = self._read_group(group)[
                indices[is_in_group] - self._group_starts[group]
            ]
        return records

    def missing(self, samples: Sequence[int]) -> tuple[str, ...]:
        """Return the names of these samples' files that are not on this machine."""
        groups = self._groups_of(np.asarray(samples, np.int64))
        files = dict.fromkeys(self._group_locations[int(group)][0] for group in groups)
        names = [self.index.files[file].name for file in files]
        return tuple(name for name in names if not (self._directory / name).exists())

    def _groups_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._group_starts, numbers, side="right") - 1

    def _read_group(self, number: int) -> Records:
        if number in self._cached_groups:
            self._cached_groups.move_to_end(number)
            return self._cached_groups[number]
        file, group = self._group_locations[number]
        records = self._open_file(file).records(group)
        self._cached_groups[number] = records
        while len(self._cached_groups) > _GROUPS_IN_MEMORY:
            self._cached_groups.popitem(last=False)
        return records

    def _open_file(self, number: int) -> LogitsFile:
        if self._current_file is None or self._current_file[0] != number:
            if self._current_file is not None:
                self._current_file[1].close()
                self._current_file = None
            entry = self.index.files[number]
            path = self._directory / entry.name
            logits = LogitsFile(path)
            if logits.facts != self.index.facts or logits.row_groups != entry.row_groups:
                raise DataError(
                    f"expected the file that the capture's index lists at {str(path)!r}, got "
                    "another; restore it from a copy, or capture again"
                )
            self._current_file = number, logits
        return self._current_file[1]
