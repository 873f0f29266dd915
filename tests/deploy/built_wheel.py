"""Build a wheel of this checkout without the network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster import ROOT


def build_wheel(directory: Path) -> Path:
    """Build a wheel from a copy, which leaves the checkout clean; return its path."""
    source = directory / "source"
    source.mkdir()
    for name in ("backends", "coordinator", "protocol", "samestep", "worker"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--no-index", "--wheel-dir", directory, source],
        check=True,
    )  # fmt: skip
    (wheel,) = directory.glob("*.whl")
    return wheel
