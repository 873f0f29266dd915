"""A run that this coordinator executes: a new one, or one loaded from its locked directory."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path

from coordinator.disk.directory_lock import DirectoryLock
from coordinator.files.blob_index import BlobIndex, read_or_build_index, write_index
from coordinator.files.permitted_files import PermittedFiles
from coordinator.run.outputs.events import Checkpointed, Committed, ManifestSettled, Record
from coordinator.run.outputs.restart import AdmissionRecord, Resumption
from coordinator.service.spec_change import SpecChange, missing_spec_change
from coordinator.storage.copies import check_directory
from coordinator.storage.directory.journal import (
    JournalEnd,
    is_abandoned,
    newest_scale,
    read_end,
    read_evaluations,
)
from coordinator.storage.directory.journal_records import Resumed, RunStarted
from coordinator.storage.directory.run_directory import RunDirectory, StoredRun
from coordinator.storage.file_digests import check_files
from coordinator.storage.recovery import Recovery, recover, remove_later_checkpoints
from coordinator.storage.rollback import roll_back
from coordinator.storage.states.checkpoint import FORMAT, checkpoint_steps
from protocol import __version__
from protocol.base.errors import Mismatch, SamestepError, StorageDamaged, UsageError
from protocol.base.option_names import option
from protocol.exact.schedule import initial_loss_scale, next_loss_scale, scales_loss
from protocol.spec.run_spec import DigitsRun, RunSpec


@dataclass(frozen=True, slots=True)
class Restart:
    """The point at which a run continues: its state on disk, and that of its state machine."""

    recovery: Recovery
    resumption: Resumption


@dataclass(frozen=True, slots=True)
class RunInstance:
    """One run, queued or in progress.

    Attributes:
        stored: ID and spec of the run, as on disk.
        directory: The files of the run.
        lock: The lock of the directory.
        restart: The point at which the run continues; None for a new run.
        blobs: The files that the run spec names, for workers to request.
    """

    stored: StoredRun
    directory: RunDirectory
    lock: DirectoryLock
    restart: Restart | None = None
    blobs: BlobIndex | None = None

    def first_lines(self) -> list[Record]:
        """Return the lines to add to the journal before the run continues.

        The end of the journal must be intact.

        Raises:
            StorageFailed: The journal cannot be read.
        """
        checkpoint_step = self.restart.resumption.saved if self.restart is not None else 0
        journal = read_end(self.directory.journal, checkpoint_step)
        lines: list[Record] = []
        if not journal.has_run:
            lines.append(RunStarted.of(self.stored.run_id, self.stored.document, _versions()))
        if self.restart is not None:
            recovery = self.restart.recovery
            lines += _lines_after_restart(recovery, journal, self.lock.term)
            lines += missing_spec_change(self.directory, self.stored, self.lock.term, recovery.step)
        return lines


def begin_run(
    run_id: str, spec: RunSpec, lock: DirectoryLock, blobs: BlobIndex | None = None
) -> RunInstance:
    """Begin a new run in a locked directory.

    Raises:
        UsageError: The spec has evaluations without held-out data, the directory contains a run, or
            the spec's directories for copies cannot be used.
        StorageFailed: A write failed.
    """
    _refuse_evaluations_without_data(spec)
    for copies_directory in spec.checkpoint.copies:
        check_directory(copies_directory)
    directory = RunDirectory(lock.directory)
    directory.begin(run_id, spec)
    if blobs is not None:
        write_index(directory.files_file, blobs)
    stored_run = StoredRun(run_id, spec, spec.model_dump(mode="json"))
    return RunInstance(stored_run, directory, lock, blobs=blobs)


def _refuse_evaluations_without_data(spec: RunSpec) -> None:
    """Refuse `evaluate_every` if the spec holds out no data.

    Only a new run is refused: the spec of an earlier run may combine both.

    Raises:
        UsageError: The spec has `evaluate_every`, but neither held-out nor validation data.
    """
    key = "digits" if isinstance(spec, DigitsRun) else "data"
    section = getattr(spec, key)
    if spec.is_user_task or section is None or not spec.evaluate_every:
        return
    if section.holdout or getattr(section, "validation", None) is not None:
        return
    remedy = f"raise {key}.holdout" + (", set data.validation," if key == "data" else "")
    raise UsageError(
        f"evaluate_every {spec.evaluate_every}: expected held-out data, got none "
        f"({key}.holdout 0); {remedy} or --set evaluate_every=0"
    )


def load_run(
    lock: DirectoryLock,
    spec: RunSpec | None = None,
    from_step: int | None = None,
    permitted_files: PermittedFiles | None = None,
    changes: Sequence[str] | RunSpec = (),
) -> RunInstance | None:
    """Load the run in a locked directory to continue it.

    Args:
        lock: The lock of the directory.
        spec: The expected run spec; None for any.
        from_step: Roll back to the checkpoint after this many steps, even in a finished run.
        permitted_files: The files that the run may read, besides those read before; None: all.
        changes: Changes of the run spec as in `SpecChange.of`, made first, even in a finished run.

    Returns:
        None if there is no run, or it has finished.

    Raises:
        Mismatch: The directory holds another run.
        RunSpecError: The changed run spec is not valid.
        UsageError: There is no such checkpoint, or the run spec may not change in this way.
        StorageDamaged: A file is damaged in a way that no crash explains.
        StorageFailed: A read or write failed.
    """
    directory = RunDirectory(lock.directory)
    check_files(directory)
    stored_run = directory.read_run()
    if stored_run is None:
        return None
    if spec is not None and spec != stored_run.spec:
        raise Mismatch(
            f"{str(lock.directory)!r} has run {stored_run.run_id!r} of another run spec; leave "
            f"the run spec out to continue it (--set KEY=VALUE changes it), or choose another "
            f"{option('--out')}"
        )
    change = SpecChange.of(directory, stored_run, changes, from_step)
    if from_step is None and change is None and not is_unfinished(lock.directory):
        return None
    blobs = read_or_build_index(directory.files_file, stored_run.spec, permitted_files)
    admission = directory.read_admission_record()
    rollback_notes = () if from_step is None else (roll_back(directory, from_step, lock.term),)
    stored_run, change_notes = (stored_run, ()) if change is None else change.write(lock)
    recovery = recover(directory)
    if recovery is None:
        return RunInstance(stored_run, directory, lock, None, blobs)
    if rollback_notes or change is not None:
        # Later commits no longer count, even if their steps could be compared.
        notes = (*recovery.notes, *rollback_notes, *change_notes)
        recovery = replace(recovery, redo=(), notes=notes)
    metrics: dict[int, dict[str, float]] = {}
    if stored_run.spec.stop is not None or stored_run.spec.optimizer.plateau is not None:
        metrics = read_evaluations(directory.journal, recovery.step)
    scale = _loss_scale(directory, recovery) if scales_loss(stored_run.spec) else None
    resumption = replace(_resumption(recovery, admission), metrics=metrics, loss_scale=scale)
    if not rollback_notes:
        _check_complete(directory, recovery)
    remove_later_checkpoints(directory, recovery)
    return RunInstance(stored_run, directory, lock, Restart(recovery, resumption), blobs)


def _check_complete(directory: RunDirectory, recovery: Recovery) -> None:
    """Check that journal and log are complete.

    The journal is synced before a checkpoint is written, and the log before the journal reports
    a step. A journal or log that lacks more steps than this order explains was cut.

    Raises:
        StorageDamaged: The journal or the log is not complete.
        StorageFailed: The journal or the log cannot be read.
    """
    checkpoint_step = recovery.checkpoint.info.step
    journal = read_end(directory.journal, checkpoint_step)
    if not journal.has_run or journal.commits < checkpoint_step:
        problem = (
            f"it has {journal.commits} steps" if journal.has_run else "its first line is missing"
        )
        reason = (
            f"{problem}, and there is a checkpoint after {checkpoint_step}; restore it from a copy"
        )
        raise StorageDamaged(str(directory.journal), "", reason)
    last = -1 if recovery.index.last_step is None else recovery.index.last_step
    stored_steps = max(last + 1, *checkpoint_steps(directory.checkpoints))
    # The newest step may be torn; and a rollback may have set the missing steps aside.
    if journal.commits > stored_steps + 1 and not directory.set_aside.exists():
        reason = (
            f"expected the {journal.commits} steps in the journal, got {stored_steps}; restore the "
            f"log from a copy, or redo the missing steps (--from-step {checkpoint_step})"
        )
        raise StorageDamaged(str(directory.log), "", reason)


def _resumption(recovery: Recovery, record: AdmissionRecord | None) -> Resumption:
    """Return the point at which the run's state machine continues."""
    info = recovery.checkpoint.info
    has_digest = info.step == recovery.step and info.format == FORMAT
    needs_initial_digest = recovery.step == 0 and record is None
    redone = {
        record.commit.step: None if record.commit.scalars is None else record.commit.averages_digest
        for record in recovery.redo
    }
    return Resumption(
        manifest=recovery.manifest,
        step=recovery.step,
        optimizer_step=recovery.optimizer_step,
        losses=recovery.losses,
        state_digest=info.state_digest if has_digest else None,
        saved=info.step,
        redone=redone,
        admission=record,
        initial_digest=recovery.load_replica().initial_digest() if needs_initial_digest else None,
    )


def _loss_scale(directory: RunDirectory, recovery: Recovery) -> float:
    """Return the loss scale of the next step, from the newest commit that has one.

    That commit is in the log or, before the checkpoint, in the journal.
    """
    spec = recovery.run.spec
    logged_scales = {
        logged_step.step: logged_step.record.commit.scalars.loss_scale
        for logged_step in recovery.logged
        if logged_step.record.commit.scalars is not None
    }
    scale_step, scale = -1, initial_loss_scale(spec)
    if logged_scales:
        scale_step, scale = max(logged_scales.items())
    elif (newest := newest_scale(directory.journal, recovery.step)) is not None:
        scale_step, scale = newest
    for step in range(max(scale_step + 1, 1), recovery.step + 1):
        scale = next_loss_scale(spec, scale, step)
    return scale


def _lines_after_restart(recovery: Recovery, journal: JournalEnd, term: int) -> Iterator[Record]:
    """Yield the lines that the journal must have before the run continues.

    Args:
        recovery: The run as recovered from disk.
        journal: The end of the journal so far.
        term: Term of the new coordinator.
    """
    info = recovery.checkpoint.info
    if not journal.has_manifest:
        yield ManifestSettled.of(recovery.manifest)
    commits = min(journal.commits, recovery.step)
    updates = {info.step: info.optimizer_step}
    updates |= {step.step + 1: step.record.optimizer_step for step in recovery.logged}
    yield Resumed(
        term=term,
        step=commits,
        optimizer_step=updates.get(commits, info.optimizer_step),
        notes=tuple(note[:2000] for note in recovery.notes),
    )
    if not journal.has_checkpoint:
        yield Checkpointed(
            term=info.term,
            step=info.step,
            optimizer_step=info.optimizer_step,
            weights_digest=info.weights_digest,
            state_digest=info.state_digest,
            directory=recovery.checkpoint.path.name,
        )
    for step in recovery.logged:
        if step.step >= commits:
            yield Committed.of(step.record, recovered=True)


def is_unfinished(path: Path) -> bool:
    """Return whether a directory has a run that can continue: interrupted, failed or drained."""
    directory = RunDirectory(path)
    if directory.read_run_file() is None:
        return False
    result = directory.read_result()
    return result is None or result["outcome"] == "drained"


def unfinished_runs(path: Path) -> list[Path]:
    """Return the directories below `path` with unfinished runs, oldest first.

    Runs that an operator has given up are excluded.

    Raises:
        UsageError: There is no such directory.
    """
    if not path.is_dir():
        raise UsageError(f"expected runs to resume in {str(path)!r}, found no such directory")
    unfinished = [child for child in path.iterdir() if _seems_unfinished(child)]
    return sorted(unfinished, key=lambda child: RunDirectory(child).accepted_ns())


def abandoned_runs(path: Path) -> list[str]:
    """Return the names of the directories below `path` with runs that an operator has given up."""
    return [
        record_path.parent.name
        for record_path in sorted(path.glob("*/run.json"))
        if _is_given_up(record_path.parent)
    ]


def _is_given_up(path: Path) -> bool:
    try:
        return is_unfinished(path) and is_abandoned(RunDirectory(path).journal)
    except SamestepError:
        return False


def _seems_unfinished(path: Path) -> bool:
    """Return whether a run is unfinished, or unreadable: resuming it reports the error."""
    try:
        return is_unfinished(path) and not _is_given_up(path)
    except SamestepError:
        return True


@cache
def _versions() -> dict[str, str]:
    """Return the versions of the installed software that decides bits or formats."""
    names = ("numpy", "blake3", "safetensors")
    return {
        "samestep": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names},
    }
