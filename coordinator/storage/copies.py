"""Copies of a run's checkpoints in other directories, and a run brought back from one.

    DIRECTORY/RUN-ID/after-0000000050/   run.json, manifest.json, terms.json, journal.jsonl,
                                         checkpoints/step-0000000050/

Each is a run's directory in small: what a restart needs to go on from that checkpoint, whole under
its name or not there. The list of the run's files is left out: on another machine they lie
elsewhere, so they are found and hashed anew.

Its journal is the run's as it was then, whole: so a copy knows its history. Of two the one with the
newer epoch is newer, then the one of more steps. Whose journal goes on in the run's to a line that
takes its checkpoint's steps back (--from-step) is no part of the run any more, and is removed.

A run that was brought back has a line that says so in its journal, and in no other: whoever finds a
copy with such a line that its own journal does not have copies nothing there, and removes nothing.
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
    read_if_there,
    remove_temporaries,
    replace_file,
    storing,
    sync_directory,
)
from coordinator.storage.directory.journal import (
    Entry,
    Journal,
    newest_epoch,
    newest_line,
    verify_journal,
)
from coordinator.storage.directory.journal_records import Committed, Resumed
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.kept_files import check_files
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
_BROUGHT_BACK: Final = "brought back from a copy: "
"""Begins the note of a journal's line where a run was brought back."""
_ATTEMPTS: Final = 5
"""At reading small files and the journal while they are written."""


class BroughtBack(NamedTuple):
    """A run that was made again: after how many steps it goes on, and what people are told."""

    step: int
    told: str


class _Whole(NamedTuple):
    """A copy that was verified: its checkpoint, the lines of its journal, the commits of steps
    that the checkpoint does not hold."""

    info: CheckpointInfo
    entries: tuple[Entry, ...]
    later: Sequence[Committed]


def copy_name(step: int) -> str:
    """Of a copy of the checkpoint after so many steps."""
    return f"{_PREFIX}{step:010}"


def is_copy_name(name: str) -> bool:
    """Whether a copy may be called so."""
    return _NAME.fullmatch(name) is not None


def step_of(name: str) -> int:
    """Of the checkpoint that a copy of this name is of."""
    return int(name.removeprefix(_PREFIX))


@dataclass(frozen=True, slots=True)
class Held:
    """What is known of a copy without reading it.

    Attributes:
        name: Of its directory.
        epoch: That its journal ends with.
        lines: Of its journal.
        head: Hash of the last of them.
        branch: See `branch`.
    """

    name: str
    epoch: int
    lines: int
    head: str
    branch: str

    @property
    def step(self) -> int:
        """Of its checkpoint."""
        return step_of(self.name)

    def begins(self, told: Sequence[Entry]) -> bool:
        """Whether the lines of a run's journal begin with the copy's."""
        return 0 < self.lines <= len(told) and told[self.lines - 1].hash == self.head

    def taken_back(self, told: Sequence[Entry]) -> bool:
        """Whether the run has gone back, after it was copied, to a step before the copy's."""
        if not self.begins(told):
            return False
        since = (entry.record for entry in told[self.lines :])
        return any(record.step < self.step for record in since if isinstance(record, Resumed))


def check_place(to: Path) -> None:
    """See that copies can be kept there, before a run begins; made if it is not there.

    Raises:
        UsageError: It is no directory, or cannot be written.
    """
    _check_directory(to)
    place = _expanded(to)
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise UsageError(
            f"checkpoint.copies: expected a directory that can be written at {str(to)!r}: "
            f"{error.strerror or error}"
        ) from None


def _expanded(to: Path) -> Path:
    return Path(os.path.expanduser(to))  # noqa: PTH111  (leaves an unknown ~name as it is)


def _check_directory(to: Path) -> None:
    place = _expanded(to).absolute()
    there = next((path for path in (place, *place.parents) if os.path.lexists(path)), place)
    if not there.is_dir():
        which = "that" if there == place else repr(str(there))
        raise UsageError(
            f"checkpoint.copies: expected a directory at {str(to)!r}, but {which} is none; move "
            "it away, or name another directory"
        )


def copy_checkpoint(directory: RunDirectory, step: int, to: Path, keep: int) -> bool:
    """Copy what a restart needs to go on after `step` steps, verify it, and remove older ones.

    What a copy that failed or was cut short has left is removed, and so are copies of steps that
    the run has taken back since.

    Args:
        directory: The run's; its coordinator may go on meanwhile, but keeps this checkpoint.
        step: The checkpoint's.
        to: Where copies are kept; made if it is not there; ~ is the user's home.
        keep: So many are left of this run.

    Returns:
        Whether it was copied; False if a copy was there.

    Raises:
        StorageFailed: A disk refuses.
        StorageDamaged: What was written there is not what was read.
        UsageError: The run was brought back elsewhere, and is copied to the same place from there;
            or that is no directory.
    """
    run = directory.read_run()
    assert run is not None
    _check_directory(to)
    place = _expanded(to) / run.run_id / copy_name(step)
    with storing("copy a checkpoint to", place):
        make_directory(place.parent)
    remove_temporaries(place.parent)
    held = [_held_there(copy) for copy in _copies(place.parent)]
    told: Sequence[Entry] = verify_journal(directory.journal).entries if held else ()
    known = next((copy for copy in held if copy.name == place.name), None)
    check_rivals(held, told, str(place.parent))
    made = known is None or not is_current(known, told)
    if made:
        told = _make(directory, step, place)
    for name in superfluous([copy for copy in held if copy is not known], told, keep):
        remove_checkpoint(place.parent / name)
    remove_temporaries(place.parent)
    return made


def _make(directory: RunDirectory, step: int, place: Path) -> tuple[Entry, ...]:
    """Copy and verify, in place of one with another history; the lines of its journal."""
    temporary = place.with_name(place.name + TEMPORARY_SUFFIX)
    source = checkpoint_path(directory.checkpoints, step)
    try:
        with storing("copy a checkpoint to", place):
            temporary.mkdir()
        _copy_small_files(directory, temporary)
        _copy_tree(source, checkpoint_path(RunDirectory(temporary).checkpoints, step))
        entries = _verify(RunDirectory(temporary)).entries
        remove_checkpoint(place)
        with storing("copy a checkpoint to", place):
            temporary.replace(place)
            sync_directory(place.parent)
    except SamestepError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return entries


def _held_there(copy: Path) -> Held:
    try:
        return held_in(copy)
    except StorageDamaged as error:
        reason = f"this copy is damaged ({error.reason}); remove it, and it is made anew"
        raise StorageDamaged(str(copy), "", reason) from None


def held_in(copy: Path) -> Held:
    """What its journal says of a copy.

    Raises:
        StorageFailed: It cannot be read.
    """
    journal = RunDirectory(copy).journal
    number, head = newest_line(journal)
    told = verify_journal(journal).entries if journal.exists() else ()
    return Held(copy.name, newest_epoch(journal), number, head, branch(told))


def branch(told: Sequence[Entry]) -> str:
    """Hash of the line where a journal says that the run was brought back, the newest such line;
    empty if it never was. Two coordinators that go on with one run have it different."""
    brought = [
        entry.hash
        for entry in told
        if isinstance(entry.record, Resumed)
        and any(note.startswith(_BROUGHT_BACK) for note in entry.record.notes)
    ]
    return brought[-1] if brought else ""


def check_rivals(held: Iterable[Held], told: Sequence[Entry], where: str) -> None:
    """A run that was brought back while its first coordinator lives is two: the newer one copies.

    Args:
        held: Copies that are there.
        told: The lines of the run's journal.
        where: They are, for people.

    Raises:
        UsageError: One is of a way that this coordinator knows nothing of.
    """
    known = {"", *(entry.hash for entry in told)}
    for copy in held:
        if copy.branch not in known:
            raise UsageError(
                f"{where!r} has {copy.name}, of the same run brought back elsewhere: end one of "
                "the two coordinators, or name another place in checkpoint.copies"
            )


def _age(copy: Held) -> tuple[int, int]:
    """The newer epoch is newer, then more steps are."""
    return copy.epoch, copy.step


def newest_of(held: Sequence[Held]) -> Held:
    """The one to go on from."""
    return max(held, key=_age)


def is_current(copy: Held, told: Sequence[Entry]) -> bool:
    """Whether it need not be made anew: it is of the run as it went on, on the same branch."""
    return copy.begins(told) and copy.branch == branch(told) and not copy.taken_back(told)


def superfluous(others: Sequence[Held], told: Sequence[Entry], keep: int) -> list[str]:
    """Names of those to remove beside one that is as new as can be, so that `keep` are left."""
    void = [copy for copy in others if copy.taken_back(told)]
    older = sorted((copy for copy in others if copy not in void), key=_age)
    return [copy.name for copy in (*void, *older[: max(0, len(older) + 1 - keep)])]


def bring_back(source: Path, to: Path) -> BroughtBack:
    """Make the newest copy a run's directory again.

    Its journal gets a line of that: steps committed after the checkpoint are void, and done again.

    Args:
        source: A directory of copies, of one run in it, or one copy.
        to: The run's new directory; it holds no run.

    Raises:
        UsageError: There is no copy, of several runs none was named, or `to` holds a run.
        StorageDamaged: The copy is not what was written.
        StorageFailed: A disk refuses.
    """
    check_no_run(to)
    copy = RunDirectory(_newest(source))
    whole = _verify(copy)
    told = _told(copy.path, whole)
    with storing("bring a run back to", to):
        make_directory(to)
    _copy_tree(copy.checkpoints, RunDirectory(to).checkpoints)
    names = [path.name for path in (*copy.small_files, copy.journal) if path.exists()]
    names.remove(copy.run_file.name)
    for name in names:
        replace_file(to / name, _pieces(copy.path / name))
    _tell_journal(RunDirectory(to).journal, whole.info, told)
    # run.json comes last: without it there is no run yet.
    replace_file(to / copy.run_file.name, _pieces(copy.run_file))
    return BroughtBack(whole.info.step, told)


def check_no_run(to: Path) -> None:
    """See that a run can be brought back to a directory.

    Raises:
        UsageError: It holds one.
    """
    if RunDirectory(to).run_file.exists():
        raise UsageError(
            f"{str(to)!r} holds a run already: go on with it without --from, or name another --out"
        )


def _told(copy: Path, whole: _Whole) -> str:
    """What people have to know of a copy that a run goes on from."""
    told = [f"the run goes on after step {whole.info.step}"]
    if later := whole.later:
        told.append(
            f"steps {later[0].step} to {later[-1].step} were committed: they are done again"
        )
    if skipped := [str(commit.step) for commit in later if commit.skipped]:
        told.append(f"of them {', '.join(skipped)} had been skipped: that is decided anew")
    told.append(
        f"the copy knows the run up to {whole.entries[-1].time}: nothing that was told later, such "
        "as --from-step"
    )
    newest = _copies(copy.parent)[-1:]
    if newest and newest[0].resolve() != copy.resolve():
        told.append(f"newer is {str(newest[0])!r}")
    return "; ".join(told)


def _tell_journal(path: Path, info: CheckpointInfo, told: str) -> None:
    epoch = newest_epoch(path) + 1
    journal = Journal(path)
    try:
        note = f"{_BROUGHT_BACK}{told}"[:2000]
        journal.append(
            Resumed(
                epoch=epoch, step=info.step, optimizer_step=info.optimizer_step, notes=(note,)
            )
        )  # fmt: skip
        journal.sync()
    finally:
        journal.close()


def _newest(source: Path) -> Path:
    if (source / "run.json").is_file():
        return source
    runs = [source, *sorted(path for path in source.glob("*") if path.is_dir())]
    found = [copies[-1] for run in runs if (copies := _copies(run))]
    if len(found) == 1:
        return found[0]
    if not found:
        near = source.glob("*/*") if source.is_dir() else source.parent.glob("*")
        below = [copies[-1] for run in near if (copies := _copies(run))]
        there = f"; there are, newest first: {_choices(below)}" if below else ""
        raise UsageError(
            f"--from: expected copies of a run's checkpoints in {str(source)!r}, found none{there}"
        )
    raise UsageError(
        f"--from: {str(source)!r} has copies of {len(found)} runs; name one, newest first: "
        f"{_choices(found)}"
    )


def _choices(copies: Iterable[Path]) -> str:
    """Runs by their newest copies, the newest first, as arguments."""
    by_age = sorted(copies, key=lambda copy: copy.stat().st_mtime, reverse=True)
    return ", ".join(choice(str(copy.parent), step_of(copy.name)) for copy in by_age)


def choice(place: str, step: int) -> str:
    """A run that can be gone on with, for people: the exact argument, and its last step."""
    return f"--from {shlex.quote(place)} (last step {step})"


def _copies(run: Path) -> list[Path]:
    """Whole ones, oldest first: by the epoch that their journal ends with, then by their steps."""
    found = [path for path in run.glob(_PREFIX + "*") if is_copy_name(path.name)]
    return sorted(found, key=lambda copy: (newest_epoch(RunDirectory(copy).journal), copy.name))


def _verify(copy: RunDirectory) -> _Whole:
    """See that a copy is whole."""
    check_files(copy)
    verified = verify_journal(copy.journal)
    if verified.bad_line is not None:
        reason = f"line {verified.bad_line} is bad: {verified.reason}; take another copy"
        raise StorageDamaged(str(copy.journal), "", reason)
    run, manifest = copy.read_run(), copy.read_manifest()
    steps = checkpoint_steps(copy.checkpoints)
    commits = _counted(verified.entries)
    if run is None or manifest is None or not steps or len(commits) < steps[-1]:
        raise StorageDamaged(str(copy.path), "", "it is no whole copy; take another one")
    info = find_checkpoint(copy.checkpoints, steps[-1], run.run_id, manifest).info
    return _Whole(info, verified.entries, commits[info.step :])


def _counted(entries: Sequence[Entry]) -> list[Committed]:
    """The commits that nobody has taken back."""
    commits: list[Committed] = []
    for entry in entries:
        if isinstance(entry.record, Resumed):
            del commits[entry.record.step :]
        elif isinstance(entry.record, Committed):
            commits.append(entry.record)
    return commits


def _copy_small_files(directory: RunDirectory, to: Path) -> None:
    """As they were at one moment: what is replaced while the journal is read is read again."""
    names = [path.name for path in directory.small_files if path != directory.files_file]
    names.append(directory.journal.name)
    for attempt in range(_ATTEMPTS):
        before = {name: read_if_there(directory.path / name) for name in names}
        for name, content in before.items():
            if content is not None:
                # A line of the journal may be half written just now.
                whole = content.rfind(b"\n") + 1 if name == directory.journal.name else None
                replace_file(to / name, content[:whole])
        try:
            check_files(RunDirectory(to))
        except SamestepError:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return


def _copy_tree(source: Path, to: Path) -> None:
    with storing("read", source):
        files = sorted(
            path for path in source.rglob("*")
            if path.suffix != TEMPORARY_SUFFIX and path.is_file()
        )  # fmt: skip
    for path in files:
        target = to / path.relative_to(source)
        with storing("make", target.parent):
            make_directory(target.parent)
        replace_file(target, _pieces(path))


def _pieces(path: Path) -> Iterator[memoryview]:
    with storing("read", path), open_regular(path) as file:
        while piece := file.read(limits.BODY_BYTES):
            yield memoryview(piece)
