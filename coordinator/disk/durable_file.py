"""Write files so that they survive a crash; every failure is a `StorageFailed`.

A new file is written under a temporary name, synced and renamed, and its directory is synced: a
reader sees the old content or the new, never half of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from blake3 import blake3

from protocol.base.errors import StorageFailed, UsageError
from protocol.base.regular_file import check_regular, read_regular

TEMPORARY_SUFFIX: Final = ".part"
_PIECE_BYTES: Final = 1 << 24
_MOST_LINKS: Final = 40
"""The longest chain of symbolic links, as on Linux."""

MISSING: Final = "No such file or directory; restore what is missing, then continue"
_REMEDIES: Final = {
    errno.ENOSPC: "make room, then continue",
    errno.EDQUOT: "raise the quota or make room, then continue",
    errno.EROFS: "mount it writable, then continue",
    errno.ENOENT: "restore what is missing, then continue",
    errno.ESTALE: "restore the file system, then continue",
    errno.EACCES: "give this user read and write permission, then continue",
    errno.EPERM: "give this user read and write permission, then continue",
    errno.EIO: "check the disk, then continue",
    errno.ENXIO: "start the process that reads from the pipe, then continue",
    errno.EPIPE: "keep the process that reads from the pipe running, then continue",
    errno.EEXIST: "expected a directory, got a file; remove it, then continue",
    errno.EISDIR: "expected a file there; restore it from a copy",
    errno.ENOTDIR: "expected a directory there; restore it from a copy",
}


@contextmanager
def storage_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn every OSError inside into a StorageFailed that names file and remedy.

    A name that is too long for any disk raises a UsageError.

    Args:
        doing: The operation in the message, as a verb: "read", "append to".
        path: The file in the message.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(
                f"expected a name that a file can have, got {str(path)!r}: it is too long"
            ) from None
        reason = error.strerror or str(error)
        remedy = _REMEDIES.get(error.errno or 0)
        text = f"{reason}; {remedy}" if remedy else reason
        raise StorageFailed(doing, str(path), text) from error


def read_if_exists(path: Path) -> bytes | None:
    """Return the content of a file; None if it is missing.

    Raises:
        StorageFailed: The file cannot be read.
    """
    with storage_errors("read", path):
        return read_regular(path) if path.exists() else None


def open_to_read(path: Path) -> int:
    """Open a regular file for reading.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    check_regular(path.stat().st_mode, path)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def write_all(fd: int, buffers: Sequence[memoryview]) -> None:
    """Write all buffers at the descriptor's offset, without joining them.

    Raises:
        OSError: Not everything was written.
    """
    remaining = [buffer for buffer in buffers if buffer.nbytes]
    while remaining:
        count = os.writev(fd, remaining)
        while remaining and count >= remaining[0].nbytes:
            count -= remaining.pop(0).nbytes
        if remaining:
            remaining[0] = remaining[0][count:]


def write_again(fd: int, start: int, end: int) -> None:
    """Rewrite the bytes of a file from `start` to `end` in place, and sync it.

    After a failed sync, bytes may be readable that never reached the disk, and on Linux the next
    sync does not report that. The failed sync may have been that of a process that has ended: the
    last data that it wrote is durable only after this call.

    Args:
        fd: The file, open for reading and writing; its offset changes.
        start: The first byte in doubt.
        end: The offset after the last byte.

    Raises:
        OSError: A read or write failed; the call can be repeated.
    """
    os.lseek(fd, start, os.SEEK_SET)
    while start < end:
        piece = os.pread(fd, min(_PIECE_BYTES, end - start), start)
        if not piece:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write_all(fd, [memoryview(piece)])
        start += len(piece)
    os.fsync(fd)


def sync_directory(directory: Path) -> None:
    """Make names created, renamed or removed in a directory durable.

    Raises:
        OSError: The directory cannot be synced.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents durably; sync an existing directory too.

    Raises:
        OSError: The directory cannot be made.
    """
    missing = [directory for directory in path.parents if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in (path, *missing):
        sync_directory(directory.parent)


def make_below(base: Path, path: Path) -> None:
    """Make a directory and the directories between it and `base`, which must exist.

    A run's directory that vanishes during the run is not created again: otherwise it could not be
    restored to its place.

    Raises:
        OSError: The directory cannot be made, or `base` is missing.
    """
    parents = [base / part for part in reversed(path.relative_to(base).parents)]
    for directory in (*parents[1:], path):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def replace_file(path: Path, content: bytes | Iterable[memoryview]) -> str:
    """Replace a file durably: write, sync, rename into place, sync the directory.

    Args:
        path: The file.
        content: The whole content, or its pieces in order.

    Returns:
        The content's BLAKE3, 64 hex digits.

    Raises:
        StorageFailed: A write failed; the old content is untouched.
    """
    with NewFile(path) as file:
        file.write(content)
        return file.confirm()


def write_output(path: Path, content: bytes) -> bool:
    """Write to a path that a user named: replace a file, or write into a pipe or device.

    A symbolic link stays, and its target is written. A descriptor of this process (`/dev/stdout`,
    `/dev/fd/N`) is written at its own offset.

    Returns:
        Whether a file of that name now has this content.

    Raises:
        StorageFailed: A write failed.
    """
    with storage_errors("write", path):
        descriptor = _own_descriptor(path)
        if descriptor is not None:
            write_all(descriptor, [memoryview(content)])
        elif path.exists() and not path.is_file():
            # Opening a pipe without a reader would block.
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            try:
                os.set_blocking(fd, True)
                write_all(fd, [memoryview(content)])
            finally:
                os.close(fd)
        else:
            replace_file(Path(os.path.realpath(path)), content)
            return True
    return False


def _own_descriptor(path: Path) -> int | None:
    """Return the open descriptor of this process that a path leads to."""
    current = path.absolute()
    for _ in range(_MOST_LINKS):
        if os.path.realpath(current.parent) == os.path.realpath("/proc/self/fd"):
            return int(current.name) if current.name.isdecimal() else None
        if not current.is_symlink():
            break
        current = current.parent / current.readlink()
    return None


class NewFile:
    """A file under its temporary name: `write`, then `confirm`.

    As a context manager it closes the file, and removes it after a failed write.

    Args:
        path: The file's final name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        self._digest = blake3(max_threads=blake3.AUTO)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with storage_errors("write", path):
            self._fd = os.open(self._temporary, flags, 0o666)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: object, traceback: object
    ) -> None:
        os.close(self._fd)
        if error_type is not None and issubclass(error_type, StorageFailed):
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)

    def write(self, content: bytes | Iterable[memoryview]) -> None:
        """Write the content, which is not yet durable; the buffers may change afterwards.

        Raises:
            StorageFailed: A write failed.
        """
        with storage_errors("write", self.path):
            for piece in [memoryview(content)] if isinstance(content, bytes) else content:
                write_all(self._fd, [piece])
                self._digest.update(piece)

    def confirm(self) -> str:
        """Make the file durable under its final name.

        Returns:
            The content's BLAKE3, 64 hex digits.

        Raises:
            StorageFailed: A write failed; the old content is untouched.
        """
        with storage_errors("write", self.path):
            os.fsync(self._fd)
            self._temporary.replace(self.path)
            sync_directory(self.path.parent)
        return self._digest.hexdigest()


def remove_temporaries(directory: Path) -> None:
    """Remove temporary files that a crash left; the directory may be missing.

    Raises:
        StorageFailed: A write failed.
    """
    if not directory.is_dir():
        return
    with storage_errors("clear", directory):
        for path in directory.glob("*" + TEMPORARY_SUFFIX):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def is_same_file(fd: int, path: Path) -> bool:
    """Return whether the open file still has this name; False if it was removed, moved or
    replaced."""
    try:
        by_name = path.stat()
    except OSError:
        return False
    by_descriptor = os.fstat(fd)
    return (by_name.st_dev, by_name.st_ino) == (by_descriptor.st_dev, by_descriptor.st_ino)
