"""Directories that live as long as a process."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from protocol.cli.command_line import child_environment
from protocol.machine.scratch import ScratchDirectory

PROGRAM = """
from pathlib import Path
from protocol.machine.scratch import ScratchDirectory
scratch = ScratchDirectory()
(Path(scratch.name) / "file").write_text("content")
print(scratch.name, flush=True)
input()
"""
LONG_AGO = 1_000_000_000


@pytest.fixture(autouse=True)
def _temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_leftovers_of_dead_processes_are_removed_and_live_ones_stay(tmp_path):
    environment = {**child_environment(), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        directory = Path(process.stdout.readline().strip())
        os.utime(directory, (LONG_AGO, LONG_AGO))
        with ScratchDirectory() as scratch:
            assert directory.parent == Path(scratch).parent
            assert directory.is_dir(), "its process is alive"
        process.kill()
    young_directory = tmp_path / "samestep-held-young"
    young_directory.mkdir()
    with ScratchDirectory() as scratch:
        assert sorted(tmp_path.iterdir()) == sorted([Path(scratch), young_directory])
    assert [*tmp_path.iterdir()] == [young_directory], "it may not be locked yet"


def test_foreign_directories_stay(tmp_path):
    other_directory = tmp_path / "elsewhere"
    other_directory.mkdir()
    link, file = tmp_path / "samestep-held-link", tmp_path / "samestep-held-file"
    link.symlink_to(other_directory)
    file.touch()
    for path in (link, file):
        os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)
    with ScratchDirectory():
        assert link.is_symlink()
        assert file.is_file()
