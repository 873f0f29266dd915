"""Files by digest in a directory that all workers of a user on this machine share.

    blobs/<2 hex digits>/<digest>          whole and verified
    blobs/<2 hex digits>/<digest>.part     being fetched; its writer holds a lock on it
    blobs/<2 hex digits>/<digest>.PID.part  likewise, by a process that shares it with nobody

A file gets its name only once its bytes have that digest. What a crash damages later is found
when the file is used: its digest is computed again by each process. Nothing is ever removed but
what turned out wrong; the directory may be emptied whenever no run is being prepared.
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
except ImportError:  # Windows: each process fetches for itself
    fcntl = None  # type: ignore[assignment]

from protocol.base import limits
from protocol.base.errors import StorageFailed, lock_failure
from protocol.spec.file_digest import FileDigests
from protocol.wire.connection import Body

_REMEDY: Final = "make room there, or name another directory with SAMESTEP_CACHE"
_WHOLE_MODE: Final = 0o444


class Part:
    """A file being fetched, locked for the life of this object.

    Attributes:
        have: Bytes that are there.
        resumed: Whether some of them were there before.
    """

    def __init__(self, fd: int, path: Path, target: Path, size: int, digests: FileDigests) -> None:
        self._fd = fd
        self._digests = digests
        self._path = path
        self._target = target
        self._size = size
        self._hasher = blake3()
        self.have = 0
        self._read_what_is_there()
        self.resumed = self.have > 0

    @property
    def complete(self) -> bool:
        return self.have == self._size

    def append(self, values: Body) -> None:
        """Write the next bytes.

        Raises:
            StorageFailed: The disk refuses.
        """
        left = values.data
        with storing("write", self._path):
            while left:
                written = os.write(self._fd, left)
                self._hasher.update(left[:written])
                self.have += written
                left = left[written:]

    def finish(self) -> bool:
        """Give the whole file its name, if it has its digest; else throw it away. Closes it."""
        right = self._hasher.hexdigest() == self._target.name
        with storing("keep", self._target):
            if fcntl is None:
                self.close()  # Windows renames nothing that is open
            if right:
                self._path.chmod(_WHOLE_MODE)
                self._path.replace(self._target)
                self._digests.remember(self._target, self._target.name)
            else:
                self._path.unlink()
        self.close()
        return right

    def close(self) -> None:
        """Let others go on with it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read_what_is_there(self) -> None:
        if os.fstat(self._fd).st_size > self._size:
            os.ftruncate(self._fd, 0)
        while piece := os.read(self._fd, limits.MIB):
            self._hasher.update(piece)
            self.have += len(piece)


class BlobCache:
    """See the module's text. Any number of processes may use one directory."""

    def __init__(self, directory: Path, digests: FileDigests) -> None:
        self.directory = directory
        self._digests = digests

    def find(self, digest: str, size: int) -> Path | None:
        """The whole file, if it is here and has its digest still."""
        path = self._path(digest)
        return path if self._digests.holds(path, size, digest) else None

    def part_bytes(self, digest: str) -> int:
        """How much of it an earlier attempt or another worker has fetched."""
        try:
            return self._part_path(digest).stat().st_size
        except OSError:
            return 0

    def reserve(self, missing_bytes: int) -> None:
        """Check that there is room, before anything is fetched.

        Raises:
            StorageFailed: There is not, or nothing can be written there.
        """
        with storing("use the cache", self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.directory).free
        if free < missing_bytes:
            raise StorageFailed(
                "use the cache",
                str(self.directory),
                f"{missing_bytes} bytes are to be fetched, {free} are free; {_REMEDY}",
            )

    def put(self, digest: str, content: Body) -> bool:
        """Keep a small file; False if its digest is another.

        Raises:
            StorageFailed: The disk refuses.
        """
        if blake3(content.data).hexdigest() != digest:
            return False
        # Two workers may write the same file: each under a name of its own.
        part = self._open(digest, self._path(digest).with_suffix(f".{os.getpid()}.part"), 0)
        assert part is not None
        try:
            part.append(content)
        except StorageFailed:
            self._path(digest).with_suffix(f".{os.getpid()}.part").unlink(missing_ok=True)
            part.close()
            raise
        return part.finish()

    def open_part(self, digest: str, size: int, *, own: bool = False) -> Part | None:
        """Take a large file's part, to be written further; None while another process has it.

        Args:
            digest: Of the whole.
            size: Of the whole.
            own: Do not wait for others: start one that nobody else writes.

        Raises:
            StorageFailed: The disk refuses.
        """
        path = self._part_path(digest)
        alone = own or fcntl is None
        return self._open(digest, path.with_suffix(f".{os.getpid()}.part") if alone else path, size)

    def _open(self, digest: str, path: Path, size: int) -> Part | None:
        with storing("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
            try:
                if _lock(fd) and _is_named(fd, path):
                    return Part(fd, path, self._path(digest), size, self._digests)
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
def storing(doing: str, path: Path) -> Iterator[None]:
    """Turn every OSError inside into a StorageFailed that says what can be done."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(doing, str(path), f"{error.strerror or error}; {_REMEDY}") from None


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
    """Whether it still has this name: its last writer may have renamed it, whole, meanwhile."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)
