"""Scenarios of the run's logic, event by event; `SAMESTEP_REWRITE=1` rewrites the transcripts."""

import os
from pathlib import Path

import pytest

from tests.transcripts.transcript import play

TRANSCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_run_follows_the_transcript(path):
    transcript = play(path)
    if os.environ.get("SAMESTEP_REWRITE"):
        path.write_text(transcript)
    assert transcript.splitlines() == path.read_text().splitlines()


def test_transcripts_exist():
    assert len(TRANSCRIPTS) >= 30
    assert all("\n> r" in path.read_text() for path in TRANSCRIPTS)
