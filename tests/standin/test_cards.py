"""`benchmarks.cards` from start to end, where torch has the stand-in."""

import os
import subprocess
import sys

import pytest

from benchmarks.cards import PARTS
from tests import house

pytestmark = pytest.mark.slow

SKIPPED = {
    "streams, watched by torch": "torch has no CUDA device here",
    "speed of a run": "for CUDA, XPU",
}


def test_every_part_runs_or_names_what_it_lacks(environment, tmp_path):
    page = tmp_path / "cards.md"
    completed = subprocess.run(
        [sys.executable, "-m", "benchmarks.cards", "--quick", "--minutes", "60",
         "--report", str(page)],
        cwd=house.ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=900, check=False,
    )  # fmt: skip
    text = page.read_text()
    assert completed.returncode == 0, text
    assert "These are no cards, but the stand-in" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    results = {row[0].removeprefix("| "): row[1:] for row in rows}
    assert list(results) == [part.name for part in PARTS]
    for part in PARTS:
        result, came_out, _ = results[part.name]
        if "vulkan" in part.needed_devices:
            assert result.startswith("skipped: no card with Vulkan: ")
        elif part.name in SKIPPED:
            assert result == f"skipped: {SKIPPED[part.name]}"
        else:
            assert (result, bool(came_out)) == ("passed", True)
    assert "the cards' digests are one; the CPU's is the same" in text
    assert "ranks used the cards {0: [0], 1: [1]}, each its own" in text
    assert "the digest is that of one card" in text
    assert "nothing of a card" in text
    assert "no nvidia-smi or rocm-smi" in text
