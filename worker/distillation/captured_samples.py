"""The samples of a capture as a task reads them: file by file, a row group at a time.

No more than a few row groups are in memory, whatever the size of the capture; its files need not be
here before a sample of theirs is read.
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
"""A microbatch may end in the next row group, and an evaluation reads others in between."""


class CapturedSamples:
    """Samples by their place: the first of the first file is 0.

    Attributes:
        index: Of the capture.

    Raises:
        DataError: There is no capture in the directory.
    """

    def __init__(self, directory: Path) -> None:
        self.index: CaptureIndex = read_index(directory)
        self._directory = directory
        groups = [n for file in self.index.files for n in file.row_groups]
        self._group_starts = np.cumsum([0, *groups])
        self._group_places = [
            (file, group)
            for file, each in enumerate(self.index.files)
            for group in range(len(each.row_groups))
        ]
        self._open: tuple[int, LogitsFile] | None = None
        self._read: OrderedDict[int, Records] = OrderedDict()

    def read(self, samples: Sequence[int]) -> Records:
        """The records of these samples.

        Raises:
            DataError: A file is missing, damaged, or another capture's.
        """
        places = np.asarray(samples, np.int64)
        groups = self._groups_of(places)
        found = np.empty(len(places), record_dtype(self.index.facts.layout))
        for group in dict.fromkeys(groups.tolist()):
            here = groups == group
            found[here] = self._group(group)[places[here] - self._group_starts[group]]
        return found

    def missing(self, samples: Sequence[int]) -> tuple[str, ...]:
        """The files of these samples that are not here."""
        groups = self._groups_of(np.asarray(samples, np.int64))
        files = dict.fromkeys(self._group_places[int(group)][0] for group in groups)
        names = [self.index.files[file].name for file in files]
        return tuple(name for name in names if not (self._directory / name).exists())

    def _groups_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._group_starts, places, side="right") - 1

    def _group(self, number: int) -> Records:
        if number in self._read:
            self._read.move_to_end(number)
            return self._read[number]
        file, group = self._group_places[number]
        records = self._file(file).records(group)
        self._read[number] = records
        while len(self._read) > _GROUPS_IN_MEMORY:
            self._read.popitem(last=False)
        return records

    def _file(self, number: int) -> LogitsFile:
        if self._open is None or self._open[0] != number:
            if self._open is not None:
                self._open[1].close()
                self._open = None
            listed = self.index.files[number]
            path = self._directory / listed.name
            logits = LogitsFile(path)
            if logits.facts != self.index.facts or logits.row_groups != listed.row_groups:
                raise DataError(
                    f"{str(path)!r} is not the file that the capture lists; restore it from a "
                    "copy, or capture again"
                )
            self._open = number, logits
        return self._open[1]
