"""Roll a run back to an earlier checkpoint, and set later files aside.

    set-aside/term-TTTTTT/    the files that the coordinator of that term set aside

Every move leaves a directory that a plain restart can continue: the result goes first, then
checkpoints and log segments, from new to old. Captured logits and per-replica states go last: their
steps are committed until the log is cut.

Everything that a restart would refuse is checked before the first move: a refused rollback changes
nothing.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from coordinator.capture.captured_files import find_files_from
from coordinator.disk.durable_file import storage_errors, sync_directory
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.log.log_index import segment_base, segment_files
from coordinator.storage.log.log_reader import find_truncations
from coordinator.storage.states.checkpoint import checkpoint_path, checkpoint_steps, find_checkpoint
from coordinator.storage.states.replica_states import (
    check_replica_states,
    recorded_digest,
    replica_state_steps,
)
from protocol.base.errors import Mismatch, StorageDamaged, StorageFailed, UsageError
from protocol.spec.manifest import Manifest


def roll_back(directory: RunDirectory, step: int, term: int) -> str:
    """Make the checkpoint after `step` steps the newest state of the run.

    Only the holder of the directory's lock may call this.

    Args:
        directory: Directory of the run.
        step: Number of steps before the checkpoint.
        term: Term of the coordinator.

    Returns:
        A description for the user and the journal.

    Raises:
        UsageError: There is no such checkpoint, or captured files are missing before it.
        StorageDamaged: A segment of the log, or the per-replica state after that step, is damaged.
        Mismatch: The log belongs to another run.
        StorageFailed: A write failed; the call can be repeated.
    """
    run, manifest = directory.read_run(), directory.read_manifest()
    intact = (
        [] if run is None or manifest is None else _intact_steps(directory, run.run_id, manifest)
    )
    if step not in intact:
        steps = ", ".join(map(str, intact)) or "none"
        raise UsageError(
            f"--from-step {step}: expected a step with an intact checkpoint in "
            f"{str(directory.path)!r}: {steps}"
        )
    assert run is not None
    assert manifest is not None
    if run.spec.replicas is not None:
        check_replica_states(directory, run, manifest, step, recorded_digest(directory, step))
    with storage_errors("read", directory.log):
        segments = segment_files(directory.log)
    remaining = [path for path in segments if segment_base(path) < step]
    cut_offsets = dict(find_truncations(remaining, step, run.run_id, manifest))
    logits = find_files_from(directory.path, manifest, run.spec, step) if manifest.capture else []
    aside = directory.set_aside / f"term-{term:06d}"
    with storage_errors("set aside later files in", directory.path):
        _move(directory.result_file, aside)
        if manifest.capture is None:
            _move(directory.path / manifest.export.directory, aside)
        for later in [s for s in reversed(checkpoint_steps(directory.checkpoints)) if s > step]:
            _move(checkpoint_path(directory.checkpoints, later), aside / "checkpoints")
        for segment in reversed(segments):
            if segment not in remaining:
                _move(segment, aside / "log")
            elif segment in cut_offsets:
                _cut_segment(segment, cut_offsets[segment], aside / "log")
        for later in [s for s in reversed(replica_state_steps(directory.replicas)) if s > step]:
            _move(directory.replica_state_file(later), aside / "replicas")
        for path in reversed(logits):
            _move(path, aside / manifest.export.directory)
    return (
        f"rolled back to the checkpoint of step {step} (--from-step); later files are in "
        f"{aside.relative_to(directory.path)}"
    )


def set_result_aside(directory: RunDirectory, term: int) -> str:
    """Set aside the result of a finished run that continues.

    Returns:
        A description for the user and the journal.

    Raises:
        StorageFailed: A write failed; the call can be repeated.
    """
    manifest, aside = directory.read_manifest(), directory.set_aside / f"term-{term:06d}"
    with storage_errors("set aside the result in", directory.path):
        _move(directory.result_file, aside)
        if manifest is not None and manifest.capture is None:
            _move(directory.path / manifest.export.directory, aside)
    return f"the result so far is in {aside.relative_to(directory.path)}"


def _intact_steps(directory: RunDirectory, run_id: str, manifest: Manifest) -> list[int]:
    """Return the steps of the intact checkpoints."""
    intact = []
    for step in checkpoint_steps(directory.checkpoints):
        try:
            find_checkpoint(directory.checkpoints, step, run_id, manifest)
        except (StorageDamaged, StorageFailed, Mismatch):
            continue
        intact.append(step)
    return intact


def _cut_segment(path: Path, end: int, aside: Path) -> None:
    """Copy a segment aside and cut it, even if newer segments override its later steps.

    Once the newer segments are set aside, those steps would count again.
    """
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
