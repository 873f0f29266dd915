"""What a run keeps on disk while it goes on, with a disk that refuses at the wrong moment."""

import errno
import os

import pytest

from coordinator.log_records import ChunkPlace
from coordinator.run_directory import RunDirectory
from coordinator.run_storage import RunStorage
from coordinator.terms import Terms
from protocol.errors import RunFailed, StorageFailed
from tests.durable_run import MANIFEST, RUN_ID, SPEC, averages, record_of


async def test_a_commit_whose_sync_failed_is_read_by_nobody(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path)
    directory.begin(RUN_ID, SPEC)
    storage = RunStorage(directory, RUN_ID, SPEC, epoch=1, guard=lambda: None, failed=print)
    storage.settle(MANIFEST, 0)
    for step in range(2):
        for block, values in enumerate(averages(step)):
            storage.append(ChunkPlace(1, step, 0, block, 0), values)
        if step == 0:
            await storage.commit(record_of(0, 1))
    monkeypatch.setattr(os, "fdatasync", _refuses)
    with pytest.raises(StorageFailed):
        await storage.commit(record_of(1, 2))
    assert [logged.step for logged in await storage.logged(0)] == [0]
    monkeypatch.undo()
    await storage.commit(record_of(1, 2))
    assert [logged.step for logged in await storage.logged(0)] == [0, 1]
    await storage.close()


def _refuses(fd):
    raise OSError(errno.EIO, f"no file {fd}")


async def test_terms_that_the_disk_refused_are_written_before_the_next_commit(
    tmp_path, monkeypatch
):
    directory = RunDirectory(tmp_path)
    directory.begin(RUN_ID, SPEC)
    storage = RunStorage(directory, RUN_ID, SPEC, epoch=1, guard=lambda: None, failed=print)
    storage.settle(MANIFEST, 0)
    terms = Terms(signature="a" * 64, initial_digest="b" * 64)
    storage.remember(terms)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _refuses)
        with pytest.raises(StorageFailed):
            await storage.commit(record_of(0, 0, skip=True))
    assert directory.read_terms() is None
    await storage.commit(record_of(0, 0, skip=True))
    assert directory.read_terms() == terms
    await storage.close()


async def test_one_that_has_lost_the_directory_writes_no_terms(tmp_path):
    def lost():
        raise RunFailed("another coordinator has it")

    directory = RunDirectory(tmp_path)
    directory.begin(RUN_ID, SPEC)
    held = RunStorage(directory, RUN_ID, SPEC, epoch=1, guard=lambda: None, failed=print)
    held.settle(MANIFEST, 0)
    await held.commit(record_of(0, 0, skip=True))
    held._guard = lost
    held.remember(Terms(signature="a" * 64, initial_digest="b" * 64))
    with pytest.raises(RunFailed):
        await held.commit(record_of(1, 0, skip=True))
    assert directory.read_terms() is None
    await held.close()
