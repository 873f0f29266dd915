"""Where copies of checkpoints are kept: a directory, or a worker's name."""

from __future__ import annotations


def is_directory(place: str) -> bool:
    """Whether it is a directory's path and no worker's name: it has a / in it, or begins so."""
    return "/" in place or place.startswith((".", "~"))
