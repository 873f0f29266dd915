"""Copies of checkpoints: whole or not there, verified, the oldest removed first."""

from __future__ import annotations

import pytest

from coordinator.storage.copies import bring_back, copy_checkpoint
from coordinator.storage.recovery import recover
from coordinator.storage.run_directory import RunDirectory
from protocol.base.errors import SamestepError, UsageError
from tests.durable_run import written_run


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    return RunDirectory(written_run(tmp_path / "run"))


def newest(directory: RunDirectory) -> int:
    return max(int(path.name.removeprefix("step-")) for path in directory.checkpoints.iterdir())


def test_a_copy_is_brought_back(directory, tmp_path):
    step = newest(directory)
    copy_checkpoint(directory, step, tmp_path / "copies", keep=1)
    assert bring_back(tmp_path / "copies", tmp_path / "again") == step
    recovery = recover(RunDirectory(tmp_path / "again"))
    assert recovery is not None
    assert recovery.step == step
    with pytest.raises(UsageError, match="holds a run already"):
        bring_back(tmp_path / "copies", tmp_path / "again")


def test_the_oldest_goes_first(directory, tmp_path):
    steps = sorted(int(p.name.removeprefix("step-")) for p in directory.checkpoints.iterdir())
    for step in steps:
        copy_checkpoint(directory, step, tmp_path, keep=1)
    (run,) = [path for path in tmp_path.iterdir() if path != directory.path]
    assert [path.name for path in run.iterdir()] == [f"after-{steps[-1]:010}"]


def test_what_a_crash_left_half_copied_is_no_copy(directory, tmp_path):
    copy_checkpoint(directory, newest(directory), tmp_path / "copies", keep=1)
    (copy,) = (tmp_path / "copies").glob("*/*")
    copy.rename(copy.with_name(copy.name + ".part"))
    with pytest.raises(UsageError, match="found none"):
        bring_back(tmp_path / "copies", tmp_path / "again")
    copy_checkpoint(directory, newest(directory), tmp_path / "copies", keep=1)
    assert bring_back(tmp_path / "copies", tmp_path / "again") == newest(directory)


@pytest.mark.parametrize("name", ["run.json", "manifest.json", "checkpoint.json", "journal.jsonl"])
def test_a_copy_that_was_changed_is_refused(directory, tmp_path, name):
    copy_checkpoint(directory, newest(directory), tmp_path / "copies", keep=1)
    (file,) = (tmp_path / "copies").rglob(name)
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)
    with pytest.raises(SamestepError):
        bring_back(tmp_path / "copies", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_of_several_runs_one_is_to_be_named(directory, tmp_path):
    copy_checkpoint(directory, newest(directory), tmp_path / "copies", keep=1)
    (run,) = (tmp_path / "copies").iterdir()
    other = run.with_name("other")
    other.mkdir()
    (other / next(run.iterdir()).name).mkdir()
    with pytest.raises(UsageError, match="of several runs: name one"):
        bring_back(tmp_path / "copies", tmp_path / "again")
    assert bring_back(run, tmp_path / "again") == newest(directory)
