"""Taking logged steps again, with the same bits."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.log_records import Array, CommitRecord
from protocol.digest import weights_digest
from protocol.manifest import Block
from protocol.replica import Replica


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


def averages_digest(averages: Sequence[Array], blocks: tuple[Block, ...]) -> str:
    """Digest of averaged gradients by tensor name, as commits carry it."""
    return weights_digest(
        {
            tensor.name: average[part].reshape(tensor.shape)
            for block, average in zip(blocks, averages, strict=True)
            for tensor, part in block.slices()
        }
    )
