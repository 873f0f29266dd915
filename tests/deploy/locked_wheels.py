"""The locked packages as files, for machines and containers without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3

from tests.cluster import ROOT

DEBIAN_PYTHON = "3.11"


def locked_wheels(cache: pytest.Cache, *sets: str) -> Path:
    """Return a folder with the packages of these files of `requirements/`, cached between runs.

    Skips the test if the packages are not available.

    Args:
        cache: pytest's cache.
        sets: File names without ".txt"; default `coordinator`.
    """
    sets = sets or ("coordinator",)
    folder = cache.mkdir("-".join(("wheels", *sets)))
    for name in sets:
        _download(folder, ROOT / "requirements" / f"{name}.txt")
    return folder


def _download(folder: Path, lock: Path) -> None:
    complete_marker = folder / f"{blake3(lock.read_bytes()).hexdigest()}.whole"
    if complete_marker.exists():
        return
    completed = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
         "--only-binary=:all:", "--python-version", DEBIAN_PYTHON, "--dest", folder,
         "-r", lock],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if completed.returncode:
        pytest.skip(
            f"the packages cannot be downloaded: {completed.stderr.strip().splitlines()[-1]}"
        )
    complete_marker.touch()
