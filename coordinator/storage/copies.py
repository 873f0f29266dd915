"""Copies of a run's checkpoints in other directories, and a run brought back from one.

    DIRECTORY/RUN-ID/after-0000000050/   run.json, manifest.json, terms.json, journal.jsonl,
                                         checkpoints/step-0000000050/

Each is a run's directory in small: what a restart needs to go on from that checkpoint, whole under
its name or not there. The list of the run's files is left out: on another machine they lie
elsewhere, so they are found and hashed anew.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from coordinator.disk.durable_file import (
    TEMPORARY_SUFFIX,
    make_directory,
    replace_file,
    storing,
    sync_directory,
)
from coordinator.storage.checkpoint import checkpoint_path, checkpoint_steps, find_checkpoint
from coordinator.storage.journal import verify_journal
from coordinator.storage.kept_files import check_files
from coordinator.storage.run_directory import RunDirectory
from protocol.base import limits
from protocol.base.errors import SamestepError, StorageDamaged, UsageError

_PREFIX: Final = "after-"
_ATTEMPTS: Final = 5
"""At reading small files and the journal while they are written."""


def copy_checkpoint(directory: RunDirectory, step: int, to: Path, keep: int) -> None:
    """Copy what a restart needs to go on after `step` steps, verify it, and remove older ones.

    Args:
        directory: The run's; its coordinator may go on meanwhile.
        step: The checkpoint's.
        to: Where copies are kept; made if it is not there; ~ is the user's home.
        keep: So many are left of this run.

    Raises:
        StorageFailed: A disk refuses.
        StorageDamaged: What was written there is not what was read.
    """
    run = directory.read_run()
    assert run is not None
    place = to.expanduser() / run.run_id / f"{_PREFIX}{step:010}"
    if place.exists():
        return
    temporary = place.with_name(place.name + TEMPORARY_SUFFIX)
    with storing("copy a checkpoint to", place):
        make_directory(place.parent)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    _copy_small_files(directory, temporary)
    source = checkpoint_path(directory.checkpoints, step)
    _copy_tree(source, checkpoint_path(RunDirectory(temporary).checkpoints, step))
    _verify(RunDirectory(temporary))
    with storing("copy a checkpoint to", place):
        temporary.replace(place)
        sync_directory(place.parent)
        for older in _copies(place.parent)[:-keep]:
            shutil.rmtree(older)


def bring_back(source: Path, to: Path) -> int:
    """Make the newest copy a run's directory again.

    Args:
        source: A directory of copies, of one run in it, or one copy.
        to: The run's new directory; it holds no run.

    Returns:
        After how many steps the run goes on.

    Raises:
        UsageError: There is no copy, of several runs none was named, or `to` holds a run.
        StorageDamaged: The copy is not what was written.
        StorageFailed: A disk refuses.
    """
    if RunDirectory(to).run_file.exists():
        raise UsageError(
            f"{str(to)!r} holds a run already: go on with it without --from, or name another --out"
        )
    copy = RunDirectory(_newest(source))
    step = _verify(copy)
    with storing("bring a run back to", to):
        make_directory(to)
    _copy_tree(copy.checkpoints, RunDirectory(to).checkpoints)
    # run.json comes last: without it there is no run yet.
    names = [path.name for path in (*copy.small_files, copy.journal) if path.exists()]
    for name in sorted(names, key=lambda name: name == copy.run_file.name):
        replace_file(to / name, _pieces(copy.path / name))
    return step


def _newest(source: Path) -> Path:
    if (source / "run.json").is_file():
        return source
    runs = [source, *sorted(path for path in source.glob("*") if path.is_dir())]
    found = {run.name: copies[-1] for run in runs if (copies := _copies(run))}
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise UsageError(
            f"--from: expected copies of a run's checkpoints in {str(source)!r}, found none"
        )
    raise UsageError(
        f"--from: {str(source)!r} has copies of several runs: name one, such as "
        f"{str(source / min(found))!r}"
    )


def _copies(run: Path) -> list[Path]:
    """Whole ones, oldest first."""
    return sorted(
        path for path in run.glob(_PREFIX + "*")
        if path.is_dir() and not path.name.endswith(TEMPORARY_SUFFIX)
    )  # fmt: skip


def _verify(copy: RunDirectory) -> int:
    """See that a copy is whole; the steps that its checkpoint is of."""
    check_files(copy)
    verified = verify_journal(copy.journal)
    if verified.bad_line is not None:
        reason = f"line {verified.bad_line} is bad: {verified.reason}; take another copy"
        raise StorageDamaged(str(copy.journal), "", reason)
    run, manifest = copy.read_run(), copy.read_manifest()
    steps = checkpoint_steps(copy.checkpoints)
    if run is None or manifest is None or not steps:
        raise StorageDamaged(str(copy.path), "", "it is no whole copy; take another one")
    return find_checkpoint(copy.checkpoints, steps[-1], run.run_id, manifest).info.step


def _copy_small_files(directory: RunDirectory, to: Path) -> None:
    """As they were at one moment: what is replaced while the journal is read is read again."""
    names = [path.name for path in directory.small_files if path != directory.files_file]
    names.append(directory.journal.name)
    for attempt in range(_ATTEMPTS):
        before = {name: _content(directory.path / name) for name in names}
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


def _content(path: Path) -> bytes | None:
    with storing("read", path):
        return path.read_bytes() if path.exists() else None


def _copy_tree(source: Path, to: Path) -> None:
    with storing("read", source):
        files = sorted(path for path in source.rglob("*") if path.is_file())
    for path in files:
        target = to / path.relative_to(source)
        with storing("make", target.parent):
            make_directory(target.parent)
        replace_file(target, _pieces(path))


def _pieces(path: Path) -> Iterator[memoryview]:
    with storing("read", path), path.open("rb") as file:
        while piece := file.read(limits.BODY_BYTES):
            yield memoryview(piece)
