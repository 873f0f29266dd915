"""In which order a run's files become durable."""

import pytest

from coordinator import run_storage
from coordinator.checkpoint import write_checkpoint
from coordinator.journal import Journal, read_journal
from coordinator.journal_records import Commanded, Record
from coordinator.run_directory import RunDirectory
from coordinator.run_storage import RunStorage
from protocol.errors import SamestepError
from tests.durable_run import MANIFEST, RUN_ID, SPEC, state_zero


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.begin(RUN_ID, SPEC)
    return directory


async def test_the_journal_is_durable_before_a_checkpoint_takes_the_place_of_the_log(
    directory, monkeypatch
):
    """Else a restart from the checkpoint would not know what the journal lacks."""
    failures: list[SamestepError] = []
    storage = RunStorage(
        directory, RUN_ID, SPEC, epoch=1, guard=lambda: None, failed=failures.append
    )
    storage.settle(MANIFEST, 0)
    monkeypatch.setattr(storage, "_unsynced", True)  # its turn has not come yet
    storage.record([Commanded(epoch=1, step=0, command="halt")])
    seen: list[Record] = []

    def spied(*given, **named):
        seen.extend(entry.record for entry in read_journal(directory.journal))
        return write_checkpoint(*given, **named)

    monkeypatch.setattr(run_storage, "write_checkpoint", spied)
    await storage.save(state_zero(), ())
    await storage.close()
    assert seen == [Commanded(epoch=1, step=0, command="halt")]
    assert failures == []
    assert Journal(directory.journal).lines == 1
