"""What a coordinator finds when it starts in a directory that holds a run.

`recover` is quick: it compares the files of the newest checkpoint with their hashes and walks the
log's heads, so workers can be served at once. `Recovery.replica` then catches up, off that path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.run.outputs.restart import CommitRecord
from coordinator.storage.directory.run_directory import RunDirectory, StoredRun
from coordinator.storage.log.log_index import LoggedStep, LogIndex, read_averages
from coordinator.storage.log.log_reader import scan_log
from coordinator.storage.log.replay import take
from coordinator.storage.states.checkpoint import (
    Checkpoint,
    checkpoint_path,
    checkpoint_steps,
    latest_checkpoint,
    remove_checkpoint,
)
from coordinator.storage.states.own_files import check_own, told
from coordinator.storage.states.saved_state import load_replica
from protocol.base.errors import StorageDamaged
from protocol.exact.replica import Replica
from protocol.spec.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Recovery:
    """A run to go on with.

    Attributes:
        run: Id and spec.
        manifest: What the workers had agreed on.
        checkpoint: The newest whole one.
        logged: Committed steps after the checkpoint whose averages are there, in order.
        redo: Commits after those, whose averages were not kept (mode `checkpoint`): the steps are
            done again. Those skipped then are to be skipped again; the others' digests can be
            compared.
        step: Steps committed that can be had back: the run goes on with this one.
        optimizer_step: Updates among them.
        losses: Mean loss of each; NaN for a skipped one.
        own_digest: Of what replicas have of their own then, as the last commit names it.
        index: Where the log's steps lie, those before the checkpoint too.
        notes: What was cut off or passed over, for people and for the journal.
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

    def replica(self) -> Replica:
        """The state after `step` steps: the checkpoint's, with the logged steps taken again.

        Raises:
            StorageDamaged: The log or the checkpoint is not what was written, or does not lead to
                the digest that was known.
            StorageFailed: They cannot be read.
        """
        replica = load_replica(self.checkpoint, self.manifest, self.run.spec.update)
        for logged in self.logged:
            averages = read_averages(logged, self.manifest.blocks)
            known = logged.record.state_before if logged is self.logged[-1] else None
            if known is not None and replica.state_digest() != known:
                reason = (
                    f"steps before {logged.step} do not lead to the state they led to; bring it "
                    "back from a copy, or go back to a checkpoint before it (--from-step N)"
                )
                raise StorageDamaged(str(logged.path), "", reason)
            take(replica, logged.record, averages)
        return replica


def recover(directory: RunDirectory) -> Recovery | None:
    """See what there is, after clearing away what a crash left half done.

    Only who holds the directory (`Claim`) may call this: it cuts torn tails.

    Returns:
        None if there is no run, or no state of it was saved yet: it begins anew.

    Raises:
        StorageDamaged: Something is damaged that no crash explains; or steps are committed, but no
            state is left that they follow.
        StorageFailed: The disk refuses.
        Mismatch: A file is of another run.
    """
    run = directory.read_run()
    if run is None:
        return None
    directory.clear()
    manifest = directory.read_manifest()
    if manifest is None:
        if checkpoint_steps(directory.checkpoints):
            reason = "it is missing, though there are checkpoints; bring it back from a copy"
            raise StorageDamaged(str(directory.manifest_file), "", reason)
        return None
    checkpoint, passed = latest_checkpoint(directory.checkpoints, run.run_id, manifest)
    scan = scan_log(directory.log, run.run_id, manifest, repair=True)
    base = checkpoint.info.step if checkpoint is not None else 0
    logged, redo = _split(list(scan.index.following(base)))
    if checkpoint is None:
        if passed or scan.index.last is not None:
            raise _no_state(directory, scan.index.last, passed)
        return None
    own_digest = logged[-1].record.own_digest if logged else None
    if run.spec.replicas is not None and not logged:
        own_digest = told(directory, base)
    check_own(directory, run, manifest, base + len(logged), own_digest)
    notes = [f"checkpoint passed over: {reason}" for reason in passed]
    notes += [str(cut) for cut in scan.cuts]
    notes += _out_of_reach(scan.index, base + len(logged) + len(redo))
    info = checkpoint.info
    return Recovery(
        run=run,
        manifest=manifest,
        checkpoint=checkpoint,
        logged=tuple(logged),
        redo=tuple(redo),
        step=base + len(logged),
        optimizer_step=logged[-1].record.optimizer_step if logged else info.optimizer_step,
        losses=(
            *(math.nan if loss is None else loss for loss in info.losses),
            *(step.record.commit.loss for step in logged),
        ),
        notes=tuple(notes),
        index=scan.index,
        own_digest=own_digest,
    )


def _no_state(directory: RunDirectory, last: int | None, passed: Sequence[str]) -> StorageDamaged:
    """The state of step 0 is saved before any step: else nothing has begun."""
    steps = "" if last is None else f", which the log's steps up to {last} follow"
    why = passed or ("bring one back from a copy",)
    reason = "; ".join((f"expected a whole checkpoint{steps}, found none", *why))
    return StorageDamaged(str(directory.checkpoints), "", reason)


def _split(row: list[LoggedStep]) -> tuple[list[LoggedStep], list[CommitRecord]]:
    """Steps that can be taken again from what is kept, and those after the first that cannot."""
    kept = 0
    while kept < len(row) and (row[kept].has_averages or row[kept].record.commit.scalars is None):
        kept += 1
    return row[:kept], [logged.record for logged in row[kept:]]


def _out_of_reach(index: LogIndex, step: int) -> list[str]:
    if index.last is None or index.last < step:
        return []
    which = f"steps up to {index.last} are in the log"
    return [f"{which}, but no state that they follow: they are done again"]


def leave_behind(directory: RunDirectory, recovery: Recovery) -> None:
    """The run goes on from `recovery.step`: checkpoints of later steps, which could not be used,
    must not be taken for its own some day.

    Raises:
        StorageFailed: The disk refuses.
    """
    for step in checkpoint_steps(directory.checkpoints):
        if step > recovery.step:
            remove_checkpoint(checkpoint_path(directory.checkpoints, step))
