"""The disk of a simulated machine: real files, and a ledger of what a loss of power would leave.

The product's storage runs as it is. What it calls of the system to change a disk is interposed: so
a full disk, a failing sync and a process that is killed between two calls can be had at any call,
whoever makes it. The ledger knows of each file what was last synced, and of each directory which
names; losing power leaves that, and of what was not synced since a random part: a file's new end up
to some byte, perhaps with a wrong one or a hole in it; a new, renamed or removed name or the one
before. What a failed sync was to write is never written unless somebody writes it
anew, though it can be read, also by other processes (as Linux has it).
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
"""How often what was not synced has a wrong byte."""

Content = bytes | dict[str, "Content"]


class Killed(BaseException):
    """The process ends at this call; `act` is how."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act


class Disk:
    """One machine's, below a directory.

    Attributes:
        full: Whether nothing more can be written.
        sync_fails: The next sync of a path like this fails; None if none does.
        slowness: How much longer than else everything takes.
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
        """Meanwhile the process's calls that change a disk pass through here."""
        names = ("open", "close", "writev", "ftruncate", "fsync", "fdatasync", *_CHANGES)
        self._real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in names}
        own: dict[str, Callable[..., Any]] = {name: self._change(name) for name in _CHANGES}
        own |= {
            "open": self._open, "close": self._close, "writev": self._writev,
            "ftruncate": self._ftruncate, "fsync": self._fsync, "fdatasync": self._fsync,
        }  # fmt: skip
        with mock.patch.dict(vars(os), own):
            yield

    @contextmanager
    def dying_after(self, changes: int) -> Iterator[None]:
        """The process that acts now is killed after so many changes.

        Raises:
            Killed: In it.
        """
        self._left = changes
        try:
            yield
        finally:
            self.spare()

    def kill_after(self, changes: int, act: Callable[[], None]) -> None:
        """The process that acts now ends so, after so many changes, unless it has done before."""
        self._left, self._act = changes, act

    def spare(self) -> None:
        """It has done."""
        self._left, self._act = None, _nothing

    def close(self, fds: set[int]) -> None:
        """What a process had open, which is dead."""
        for fd in fds:
            self._paths.pop(fd, None)
            self._real["close"](fd)
        fds.clear()

    def has_synced(self, path: Path, end: int) -> bool:
        """Whether a file would outlast a loss of power, up to some byte."""
        return self._files.get(path.stat().st_ino, b"")[:end] == path.read_bytes()[:end]

    # What the product calls.

    def _about_to(self, *, grow: bool = False) -> None:
        """A change comes next.

        Raises:
            Killed: The process is dead before it.
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
        ours = name.startswith(self._prefix) or name == self._name
        new = False
        if ours and flags & (os.O_CREAT | os.O_TRUNC):
            new = not Path(path).exists()
            self._about_to(grow=True)
        fd: int = self._real["open"](path, flags, mode, **options)
        if ours:
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
        """It is new: a file system may give the number of what is gone again."""
        self._files.pop(number, None)
        self._names.pop(number, None)

    def _close(self, fd: int) -> None:
        # What a dead process had open may be closed when nobody acts: its tasks are let go of.
        if self._paths.pop(fd, None) is not None:
            self._owners.pop(fd, set()).discard(fd)
        self._real["close"](fd)

    def _writev(self, fd: int, buffers: Any) -> int:
        if fd not in self._paths:
            return int(self._real["writev"](fd, buffers))
        try:
            self._about_to(grow=True)
        except (OSError, Killed):
            # A part of it got there.
            if self._clock.rng.random() < 0.5:
                data = b"".join(buffers)
                self._written(fd, [data[: int(len(data) * self._clock.rng.random())]])
            raise
        return self._written(fd, buffers)

    def _written(self, fd: int, buffers: Any) -> int:
        count = int(self._real["writev"](fd, buffers))
        number = os.fstat(fd).st_ino
        if number in self._unwritten:
            # What is written anew will be synced.
            start, end = self._unwritten.pop(number)
            place = os.lseek(fd, 0, os.SEEK_CUR)
            if place - count <= start:
                start = max(start, place)
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
            again: int = self._real["open"](f"/proc/self/fd/{fd}", os.O_RDONLY)
            content = os.pread(again, size, 0)
            self._real["close"](again)
        if number in self._unwritten:
            start, end = self._unwritten[number]
            content = content[:start] + bytes(min(end, len(content)) - start) + content[end:]
        return content

    # Losing power.

    def lose_power(self, rng: Random) -> None:
        """All that runs on this machine is dead: what is left is what is found from now on."""
        left = self._left_of(self.root, self.root.stat().st_ino, rng)
        full, self.full = self.full, False
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._files.clear()
        self._names.clear()
        self._unwritten.clear()
        self._put(self.root, left)
        self.full = full

    def _left_of(self, path: Path | None, number: int, rng: Random) -> dict[str, Content]:
        """A directory's content; it has no path if only its synced name is left."""
        synced = self._names.get(number, {})
        present = {e.name: e.inode() for e in os.scandir(path)} if path is not None else {}
        left: dict[str, Content] = {}
        for name in sorted(synced.keys() | present.keys()):
            inode = synced.get(name) if rng.random() < 0.5 else present.get(name)
            if inode is None:
                continue
            where = path / name if path is not None and present.get(name) == inode else None
            content = self._found(where, inode, rng)
            if content is not None:
                left[name] = content
        return left

    def _found(self, path: Path | None, number: int, rng: Random) -> Content | None:
        if number in self._names or (path is not None and path.is_dir()):
            return self._left_of(path, number, rng)
        synced = self._files.get(number, b"")
        present = path.read_bytes() if path is not None else synced
        if number in self._unwritten or not present.startswith(synced):
            return synced
        end = rng.choice((len(present), rng.randint(len(synced), len(present))))
        content = bytearray(present[:end])
        if end > len(synced) and rng.random() < _GARBLED:
            at = rng.randrange(len(synced), end)
            if rng.random() < 0.5:
                content[at] ^= 1
            else:
                hole = content[at : at + rng.choice((16, 128, 1024))]
                content[at : at + len(hole)] = bytes(len(hole))
        return bytes(content)

    def _put(self, path: Path, left: dict[str, Content]) -> None:
        for name, content in left.items():
            if isinstance(content, dict):
                (path / name).mkdir()
                self._put(path / name, content)
            else:
                (path / name).write_bytes(content)
                self._files[(path / name).stat().st_ino] = content
        self._names[path.stat().st_ino] = {e.name: e.inode() for e in os.scandir(path)}


def _nothing() -> None:
    """How a process ends that is dead already."""


def _readable(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
