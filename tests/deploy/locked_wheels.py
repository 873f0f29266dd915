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
    """A folder with what these files of `requirements/` name; kept from one run to the next.

    Args:
        cache: Of pytest.
        sets: Without ".txt"; `coordinator` if none is given.

    Skips the test where they cannot be had.
    """
    sets = sets or ("coordinator",)
    folder = cache.mkdir("-".join(("wheels", *sets)))
    for name in sets:
        _have(folder, ROOT / "requirements" / f"{name}.txt")
    return folder


def _have(folder: Path, lock: Path) -> None:
    whole = folder / f"{blake3(lock.read_bytes()).hexdigest()}.whole"
    if whole.exists():
        return
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
         "--only-binary=:all:", "--python-version", DEBIAN_PYTHON, "--dest", folder,
         "-r", lock],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"the packages cannot be had: {done.stderr.strip().splitlines()[-1]}")
    whole.touch()
