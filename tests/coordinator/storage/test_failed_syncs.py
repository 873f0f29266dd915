"""A sync fails, the coordinator is killed, the next one goes on, and the power fails: all that it
went on from is there. The disk is the simulation's, which keeps what was synced and nothing else,
and loses what a failed sync was to write though it can be read."""

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
    append_step,
    averages,
    log_step,
    read_journal,
    record_of,
    state_zero,
)
from tests.simulation.disk import Disk
from tests.simulation.virtual_time import Clock


class Worst(Random):
    """Nothing that was not synced is left."""

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
    with failing_disk.interposed():
        yield failing_disk


def opened(directory, *, term=1, next_step=0, **how):
    return GradientLog(directory, RUN_ID, MANIFEST, term=term, next_step=next_step, **how)


def refused(disk, where, work):
    disk.sync_fails = where
    with pytest.raises(StorageFailed):
        work()
    assert disk.sync_fails is None


def kept_steps(directory):
    return [logged.step for logged in scan_log(directory, RUN_ID, MANIFEST).index.following(0)]


@pytest.mark.parametrize("earlier", [0, 2])
def test_a_commit_that_a_restart_finds_outlasts_it(disk, tmp_path, earlier):
    directory = tmp_path / "log"
    log = opened(directory)
    for step in range(earlier):
        log_step(log, step)
    append_step(log, earlier)
    refused(disk, "*/log/*", lambda: log.commit(record_of(earlier, earlier + 1)))
    log.close()
    scan_result = scan_log(directory, RUN_ID, MANIFEST, repair=True)
    assert scan_result.index.last == earlier
    opened(directory, term=2, next_step=earlier + 1, index=scan_result.index).close()
    disk.lose_power(Worst())
    assert kept_steps(directory) == list(range(earlier + 1))


def test_a_line_that_a_restart_finds_outlasts_it(disk, tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append(EXAMPLES[0])
    journal.sync()
    for record in EXAMPLES[1:3]:
        journal.append(record)
    refused(disk, "*/journal.jsonl", journal.sync)
    journal.close()
    successor = Journal(path)
    successor.append(EXAMPLES[3])
    successor.sync()
    successor.close()
    disk.lose_power(Worst())
    assert [entry.record for entry in read_journal(path)] == EXAMPLES[:4]


def test_a_checkpoint_that_a_restart_finds_outlasts_it(disk, tmp_path):
    root = tmp_path / "checkpoints"
    replica = state_zero()
    scalars = record_of(0, 1).commit.scalars
    assert scalars is not None
    apply_logged_step(replica, record_of(0, 1), averages(0))

    def write():
        return write_checkpoint(root, MANIFEST, replica, run_id=RUN_ID, term=1, losses=[1.0])

    refused(disk, "*/checkpoints", write)
    checkpoint = write()
    disk.lose_power(Worst())
    assert find_checkpoint(root, 1, RUN_ID, MANIFEST) == checkpoint


@pytest.mark.parametrize("power", [False, True])
def test_a_commit_after_a_segment_whose_name_was_not_synced_is_kept(disk, tmp_path, power):
    directory = tmp_path / "log"
    log = opened(directory)
    log_step(log, 0)
    append_step(log, 1)
    refused(disk, "*/log", log.roll)
    log.commit(record_of(1, 2))
    log.close()
    if power:
        disk.lose_power(Worst())
    assert kept_steps(directory) == [0, 1]
