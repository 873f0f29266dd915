"""Copy a run's checkpoints to other directories, and restore a run from a copy.

    DIRECTORY/RUN-ID/after-0000000050/   run.json, manifest.json, terms.json, journal.jsonl,
                                         checkpoints/step-0000000050/

Each copy is a small run directory with the files that a restart needs to continue from that
checkpoint. Under its final name a copy is complete. A copy has no list of the run's files: on
another machine they are elsewhere, so they are hashed again.

A copy has the complete journal up to its time, and so its history. Of two copies, the one with the
higher term is newer; of two with the same term, the one with more steps. If the run's journal
continues that of a copy with a rollback (--from-step) to a step before the copy's checkpoint, the
copy is obsolete and is removed.

A restored run records the restoration only in its journal. If a coordinator finds a copy whose
journal has such a line that its own journal lacks, it copies nothing to that directory and removes
nothing from it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from coordinator.disk.durable_file import (
    TEMPORARY_SUFFIX,
    make_directory,
    read_if_exists,
    remove_temporaries,
    replace_file,
    storage_errors,
    sync_directory,
)
from coordinator.run.outputs.events import Committed
from coordinator.storage.directory.journal import (
    Entry,
    Journal,
    newest_line,
    newest_term,
    verify_journal,
)
from coordinator.storage.directory.journal_records import Resumed
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.file_digests import check_files
from coordinator.storage.states.checkpoint import (
    CheckpointInfo,
    checkpoint_path,
    checkpoint_steps,
    find_checkpoint,
    remove_checkpoint,
)
from protocol.base import limits
from protocol.base.errors import SamestepError, StorageDamaged, UsageError
from protocol.base.regular_file import open_regular

_PREFIX: Final = "after-"
_NAME: Final = re.compile(_PREFIX + r"(\d{10,})")
_RESTORED_NOTE: Final = "restored from a copy: "
"""The beginning of a restored run's note in the journal; it must not change, since journals on disk
contain it."""
_ATTEMPTS: Final = 5
"""Most attempts to read the small files, which may change meanwhile."""


class RestoredCopy(NamedTuple):
    """A restored run: the step after which it continues, and a summary for users."""

    step: int
    summary: str


class _VerifiedCopy(NamedTuple):
    """A verified copy: its checkpoint, the lines of its journal, and the commits after the
    checkpoint."""

    info: CheckpointInfo
    entries: tuple[Entry, ...]
    later_commits: Sequence[Committed]


def _copy_name(step: int) -> str:
    """Return the name of the copy of a checkpoint."""
    return f"{_PREFIX}{step:010}"


def _step_of(name: str) -> int:
    """Return the step of the checkpoint in a copy of this name."""
    return int(name.removeprefix(_PREFIX))


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy, as described by its name and journal.

    Attributes:
        name: Name of the copy's directory.
        term: Term of the last lines of the copy's journal.
        lines: Number of lines in the copy's journal.
        head: Hash of the last line.
        branch: See `_branch`.
    """

    name: str
    term: int
    lines: int
    head: str
    branch: str

    @property
    def step(self) -> int:
        """The step of the copy's checkpoint."""
        return _step_of(self.name)

    def is_prefix(self, entries: Sequence[Entry]) -> bool:
        """Return whether the run's journal begins with the copy's lines."""
        return 0 < self.lines <= len(entries) and entries[self.lines - 1].hash == self.head

    def is_obsolete(self, entries: Sequence[Entry]) -> bool:
        """Return whether, after the copy, the run was rolled back to an earlier step."""
        if not self.is_prefix(entries):
            return False
        later_records = (entry.record for entry in entries[self.lines :])
        return any(
            record.step < self.step for record in later_records if isinstance(record, Resumed)
        )


def check_directory(to: str) -> None:
    """Check before a run begins that copies can be written to a directory; create it if missing.

    Raises:
        UsageError: The path is not a directory, or cannot be written.
    """
    directory = _directory(to)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(
            f"checkpoint.copies: expected a directory that can be written at {to!r}: "
            f"{error.strerror or error}"
        ) from None


def _directory(to: str) -> Path:
    """Return the directory that an entry of `checkpoint.copies` names.

    Raises:
        UsageError: The path is not a directory, or the entry is a worker's name, as earlier
            releases allowed.
    """
    if not ("/" in to or to.startswith((".", "~"))):
        raise UsageError(
            f"checkpoint.copies: expected a directory, with a / in it, got {to!r}; copies on "
            "workers are no longer supported"
        )
    directory = Path(os.path.expanduser(to))  # noqa: PTH111  (leaves an unknown ~name as it is)
    path = directory.absolute()
    existing_path = next(
        (ancestor for ancestor in (path, *path.parents) if os.path.lexists(ancestor)), path
    )
    if not existing_path.is_dir():
        obstacle = "that" if existing_path == path else repr(str(existing_path))
        raise UsageError(
            f"checkpoint.copies: expected a directory at {to!r}, but {obstacle} is not one; move "
            "it away, or name another directory"
        )
    return directory


def copy_checkpoint(directory: RunDirectory, step: int, to: str, keep: int) -> bool:
    """Copy the files that a restart needs to continue after `step` steps, verify the copy, and
    remove older copies.

    The remains of failed copies are removed, and so are copies of steps that were rolled back.

    Args:
        directory: Directory of the run, which may continue meanwhile but keeps this checkpoint.
        step: Step of the checkpoint.
        to: The directory of copies; created if missing; ~ is the user's home.
        keep: How many copies of this run to keep.

    Returns:
        Whether a copy was made; False if it exists already.

    Raises:
        StorageFailed: A read or write failed.
        StorageDamaged: The copy differs from its source.
        UsageError: The run was also restored elsewhere and is copied to the same directory from
            there; or `to` is not a directory.
    """
    run = directory.read_run()
    assert run is not None
    target = _directory(to) / run.run_id / _copy_name(step)
    with storage_errors("copy a checkpoint to", target):
        make_directory(target.parent)
    remove_temporaries(target.parent)
    copies = [_describe(copy) for copy in _copies(target.parent)]
    entries: Sequence[Entry] = verify_journal(directory.journal).entries if copies else ()
    existing = next((copy for copy in copies if copy.name == target.name), None)
    _check_rivals(copies, entries, target.parent)
    is_new = existing is None or not _is_current(existing, entries)
    if is_new:
        entries = _make_copy(directory, step, target)
    for name in _copies_to_remove([copy for copy in copies if copy is not existing], entries, keep):
        remove_checkpoint(target.parent / name)
    remove_temporaries(target.parent)
    return is_new


def _make_copy(directory: RunDirectory, step: int, target: Path) -> tuple[Entry, ...]:
    """Make and verify a copy, which replaces a copy with another history; return the lines of its
    journal."""
    temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
    source = checkpoint_path(directory.checkpoints, step)
    try:
        with storage_errors("copy a checkpoint to", target):
            temporary.mkdir()
        _copy_small_files(directory, temporary)
        _copy_tree(source, checkpoint_path(RunDirectory(temporary).checkpoints, step))
        entries = _verify_copy(RunDirectory(temporary)).entries
        remove_checkpoint(target)
        with storage_errors("copy a checkpoint to", target):
            temporary.replace(target)
            sync_directory(target.parent)
    except SamestepError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return entries


def _describe(copy: Path) -> _Copy:
    """Describe a copy by its journal.

    Raises:
        StorageDamaged: The copy's journal is damaged.
        StorageFailed: The copy cannot be read.
    """
    journal = RunDirectory(copy).journal
    try:
        number, head = newest_line(journal)
        entries = verify_journal(journal).entries if journal.exists() else ()
    except StorageDamaged as error:
        reason = f"this copy is damaged ({error.reason}); remove it: a new copy is then made"
        raise StorageDamaged(str(copy), "", reason) from None
    return _Copy(copy.name, newest_term(journal), number, head, _branch(entries))


def _branch(entries: Sequence[Entry]) -> str:
    """Return the hash of the newest journal line that says the run was restored; empty if none.

    Two coordinators that continue one run have different branches.
    """
    restored_digests = [
        entry.hash
        for entry in entries
        if isinstance(entry.record, Resumed)
        and any(note.startswith(_RESTORED_NOTE) for note in entry.record.notes)
    ]
    return restored_digests[-1] if restored_digests else ""


def _check_rivals(copies: Iterable[_Copy], entries: Sequence[Entry], directory: Path) -> None:
    """Check that no other coordinator continues the run from a copy and writes copies here.

    Args:
        copies: The existing copies.
        entries: The lines of the run's journal.
        directory: The directory of the copies.

    Raises:
        UsageError: A copy is of a branch that this coordinator does not know.
    """
    journal_hashes = {"", *(entry.hash for entry in entries)}
    for copy in copies:
        if copy.branch not in journal_hashes:
            raise UsageError(
                f"{str(directory)!r} has {copy.name} of the same run, restored elsewhere: end one "
                "of the two coordinators, or name another directory in checkpoint.copies"
            )


def _age(copy: _Copy) -> tuple[int, int]:
    """Order copies: by term, then by steps."""
    return copy.term, copy.step


def _is_current(copy: _Copy, entries: Sequence[Entry]) -> bool:
    """Return whether a copy belongs to the run's current history and branch."""
    return (
        copy.is_prefix(entries)
        and copy.branch == _branch(entries)
        and not copy.is_obsolete(entries)
    )


def _copies_to_remove(others: Sequence[_Copy], entries: Sequence[Entry], keep: int) -> list[str]:
    """Return the names of the copies to remove, so that `keep` are left with the newest."""
    obsolete_copies = [copy for copy in others if copy.is_obsolete(entries)]
    older_copies = sorted((copy for copy in others if copy not in obsolete_copies), key=_age)
    return [
        copy.name
        for copy in (*obsolete_copies, *older_copies[: max(0, len(older_copies) + 1 - keep)])
    ]


def restore_copy(source: Path, to: Path) -> RestoredCopy:
    """Restore a run directory from the newest copy, and record that in its journal.

    Steps committed after the checkpoint are rolled back, and redone.

    Args:
        source: A directory of copies of one run, or one copy.
        to: The run's new directory, without a run.

    Raises:
        UsageError: There is no copy, or there are copies of several runs; or `to` has a run.
        StorageDamaged: The copy is damaged.
        StorageFailed: A read or write failed.
    """
    check_no_run(to)
    copy = RunDirectory(_newest_copy(source))
    verified_copy = _verify_copy(copy)
    summary = _summary(copy.path, verified_copy)
    with storage_errors("restore a run to", to):
        make_directory(to)
    _copy_tree(copy.checkpoints, RunDirectory(to).checkpoints)
    names = [path.name for path in (*copy.small_files, copy.journal) if path.exists()]
    names.remove(copy.run_file.name)
    for name in names:
        replace_file(to / name, _pieces(copy.path / name))
    _record_restoration(RunDirectory(to).journal, verified_copy.info, summary)
    # run.json comes last: without it there is no run yet.
    replace_file(to / copy.run_file.name, _pieces(copy.run_file))
    return RestoredCopy(verified_copy.info.step, summary)


def check_no_run(to: Path) -> None:
    """Check that a run can be restored to a directory.

    Raises:
        UsageError: The directory holds a run.
    """
    if RunDirectory(to).run_file.exists():
        raise UsageError(
            f"{str(to)!r} holds a run already: continue it without --from, or name another --out"
        )


def _summary(copy: Path, verified_copy: _VerifiedCopy) -> str:
    """Summarize for users the copy from which a run continues."""
    notes = [f"the run continues after step {verified_copy.info.step}"]
    if later_commits := verified_copy.later_commits:
        first_step, last_step = later_commits[0].step, later_commits[-1].step
        notes.append(f"steps {first_step} to {last_step} were committed: they are done again")
    if skipped := [str(commit.step) for commit in later_commits if commit.skipped]:
        notes.append(
            f"of these, {', '.join(skipped)} were skipped: whether to skip them is decided again"
        )
    notes.append(
        f"the copy's journal ends at {verified_copy.entries[-1].time}: later commands, such as "
        "--from-step, are not in it"
    )
    newest = _copies(copy.parent)[-1:]
    if newest and newest[0].resolve() != copy.resolve():
        notes.append(f"there is a newer copy: {str(newest[0])!r}")
    return "; ".join(notes)


def _record_restoration(path: Path, info: CheckpointInfo, summary: str) -> None:
    term = newest_term(path) + 1
    journal = Journal(path)
    try:
        note = f"{_RESTORED_NOTE}{summary}"[:2000]
        journal.append(
            Resumed(
                term=term, step=info.step, optimizer_step=info.optimizer_step, notes=(note,)
            )
        )  # fmt: skip
        journal.sync()
    finally:
        journal.close()


def _newest_copy(source: Path) -> Path:
    if (source / "run.json").is_file():
        return source
    runs = [source, *sorted(path for path in source.glob("*") if path.is_dir())]
    newest = [copies[-1] for run in runs if (copies := _copies(run))]
    if len(newest) == 1:
        return newest[0]
    if not newest:
        run_directories = source.glob("*/*") if source.is_dir() else source.parent.glob("*")
        newest_copies = [copies[-1] for run in run_directories if (copies := _copies(run))]
        choices_text = (
            f"; there are, newest first: {_choices(newest_copies)}" if newest_copies else ""
        )
        raise UsageError(
            f"--from: expected copies of a run's checkpoints in {str(source)!r}, found none"
            f"{choices_text}"
        )
    raise UsageError(
        f"--from: {str(source)!r} has copies of {len(newest)} runs; name one, newest first: "
        f"{_choices(newest)}"
    )


def _choices(copies: Iterable[Path]) -> str:
    """Format the newest copies of runs as arguments, the newest first."""
    by_age = sorted(copies, key=lambda copy: copy.stat().st_mtime, reverse=True)
    return ", ".join(
        f"--from {shlex.quote(str(copy.parent))} (after step {_step_of(copy.name)})"
        for copy in by_age
    )


def _copies(run: Path) -> list[Path]:
    """Return the complete copies, oldest first: by the term of their journals, then by steps."""
    paths = [path for path in run.glob(_PREFIX + "*") if _NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda copy: (newest_term(RunDirectory(copy).journal), copy.name))


def _verify_copy(copy: RunDirectory) -> _VerifiedCopy:
    """Check that a copy is complete."""
    check_files(copy)
    journal = verify_journal(copy.journal)
    if journal.bad_line is not None:
        reason = f"line {journal.bad_line} is bad: {journal.reason}; take another copy"
        raise StorageDamaged(str(copy.journal), "", reason)
    run, manifest = copy.read_run(), copy.read_manifest()
    steps = checkpoint_steps(copy.checkpoints)
    commits = _valid_commits(journal.entries)
    if run is None or manifest is None or not steps or len(commits) < steps[-1]:
        raise StorageDamaged(str(copy.path), "", "it is incomplete; take another copy")
    info = find_checkpoint(copy.checkpoints, steps[-1], run.run_id, manifest).info
    return _VerifiedCopy(info, journal.entries, commits[info.step :])


def _valid_commits(entries: Sequence[Entry]) -> list[Committed]:
    """Return the commits that were not rolled back."""
    commits: list[Committed] = []
    for entry in entries:
        if isinstance(entry.record, Resumed):
            del commits[entry.record.step :]
        elif isinstance(entry.record, Committed):
            commits.append(entry.record)
    return commits


def _copy_small_files(directory: RunDirectory, to: Path) -> None:
    """Copy a consistent set of the small files: start over if a file is replaced meanwhile."""
    names = [path.name for path in directory.small_files if path != directory.files_file]
    names.append(directory.journal.name)
    for attempt in range(_ATTEMPTS):
        earlier_contents = {name: read_if_exists(directory.path / name) for name in names}
        for name, content in earlier_contents.items():
            if content is not None:
                # The last line of the journal may be incomplete.
                end = content.rfind(b"\n") + 1 if name == directory.journal.name else None
                replace_file(to / name, content[:end])
        try:
            check_files(RunDirectory(to))
        except SamestepError:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return


def _copy_tree(source: Path, to: Path) -> None:
    with storage_errors("read", source):
        files = sorted(
            path for path in source.rglob("*")
            if path.suffix != TEMPORARY_SUFFIX and path.is_file()
        )  # fmt: skip
    for path in files:
        target = to / path.relative_to(source)
        with storage_errors("make", target.parent):
            make_directory(target.parent)
        replace_file(target, _pieces(path))


def _pieces(path: Path) -> Iterator[memoryview]:
    with storage_errors("read", path), open_regular(path) as file:
        while piece := file.read(limits.BODY_BYTES):
            yield memoryview(piece)
