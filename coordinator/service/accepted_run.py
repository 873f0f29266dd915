"""A run that this coordinator has taken on: its directory is held, begun or found again."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path

from coordinator.disk.claim import Claim
from coordinator.files.blob_index import BlobIndex
from coordinator.files.kept_index import keep_index, kept_index
from coordinator.files.permitted import PermittedFiles
from coordinator.run.outputs.restart import Resumption, Terms
from coordinator.service.chronicle import committed, settled
from coordinator.storage.copies import check_place
from coordinator.storage.directory.journal import (
    JournalEnd,
    evaluations,
    newest_scale,
    read_end,
    was_given_up,
)
from coordinator.storage.directory.journal_records import Checkpointed, Record, Resumed, RunBegins
from coordinator.storage.directory.run_directory import RunDirectory, StoredRun
from coordinator.storage.kept_files import check_files
from coordinator.storage.recovery import Recovery, leave_behind, recover
from coordinator.storage.states.checkpoint import checkpoint_steps
from coordinator.storage.way_back import go_back
from protocol import __version__
from protocol.base.errors import Mismatch, SamestepError, StorageDamaged, UsageError
from protocol.base.place import is_directory
from protocol.exact.loss_scale import first_scale, scale_after, scales
from protocol.spec.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class Restart:
    """Where a run goes on: what an earlier coordinator has left, and what its logic makes of it."""

    recovery: Recovery
    resumption: Resumption


@dataclass(frozen=True, slots=True)
class AcceptedRun:
    """One run, waiting or in progress.

    Attributes:
        stored: Its id and spec, as they are on disk.
        directory: Its files.
        claim: Holds the directory.
        restart: Where it goes on from; None if it begins.
        blobs: The files that it names, for workers to ask for.
    """

    stored: StoredRun
    directory: RunDirectory
    claim: Claim
    restart: Restart | None = None
    blobs: BlobIndex | None = None

    def first_lines(self) -> list[Record]:
        """What the journal has to say before anything happens; its end is sound.

        Raises:
            StorageFailed: It cannot be read.
        """
        saved = self.restart.resumption.saved if self.restart is not None else 0
        journal = read_end(self.directory.journal, saved)
        lines: list[Record] = []
        if not journal.begun:
            lines.append(RunBegins.of(self.stored.run_id, self.stored.document, _versions()))
        if self.restart is not None:
            lines += _lines_after_restart(self.restart.recovery, journal, self.claim.epoch)
        return lines


def begin_run(
    run_id: str, spec: RunSpec, claim: Claim, blobs: BlobIndex | None = None
) -> AcceptedRun:
    """Begin a new run in a directory that is held.

    Raises:
        UsageError: There is a run already, or copies cannot be kept where the spec says.
        StorageFailed: The disk refuses.
    """
    for place in spec.checkpoint.copies:
        if is_directory(place):
            check_place(Path(place))
    directory = RunDirectory(claim.directory)
    directory.begin(run_id, spec)
    if blobs is not None:
        keep_index(directory.files_file, blobs)
    stored = StoredRun(run_id, spec, spec.model_dump(mode="json"))
    return AcceptedRun(stored, directory, claim, blobs=blobs)


def find_run(
    claim: Claim,
    spec: RunSpec | None = None,
    from_step: int | None = None,
    permitted: PermittedFiles | None = None,
) -> AcceptedRun | None:
    """The run in a directory that is held, to go on with.

    Args:
        claim: Holds the directory.
        spec: What the run has to be; None for whatever it is.
        from_step: Go back to the checkpoint after so many steps, also of a finished run.
        permitted: Which files may be read that the run has not read before; None for all.

    Returns:
        None if there is no run, or it has finished.

    Raises:
        Mismatch: It is another run.
        UsageError: No such checkpoint is kept.
        StorageDamaged: Something is damaged that no crash explains.
        StorageFailed: The disk refuses.
    """
    directory = RunDirectory(claim.directory)
    check_files(directory)
    stored = directory.read_run()
    if stored is None:
        return None
    if spec is not None and spec != stored.spec:
        raise Mismatch(
            f"{str(claim.directory)!r} holds run {stored.run_id!r} of another run spec; leave "
            "the run spec out to go on with it, or choose another --out"
        )
    if from_step is None and not is_unfinished(claim.directory):
        return None
    blobs = kept_index(directory.files_file, stored.spec, permitted)
    terms = directory.read_terms()
    gone_back = () if from_step is None else (go_back(directory, from_step, claim.epoch),)
    recovery = recover(directory)
    if recovery is None:
        return AcceptedRun(stored, directory, claim, None, blobs)
    if gone_back:
        # What was committed from there on is void, also where the steps could be compared.
        recovery = replace(recovery, redo=(), notes=(*recovery.notes, *gone_back))
    figures: dict[int, dict[str, float]] = {}
    if stored.spec.stop is not None:
        figures = evaluations(directory.journal, recovery.step)
    scale = _loss_scale(directory, recovery) if scales(stored.spec) else None
    resumption = replace(_resumption(recovery, terms), figures=figures, loss_scale=scale)
    if not gone_back:
        _check_whole(directory, recovery)
    leave_behind(directory, recovery)
    return AcceptedRun(stored, directory, claim, Restart(recovery, resumption), blobs)


def _check_whole(directory: RunDirectory, recovery: Recovery) -> None:
    """A journal is synced before a checkpoint is written, and a log before the journal tells of
    its step: one that lacks more than a crash can take was cut.

    Raises:
        StorageDamaged: It was; what a journal would say of the other files is lost with it.
        StorageFailed: It cannot be read.
    """
    saved = recovery.checkpoint.info.step
    journal = read_end(directory.journal, saved)
    if not journal.begun or journal.commits < saved:
        told = f"it tells of {journal.commits} steps" if journal.begun else "it has no beginning"
        reason = f"{told}, and a checkpoint is there after {saved}; bring it back from a copy"
        raise StorageDamaged(str(directory.journal), "", reason)
    last = -1 if recovery.index.last is None else recovery.index.last
    kept = max(last + 1, *checkpoint_steps(directory.checkpoints))
    # The newest step may be a torn one; and whoever was going back has set aside what is missing.
    if journal.commits > kept + 1 and not directory.set_aside.exists():
        reason = (
            f"expected the {journal.commits} steps that the journal tells of, got {kept}; bring it "
            f"back from a copy, or take the others again (--from-step {saved})"
        )
        raise StorageDamaged(str(directory.log), "", reason)


def _resumption(recovery: Recovery, terms: Terms | None) -> Resumption:
    """Where the run's logic goes on from."""
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


def _loss_scale(directory: RunDirectory, recovery: Recovery) -> float:
    """Of the step that comes next: from the newest commit that tells one, be it in the log or, of
    steps before the checkpoint, in the journal."""
    spec = recovery.run.spec
    told = {
        logged.step: logged.record.commit.scalars.loss_scale
        for logged in recovery.logged
        if logged.record.commit.scalars is not None
    }
    at, scale = -1, first_scale(spec)
    if told:
        at, scale = max(told.items())
    elif (found := newest_scale(directory.journal, recovery.step)) is not None:
        at, scale = found
    for step in range(max(at + 1, 1), recovery.step + 1):
        scale = scale_after(spec, scale, step)
    return scale


def _lines_after_restart(recovery: Recovery, journal: JournalEnd, epoch: int) -> Iterator[Record]:
    """What the journal has to say before the run goes on.

    Args:
        recovery: What was found.
        journal: What the journal says so far.
        epoch: The new coordinator's.
    """
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


def is_unfinished(path: Path) -> bool:
    """Whether a directory holds a run that can go on: interrupted, failed or drained."""
    directory = RunDirectory(path)
    if directory.read_run_file() is None:
        return False
    result = directory.read_result()
    return result is None or result["outcome"] == "drained"


def unfinished_runs(path: Path) -> list[Path]:
    """The directories below this one that hold runs which are to go on, oldest first: not those
    that an operator gave up.

    Raises:
        UsageError: There is no such directory.
    """
    if not path.is_dir():
        raise UsageError(f"expected runs to resume in {str(path)!r}, found no such directory")
    found = [child for child in path.iterdir() if _seems_unfinished(child)]
    return sorted(found, key=lambda child: RunDirectory(child).accepted_ns())


def given_up_runs(path: Path) -> list[str]:
    """Names of the directories below this one whose runs an operator gave up."""
    return [each.parent.name for each in sorted(path.glob("*/run.json")) if _given_up(each.parent)]


def _given_up(path: Path) -> bool:
    try:
        return is_unfinished(path) and was_given_up(RunDirectory(path).journal)
    except SamestepError:
        return False


def _seems_unfinished(path: Path) -> bool:
    """Also where that cannot be told: whoever takes it up will say why."""
    try:
        return is_unfinished(path) and not _given_up(path)
    except SamestepError:
        return True


@cache
def _versions() -> dict[str, str]:
    """Of the software on this side that decides bits or formats."""
    names = ("numpy", "blake3", "safetensors")
    return {
        "samestep": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names},
    }
