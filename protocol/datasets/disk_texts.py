"""Texts in an unnamed temporary file: a corpus may be larger than memory.

Only the offset and the length of each text are in memory. The file disappears with the process.
Texts are read, not mapped, so that the file's pages do not count as the process's memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, overload

from blake3 import blake3

from protocol.base.errors import StorageFailed

DIGEST_BYTES: Final = 16
"""Size of the digest by which equal texts are detected; collisions do not occur in practice."""
_LARGE_FILES: Final = Path("/var/tmp")  # noqa: S108 -- files without a name; /tmp may be memory
_READ_BYTES: Final = 1 << 20
_WRITE_BYTES: Final = 1 << 18


class DiskFile:
    """An unnamed temporary file that is appended to, and read at any offset."""

    def __init__(self) -> None:
        directory = os.environ.get("TMPDIR")
        self._directory = directory or (
            str(_LARGE_FILES) if os.access(_LARGE_FILES, os.W_OK) else None
        )
        try:
            with tempfile.TemporaryFile(dir=self._directory) as file:
                self._fd = os.dup(file.fileno())
        except OSError as error:
            raise self._storage_error(error) from None
        weakref.finalize(self, os.close, self._fd)
        self._buffer = bytearray()
        self._written = 0

    def __len__(self) -> int:
        return self._written + len(self._buffer)

    def append(self, content: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            StorageFailed: Writing to the disk failed.
        """
        self._buffer += content
        if len(self._buffer) >= _WRITE_BYTES:
            self.flush()

    def read(self, lo: int, hi: int) -> bytes:
        """Return the bytes [lo, hi)."""
        if self._buffer:
            self.flush()
        parts, offset = [], lo
        while offset < hi:
            part = os.pread(self._fd, hi - offset, offset)
            if not part:
                raise StorageFailed("read", str(self._directory or "/tmp"), "the file is short")  # noqa: S108
            parts.append(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def append_mapped(self, content: memoryview) -> memoryview:
        """Append bytes, and return them as memory that is mapped from the file.

        Args:
            content: At least one byte.

        Raises:
            StorageFailed: Writing to the disk failed.
        """
        self.flush()
        lo = self._written + -self._written % mmap.ALLOCATIONGRANULARITY
        try:
            bytes_written = 0
            while bytes_written < len(content):
                bytes_written += os.pwrite(self._fd, content[bytes_written:], lo + bytes_written)
            self._written = lo + bytes_written
            return memoryview(mmap.mmap(self._fd, bytes_written, offset=lo))
        except OSError as error:
            raise self._storage_error(error) from None

    def pieces(self) -> Iterator[bytes]:
        """Yield the whole file in pieces."""
        for lo in range(0, len(self), _READ_BYTES):
            yield self.read(lo, min(lo + _READ_BYTES, len(self)))

    def flush(self) -> None:
        """Write appended bytes from the buffer to the file.

        Raises:
            StorageFailed: Writing to the disk failed.
        """
        try:
            while self._buffer:
                written = os.pwrite(self._fd, self._buffer, self._written)
                self._written += written
                del self._buffer[:written]
        except OSError as error:
            raise self._storage_error(error) from None

    def _storage_error(self, error: OSError) -> StorageFailed:
        directory = str(self._directory or tempfile.gettempdir())
        return StorageFailed(
            "store the data in", directory, f"{error.strerror}; set TMPDIR to another directory"
        )


class DiskTexts(Sequence[str]):
    """Texts in the order in which they were appended.

    Attributes:
        file: All texts in UTF-8, concatenated.
        characters: The length of each text.
    """

    def __init__(self) -> None:
        self.file = DiskFile()
        self.characters = array("q")
        self._ends = array("q", [0])

    @staticmethod
    def of(texts: Iterable[str]) -> DiskTexts:
        """Store these texts in a new file."""
        texts_on_disk = DiskTexts()
        for text in texts:
            texts_on_disk.append(text)
        return texts_on_disk

    def append(self, text: str) -> None:
        """Append a text.

        Raises:
            StorageFailed: Writing to the disk failed.
        """
        self.file.append(text.encode())
        self.characters.append(len(text))
        self._ends.append(len(self.file))

    def __len__(self) -> int:
        return len(self.characters)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[str]: ...
    def __getitem__(self, number: int | slice) -> str | Sequence[str]:
        if isinstance(number, slice):
            return SelectedTexts(self, range(len(self))[number])
        index = range(len(self))[number]
        return self.file.read(self._ends[index], self._ends[index + 1]).decode()


class DistinctTexts:
    """Distinct texts in the order in which they are added.

    Attributes:
        texts: The distinct texts.
        duplicates: Number of repeated texts.
    """

    def __init__(self) -> None:
        self.texts = DiskTexts()
        self.duplicates = 0
        self._digests: set[bytes] = set()

    def add(self, text: str) -> bool:
        """Add a text, and return whether it is new.

        Raises:
            StorageFailed: Writing to the disk failed.
        """
        digest = blake3(text.encode()).digest(DIGEST_BYTES)
        if digest in self._digests:
            self.duplicates += 1
            return False
        self._digests.add(digest)
        self.texts.append(text)
        return True


class SelectedTexts(Sequence[str]):
    """Some of the texts of a sequence, selected by index."""

    def __init__(self, texts: Sequence[str], numbers: Sequence[int]) -> None:
        self._texts = texts
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[str]: ...
    def __getitem__(self, number: int | slice) -> str | Sequence[str]:
        if isinstance(number, slice):
            return SelectedTexts(self._texts, self._numbers[number])
        return self._texts[self._numbers[number]]
