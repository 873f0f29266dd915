"""The test suites for cards, run in processes whose torch has the stand-in accelerator."""

import os
import subprocess
import sys

import pytest

from tests import structure

pytestmark = pytest.mark.slow

SUITES = {
    "stand-in": ["tests/standin/suite.py"],
    "losses over a vocabulary": [
        "tests/standin/vocabulary.py",
        "tests/backends/losses/test_vocabulary_loss.py",
    ],
    "library": ["tests/standin/library.py"],
    "model families": ["tests/backends/eager/models.py"],
    "eager backend": ["tests/backends/eager", "tests/backends/test_conformance.py"],
}


@pytest.mark.parametrize("suite", SUITES)
def test_suite(environment, suite):
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-k", "not vulkan", *SUITES[suite]]
    completed = subprocess.run(
        command, cwd=structure.ROOT, env={**os.environ, **environment}, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout[-4000:] + completed.stderr[-1000:]
