"""What a recovery means for the logic of the run, and for its journal. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.run.restart import Resumption, Terms
from coordinator.service.chronicle import committed, settled
from coordinator.storage.journal import JournalEnd
from coordinator.storage.journal_records import Checkpointed, Record, Resumed
from coordinator.storage.recovery import Recovery
from protocol.base.errors import StorageDamaged


def resumption_of(recovery: Recovery, terms: Terms | None) -> Resumption | None:
    """Where the run's logic goes on from.

    Returns:
        None if the state of step 0 was not saved yet: the run begins anew, under its name.

    Raises:
        StorageDamaged: Steps are committed, but no state is left that they follow.
    """
    if recovery.manifest is None or recovery.checkpoint is None:
        if recovery.logged or recovery.redo or recovery.notes:
            reason = "; ".join(("no checkpoint is whole", *recovery.notes))
            raise StorageDamaged("checkpoints", "", reason)
        return None
    info = recovery.checkpoint.info
    redone = {
        record.commit.step: None if record.commit.scalars is None else record.commit.averages_digest
        for record in recovery.redo
    }
    return Resumption(
        manifest=recovery.manifest,
        step=recovery.step,
        optimizer_step=recovery.optimizer_step,
        losses=recovery.losses,
        state_digest=info.state_digest if info.step == recovery.step else None,
        saved=info.step,
        redone=redone,
        terms=terms,
    )


def lines_after_restart(recovery: Recovery, journal: JournalEnd, epoch: int) -> Iterator[Record]:
    """What the journal has to say before the run goes on.

    Args:
        recovery: What was found; its state is within reach.
        journal: What the journal says so far.
        epoch: The new coordinator's.
    """
    assert recovery.manifest is not None
    assert recovery.checkpoint is not None
    info = recovery.checkpoint.info
    if not journal.settled:
        yield settled(recovery.manifest)
    known = min(journal.commits, recovery.step)
    updates = {info.step: info.optimizer_step}
    updates |= {step.step + 1: step.record.optimizer_step for step in recovery.logged}
    yield Resumed(
        epoch=epoch,
        step=known,
        optimizer_step=updates.get(known, info.optimizer_step),
        notes=tuple(note[:2000] for note in recovery.notes),
    )
    if not journal.saved:
        yield Checkpointed(
            epoch=info.epoch,
            step=info.step,
            optimizer_step=info.optimizer_step,
            weights_digest=info.weights_digest,
            state_digest=info.state_digest,
            directory=recovery.checkpoint.path.name,
        )
    for step in recovery.logged:
        if step.step >= known:
            yield committed(step.record, recovered=True)
