"""Writing so that it is still there after a crash; what the disk refuses is one typed error.

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
"""One to the next, as Linux has it."""

MISSING: Final = "No such file or directory; bring back what is missing, then go on"
_REMEDIES: Final = {
    errno.ENOSPC: "make room, then go on",
    errno.EDQUOT: "raise the quota or make room, then go on",
    errno.EROFS: "mount it writable, then go on",
    errno.ENOENT: "bring back what is missing, then go on",
    errno.ESTALE: "bring the file system back, then go on",
    errno.EACCES: "let this user read and write it, then go on",
    errno.EPERM: "let this user read and write it, then go on",
    errno.EIO: "look after the disk, then go on",
    errno.ENXIO: "start what reads from the pipe, then go on",
    errno.EPIPE: "keep what reads from the pipe running, then go on",
    errno.EEXIST: "expected a directory, got a file; remove it, then go on",
    errno.EISDIR: "expected a file there; bring it back from a copy",
    errno.ENOTDIR: "expected a directory there; bring it back from a copy",
}


@contextmanager
def storing(doing: str, path: Path) -> Iterator[None]:
    """Turn every OSError inside into a StorageFailed that names the file and the remedy; that of a
    name which is too long for any disk into a UsageError."""
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


def read_if_there(path: Path) -> bytes | None:
    """What a file holds; None if there is none.

    Raises:
        StorageFailed: It cannot be read.
    """
    with storing("read", path):
        return read_regular(path) if path.exists() else None


def open_to_read(path: Path) -> int:
    """Open a regular file for reading.

    Raises:
        OSError: It cannot be opened, or is another kind of thing.
    """
    check_regular(path.stat().st_mode, path)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def write_all(fd: int, buffers: Sequence[memoryview]) -> None:
    """Write every byte of the buffers at the descriptor's place, without joining them.

    Raises:
        OSError: The disk took a part of them or nothing.
    """
    left = [buffer for buffer in buffers if buffer.nbytes]
    while left:
        written = os.writev(fd, left)
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if left:
            left[0] = left[0][written:]


def write_again(fd: int, start: int, end: int) -> None:
    """Write what a file holds from `start` to `end` once more, in place, and sync the file.

    After a sync that failed, bytes can be read that never got to the disk, and the next sync says
    nothing of them (as Linux has it). That may have been a process that is gone: what it wrote
    last counts as durable only after this.

    Args:
        fd: The file, open for reading and writing; its place is moved.
        start: The first byte in doubt.
        end: The byte after the last one.

    Raises:
        OSError: The disk refuses; the call can be made again.
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
    """Make a directory, and those above it that are missing; durable also where it is there.

    Raises:
        OSError: It cannot be made.
    """
    missing = [directory for directory in path.parents if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in (path, *missing):
        sync_directory(directory.parent)


def make_below(base: Path, path: Path) -> None:
    """Make a directory, and those between it and `base`, which must be there.

    A run's directory that has vanished while the run goes on is not made anew: it could not be
    brought back to its place then.

    Raises:
        OSError: It cannot be made, or `base` is not there.
    """
    between = [base / part for part in reversed(path.relative_to(base).parents)]
    for directory in (*between[1:], path):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def replace_file(path: Path, content: bytes | Iterable[memoryview]) -> str:
    """Write, sync, rename into place, sync the directory.

    Args:
        path: The file.
        content: All of it, or its pieces in order.

    Returns:
        The content's BLAKE3, 64 hex digits.

    Raises:
        StorageFailed: The disk refuses; what was there before is untouched.
    """
    with NewFile(path) as file:
        file.write(content)
        return file.confirm()


def write_output(path: Path, content: bytes) -> bool:
    """Write to a path that a user named: a file is replaced, a pipe or device written into.

    A symbolic link stays, and what it leads to is written. A descriptor of this process
    (`/dev/stdout`, `/dev/fd/N`) is written at its own offset.

    Returns:
        Whether a file of that name now has this content.

    Raises:
        StorageFailed: The system refuses.
    """
    with storing("write", path):
        descriptor = _own_descriptor(path)
        if descriptor is not None:
            write_all(descriptor, [memoryview(content)])
        elif path.exists() and not path.is_file():
            # Without a reader a pipe would be waited for.
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
    """The open descriptor of this process that a path leads to."""
    here = path.absolute()
    for _ in range(_MOST_LINKS):
        if os.path.realpath(here.parent) == os.path.realpath("/proc/self/fd"):
            return int(here.name) if here.name.isdecimal() else None
        if not here.is_symlink():
            break
        here = here.parent / here.readlink()
    return None


class NewFile:
    """A file under its temporary name: `write`, then `confirm`.

    As a context manager it closes the file, and removes it if the disk refuses.

    Args:
        path: Its name in the end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        self._digest = blake3(max_threads=blake3.AUTO)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with storing("write", path):
            self._fd = os.open(self._temporary, flags, 0o666)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        os.close(self._fd)
        if kind is not None and issubclass(kind, StorageFailed):
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)

    def write(self, content: bytes | Iterable[memoryview]) -> None:
        """Write it, not durable yet; what was given may change then.

        Raises:
            StorageFailed: The disk refuses.
        """
        with storing("write", self.path):
            for piece in [memoryview(content)] if isinstance(content, bytes) else content:
                write_all(self._fd, [piece])
                self._digest.update(piece)

    def confirm(self) -> str:
        """Make it durable under its name.

        Returns:
            The content's BLAKE3, 64 hex digits.

        Raises:
            StorageFailed: The disk refuses; what was there before is untouched.
        """
        with storing("write", self.path):
            os.fsync(self._fd)
            self._temporary.replace(self.path)
            sync_directory(self.path.parent)
        return self._digest.hexdigest()


def remove_temporaries(directory: Path) -> None:
    """Clear away what a crash left half written; does nothing where there is no directory.

    Raises:
        StorageFailed: The disk refuses.
    """
    if not directory.is_dir():
        return
    with storing("clear", directory):
        for path in directory.glob("*" + TEMPORARY_SUFFIX):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def is_same_file(fd: int, path: Path) -> bool:
    """Whether the open file is still the one with this name: not removed, moved or replaced."""
    try:
        named = path.stat()
    except OSError:
        return False
    ours = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)
