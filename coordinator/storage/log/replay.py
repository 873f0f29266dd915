"""Taking logged steps again, with the same bits."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.run.outputs.restart import CommitRecord
from coordinator.storage.log.log_records import Array
from protocol.exact.replica import Replica


def take(replica: Replica, record: CommitRecord, averages: Sequence[Array] | None) -> None:
    """Apply a logged step to the replica that has taken all before it, or skip it."""
    commit = record.commit
    assert commit.step == replica.step
    if commit.scalars is None:
        replica.skip()
    else:
        assert averages is not None
        replica.apply(averages, commit.scalars)
    assert replica.optimizer_step == record.optimizer_step
