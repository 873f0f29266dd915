"""The order in which a run's files become durable, with and without disk failures."""

import asyncio
import errno
import os

import pytest

from coordinator.run.outputs.events import Record
from coordinator.run.outputs.restart import AdmissionRecord
from coordinator.storage import run_storage
from coordinator.storage.directory.journal import Journal
from coordinator.storage.directory.journal_records import CommandReceived, FileDigests
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.log.log_index import apply_logged_step
from coordinator.storage.log.log_records import ChunkId
from coordinator.storage.run_storage import RunStorage
from coordinator.storage.states.checkpoint import checkpoint_steps, read_metrics, write_checkpoint
from protocol.base import limits
from protocol.base.errors import RunFailed, StorageFailed
from tests.durable_run import (
    MANIFEST,
    RUN_ID,
    SPEC,
    averages,
    initial_replica,
    read_journal,
    record_of,
)


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.begin(RUN_ID, SPEC)
    return directory


def begin(directory, spec=SPEC):
    failures: list[Exception] = []
    storage = RunStorage(
        directory, RUN_ID, spec, term=1, guard=lambda: None, failed=failures.append
    )
    storage.begin_log(MANIFEST, 0)
    return storage, failures


async def test_journal_is_durable_before_a_checkpoint_replaces_the_log(directory, monkeypatch):
    """Otherwise a restart from the checkpoint could not find the lines that the journal lacks."""
    storage, failures = begin(directory)
    monkeypatch.setattr(storage, "_unsynced", True)  # the periodic sync has not run yet
    storage.append_records([CommandReceived(term=1, step=0, command="halt")])
    journal_records: list[Record] = []

    def record_journal(*arguments, **options):
        journal_records.extend(entry.record for entry in read_journal(directory.journal))
        return write_checkpoint(*arguments, **options)

    monkeypatch.setattr(run_storage, "write_checkpoint", record_journal)
    await storage.save_checkpoint(initial_replica(), ())
    await storage.close()
    assert journal_records == [CommandReceived(term=1, step=0, command="halt")]
    assert failures == []
    assert Journal(directory.journal).line_count == 1


async def test_commit_with_failed_sync_is_not_read(directory, monkeypatch):
    storage, _ = begin(directory)
    for step in range(2):
        for block, values in enumerate(averages(step)):
            storage.append(ChunkId(1, step, 0, block, 0), values)
        if step == 0:
            await storage.commit(record_of(0, 1))
    monkeypatch.setattr(os, "fdatasync", _raise_io_error)
    with pytest.raises(StorageFailed):
        await storage.commit(record_of(1, 2))
    assert [logged_step.step for logged_step in await storage.read_logged_steps(0)] == [0]
    monkeypatch.undo()
    await storage.commit(record_of(1, 2))
    assert [logged_step.step for logged_step in await storage.read_logged_steps(0)] == [0, 1]
    await storage.close()


async def test_checkpoint_is_not_removed_while_it_is_copied(directory):
    storage, failures = begin(directory)
    replica, losses = initial_replica(), [float("nan")] * 4
    await storage.save_checkpoint(replica, ())
    async with storage.hold_newest_checkpoint() as newest:
        for step in range(4):
            await storage.commit(record := record_of(step, 0, skip=True))
            apply_logged_step(replica, record, [])
            await storage.save_checkpoint(replica, losses[: step + 1])
        assert checkpoint_steps(directory.checkpoints) == [newest, 3, 4]
    await storage.close()
    assert failures == []


def _raise_io_error(fd, *_arguments):
    raise OSError(errno.EIO, f"no file {fd}")


async def test_unwritten_admission_record_is_written_before_the_next_commit(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path)
    directory.begin(RUN_ID, SPEC)
    storage = RunStorage(directory, RUN_ID, SPEC, term=1, guard=lambda: None, failed=print)
    storage.begin_log(MANIFEST, 0)
    admission_record = AdmissionRecord(signature="a" * 64, initial_digest="b" * 64)
    storage.save_admission_record(admission_record)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _raise_io_error)
        with pytest.raises(StorageFailed):
            await storage.commit(record_of(0, 0, skip=True))
    assert directory.read_admission_record() is None
    await storage.commit(record_of(0, 0, skip=True))
    assert directory.read_admission_record() == admission_record
    await storage.close()


async def test_replaced_coordinator_writes_no_admission_record(tmp_path):
    def raise_lost_lock():
        raise RunFailed("another coordinator has it")

    directory = RunDirectory(tmp_path)
    directory.begin(RUN_ID, SPEC)
    storage = RunStorage(directory, RUN_ID, SPEC, term=1, guard=lambda: None, failed=print)
    storage.begin_log(MANIFEST, 0)
    await storage.commit(record_of(0, 0, skip=True))
    storage._guard = raise_lost_lock
    storage.save_admission_record(AdmissionRecord(signature="a" * 64, initial_digest="b" * 64))
    with pytest.raises(RunFailed):
        await storage.commit(record_of(1, 0, skip=True))
    assert directory.read_admission_record() is None
    await storage.close()


async def test_lines_wait_for_a_journal_that_cannot_be_opened(directory, monkeypatch):
    storage, failures = begin(directory)
    first, later_command = (
        CommandReceived(term=1, step=0, command=command) for command in ("halt", "drain")
    )
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _raise_io_error)
        storage.begin_journal(lambda: [first])
        storage.append_records([later_command])
        await storage._do("journal", lambda: None)
    assert [type(failure) for failure in failures] == [StorageFailed] * len(failures)
    assert failures
    end = CommandReceived(term=1, step=0, command="continue")
    await storage.end_journal(end)
    storage.append_records([later_command])  # no line follows the last one
    await storage.close()
    records = [entry.record for entry in read_journal(directory.journal)]
    assert [each for each in records if not isinstance(each, FileDigests)] == [
        first,
        later_command,
        end,
    ]


async def test_metrics_are_written_with_a_later_checkpoint(directory):
    storage, _ = begin(directory)
    storage.save_metrics(0, initial_replica().state_digest(), {"accuracy": 0.5})
    storage.append_records([CommandReceived(term=1, step=0, command="checkpoint")])
    await storage.save_checkpoint(initial_replica(), ())
    await storage.close()
    metrics = read_metrics(directory.checkpoints, 0)
    assert metrics is not None
    assert metrics.figures == {"accuracy": 0.5}


async def test_averages_are_kept_for_the_next_joiner_after_a_disk_failure(directory, monkeypatch):
    """Otherwise a joiner could not get from a checkpoint to the current state."""
    storage, _ = begin(directory, SPEC.model_copy(update={"log": "checkpoint"}))
    await storage.roll_log()
    is_failing = iter([True])
    fsync = os.fsync

    def fail_once(fd):
        return _raise_io_error(fd) if next(is_failing, False) else fsync(fd)

    monkeypatch.setattr(os, "fsync", fail_once)
    first = asyncio.ensure_future(storage.hold_averages().__aenter__())
    await asyncio.sleep(0)  # lets it make its request
    async with storage.hold_averages():
        with pytest.raises(StorageFailed):
            await first
        assert await storage.first_step_with_averages() == 0
    await storage.close()


async def test_log_is_kept_for_a_joiner_for_a_limited_time(directory, monkeypatch):
    """A joiner that had to restart after every two checkpoints would never join a busy run."""
    monkeypatch.setattr(limits, "REPLAY_BYTES", 0)  # size of a state: the averages of three steps
    storage, failures = begin(directory)
    replica, losses = initial_replica(), [float("nan")] * 9
    async with storage.hold_averages() as joiner:
        await storage.save_checkpoint(replica, ())
        joiner.move_to(0)
        for step in range(7):
            await storage.commit(record := record_of(step, 0, skip=True))
            apply_logged_step(replica, record, [])
            await storage.roll_log()
            await storage.save_checkpoint(replica, losses[: step + 1])
            first = [logged_step.step for logged_step in await storage.read_logged_steps(0)][:1]
            assert (first, joiner.is_dropped) == (([], True) if step == 6 else ([0], False))
        joiner.move_to(6)
        assert not joiner.is_dropped
    await storage.close()
    assert failures == []


async def test_checkpoint_written_after_later_metrics_has_its_own(directory):
    """Otherwise the speed of the disk would decide which state is best."""
    storage, _ = begin(directory)
    storage.save_metrics(0, initial_replica().state_digest(), {"accuracy": 0.5})
    storage.save_metrics(2, "d" * 64, {"accuracy": 0.25})
    await storage.save_checkpoint(initial_replica(), ())
    await storage.close()
    metrics = read_metrics(directory.checkpoints, 0)
    assert metrics is not None
    assert metrics.figures == {"accuracy": 0.5}
