"""The disk of a simulated machine: real files, and a record of what a power failure would leave.

The product's storage runs unchanged. The system calls that change a disk are intercepted, so any
call can meet a full disk or a failing sync, and a process can be killed between any two calls. The
record has the last synced content of each file, and the synced names of each directory. A power
failure leaves that, plus a random part of unsynced data: a file's new end up to some byte, perhaps
with a wrong byte or a hole; a new, renamed or removed name, or the previous one. Data of a failed
sync never reaches the disk unless it is written again, although processes can read it (as on
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
_CORRUPTION_PROBABILITY: Final = 0.5
"""Probability of a wrong byte in unsynced data."""

Content = bytes | dict[str, "Content"]


class ProcessKilled(BaseException):
    """The process is killed at this call; `act` kills it."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act


class Disk:
    """The disk of one machine, below a directory.

    Attributes:
        full: Whether the disk is full.
        sync_fails: Pattern of the path whose next sync fails; None if no sync fails.
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
        self._changes_left: int | None = None
        self._act = _nothing
        self._files: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {root.stat().st_ino: {}}
        self._unwritten: dict[int, tuple[int, int]] = {}

    @contextmanager
    def intercept_calls(self) -> Iterator[None]:
        """Route system calls that change a disk through this object, within a `with` block."""
        names = ("open", "close", "writev", "ftruncate", "fsync", "fdatasync", *_CHANGES)
        self._real_calls: dict[str, Callable[..., Any]] = {
            name: getattr(os, name) for name in names
        }
        intercepted_calls: dict[str, Callable[..., Any]] = {
            name: self._change(name) for name in _CHANGES
        }
        intercepted_calls |= {
            "open": self._open, "close": self._close, "writev": self._writev,
            "ftruncate": self._ftruncate, "fsync": self._fsync, "fdatasync": self._fsync,
        }  # fmt: skip
        with mock.patch.dict(vars(os), intercepted_calls):
            yield

    @contextmanager
    def killing_after(self, changes: int) -> Iterator[None]:
        """Kill the current process after this many changes of the disk.

        Raises:
            ProcessKilled: The process would make a further change.
        """
        self._changes_left = changes
        try:
            yield
        finally:
            self.cancel_kill()

    def kill_after(self, changes: int, act: Callable[[], None]) -> None:
        """End the current process after this many changes, unless it finishes first."""
        self._changes_left, self._act = changes, act

    def cancel_kill(self) -> None:
        """Cancel a pending kill: the process has finished."""
        self._changes_left, self._act = None, _nothing

    def close(self, fds: set[int]) -> None:
        """Close the files of a dead process."""
        for fd in fds:
            self._paths.pop(fd, None)
            self._real_calls["close"](fd)
        fds.clear()

    def has_synced(self, path: Path, end: int) -> bool:
        """Return whether the first `end` bytes of a file would survive a power failure."""
        return self._files.get(path.stat().st_ino, b"")[:end] == path.read_bytes()[:end]

    # Intercepted calls.

    def _before_change(self, *, grow: bool = False) -> None:
        """Kill the process or raise an error, if one is due before the next change.

        Raises:
            ProcessKilled: The process is killed before the change.
            OSError: The disk is full.
        """
        if self._changes_left is not None:
            if not self._changes_left:
                act = self._act
                self.cancel_kill()
                raise ProcessKilled(act)
            self._changes_left -= 1
        if grow and self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _change(self, name: str) -> Callable[..., Any]:
        real_call = self._real_calls[name]

        def change(path: Any, *arguments: Any, **options: Any) -> Any:
            if options.get("dir_fd") is not None or str(path).startswith(self._prefix):
                self._before_change(grow=name == "mkdir")
            result = real_call(path, *arguments, **options)
            if name == "mkdir" and str(path).startswith(self._prefix):
                self._forget(Path(path).stat().st_ino)
            return result

        return change

    def _open(self, path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        name = str(path)
        is_below_root = name.startswith(self._prefix) or name == self._name
        is_new = False
        if is_below_root and flags & (os.O_CREAT | os.O_TRUNC):
            is_new = not Path(path).exists()
            self._before_change(grow=True)
        fd: int = self._real_calls["open"](path, flags, mode, **options)
        if is_below_root:
            self._paths[fd] = name
            if self._clock.current is not None:
                self._owners[fd] = self._clock.current.fds
                self._clock.current.fds.add(fd)
            if is_new or flags & os.O_TRUNC:
                number = os.fstat(fd).st_ino
                self._unwritten.pop(number, None)
                if is_new:
                    self._forget(number)
        return fd

    def _forget(self, number: int) -> None:
        """Forget an inode number: the file system may reuse that of a removed file."""
        self._files.pop(number, None)
        self._names.pop(number, None)

    def _close(self, fd: int) -> None:
        # Garbage collection of a dead process's tasks may close files while no process acts.
        if self._paths.pop(fd, None) is not None:
            self._owners.pop(fd, set()).discard(fd)
        self._real_calls["close"](fd)

    def _writev(self, fd: int, buffers: Any) -> int:
        if fd not in self._paths:
            return int(self._real_calls["writev"](fd, buffers))
        try:
            self._before_change(grow=True)
        except (OSError, ProcessKilled):
            # Sometimes a part of the data is written.
            if self._clock.rng.random() < 0.5:
                data = b"".join(buffers)
                self._write_to_disk(fd, [data[: int(len(data) * self._clock.rng.random())]])
            raise
        return self._write_to_disk(fd, buffers)

    def _write_to_disk(self, fd: int, buffers: Any) -> int:
        count = int(self._real_calls["writev"](fd, buffers))
        number = os.fstat(fd).st_ino
        if number in self._unwritten:
            # The next sync will write this data again.
            start, end = self._unwritten.pop(number)
            position = os.lseek(fd, 0, os.SEEK_CUR)
            if position - count <= start:
                start = max(start, position)
            if start < end:
                self._unwritten[number] = start, end
        return count

    def _ftruncate(self, fd: int, size: int) -> None:
        if fd in self._paths:
            self._before_change()
            number = os.fstat(fd).st_ino
            if number in self._unwritten and size <= self._unwritten[number][0]:
                del self._unwritten[number]
        self._real_calls["ftruncate"](fd, size)

    def _fsync(self, fd: int) -> None:
        if fd not in self._paths:
            self._real_calls["fsync"](fd)
            return
        self._before_change()
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
        if _is_readable(fd):
            content = os.pread(fd, size, 0)
        else:
            read_fd: int = self._real_calls["open"](f"/proc/self/fd/{fd}", os.O_RDONLY)
            content = os.pread(read_fd, size, 0)
            self._real_calls["close"](read_fd)
        if number in self._unwritten:
            start, end = self._unwritten[number]
            content = content[:start] + bytes(min(end, len(content)) - start) + content[end:]
        return content

    # Power failures.

    def lose_power(self, rng: Random) -> None:
        """Reduce the disk to what survives; all processes of the machine must be dead."""
        survivors = self._surviving_directory(self.root, self.root.stat().st_ino, rng)
        full, self.full = self.full, False
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._files.clear()
        self._names.clear()
        self._unwritten.clear()
        self._write_survivors(self.root, survivors)
        self.full = full

    def _surviving_directory(
        self, path: Path | None, number: int, rng: Random
    ) -> dict[str, Content]:
        """Return a directory's surviving content; `path` is None if only the synced name
        survives."""
        synced_names = self._names.get(number, {})
        current_names = {e.name: e.inode() for e in os.scandir(path)} if path is not None else {}
        survivors: dict[str, Content] = {}
        for name in sorted(synced_names.keys() | current_names.keys()):
            inode = synced_names.get(name) if rng.random() < 0.5 else current_names.get(name)
            if inode is None:
                continue
            child_path = (
                path / name if path is not None and current_names.get(name) == inode else None
            )
            content = self._surviving_content(child_path, inode, rng)
            if content is not None:
                survivors[name] = content
        return survivors

    def _surviving_content(self, path: Path | None, number: int, rng: Random) -> Content | None:
        if number in self._names or (path is not None and path.is_dir()):
            return self._surviving_directory(path, number, rng)
        synced_content = self._files.get(number, b"")
        current_content = path.read_bytes() if path is not None else synced_content
        if number in self._unwritten or not current_content.startswith(synced_content):
            return synced_content
        end = rng.choice(
            (len(current_content), rng.randint(len(synced_content), len(current_content)))
        )
        content = bytearray(current_content[:end])
        if end > len(synced_content) and rng.random() < _CORRUPTION_PROBABILITY:
            offset = rng.randrange(len(synced_content), end)
            if rng.random() < 0.5:
                content[offset] ^= 1
            else:
                hole = content[offset : offset + rng.choice((16, 128, 1024))]
                content[offset : offset + len(hole)] = bytes(len(hole))
        return bytes(content)

    def _write_survivors(self, path: Path, survivors: dict[str, Content]) -> None:
        for name, content in survivors.items():
            if isinstance(content, dict):
                (path / name).mkdir()
                self._write_survivors(path / name, content)
            else:
                (path / name).write_bytes(content)
                self._files[(path / name).stat().st_ino] = content
        self._names[path.stat().st_ino] = {e.name: e.inode() for e in os.scandir(path)}


def _nothing() -> None:
    """Do nothing: the process to kill is already dead."""


def _is_readable(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
