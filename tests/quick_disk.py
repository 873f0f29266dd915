"""No test cuts the power, so none can see whether the disk was waited for: they do not wait for it,
nor do the commands that are forked. Those that are started anew do."""

from __future__ import annotations

import os


def wait_for_no_disk() -> None:
    """From now on syncing a file is to see that it is open."""
    for name in ("fsync", "fdatasync"):
        setattr(os, name, _is_open)


def _is_open(fd: int) -> None:
    os.fstat(fd)
