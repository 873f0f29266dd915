"""Recover a run from its directory when a coordinator starts.

`recover` is quick: it compares the files of the newest checkpoint with their hashes and reads the
heads of the log's records, so workers can be served at once. `Recovery.load_replica` then applies
the logged steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.run.outputs.restart import CommitRecord
from coordinator.storage.directory.run_directory import RunDirectory, StoredRun
from coordinator.storage.log.log_index import LoggedStep, LogIndex, apply_logged_step, read_averages
from coordinator.storage.log.log_reader import scan_log
from coordinator.storage.states.checkpoint import (
    Checkpoint,
    checkpoint_path,
    checkpoint_steps,
    latest_checkpoint,
    remove_checkpoint,
)
from coordinator.storage.states.checkpoint_state import load_replica
from coordinator.storage.states.replica_states import check_replica_states, recorded_digest
from protocol.base.errors import StorageDamaged
from protocol.exact.replica import Replica
from protocol.spec.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Recovery:
    """A run to continue.

    Attributes:
        run: ID and spec.
        manifest: The run's manifest.
        checkpoint: The newest intact checkpoint.
        logged: Committed steps after the checkpoint whose averages are in the log, in order.
        redo: Commits of later steps, without averages (`log: checkpoint`): their steps are redone.
            Skipped steps are skipped again; for the others, the digests can be compared.
        step: Number of committed steps whose state can be restored: the run continues with this
            step.
        optimizer_step: Number of updates among these steps.
        losses: Mean loss of each of these steps; NaN for a skipped step.
        own_digest: Digest of the per-replica state after these steps, as in the last commit.
        index: Index of the log, including the steps before the checkpoint.
        notes: Descriptions of data that was cut off or skipped, for the user and the journal.
    """

    run: StoredRun
    manifest: Manifest
    checkpoint: Checkpoint
    logged: tuple[LoggedStep, ...]
    redo: tuple[CommitRecord, ...]
    step: int
    optimizer_step: int
    losses: tuple[float, ...]
    notes: tuple[str, ...]
    index: LogIndex
    own_digest: str | None = None

    def load_replica(self) -> Replica:
        """Return the state after `step` steps: the checkpoint's, with the logged steps applied.

        Raises:
            StorageDamaged: Log or checkpoint are damaged, or do not lead to the recorded digest.
            StorageFailed: Log or checkpoint cannot be read.
        """
        replica = load_replica(self.checkpoint, self.manifest, self.run.spec.step_optimizer)
        for logged_step in self.logged:
            averages = read_averages(logged_step, self.manifest.blocks)
            digest = logged_step.record.state_before if logged_step is self.logged[-1] else None
            if digest is not None and not replica.has_digest(digest):
                reason = (
                    f"the steps before {logged_step.step} do not lead to the recorded state; "
                    "restore it from a copy, or roll back to a checkpoint before it (--from-step N)"
                )
                raise StorageDamaged(str(logged_step.path), "", reason)
            apply_logged_step(replica, logged_step.record, averages)
        return replica


def recover(directory: RunDirectory) -> Recovery | None:
    """Find a run's newest state, after removing incomplete files that a crash has left.

    Only the holder of the directory's lock may call this: it cuts torn tails.

    Returns:
        None if there is no run, or the run has no saved state and starts from the beginning.

    Raises:
        StorageDamaged: A file is damaged in a way that no crash explains; or the state before
            committed steps is lost.
        StorageFailed: A read or write failed.
        Mismatch: A file belongs to another run.
    """
    run = directory.read_run()
    if run is None:
        return None
    directory.clear()
    manifest = directory.read_manifest()
    if manifest is None:
        if checkpoint_steps(directory.checkpoints):
            reason = "it is missing, though there are checkpoints; restore it from a copy"
            raise StorageDamaged(str(directory.manifest_file), "", reason)
        return None
    checkpoint, skipped = latest_checkpoint(directory.checkpoints, run.run_id, manifest)
    scan = scan_log(directory.log, run.run_id, manifest, repair=True)
    base = checkpoint.info.step if checkpoint is not None else 0
    logged_steps, redo = _split_steps(list(scan.index.steps_from(base)))
    if checkpoint is None:
        if skipped or scan.index.last_step is not None:
            raise _no_state(directory, scan.index.last_step, skipped)
        return None
    own_digest = logged_steps[-1].record.own_digest if logged_steps else None
    if run.spec.replicas is not None and not logged_steps:
        own_digest = recorded_digest(directory, base)
    check_replica_states(directory, run, manifest, base + len(logged_steps), own_digest)
    notes = [f"checkpoint skipped: {reason}" for reason in skipped]
    notes += [str(tail) for tail in scan.torn_tails]
    notes += _note_lost_states(scan.index, base + len(logged_steps) + len(redo))
    info = checkpoint.info
    return Recovery(
        run=run,
        manifest=manifest,
        checkpoint=checkpoint,
        logged=tuple(logged_steps),
        redo=tuple(redo),
        step=base + len(logged_steps),
        optimizer_step=logged_steps[-1].record.optimizer_step
        if logged_steps
        else info.optimizer_step,
        losses=(
            *(math.nan if loss is None else loss for loss in info.losses),
            *(step.record.commit.loss for step in logged_steps),
        ),
        notes=tuple(notes),
        index=scan.index,
        own_digest=own_digest,
    )


def _no_state(directory: RunDirectory, last: int | None, skipped: Sequence[str]) -> StorageDamaged:
    """Return the error of a run without an intact checkpoint: the first checkpoint is written
    before any step."""
    steps = "" if last is None else f", which the log's steps up to {last} follow"
    reasons = skipped or ("restore one from a copy",)
    reason = "; ".join((f"expected an intact checkpoint{steps}, found none", *reasons))
    return StorageDamaged(str(directory.checkpoints), "", reason)


def _split_steps(steps: list[LoggedStep]) -> tuple[list[LoggedStep], list[CommitRecord]]:
    """Split steps into those that can be applied from the log, and the commits of all later
    ones."""
    count = 0
    while count < len(steps) and (
        steps[count].has_averages or steps[count].record.commit.scalars is None
    ):
        count += 1
    return steps[:count], [logged_step.record for logged_step in steps[count:]]


def _note_lost_states(index: LogIndex, step: int) -> list[str]:
    if index.last_step is None or index.last_step < step:
        return []
    steps_text = f"steps up to {index.last_step} are in the log"
    return [f"{steps_text}, but the state before them is lost: they are done again"]


def remove_later_checkpoints(directory: RunDirectory, recovery: Recovery) -> None:
    """Remove the checkpoints of steps after `recovery.step`: they are not intact.

    Otherwise a later restart might use them.

    Raises:
        StorageFailed: A write failed.
    """
    for step in checkpoint_steps(directory.checkpoints):
        if step > recovery.step:
            remove_checkpoint(checkpoint_path(directory.checkpoints, step))
