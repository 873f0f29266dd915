"""Going back to a kept checkpoint: what came after it is set aside, no part of the run any more.

    set-aside/epoch-EEEEEE/    what the coordinator of that epoch found in its way

Every move leaves a directory that a plain restart can go on with: the result goes first, then
checkpoints and segments of the log, the newest first. Files of captured logits and what replicas
have of their own go last: until the log is cut, their steps are committed.

All that a restart would refuse is looked at before the first move: who is refused finds the
directory as it was.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from coordinator.capture.captured_files import files_from
from coordinator.disk.durable_file import storing, sync_directory
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.log.log_index import segment_base, segment_files
from coordinator.storage.log.log_reader import cuts_before
from coordinator.storage.states.checkpoint import checkpoint_path, checkpoint_steps, find_checkpoint
from coordinator.storage.states.own_files import check_own, own_steps, told
from protocol.base.errors import Mismatch, StorageDamaged, StorageFailed, UsageError
from protocol.spec.manifest import Manifest


def go_back(directory: RunDirectory, step: int, epoch: int) -> str:
    """Make the checkpoint after `step` steps the newest state that there is.

    Only who holds the directory (`Claim`) may call this.

    Args:
        directory: The run's.
        step: Of a checkpoint that is kept.
        epoch: The coordinator's.

    Returns:
        What was done, for people and for the journal.

    Raises:
        UsageError: No such checkpoint is kept, or a capture has too little to go on from it.
        StorageDamaged: A segment of the log, or what replicas have of their own in that round, is
            not what was written.
        Mismatch: The log is of another run.
        StorageFailed: The disk refuses; the call can be made again.
    """
    run, manifest = directory.read_run(), directory.read_manifest()
    kept = [] if run is None or manifest is None else _kept(directory, run.run_id, manifest)
    if step not in kept:
        steps = ", ".join(map(str, kept)) or "none"
        raise UsageError(
            f"--from-step {step}: no checkpoint of step {step} is kept in {str(directory.path)!r}; "
            f"kept are those of steps: {steps}"
        )
    assert run is not None
    assert manifest is not None
    if run.spec.replicas is not None:
        check_own(directory, run, manifest, step, told(directory, step))
    with storing("read", directory.log):
        segments = segment_files(directory.log)
    left = [path for path in segments if segment_base(path) < step]
    ends = dict(cuts_before(left, step, run.run_id, manifest))
    captured = files_from(directory.path, manifest, run.spec, step) if manifest.capture else []
    aside = directory.set_aside / f"epoch-{epoch:06d}"
    with storing("set aside what follows in", directory.path):
        _move(directory.result_file, aside)
        if manifest.capture is None:
            _move(directory.path / manifest.export.directory, aside)
        for later in [s for s in reversed(checkpoint_steps(directory.checkpoints)) if s > step]:
            _move(checkpoint_path(directory.checkpoints, later), aside / "checkpoints")
        for segment in reversed(segments):
            if segment not in left:
                _move(segment, aside / "log")
            elif segment in ends:
                _cut_segment(segment, ends[segment], aside / "log")
        for later in [s for s in reversed(own_steps(directory.replicas)) if s > step]:
            _move(directory.own_file(later), aside / "replicas")
        for path in reversed(captured):
            _move(path, aside / manifest.export.directory)
    return (
        f"gone back to the checkpoint of step {step}, as told (--from-step); what came later is in "
        f"{aside.relative_to(directory.path)}"
    )


def _kept(directory: RunDirectory, run_id: str, manifest: Manifest) -> list[int]:
    """Steps of the checkpoints that are whole."""
    kept = []
    for step in checkpoint_steps(directory.checkpoints):
        try:
            find_checkpoint(directory.checkpoints, step, run_id, manifest)
        except (StorageDamaged, StorageFailed, Mismatch):
            continue
        kept.append(step)
    return kept


def _cut_segment(path: Path, end: int, aside: Path) -> None:
    """Also one that newer segments have made void: it would count again without them."""
    aside.mkdir(parents=True, exist_ok=True)
    copy = aside / path.name
    shutil.copyfile(path, copy)
    for file, length in ((copy, None), (path, end)):
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            if length is not None:
                os.ftruncate(fd, length)
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(file.parent)


def _move(path: Path, aside: Path) -> None:
    if not path.exists():
        return
    aside.mkdir(parents=True, exist_ok=True)
    path.rename(aside / path.name)
    for directory in (aside, aside.parent, path.parent):
        sync_directory(directory)
