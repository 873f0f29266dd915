"""What a run keeps on disk while it goes on, with a disk that refuses at the wrong moment."""

import errno
import os

import pytest

from coordinator.log_records import ChunkPlace
from coordinator.run_directory import RunDirectory
from coordinator.run_storage import RunStorage
from protocol.errors import StorageFailed
from tests.durable_run import MANIFEST, RUN_ID, SPEC, averages, record_of


async def test_a_commit_whose_sync_failed_is_read_by_nobody(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path)
    directory.begin(RUN_ID, SPEC)
    storage = RunStorage(
        directory, RUN_ID, SPEC, epoch=1, guard=lambda: None, failed=lambda error: None
    )
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
