"""BLAKE3 digests of files, which are read in pieces."""

from __future__ import annotations

import errno
import io
import os
import stat
import threading
from pathlib import Path
from typing import Final

from blake3 import blake3

from protocol.base import limits
from protocol.base.regular_file import check_regular

_PIECE_BYTES: Final = limits.MIB
_PLAIN_FLAGS: Final = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)
"""Windows has only the first and the last of these."""
_TICK_NS: Final = 100_000_000
"""Longer than a tick of any file system's clock."""


def file_digest(path: Path) -> tuple[int, str]:
    """Return a file's size in bytes and its BLAKE3 digest in 64 hex digits.

    Raises:
        OSError: The file cannot be read.
    """
    check_regular(path.stat().st_mode, path)
    with path.open("rb", buffering=0) as file:
        return open_file_digest(file)


def open_file_digest(file: io.FileIO) -> tuple[int, str]:
    """Digest an open file from its current position; see `file_digest`."""
    hasher, size = blake3(), 0
    piece = memoryview(bytearray(_PIECE_BYTES))
    while count := file.readinto(piece):
        hasher.update(piece[:count])
        size += count
    return size, hasher.hexdigest()


def open_plain(path: Path) -> io.FileIO:
    """Open a regular file and refuse links, since the file at the path may have been replaced.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    file = io.FileIO(os.open(path, _PLAIN_FLAGS), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "expected a regular file, got another type", str(path))
    return file


def file_identity(status: os.stat_result) -> tuple[int, ...]:
    """Return values that change when a file is edited, replaced or restored from a copy."""
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return (status.st_size, *times, status.st_ino, status.st_dev)


def lasting_identity(status: os.stat_result, now_ns: int) -> tuple[int, ...]:
    """Return the file's identity if every later change alters it, else an empty tuple.

    Two writes within one tick of the file system's clock give the same identity.
    """
    changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
    return file_identity(status) if changed_ns < now_ns - _TICK_NS else ()


class FileDigests:
    """A cache of file digests: a file is read again only if its identity has changed."""

    def __init__(self) -> None:
        self._digests: dict[Path, tuple[tuple[int, ...], str]] = {}
        self._lock = threading.Lock()

    def matches(self, path: Path, size: int, digest: str) -> bool:
        """Return whether the path is a readable file of this size and digest."""
        try:
            status = path.stat()
            if status.st_size != size:
                return False
            key = file_identity(status)
            with self._lock:
                cached_key, cached_digest = self._digests.get(path, ((), ""))
            if cached_key != key:
                _, cached_digest = file_digest(path)
                with self._lock:
                    self._digests[path] = (key, cached_digest)
        except OSError:
            return False
        return cached_digest == digest

    def remember(self, path: Path, digest: str) -> None:
        """Cache the digest of a file that has just been written."""
        try:
            key = file_identity(path.stat())
        except OSError:
            return
        with self._lock:
            self._digests[path] = (key, digest)
