"""Locate this user's cache directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from protocol.base.errors import StorageFailed


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Return $SAMESTEP_CACHE, systemd's $CACHE_DIRECTORY, or the user's cache directory.

    Raises:
        StorageFailed: None of them is set, and the user has no home directory.
    """
    if directory_name := environment.get("SAMESTEP_CACHE"):
        return Path(directory_name).absolute()
    if directories := environment.get("CACHE_DIRECTORY"):
        return Path(directories.split(":")[0])
    if (base := environment.get("XDG_CACHE_HOME", "")) and Path(base).is_absolute():
        return Path(base) / "samestep"
    try:
        return Path("~/.cache/samestep").expanduser()
    except RuntimeError:
        reason = "this user has no home directory; set SAMESTEP_CACHE=DIR"
        raise StorageFailed("find", "~/.cache", reason) from None
