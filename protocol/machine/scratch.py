"""Temporary directories that do not outlive their process.

Creating one removes the leftover directories of processes that were killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Final

try:
    import fcntl
except ImportError:  # not Linux: leftover directories stay there
    fcntl = None  # type: ignore[assignment]

_PREFIX: Final = "samestep-held-"
_MIN_AGE_S: Final = 60.0
"""Directories younger than this are not removed: their process may not have locked them yet."""


class ScratchDirectory(tempfile.TemporaryDirectory[str]):
    """A temporary directory that stays locked while this process uses it.

    Raises:
        OSError: The directory cannot be created.
    """

    def __init__(self) -> None:
        _remove_leftovers(Path(tempfile.gettempdir()))
        super().__init__(prefix=_PREFIX)
        self._lock_fd = _lock(Path(self.name))

    def cleanup(self) -> None:
        """Remove the directory."""
        super().cleanup()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _remove_leftovers(parent: Path) -> None:
    get_user = getattr(os, "getuid", None)
    if get_user is None:
        return
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == get_user()
            if not is_own or time.time() - status.st_mtime < _MIN_AGE_S:
                continue
            if (lock_fd := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock_fd)


def _lock(path: Path) -> int | None:
    """Lock a directory; return the descriptor that holds the lock, or None if locking fails."""
    if fcntl is None:
        return None
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # also where the file system has no locks
        os.close(fd)
        return None
    return fd
