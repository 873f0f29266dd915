"""A cache of files by digest, shared by all workers of one user on this machine.

    blobs/<2 hex digits>/<digest>           complete and verified
    blobs/<2 hex digits>/<digest>.part      partial download, locked by the process that writes it
    blobs/<2 hex digits>/<digest>.PID.part  partial download that only this process continues

A file gets its final name after its digest is verified. Each process verifies the digest again
before use, which detects later damage. Only files with a wrong digest are removed. Users may empty
the directory while no run is being prepared.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from blake3 import blake3

try:
    import fcntl
except ImportError:  # Windows: each process fetches its own copy
    fcntl = None  # type: ignore[assignment]

from protocol.base import limits
from protocol.base.errors import StorageFailed, lock_failure
from protocol.spec.files.file_digest import FileDigests
from protocol.wire.connection import Body

_REMEDY: Final = "free some space there, or set SAMESTEP_CACHE to another directory"
_COMPLETE_MODE: Final = 0o444


class PartialDownload:
    """A partial download, locked while this object is open.

    Attributes:
        size: Bytes written so far.
        was_resumed: Whether an earlier attempt wrote some of these bytes.
    """

    def __init__(self, fd: int, path: Path, target: Path, size: int, digests: FileDigests) -> None:
        self._fd = fd
        self._digests = digests
        self._path = path
        self._target = target
        self._full_size = size
        self._hasher = blake3()
        self.size = 0
        self._hash_existing_bytes()
        self.was_resumed = self.size > 0

    @property
    def is_complete(self) -> bool:
        return self.size == self._full_size

    def append(self, values: Body) -> None:
        """Write the next bytes.

        Raises:
            StorageFailed: The write failed.
        """
        unwritten = values.data
        with storage_errors("write", self._path):
            while unwritten:
                count = os.write(self._fd, unwritten)
                self._hasher.update(unwritten[:count])
                self.size += count
                unwritten = unwritten[count:]

    def finish(self) -> bool:
        """Close the complete file; rename it if its digest is right, else delete it.

        Returns:
            Whether the digest was right.
        """
        is_valid = self._hasher.hexdigest() == self._target.name
        with storage_errors("keep", self._target):
            if fcntl is None:
                self.close()  # Windows cannot rename an open file
            if is_valid:
                self._path.chmod(_COMPLETE_MODE)
                self._path.replace(self._target)
                self._digests.remember(self._target, self._target.name)
            else:
                self._path.unlink()
        self.close()
        return is_valid

    def close(self) -> None:
        """Release the lock, so that another worker can continue."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _hash_existing_bytes(self) -> None:
        if os.fstat(self._fd).st_size > self._full_size:
            os.ftruncate(self._fd, 0)
        while chunk := os.read(self._fd, limits.MIB):
            self._hasher.update(chunk)
            self.size += len(chunk)


class BlobCache:
    """The cache in one directory, for any number of processes; see the module's docstring."""

    def __init__(self, directory: Path, digests: FileDigests) -> None:
        self.directory = directory
        self._digests = digests

    def find(self, digest: str, size: int) -> Path | None:
        """Return the complete file's path; None if the cache lacks it or its digest is wrong."""
        path = self._path(digest)
        return path if self._digests.matches(path, size, digest) else None

    def part_bytes(self, digest: str) -> int:
        """Return how many bytes an earlier attempt or another worker has fetched."""
        try:
            return self._part_path(digest).stat().st_size
        except OSError:
            return 0

    def reserve(self, missing_bytes: int) -> None:
        """Check that there is disk space for files that will be fetched.

        Raises:
            StorageFailed: There is too little, or the directory is not writable.
        """
        with storage_errors("use the cache", self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            free_bytes = shutil.disk_usage(self.directory).free
        if free_bytes < missing_bytes:
            raise StorageFailed(
                "use the cache",
                str(self.directory),
                f"expected {missing_bytes} free bytes, got {free_bytes}; {_REMEDY}",
            )

    def put(self, digest: str, content: Body) -> bool:
        """Store a small file; return False if its digest is wrong.

        Raises:
            StorageFailed: The write failed.
        """
        if blake3(content.data).hexdigest() != digest:
            return False
        # Two workers may write the same file: each uses a different temporary name.
        part = self._open(digest, self._path(digest).with_suffix(f".{os.getpid()}.part"), 0)
        assert part is not None
        try:
            part.append(content)
        except StorageFailed:
            self._path(digest).with_suffix(f".{os.getpid()}.part").unlink(missing_ok=True)
            part.close()
            raise
        return part.finish()

    def open_part(
        self, digest: str, size: int, *, exclusive: bool = False
    ) -> PartialDownload | None:
        """Open a large file's partial download; return None while another process has it locked.

        Args:
            digest: Digest of the complete file.
            size: Size of the complete file in bytes.
            exclusive: Start a separate download for this process instead of sharing one.

        Raises:
            StorageFailed: The file cannot be opened.
        """
        path = self._part_path(digest)
        if exclusive or fcntl is None:
            path = path.with_suffix(f".{os.getpid()}.part")
        return self._open(digest, path, size)

    def _open(self, digest: str, path: Path, size: int) -> PartialDownload | None:
        with storage_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
            try:
                if _lock(fd) and _is_named(fd, path):
                    return PartialDownload(fd, path, self._path(digest), size, self._digests)
            except BaseException:
                os.close(fd)
                raise
        os.close(fd)
        return None

    def _path(self, digest: str) -> Path:
        return self.directory / "blobs" / digest[:2] / digest

    def _part_path(self, digest: str) -> Path:
        return self._path(digest).with_suffix(".part")


@contextmanager
def storage_errors(operation: str, path: Path) -> Iterator[None]:
    """Convert an OSError inside this context to a StorageFailed with a remedy."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(operation, str(path), f"{error.strerror or error}; {_REMEDY}") from None


def _lock(fd: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise OSError(lock_failure(error)) from None
    return True


def _is_named(fd: int, path: Path) -> bool:
    """Return whether the open file still has this name: another writer may have renamed it."""
    try:
        path_status = path.stat()
    except FileNotFoundError:
        return False
    file_status = os.fstat(fd)
    return (path_status.st_dev, path_status.st_ino) == (file_status.st_dev, file_status.st_ino)
