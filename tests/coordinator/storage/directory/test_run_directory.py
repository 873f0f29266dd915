"""A run's directory: one coordinator at a time, and the state that the next coordinator
recovers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from coordinator.disk import directory_lock
from coordinator.disk.artifacts import write_model
from coordinator.disk.directory_lock import DirectoryLock, stored_term
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.log.gradient_log import GradientLog
from coordinator.storage.recovery import recover
from coordinator.storage.states.checkpoint import checkpoint_path, write_checkpoint
from protocol.base.errors import Mismatch, RunFailed, StorageDamaged, StorageFailed, UsageError
from protocol.spec.manifest import Export
from tests.durable_run import (
    MANIFEST,
    RUN_ID,
    SPEC,
    append_averages,
    averages,
    commit_of,
    initial_replica,
    log_step,
    record_of,
)

ROOT = Path(__file__).parents[4]
LOCK_HOLDER = """
import sys
from pathlib import Path
from coordinator.disk.directory_lock import DirectoryLock
lock = DirectoryLock.acquire(Path(sys.argv[1]))
print(lock.term, flush=True)
sys.stdin.read()
"""


def start_lock_holder(directory):
    """Start another process that holds the directory until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", LOCK_HOLDER, str(directory)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_directory_lock_is_exclusive_and_released_by_a_kill(tmp_path):
    process, term = start_lock_holder(tmp_path)
    assert term == 1
    try:
        with pytest.raises(UsageError, match=f"another coordinator \\(process {process.pid}\\)"):
            DirectoryLock.acquire(tmp_path)
        assert stored_term(tmp_path) == 1
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    lock = DirectoryLock.acquire(tmp_path)
    assert lock.term == 2
    lock.check()
    lock.release()


def test_lock_is_not_inherited(tmp_path):
    lock = DirectoryLock.acquire(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        lock.release()
        DirectoryLock.acquire(tmp_path).release()
    finally:
        child.communicate()


def test_term_exceeds_all_known_terms_at_each_start(tmp_path):
    terms = []
    for known_term in (0, 0, 7, 3):
        lock = DirectoryLock.acquire(tmp_path, known_term)
        terms.append(lock.term)
        lock.release()
    assert terms == [1, 2, 8, 9]


@pytest.mark.parametrize("content", ["", "[]", '{"term": "1"}', '{"term": 0}'])
def test_unreadable_term_is_refused(tmp_path, content):
    (tmp_path / "term.json").write_text(content)
    with pytest.raises(StorageDamaged, match="remove it"):
        DirectoryLock.acquire(tmp_path)
    (tmp_path / "term.json").unlink()
    DirectoryLock.acquire(tmp_path)


def test_file_in_place_of_the_run_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be used"):
        DirectoryLock.acquire(tmp_path / "file")


def test_lost_lock_is_detected(tmp_path):
    lock = DirectoryLock.acquire(tmp_path)
    (tmp_path / "lock").rename(tmp_path / "gone")
    with pytest.raises(RunFailed, match="removed or replaced"):
        lock.check()
    second = DirectoryLock.acquire(tmp_path)
    with pytest.raises(RunFailed, match="of term 2"):
        lock.check()
    second.check()


@pytest.mark.parametrize("function_name", ["is_same_file", "_term_in"])
def test_vanishing_directory_is_reported_as_missing(tmp_path, monkeypatch, function_name):
    runs, moved = tmp_path / "runs", tmp_path / "away"
    lock = DirectoryLock.acquire(runs)
    original = getattr(directory_lock, function_name)

    def move_directory_first(*arguments):
        if runs.exists():
            runs.rename(moved)
        return original(*arguments)

    monkeypatch.setattr(directory_lock, function_name, move_directory_first)
    with pytest.raises(StorageFailed, match="restore what is missing"):
        lock.check()
    monkeypatch.undo()
    moved.rename(runs)
    lock.check()


def test_lock_survives_a_temporarily_missing_directory(tmp_path):
    directory = tmp_path / "run"
    lock = DirectoryLock.acquire(directory)
    directory.rename(tmp_path / "away")
    with pytest.raises(StorageFailed, match="restore what is missing"):
        lock.check()
    (tmp_path / "away").rename(directory)
    lock.check()


# Stored files of a run.


def begin_run(path, *, checkpoint=True):
    directory = RunDirectory(path)
    directory.begin(RUN_ID, SPEC)
    directory.write_manifest(MANIFEST)
    if checkpoint:
        write_state(directory, initial_replica())
    return directory


def write_state(directory, replica):
    losses = [1.0 / (1 + step) for step in range(replica.step)]
    return write_checkpoint(
        directory.checkpoints, MANIFEST, replica, run_id=RUN_ID, term=1, losses=losses
    )


def open_log(directory, **options):
    options = {"term": 1, "next_step": 0, **options}
    return GradientLog(directory.log, RUN_ID, MANIFEST, **options)


def trained_replica(steps):
    replica = initial_replica()
    for step in range(steps):
        scalars = commit_of(step, step + 1).scalars
        assert scalars is not None
        replica.apply(averages(step), scalars)
    return replica


def test_run_and_manifest_round_trip(tmp_path):
    directory = begin_run(tmp_path / "run")
    stored_run = directory.read_run()
    assert stored_run is not None
    assert (stored_run.run_id, stored_run.spec) == (RUN_ID, SPEC)
    assert directory.read_manifest() == MANIFEST
    directory.write_manifest(MANIFEST)
    with pytest.raises(UsageError, match="--resume"):
        directory.begin("other", SPEC)
    with pytest.raises(Mismatch, match="start a new run"):
        directory.write_manifest(MANIFEST.model_copy(update={"train_samples": 11}))


def test_directory_of_a_run_that_never_began_is_reused(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.begin(RUN_ID, SPEC)
    directory.journal.write_text("of the first\n")
    directory.begin("second", SPEC)
    stored_run = directory.read_run()
    assert stored_run is not None
    assert stored_run.run_id == "second"
    assert not directory.journal.exists()


def test_files_of_a_run_cannot_be_export_names(tmp_path):
    """The names of the lock, the term file and the report are reserved, too."""
    directory = RunDirectory(tmp_path)
    paths = [
        value for name in dir(directory) if isinstance(value := getattr(directory, name), Path)
    ]
    names = {path.name for path in paths if path != tmp_path}
    assert names
    for name in names | {directory_lock.LOCK_FILE, directory_lock.TERM_FILE, "report.html"}:
        with pytest.raises(ValidationError, match="that a run does not use"):
            Export(directory=name)


def test_missing_directory_holds_no_run(tmp_path):
    assert recover(RunDirectory(tmp_path / "none")) is None


def test_run_without_a_ready_worker_starts_from_zero(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.begin(RUN_ID, SPEC)
    assert recover(directory) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run_id": "x", "spec": {"steps": 0}}'])
def test_unreadable_run_file_is_reported(tmp_path, content):
    directory = begin_run(tmp_path)
    directory.run_file.write_bytes(content)
    with pytest.raises(StorageDamaged, match=r"run\.json"):
        recover(directory)


@pytest.mark.parametrize("checkpoint_step", [0, 1, 3, 5])
def test_state_after_the_last_commit_is_recovered(tmp_path, checkpoint_step):
    directory = begin_run(tmp_path)
    log = open_log(directory)
    for step in range(5):
        append_averages(log, step)
        digest = trained_replica(step).state_digest()
        log.commit(record_of(step, step + 1, state_before=digest))
        if step + 1 == checkpoint_step:
            log.roll()
            write_state(directory, trained_replica(checkpoint_step))
            log.remove_segments(checkpoint_step)
    append_averages(log, 5)
    log.close()
    recovery = recover(directory)
    assert recovery is not None
    assert recovery.checkpoint.info.step == checkpoint_step
    assert (recovery.step, recovery.optimizer_step, recovery.redo) == (5, 5, ())
    assert recovery.losses == tuple(1.0 / (1 + step) for step in range(5))
    assert recovery.load_replica().state_digest() == trained_replica(5).state_digest()


def test_torn_tail_is_truncated_and_recorded(tmp_path):
    directory = begin_run(tmp_path)
    log = open_log(directory)
    log_step(log, 0)
    log_step(log, 1)
    log.close()
    os.truncate(log.segment, log.segment.stat().st_size - 1)
    (directory.checkpoints / "step-0000000001.part").mkdir()
    recovery = recover(directory)
    assert recovery is not None
    assert recovery.step == 1
    assert len(recovery.notes) == 1
    assert "cut" in recovery.notes[0]
    assert not list(tmp_path.rglob("*.part"))
    second_recovery = recover(directory)
    assert second_recovery is not None
    assert second_recovery.notes == ()


def test_without_averages_steps_are_repeated_from_the_checkpoint(tmp_path):
    directory = begin_run(tmp_path)
    log = open_log(directory, mode="checkpoint")
    for step in range(2):
        log.commit(record_of(step, step + 1))
    log.roll()
    write_state(directory, trained_replica(2))
    log.commit(record_of(2, 3))
    log.commit(record_of(3, 3, skip=True))
    log.close()
    recovery = recover(directory)
    assert recovery is not None
    assert (recovery.step, recovery.optimizer_step) == (2, 2)
    assert [record.commit.step for record in recovery.redo] == [2, 3]
    assert recovery.redo[1].commit.scalars is None
    assert recovery.load_replica().state_digest() == trained_replica(2).state_digest()


def test_damaged_checkpoint_falls_back_to_the_previous_one(tmp_path):
    directory = begin_run(tmp_path)
    log = open_log(directory)
    for step in range(4):
        log_step(log, step)
    log.roll()
    write_state(directory, trained_replica(4))
    log_step(log, 4)
    log.close()
    (checkpoint_path(directory.checkpoints, 4) / "optimizer.safetensors").unlink()
    recovery = recover(directory)
    assert recovery is not None
    assert recovery.step == 5
    assert "checkpoint skipped" in recovery.notes[0]
    assert recovery.load_replica().state_digest() == trained_replica(5).state_digest()
    # Without its first segments, the log does not continue any checkpoint.
    open_log(directory, term=2, next_step=5).remove_segments(4)
    recovery = recover(directory)
    assert recovery is not None
    assert recovery.step == 0
    assert any("done again" in note for note in recovery.notes)


def test_log_without_any_checkpoint_is_refused(tmp_path):
    directory = begin_run(tmp_path, checkpoint=False)
    log = open_log(directory)
    for step in range(3):
        log_step(log, step)
    log.close()
    with pytest.raises(StorageDamaged, match="expected an intact checkpoint"):
        recover(directory)


def test_run_without_a_saved_first_state_starts_over(tmp_path):
    directory = begin_run(tmp_path, checkpoint=False)
    open_log(directory).close()
    assert recover(directory) is None


def test_replay_with_another_digest_is_refused(tmp_path):
    directory = begin_run(tmp_path)
    log = open_log(directory)
    log_step(log, 0)
    append_averages(log, 1)
    log.commit(record_of(1, 2, state_before="0" * 64))
    log.close()
    recovery = recover(directory)
    assert recovery is not None
    with pytest.raises(StorageDamaged, match="do not lead"):
        recovery.load_replica()


def test_valid_result_is_read(tmp_path):
    directory = begin_run(tmp_path)
    assert directory.read_result() is None
    run = directory.read_run()
    assert run is not None
    result = {"run_id": run.run_id, "outcome": "finished", "steps": 3}
    directory.result_file.write_text(json.dumps(result))
    assert directory.read_result() == result
    for content in ("[", "[]", "{}", json.dumps({**result, "run_id": "another"})):
        directory.result_file.write_text(content)
        with pytest.raises(StorageDamaged, match=r"remove result\.json"):
            directory.read_result()


@pytest.mark.parametrize("name", ["log", "checkpoints", "replicas", "capture"])
def test_file_in_place_of_a_directory_is_named_at_once(tmp_path, name):
    directory = RunDirectory(tmp_path)
    directory.begin(RUN_ID, SPEC)
    assert directory.read_run() is not None
    (tmp_path / name).write_text("")
    with pytest.raises(StorageDamaged, match=f"{name}'.*expected a directory, got a file; remove"):
        recover(directory)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageDamaged, match="expected a directory"):
        directory.read_run()


def test_file_in_place_of_a_model_has_a_remedy(tmp_path):
    (tmp_path / MANIFEST.export.directory).write_text("")
    with pytest.raises(StorageFailed, match="expected a directory, got a file; remove it"):
        write_model(tmp_path, MANIFEST, initial_replica())


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"", "an empty file"),
        (b'{"run_id": "r", "sp', "a file that is not JSON, or only a part of it"),
        (b"\xff\xfe\x00", "a file that is not JSON, or only a part of it"),
        (b"[]", "JSON without keys"),
        (b'{"spec": {}}', "JSON without a text under 'run_id'"),
        (b'{"run_id": "r", "spec": 5}', "JSON without a run spec under 'spec'"),
    ],
)
def test_message_about_a_damaged_run_file_has_no_python_internals(tmp_path, content, got):
    directory = begin_run(tmp_path)
    directory.run_file.write_bytes(content)
    with pytest.raises(StorageDamaged) as damage:
        directory.read_run()
    expected = f"expected JSON with the run's ID and spec, got {got}; restore it from a copy"
    assert damage.value.reason == expected


@pytest.mark.parametrize(
    ("has_run", "remedy"),
    [
        (True, "the run in it resumes with the same command once this user can write there"),
        (False, "choose one that this user can write to: --out DIR"),
    ],
)
def test_unwritable_directory_is_one_line_with_a_remedy(tmp_path, monkeypatch, has_run, remedy):
    if has_run:
        (tmp_path / "run.json").write_text("{}")

    def refuse(*_: object) -> None:
        raise StorageFailed(
            "write", "term.json", "No space left on device; make room, then continue"
        )

    monkeypatch.setattr("coordinator.disk.directory_lock.replace_file", refuse)
    with pytest.raises(UsageError, match=rf"left on device; make room; {remedy}$"):
        DirectoryLock.acquire(tmp_path)
