"""The disk of a simulated machine: real files, and a ledger of what a power failure would leave.

The product's storage runs unchanged. The system calls that change a disk are interposed, so a full
disk, a failing sync and a kill between two calls can happen at any call of any caller. The ledger
knows the last synced content of each file, and the synced names of each directory. A power failure
leaves that, plus a random part of unsynced data: a file's new end up to some byte, perhaps with a
wrong byte or a hole; a new, renamed or removed name, or the previous one. Data of a failed sync is
never written unless it is written again, although it can be read, also by other processes (as on
Linux).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest import mock

from tests.simulation.virtual_time import Clock

_CHANGES: Final = ("mkdir", "replace", "rename", "unlink", "rmdir")
_GARBLED: Final = 0.5
"""Probability of a wrong byte in unsynced data."""

Content = bytes | dict[str, "Content"]


class Killed(BaseException):
    """The process ends at this call; `act` ends it."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act


class Disk:
    """The disk of one machine, below a directory.

    Attributes:
        full: Whether nothing more can be written.
        sync_fails: The next sync of a path like this fails; None if none does.
        slowness: Factor on the duration of all operations.
    """

    def __init__(self, root: Path, clock: Clock) -> None:
        self.root = root
        self.full = False
        self.sync_fails: str | None = None
        self.slowness = 1.0
        self._clock = clock
        self._name = str(root)
        self._prefix = f"{root}/"
        self._paths: dict[int, str] = {}
        self._owners: dict[int, set[int]] = {}
        self._left: int | None = None
        self._act = _nothing
        self._files: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {root.stat().st_ino: {}}
        self._unwritten: dict[int, tuple[int, int]] = {}

    @contextmanager
    def interposed(self) -> Iterator[None]:
        """Route the process's calls that change a disk through this object meanwhile."""
        names = ("open", "close", "writev", "ftruncate", "fsync", "fdatasync", *_CHANGES)
        self._real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in names}
        interposed_calls: dict[str, Callable[..., Any]] = {
            name: self._change(name) for name in _CHANGES
        }
        interposed_calls |= {
            "open": self._open, "close": self._close, "writev": self._writev,
            "ftruncate": self._ftruncate, "fsync": self._fsync, "fdatasync": self._fsync,
        }  # fmt: skip
        with mock.patch.dict(vars(os), interposed_calls):
            yield

    @contextmanager
    def dying_after(self, changes: int) -> Iterator[None]:
        """Kill the current process after this many changes.

        Raises:
            Killed: At that change.
        """
        self._left = changes
        try:
            yield
        finally:
            self.spare()

    def kill_after(self, changes: int, act: Callable[[], None]) -> None:
        """End the current process after this many changes, unless it finishes first."""
        self._left, self._act = changes, act

    def spare(self) -> None:
        """The process has finished."""
        self._left, self._act = None, _nothing

    def close(self, fds: set[int]) -> None:
        """Close the files of a dead process."""
        for fd in fds:
            self._paths.pop(fd, None)
            self._real["close"](fd)
        fds.clear()

    def has_synced(self, path: Path, end: int) -> bool:
        """Return whether a file would survive a power failure, up to some byte."""
        return self._files.get(path.stat().st_ino, b"")[:end] == path.read_bytes()[:end]

    # Interposed calls.

    def _about_to(self, *, grow: bool = False) -> None:
        """A change comes next.

        Raises:
            Killed: The process dies before it.
            OSError: The disk is full.
        """
        if self._left is not None:
            if not self._left:
                act = self._act
                self.spare()
                raise Killed(act)
            self._left -= 1
        if grow and self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _change(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def change(path: Any, *arguments: Any, **options: Any) -> Any:
            if options.get("dir_fd") is not None or str(path).startswith(self._prefix):
                self._about_to(grow=name == "mkdir")
            result = real(path, *arguments, **options)
            if name == "mkdir" and str(path).startswith(self._prefix):
                self._forget(Path(path).stat().st_ino)
            return result

        return change

    def _open(self, path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        name = str(path)
        is_below_root = name.startswith(self._prefix) or name == self._name
        new = False
        if is_below_root and flags & (os.O_CREAT | os.O_TRUNC):
            new = not Path(path).exists()
            self._about_to(grow=True)
        fd: int = self._real["open"](path, flags, mode, **options)
        if is_below_root:
            self._paths[fd] = name
            if self._clock.current is not None:
                self._owners[fd] = self._clock.current.fds
                self._clock.current.fds.add(fd)
            if new or flags & os.O_TRUNC:
                number = os.fstat(fd).st_ino
                self._unwritten.pop(number, None)
                if new:
                    self._forget(number)
        return fd

    def _forget(self, number: int) -> None:
        """A new file: a file system may reuse the number of a removed one."""
        self._files.pop(number, None)
        self._names.pop(number, None)

    def _close(self, fd: int) -> None:
        # Files of a dead process may be closed while no process acts: its tasks are garbage
        # collected.
        if self._paths.pop(fd, None) is not None:
            self._owners.pop(fd, set()).discard(fd)
        self._real["close"](fd)

    def _writev(self, fd: int, buffers: Any) -> int:
        if fd not in self._paths:
            return int(self._real["writev"](fd, buffers))
        try:
            self._about_to(grow=True)
        except (OSError, Killed):
            # A part of it was written.
            if self._clock.rng.random() < 0.5:
                data = b"".join(buffers)
                self._written(fd, [data[: int(len(data) * self._clock.rng.random())]])
            raise
        return self._written(fd, buffers)

    def _written(self, fd: int, buffers: Any) -> int:
        count = int(self._real["writev"](fd, buffers))
        number = os.fstat(fd).st_ino
        if number in self._unwritten:
            # Rewritten data will be synced.
            start, end = self._unwritten.pop(number)
            position = os.lseek(fd, 0, os.SEEK_CUR)
            if position - count <= start:
                start = max(start, position)
            if start < end:
                self._unwritten[number] = start, end
        return count

    def _ftruncate(self, fd: int, size: int) -> None:
        if fd in self._paths:
            self._about_to()
            number = os.fstat(fd).st_ino
            if number in self._unwritten and size <= self._unwritten[number][0]:
                del self._unwritten[number]
        self._real["ftruncate"](fd, size)

    def _fsync(self, fd: int) -> None:
        if fd not in self._paths:
            self._real["fsync"](fd)
            return
        self._about_to()
        status = os.fstat(fd)
        number, is_directory = status.st_ino, stat.S_ISDIR(status.st_mode)
        if self.sync_fails is not None and fnmatchcase(self._paths[fd], self.sync_fails):
            self.sync_fails = None
            start = len(self._files.get(number, b""))
            if not is_directory and start < status.st_size:
                self._unwritten.setdefault(number, (start, status.st_size))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if is_directory:
            self._names[number] = {entry.name: entry.inode() for entry in os.scandir(fd)}
        else:
            self._files[number] = self._read(fd, number, status.st_size)

    def _read(self, fd: int, number: int, size: int) -> bytes:
        if _readable(fd):
            content = os.pread(fd, size, 0)
        else:
            repeat: int = self._real["open"](f"/proc/self/fd/{fd}", os.O_RDONLY)
            content = os.pread(repeat, size, 0)
            self._real["close"](repeat)
        if number in self._unwritten:
            start, end = self._unwritten[number]
            content = content[:start] + bytes(min(end, len(content)) - start) + content[end:]
        return content

    # Power failures.

    def lose_power(self, rng: Random) -> None:
        """All processes of this machine are dead: from now on they find only what survives."""
        survivors = self._left_of(self.root, self.root.stat().st_ino, rng)
        full, self.full = self.full, False
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._files.clear()
        self._names.clear()
        self._unwritten.clear()
        self._put(self.root, survivors)
        self.full = full

    def _left_of(self, path: Path | None, number: int, rng: Random) -> dict[str, Content]:
        """Return the surviving content of a directory; it has no path if only its synced name
        survives."""
        synced_content = self._names.get(number, {})
        current_content = {e.name: e.inode() for e in os.scandir(path)} if path is not None else {}
        survivors: dict[str, Content] = {}
        for name in sorted(synced_content.keys() | current_content.keys()):
            inode = synced_content.get(name) if rng.random() < 0.5 else current_content.get(name)
            if inode is None:
                continue
            where = path / name if path is not None and current_content.get(name) == inode else None
            content = self._found(where, inode, rng)
            if content is not None:
                survivors[name] = content
        return survivors

    def _found(self, path: Path | None, number: int, rng: Random) -> Content | None:
        if number in self._names or (path is not None and path.is_dir()):
            return self._left_of(path, number, rng)
        synced_content = self._files.get(number, b"")
        current_content = path.read_bytes() if path is not None else synced_content
        if number in self._unwritten or not current_content.startswith(synced_content):
            return synced_content
        end = rng.choice(
            (len(current_content), rng.randint(len(synced_content), len(current_content)))
        )
        content = bytearray(current_content[:end])
        if end > len(synced_content) and rng.random() < _GARBLED:
            offset = rng.randrange(len(synced_content), end)
            if rng.random() < 0.5:
                content[offset] ^= 1
            else:
                hole = content[offset : offset + rng.choice((16, 128, 1024))]
                content[offset : offset + len(hole)] = bytes(len(hole))
        return bytes(content)

    def _put(self, path: Path, survivors: dict[str, Content]) -> None:
        for name, content in survivors.items():
            if isinstance(content, dict):
                (path / name).mkdir()
                self._put(path / name, content)
            else:
                (path / name).write_bytes(content)
                self._files[(path / name).stat().st_ino] = content
        self._names[path.stat().st_ino] = {e.name: e.inode() for e in os.scandir(path)}


def _nothing() -> None:
    """Called to end a process that is already dead."""


def _readable(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
