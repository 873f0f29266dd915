"""Test of all of `benchmarks.cards`, in a process whose torch has the stand-in device."""

import os
import subprocess
import sys

import pytest

from benchmarks.cards import PARTS
from tests import structure

pytestmark = pytest.mark.slow

SKIPPED = {
    "streams, watched by torch": "torch has no CUDA device here",
    "speed of a run": "only for CUDA and XPU",
}


def test_every_part_runs_or_names_the_missing_device(environment, tmp_path):
    page = tmp_path / "cards.md"
    completed = subprocess.run(
        [sys.executable, "-m", "benchmarks.cards", "--quick", "--minutes", "60",
         "--report", str(page)],
        cwd=structure.ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=900, check=False,
    )  # fmt: skip
    text = page.read_text()
    assert completed.returncode == 0, text
    assert "the parts ran on the stand-in device" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    results = {row[0].removeprefix("| "): row[1:] for row in rows}
    assert list(results) == [part.name for part in PARTS]
    for part in PARTS:
        result, last_line, _ = results[part.name]
        if "vulkan" in part.needed_devices:
            assert result.startswith("skipped: no card with Vulkan: ")
        elif part.name in SKIPPED:
            assert result == f"skipped: {SKIPPED[part.name]}"
        else:
            assert (result, bool(last_line)) == ("passed", True)
    assert "the cards' digests are one; the CPU's is the same" in text
    assert "ranks used the cards {0: [0], 1: [1]}, each its own" in text
    assert "the digest is that of one card" in text
    assert "says nothing about a card" in text
    assert "nvidia-smi and rocm-smi are missing" in text
