"""The digests of the small files that a restart reads: a changed file is refused.

At each start, at each checkpoint, before and after a file is replaced, and at the end, the journal
records the BLAKE3 of each file (`FileDigests`). Journals of older releases have only the run spec
and the manifest's digest; the other files are covered from the next start on. `term.json` needs no
digest: a term counts only if it is above all terms in journal and log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from blake3 import blake3

from coordinator.disk.directory_lock import DirectoryLock
from coordinator.disk.durable_file import storage_errors
from coordinator.run.outputs.events import ManifestSettled
from coordinator.storage.directory.journal import first_record, newest_record, newest_term
from coordinator.storage.directory.journal_records import FileDigests, RunStarted
from coordinator.storage.directory.run_directory import RunDirectory, is_intact
from coordinator.storage.log.log_index import segment_files, segment_term
from coordinator.storage.states.checkpoint import checkpoint_steps
from protocol.base.errors import SamestepError, StorageDamaged
from protocol.base.regular_file import read_json

_REMEDY: Final = "restore it from a copy"

Digests = dict[str, tuple[str | None, ...]]
"""The possible digests of each file, by name; None if it may be missing."""


def lock_directory(path: Path, above_term: int = 0) -> DirectoryLock:
    """Lock a directory, with a term above all terms in its files.

    Args:
        path: The directory; created if missing.
        above_term: A term known from elsewhere; the new term is greater.

    Raises:
        UsageError: Another coordinator holds the directory, or the directory cannot be written.
        StorageDamaged: The directory's term file does not hold a term.
        StorageFailed: Term file, journal or log cannot be read.
    """
    lock = DirectoryLock.acquire(path, above_term)
    directory = RunDirectory(path)
    try:
        lock.raise_term_to(known_term(directory) + 1)
    except SamestepError:
        lock.release()
        raise
    return lock


def known_term(directory: RunDirectory) -> int:
    """Return the newest term in journal and log; 0 without any.

    Raises:
        StorageFailed: Journal or log cannot be read.
    """
    with storage_errors("read", directory.log):
        segments = segment_files(directory.log)
    return max([newest_term(directory.journal), *map(segment_term, segments)])


def present_digests(directory: RunDirectory) -> Digests:
    """Return the digests of the small files that exist.

    Raises:
        StorageFailed: A file cannot be read.
    """
    digests = {path.name: file_digest(path) for path in directory.small_files}
    return {name: (digest,) for name, digest in digests.items() if digest is not None}


def file_digest(path: Path) -> str | None:
    """Return the BLAKE3 of a small file; None if it is missing."""
    with storage_errors("read", path):
        return blake3(path.read_bytes()).hexdigest() if path.exists() else None


def check_files(directory: RunDirectory) -> None:
    """Check the small files against the journal.

    Raises:
        StorageDamaged: A file is missing or was changed.
        StorageFailed: A file cannot be read.
    """
    check_journal(directory)
    for path, reason in changed_files(directory, newest_record(directory.journal, FileDigests)):
        raise StorageDamaged(str(path), "", reason)


def changed_files(directory: RunDirectory, recorded: FileDigests | None) -> list[tuple[Path, str]]:
    """Return the small files that differ from the journal, each with the reason and the remedy.

    Args:
        directory: Directory of the run.
        recorded: The newest `FileDigests`; None if an older release wrote the journal.
    """
    if recorded is None:
        return _changes_in_older_journal(directory)
    changes = []
    for path in directory.small_files:
        recorded_digests, digest = recorded.digests.get(path.name), file_digest(path)
        if recorded_digests is None or digest in recorded_digests:
            continue
        remedy = _REMEDY
        if path == directory.files_file:
            if digest is None:
                continue  # the files are hashed again
            remedy = f"{remedy}, or remove it: the run's files are hashed again"
        fault = (
            "it is missing" if digest is None else "its content differs from the journal's record"
        )
        changes.append((path, f"{fault}; {remedy}"))
    return changes


def check_journal(directory: RunDirectory) -> None:
    """Check that the journal exists and belongs to the run. If it has no intact first line, check
    the digest in `run.json`.

    Raises:
        StorageDamaged: The journal or `run.json` is missing, damaged or of another run.
        StorageFailed: The journal cannot be read.
    """
    journal, first = directory.journal, first_record(directory.journal)
    is_empty = not journal.exists() or not journal.stat().st_size
    if is_empty and checkpoint_steps(directory.checkpoints):
        reason = "it is missing or empty, and nothing else proves that run.json is intact"
        raise StorageDamaged(str(journal), "", f"{reason}; {_REMEDY}")
    try:
        document = read_json(directory.run_file)
        run_id, is_run_intact = document["run_id"], is_intact(document)
    except (OSError, ValueError, KeyError, TypeError):
        return  # reading it raises the error
    if isinstance(first, RunStarted) and is_run_intact and run_id != first.run_id:
        reason = f"it belongs to run {first.run_id!r}, and run.json to {run_id!r}"
        raise StorageDamaged(str(journal), "", f"{reason}; restore the wrong file from a copy")
    if first is None and not is_run_intact:
        reason = f"it does not match its digest; {_REMEDY}, or submit the run again"
        raise StorageDamaged(str(directory.run_file), "", reason)


def _changes_in_older_journal(directory: RunDirectory) -> list[tuple[Path, str]]:
    first, stored_run = first_record(directory.journal), directory.read_run()
    manifest_record, manifest = (
        newest_record(directory.journal, ManifestSettled),
        directory.read_manifest(),
    )
    comparisons: list[tuple[Path, object, object]] = []
    if isinstance(first, RunStarted) and stored_run is not None:
        actual = stored_run.run_id, stored_run.document
        comparisons.append((directory.run_file, actual, (first.run_id, first.spec)))
    if manifest_record is not None and manifest is not None:
        comparisons.append(
            (directory.manifest_file, manifest.digest(), manifest_record.manifest_digest)
        )
    reason = f"its content differs from the journal's record; {_REMEDY}"
    return [(path, reason) for path, actual, expected in comparisons if actual != expected]
