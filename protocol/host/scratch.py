"""A directory for as long as its process lives: whoever makes the next one removes what is left of
processes that were killed."""

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
except ImportError:  # another system than Linux, where what is left is left
    fcntl = None  # type: ignore[assignment]

_PREFIX: Final = "samestep-held-"
_YOUNG_S: Final = 60.0
"""One that has just been made may not be locked yet."""


class ScratchDirectory(tempfile.TemporaryDirectory[str]):
    """As tempfile's, locked by this process.

    Raises:
        OSError: None can be made.
    """

    def __init__(self) -> None:
        _remove_left(Path(tempfile.gettempdir()))
        super().__init__(prefix=_PREFIX)
        self._held = _locked(Path(self.name))

    def cleanup(self) -> None:
        """Remove it."""
        super().cleanup()
        if self._held is not None:
            os.close(self._held)
            self._held = None


def _remove_left(below: Path) -> None:
    users = getattr(os, "getuid", None)
    if users is None:
        return
    for path in below.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            ours = stat.S_ISDIR(found.st_mode) and found.st_uid == users()
            if not ours or time.time() - found.st_mtime < _YOUNG_S:
                continue
            if (held := _locked(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(held)


def _locked(path: Path) -> int | None:
    """What holds the directory until it is closed, at this process's end too; None if another
    process has it, or nothing can."""
    if fcntl is None:
        return None
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # also where the file system has no locks
        os.close(held)
        return None
    return held
