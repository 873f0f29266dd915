"""Copies of checkpoints: complete or absent, verified, the oldest removed first."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from coordinator.service.run_instance import load_run
from coordinator.storage.copies import copy_checkpoint, restore_copy
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.file_digests import lock_directory
from coordinator.storage.recovery import recover
from coordinator.storage.rollback import roll_back
from coordinator.storage.states.checkpoint import checkpoint_path, remove_checkpoint
from protocol.base.errors import SamestepError, UsageError
from tests.durable_run import WrittenRun, written_run


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    return RunDirectory(written_run(tmp_path / "run"))


def newest_step(directory: RunDirectory) -> int:
    return max(int(path.name.removeprefix("step-")) for path in directory.checkpoints.iterdir())


def test_copy_is_restored(directory, tmp_path):
    step = newest_step(directory)
    copy_checkpoint(directory, step, str(tmp_path / "copies"), keep=1)
    assert restore_copy(tmp_path / "copies", tmp_path / "again").step == step
    recovery = recover(RunDirectory(tmp_path / "again"))
    assert recovery is not None
    assert recovery.step == step
    with pytest.raises(UsageError, match="holds a run already"):
        restore_copy(tmp_path / "copies", tmp_path / "again")


def test_oldest_copy_is_removed_first(directory, tmp_path):
    steps = sorted(int(p.name.removeprefix("step-")) for p in directory.checkpoints.iterdir())
    for step in steps:
        copy_checkpoint(directory, step, str(tmp_path), keep=1)
    (run,) = [path for path in tmp_path.iterdir() if path != directory.path]
    assert [path.name for path in run.iterdir()] == [f"after-{steps[-1]:010}"]


def test_half_finished_copy_is_ignored(directory, tmp_path):
    copy_checkpoint(directory, newest_step(directory), str(tmp_path / "copies"), keep=1)
    (copy,) = (tmp_path / "copies").glob("*/*")
    copy.rename(copy.with_name(copy.name + ".part"))
    with pytest.raises(UsageError, match="found none"):
        restore_copy(tmp_path / "copies", tmp_path / "again")
    copy_checkpoint(directory, newest_step(directory), str(tmp_path / "copies"), keep=1)
    assert restore_copy(tmp_path / "copies", tmp_path / "again").step == newest_step(directory)


@pytest.mark.parametrize("name", ["run.json", "manifest.json", "checkpoint.json", "journal.jsonl"])
def test_changed_copy_is_refused(directory, tmp_path, name):
    copy_checkpoint(directory, newest_step(directory), str(tmp_path / "copies"), keep=1)
    (file,) = (tmp_path / "copies").rglob(name)
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)
    with pytest.raises(SamestepError):
        restore_copy(tmp_path / "copies", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def commit_steps(run: WrittenRun, count: int, copies: Path | None = None) -> None:
    """Commit `count` steps, write a checkpoint, and copy it to `copies` if given."""
    for _ in range(count):
        run.step()
    run.checkpoint()
    if copies is not None:
        copy_checkpoint(run.directory, run.replica.step, str(copies), keep=3)


def roll_back_to(run: WrittenRun, step: int) -> None:
    roll_back(run.directory, step, run.term + 1)
    run.crash_and_resume()
    run.journal.sync()


def copy_names(copies: Path) -> list[str]:
    return sorted(path.name for path in copies.glob("*/*"))


def restore(run: WrittenRun, copies: Path, target: Path) -> str:
    """Restore the copies, check that they give the state of the run, and return the summary."""
    checkpoint = restore_copy(copies, target)
    recovery = recover(RunDirectory(target))
    assert recovery is not None
    assert recovery.load_replica().state_digest() == run.replica.state_digest()
    return checkpoint.summary


def test_copies_of_rolled_back_steps_are_skipped(tmp_path):
    copies = tmp_path / "copies"
    run = WrittenRun(tmp_path / "run")
    for _ in range(3):
        commit_steps(run, 3, copies)
    roll_back_to(run, 3)
    run.skip = (4,)
    commit_steps(run, 3, copies)
    assert copy_names(copies) == ["after-0000000003", "after-0000000006"]
    restore(run, copies, tmp_path / "again")


def test_rollback_sets_later_copies_aside(tmp_path):
    copies = tmp_path / "copies"
    run = WrittenRun(tmp_path / "run")
    for _ in range(2):
        commit_steps(run, 3, copies)
    roll_back_to(run, 3)
    assert not copy_checkpoint(run.directory, 3, str(copies), keep=3)
    assert copy_names(copies) == ["after-0000000003"]
    restore(run, copies, tmp_path / "again")


def test_newer_term_wins_over_copies_with_more_steps(tmp_path):
    before, copies = tmp_path / "before", tmp_path / "copies"
    run = WrittenRun(tmp_path / "run")
    commit_steps(run, 3)
    commit_steps(run, 3, before)
    roll_back_to(run, 3)
    copy_checkpoint(run.directory, 3, str(copies), keep=3)
    (voided_copy,) = before.glob("*/*")
    voided_copy.rename(next(copies.iterdir()) / voided_copy.name)
    restore(run, copies, tmp_path / "again")
    summary = restore_copy(next(copies.glob("*/*6")), tmp_path / "void").summary
    assert "there is a newer copy" in summary
    assert "after-0000000003" in summary


def test_copy_of_a_live_run_restores_its_checkpoint(tmp_path):
    run = WrittenRun(tmp_path / "run", skip=(4,))
    commit_steps(run, 3)
    state = run.replica.state_digest()
    for _ in range(3):
        run.step()
    copy_checkpoint(run.directory, 3, str(tmp_path / "copies"), keep=3)
    summary = restore_copy(tmp_path / "copies", tmp_path / "again").summary
    assert "steps 3 to 5 were committed: they are done again" in summary
    assert "4 were skipped" in summary
    lock = lock_directory(tmp_path / "again")
    instance = load_run(lock)
    assert instance is not None
    assert instance.restart is not None
    assert instance.restart.recovery.step == 3
    assert instance.restart.recovery.load_replica().state_digest() == state
    lock.release()


def test_incomplete_copies_are_removed(tmp_path):
    copies = tmp_path / "copies"
    run = WrittenRun(tmp_path / "run")
    commit_steps(run, 3, copies)
    partial_file = next(copies.iterdir()) / "after-0000000001.part"
    partial_file.mkdir()
    remove_checkpoint(checkpoint_path(run.directory.checkpoints, 0))
    with pytest.raises(SamestepError):
        copy_checkpoint(run.directory, 0, str(copies), keep=3)
    assert copy_names(copies) == ["after-0000000003"]


def test_parent_directory_names_the_copy_directories(directory, tmp_path):
    copy_checkpoint(directory, newest_step(directory), str(tmp_path / "above" / "copies"), keep=1)
    with pytest.raises(UsageError, match=f"--from {tmp_path / 'above' / 'copies'}/"):
        restore_copy(tmp_path / "above", tmp_path / "again")


def test_ambiguous_copies_require_a_run_name(directory, tmp_path):
    copy_checkpoint(directory, newest_step(directory), str(tmp_path / "copies"), keep=1)
    (run,) = (tmp_path / "copies").iterdir()
    other = run.with_name("other")
    other.mkdir()
    (other / next(run.iterdir()).name).mkdir()
    copies = tmp_path / "copies"
    os.utime(other / next(run.iterdir()).name, (1, 1))
    step = newest_step(directory)
    choices = f"newest first: --from {run} (after step {step}), --from {other} (after step {step})"
    with pytest.raises(UsageError, match=re.escape(f"of 2 runs; name one, {choices}")):
        restore_copy(copies, tmp_path / "again")
    for source in (copies / "nosuch", tmp_path):
        with pytest.raises(UsageError, match=re.escape(choices)):
            restore_copy(source, tmp_path / "again")
    assert restore_copy(run, tmp_path / "again").step == newest_step(directory)


def test_restored_run_takes_over_the_copies_of_a_live_run(tmp_path):
    copies, restored_run = tmp_path / "copies", RunDirectory(tmp_path / "elsewhere")
    run = WrittenRun(tmp_path / "run")
    commit_steps(run, 3, copies)
    restore_copy(copies, restored_run.path)
    commit_steps(run, 3, copies)  # the restored run has not copied anything yet
    assert copy_checkpoint(restored_run, 3, str(copies), keep=3)
    expected_text = "has after-0000000003 of the same run, restored elsewhere: end one of the two"
    for repeat in (False, True):  # a restart of the first run has no newer term
        if repeat:
            run.crash_and_resume()
            run.journal.sync()
        run.step()
        run.checkpoint()
        with pytest.raises(UsageError, match=expected_text):
            copy_checkpoint(run.directory, run.replica.step, str(copies), keep=3)
    assert not copy_checkpoint(restored_run, 3, str(copies), keep=3)
    assert copy_names(copies) == ["after-0000000003", "after-0000000006"]
    assert restore_copy(copies, tmp_path / "again").step == 3
