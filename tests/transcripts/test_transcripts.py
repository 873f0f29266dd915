"""Scenarios of the run's logic, event by event; `SAMESTEP_REWRITE=1` writes down what happens."""

import os
from pathlib import Path

import pytest

from tests.transcripts.transcript import play

TRANSCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_run_does_what_is_written(path):
    played = play(path)
    if os.environ.get("SAMESTEP_REWRITE"):
        path.write_text(played)
    assert played.splitlines() == path.read_text().splitlines()


def test_there_are_transcripts():
    assert len(TRANSCRIPTS) >= 30
    assert all("\n> r" in path.read_text() for path in TRANSCRIPTS)
