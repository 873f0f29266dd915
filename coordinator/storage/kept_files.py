"""The small files that a restart reads are bound to the journal: one that was changed is refused.

At each start, at each checkpoint and before one is replaced the journal tells the BLAKE3 of each
(`FilesKept`). Journals of older releases do not; they have the run spec and the manifest's digest
all the same, and the other files are bound from the next start on. `epoch.json` needs no digest:
an epoch counts only if it is above all that journal and log tell of.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from blake3 import blake3

from coordinator.disk.claim import Claim
from coordinator.disk.durable_file import storing
from coordinator.storage.directory.journal import first_record, newest_epoch, newest_record
from coordinator.storage.directory.journal_records import FilesKept, ManifestSettled, RunBegins
from coordinator.storage.directory.run_directory import RunDirectory, is_whole
from coordinator.storage.log.log_index import segment_epoch, segment_files
from coordinator.storage.states.checkpoint import checkpoint_steps
from protocol.base.errors import SamestepError, StorageDamaged
from protocol.base.regular_file import read_json

_REMEDY: Final = "bring it back from a copy"

Digests = dict[str, tuple[str | None, ...]]
"""What each file may hold, by name; None: it may be missing."""


def hold(path: Path, above: int = 0) -> Claim:
    """Lock a directory, with an epoch above every one that its files tell of.

    Args:
        path: The directory, which is made if it is not there.
        above: An epoch known from elsewhere.

    Raises:
        UsageError: Another coordinator holds it, or it cannot be written.
        StorageFailed: Journal or log cannot be read.
    """
    claim = Claim.take(path, above)
    directory = RunDirectory(path)
    try:
        claim.raise_to(known_epoch(directory) + 1)
    except SamestepError:
        claim.release()
        raise
    return claim


def known_epoch(directory: RunDirectory) -> int:
    """The newest epoch that journal and log tell of; 0 where there was none.

    Raises:
        StorageFailed: They cannot be read.
    """
    with storing("read", directory.log):
        segments = segment_files(directory.log)
    return max([newest_epoch(directory.journal), *map(segment_epoch, segments)])


def kept_digests(directory: RunDirectory) -> Digests:
    """Of those that are there.

    Raises:
        StorageFailed: One cannot be read.
    """
    found = {path.name: file_digest(path) for path in directory.small_files}
    return {name: (digest,) for name, digest in found.items() if digest is not None}


def file_digest(path: Path) -> str | None:
    """BLAKE3 of a small file; None if it is not there."""
    with storing("read", path):
        return blake3(path.read_bytes()).hexdigest() if path.exists() else None


def check_files(directory: RunDirectory) -> None:
    """See that the small files are those that the journal tells of.

    Raises:
        StorageDamaged: One is missing, or not what was written.
        StorageFailed: One cannot be read.
    """
    check_bound(directory)
    for path, reason in changed_files(directory, newest_record(directory.journal, FilesKept)):
        raise StorageDamaged(str(path), "", reason)


def changed_files(directory: RunDirectory, told: FilesKept | None) -> list[tuple[Path, str]]:
    """The small files that are not what the journal tells, each with why and what to do.

    Args:
        directory: The run's.
        told: The newest such line; None if an older release wrote the journal.
    """
    if told is None:
        return _changed_since_older(directory)
    changed = []
    for path in directory.small_files:
        allowed, found = told.digests.get(path.name), file_digest(path)
        if allowed is None or found in allowed:
            continue
        remedy = _REMEDY
        if path == directory.files_file:
            if found is None:
                continue  # the files are found and hashed anew
            remedy = f"{remedy}, or remove it: the run's files are found and hashed anew"
        what = "it is missing" if found is None else "it is not what the journal says was written"
        changed.append((path, f"{what}; {remedy}"))
    return changed


def check_bound(directory: RunDirectory) -> None:
    """See that there is a journal, and that it is this run's; before it begins, that `run.json` is
    what was written.

    Raises:
        StorageDamaged: It is not so.
        StorageFailed: They cannot be read.
    """
    journal, begun = directory.journal, first_record(directory.journal)
    empty = not journal.exists() or not journal.stat().st_size
    if empty and checkpoint_steps(directory.checkpoints):
        reason = "it is missing or empty, and nothing else tells that run.json is what was written"
        raise StorageDamaged(str(journal), "", f"{reason}; {_REMEDY}")
    try:
        document = read_json(directory.run_file)
        stored, whole = document["run_id"], is_whole(document)
    except (OSError, ValueError, KeyError, TypeError):
        return  # it is refused wherever it is read
    if isinstance(begun, RunBegins) and whole and stored != begun.run_id:
        reason = f"it is of run {begun.run_id!r}, and run.json of {stored!r}"
        raise StorageDamaged(str(journal), "", f"{reason}; bring the wrong one back from a copy")
    if begun is None and not whole:
        reason = f"it is not what was written; {_REMEDY}, or submit the run again"
        raise StorageDamaged(str(directory.run_file), "", reason)


def _changed_since_older(directory: RunDirectory) -> list[tuple[Path, str]]:
    begun, stored = first_record(directory.journal), directory.read_run()
    settled, manifest = newest_record(directory.journal, ManifestSettled), directory.read_manifest()
    told: list[tuple[Path, object, object]] = []
    if isinstance(begun, RunBegins) and stored is not None:
        mine = stored.run_id, stored.document
        told.append((directory.run_file, mine, (begun.run_id, begun.spec)))
    if settled is not None and manifest is not None:
        told.append((directory.manifest_file, manifest.digest(), settled.manifest_digest))
    reason = f"it is not what the journal says was written; {_REMEDY}"
    return [(path, reason) for path, mine, theirs in told if mine != theirs]
