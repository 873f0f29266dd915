"""An append-only file with the rows of the last steps, until they become a file of logits.

    frame     4 bytes   magic "SSCR"
              u64       step
              u64       content bytes
              32 bytes  BLAKE3 of step and content
    content   records (`protocol.datasets.logits_file`)

Parquet is unreadable without its end, so a crash would cost the whole file that is being written.
With this file it costs only the rows that were not committed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from coordinator.disk.append_file import AppendFile
from coordinator.disk.durable_file import storage_errors, sync_directory
from protocol.base.errors import StorageDamaged

Bytes = NDArray[np.uint8]

_MAGIC: Final = b"SSCR"
_HEAD: Final = struct.Struct("<4sQQ32s")
_STEP: Final = struct.Struct("<Q")


class _Frame(NamedTuple):
    step: int
    offset: int
    nbytes: int

    @property
    def content(self) -> slice:
        return slice(self.offset + _HEAD.size, self.end)

    @property
    def end(self) -> int:
        return self.offset + _HEAD.size + self.nbytes


class Spool:
    """The rows of the committed steps from `first` on; later rows are cut off.

    Args:
        path: The file; created if missing.
        first: The first step in the file.
        committed: Number of committed steps; the file must have all of them from `first` on.

    Raises:
        StorageDamaged: A committed step's rows are missing or damaged.
        StorageFailed: A read or write failed.
    """

    def __init__(self, path: Path, first: int, committed: int) -> None:
        self.path = path
        with storage_errors("open", path):
            if not path.exists():
                path.touch()
                sync_directory(path.parent)
            self._frames = [f for f in _scan(path) if first <= f.step < committed]
        present = [frame.step for frame in self._frames]
        if present != list(range(first, max(first, committed))):
            reason = (
                f"expected the logits of steps {first} to {committed - 1}, which are committed; "
                f"those of {committed - first - len(present)} are missing; restore the file from a "
                "copy, or capture again"
            )
            raise StorageDamaged(str(path), "", reason)
        with storage_errors("open", path):
            self._file = self._truncate(self._frames[-1].end if self._frames else 0)

    def append(self, step: int, content: Sequence[Bytes]) -> None:
        """Make a step's rows durable; they replace rows of this step and of later ones.

        Raises:
            StorageFailed: A write failed.
        """
        with storage_errors("keep logits in", self.path):
            while self._frames and self._frames[-1].step >= step:
                self._file.close()
                self._file = self._truncate(self._frames.pop().offset)
        with self._file.use("keep logits in"):
            offset, nbytes = self._file.end, sum(map(len, content))
            head = _HEAD.pack(_MAGIC, step, nbytes, _digest(step, content))
            self._file.write([memoryview(head), *(piece.data for piece in content)])
            self._file.sync()
            self._file.confirm()
        self._frames.append(_Frame(step, offset, nbytes))

    def contents(self) -> Iterator[Bytes]:
        """Yield each step's rows in order, compared with their digest, from a memory map.

        Raises:
            StorageDamaged: Rows are damaged.
            StorageFailed: Rows cannot be read.
        """
        if not self._frames:
            return
        with storage_errors("read", self.path):
            mapped = np.memmap(self.path, np.uint8, "r")
        for frame in self._frames:
            content = mapped[frame.content]
            if bytes(mapped[frame.offset : frame.offset + _HEAD.size]) != _HEAD.pack(
                _MAGIC, frame.step, frame.nbytes, _digest(frame.step, [content])
            ):
                reason = f"the logits of step {frame.step} do not match their digest"
                raise StorageDamaged(str(self.path), "", reason)
            yield content

    def close(self) -> None:
        self._file.close()

    def _truncate(self, end: int) -> AppendFile:
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(fd, end)
        return AppendFile(self.path, fd, end, lambda: None)


def read_stored_steps(path: Path) -> list[int]:
    """Return the steps with intact rows in a spool, which is only read.

    Raises:
        StorageFailed: The spool cannot be read.
    """
    with storage_errors("read", path):
        return [frame.step for frame in _scan(path)] if path.exists() else []


def _scan(path: Path) -> Iterator[_Frame]:
    """Yield intact frames from the beginning on."""
    size = path.stat().st_size
    with path.open("rb") as file:
        at = 0
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            magic, step, nbytes, digest = _HEAD.unpack(head)
            frame = _Frame(step, at, nbytes)
            if magic != _MAGIC or frame.end > size:
                return
            content = np.frombuffer(file.read(nbytes), np.uint8)
            if len(content) < nbytes or _digest(step, [content]) != digest:
                return
            yield frame
            at = frame.end


def _digest(step: int, content: Sequence[Bytes]) -> bytes:
    hasher = blake3(_STEP.pack(step))
    for piece in content:
        hasher.update(np.ascontiguousarray(piece).data)
    return hasher.digest()
