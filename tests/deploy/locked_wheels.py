"""The locked packages as files, for machines and containers without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3

from tests.cluster import ROOT

DEBIAN_PYTHON = "3.11"


def locked_wheels(cache: pytest.Cache) -> Path:
    """A folder with what `requirements/coordinator.txt` names; kept from one run to the next.

    Skips the test where they cannot be had.
    """
    folder = cache.mkdir("wheels")
    lock = ROOT / "requirements" / "coordinator.txt"
    whole = folder / f"{blake3(lock.read_bytes()).hexdigest()}.whole"
    if whole.exists():
        return folder
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
         "--only-binary=:all:", "--python-version", DEBIAN_PYTHON, "--dest", folder,
         "-r", lock],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"the packages cannot be had: {done.stderr.strip().splitlines()[-1]}")
    whole.touch()
    return folder
