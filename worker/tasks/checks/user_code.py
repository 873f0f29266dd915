"""Distinguish a user's source files from Python's, installed packages' and samestep's."""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Final

_LIBRARY: Final = tuple(
    Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "purelib", "platlib")
)
_ROOT: Final = Path(__file__).resolve().parents[3]
_OWN_PACKAGES: Final = tuple(
    _ROOT / name for name in ("backends", "coordinator", "protocol", "samestep", "worker")
)


@lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Return whether code is the user's.

    Args:
        file: Path of a source file, or a name in angle brackets for code without one.
    """
    if file.startswith("<"):
        return not file.startswith(("<frozen", "<string", "<__array"))  # a prompt, a notebook
    path = Path(file).resolve()
    return not any(path.is_relative_to(home) for home in (*_OWN_PACKAGES, *_LIBRARY))
