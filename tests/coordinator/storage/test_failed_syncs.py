"""Data that a restarted coordinator found after a failed sync survives a power failure.

The simulated disk keeps only synced data; after a failed sync, the data can be read but is lost."""

from random import Random

import pytest

from coordinator.storage.directory.journal import Journal
from coordinator.storage.log.gradient_log import GradientLog
from coordinator.storage.log.log_index import apply_logged_step
from coordinator.storage.log.log_reader import scan_log
from coordinator.storage.states.checkpoint import find_checkpoint, write_checkpoint
from protocol.base.errors import StorageFailed
from tests.coordinator.storage.directory.test_journal import EXAMPLES
from tests.durable_run import (
    MANIFEST,
    RUN_ID,
    append_averages,
    averages,
    initial_replica,
    log_step,
    read_journal,
    record_of,
)
from tests.simulation.disk import Disk
from tests.simulation.virtual_time import Clock


class LosesUnsyncedData(Random):
    """Random choices with which the disk loses all unsynced data."""

    def random(self):
        return 0.0

    def randint(self, a, b):
        del b
        return a

    def choice(self, seq):
        return seq[-1]


@pytest.fixture
def disk(tmp_path):
    failing_disk = Disk(tmp_path, Clock(Random(0)))
    with failing_disk.intercept_calls():
        yield failing_disk


def open_log(directory, *, term=1, next_step=0, **options):
    return GradientLog(directory, RUN_ID, MANIFEST, term=term, next_step=next_step, **options)


def fail_sync(disk, pattern, operation):
    disk.sync_fails = pattern
    with pytest.raises(StorageFailed):
        operation()
    assert disk.sync_fails is None


def logged_steps(directory):
    return [
        logged_step.step
        for logged_step in scan_log(directory, RUN_ID, MANIFEST).index.steps_from(0)
    ]


@pytest.mark.parametrize("earlier_steps", [0, 2])
def test_commit_found_by_a_restart_survives_a_power_failure(disk, tmp_path, earlier_steps):
    directory = tmp_path / "log"
    log = open_log(directory)
    for step in range(earlier_steps):
        log_step(log, step)
    append_averages(log, earlier_steps)
    fail_sync(disk, "*/log/*", lambda: log.commit(record_of(earlier_steps, earlier_steps + 1)))
    log.close()
    scan_result = scan_log(directory, RUN_ID, MANIFEST, repair=True)
    assert scan_result.index.last_step == earlier_steps
    open_log(directory, term=2, next_step=earlier_steps + 1, index=scan_result.index).close()
    disk.lose_power(LosesUnsyncedData())
    assert logged_steps(directory) == list(range(earlier_steps + 1))


def test_line_found_by_a_restart_survives_a_power_failure(disk, tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append(EXAMPLES[0])
    journal.sync()
    for record in EXAMPLES[1:3]:
        journal.append(record)
    fail_sync(disk, "*/journal.jsonl", journal.sync)
    journal.close()
    successor = Journal(path)
    successor.append(EXAMPLES[3])
    successor.sync()
    successor.close()
    disk.lose_power(LosesUnsyncedData())
    assert [entry.record for entry in read_journal(path)] == EXAMPLES[:4]


def test_checkpoint_found_by_a_restart_survives_a_power_failure(disk, tmp_path):
    directory = tmp_path / "checkpoints"
    replica = initial_replica()
    scalars = record_of(0, 1).commit.scalars
    assert scalars is not None
    apply_logged_step(replica, record_of(0, 1), averages(0))

    def write():
        return write_checkpoint(directory, MANIFEST, replica, run_id=RUN_ID, term=1, losses=[1.0])

    fail_sync(disk, "*/checkpoints", write)
    checkpoint = write()
    disk.lose_power(LosesUnsyncedData())
    assert find_checkpoint(directory, 1, RUN_ID, MANIFEST) == checkpoint


@pytest.mark.parametrize("power_fails", [False, True])
def test_commit_after_a_segment_with_unsynced_name_is_kept(disk, tmp_path, power_fails):
    directory = tmp_path / "log"
    log = open_log(directory)
    log_step(log, 0)
    append_averages(log, 1)
    fail_sync(disk, "*/log", log.roll)
    log.commit(record_of(1, 2))
    log.close()
    if power_fails:
        disk.lose_power(LosesUnsyncedData())
    assert logged_steps(directory) == [0, 1]
