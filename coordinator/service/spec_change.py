"""Check a change of a run's spec, and write it to `run.json` and the journal.

The journal announces the digest of the new `run.json` before the file is written, so a crash may
leave the old or the new content. The journal's `SpecChanged` follows when the run continues.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from coordinator.disk.canonical_json import json_digest
from coordinator.disk.directory_lock import DirectoryLock
from coordinator.disk.durable_file import replace_file
from coordinator.storage.directory.journal import Journal, first_record, newest_record
from coordinator.storage.directory.journal_records import FileDigests, RunStarted, SpecChanged
from coordinator.storage.directory.run_directory import RunDirectory, StoredRun
from coordinator.storage.file_digests import file_digest, present_digests
from coordinator.storage.recovery import recover
from coordinator.storage.rollback import set_result_aside
from protocol.base.errors import UsageError
from protocol.base.option_names import option
from protocol.spec.run_spec import RunSpec, parse_run_spec_bytes
from protocol.spec.spec_changes import apply_changes, changes_between


@dataclass(frozen=True, slots=True)
class SpecChange:
    """A valid change of a run's spec, not written yet.

    Attributes:
        directory: Directory of the run.
        stored: The run with its new spec.
        content: The new `run.json`.
    """

    directory: RunDirectory
    stored: StoredRun
    content: bytes

    @classmethod
    def of(
        cls,
        directory: RunDirectory,
        stored_run: StoredRun,
        changes: Sequence[str] | RunSpec,
        from_step: int | None,
    ) -> SpecChange | None:
        """Check a change; return None if it changes nothing.

        Args:
            directory: Directory of the run.
            stored_run: The run before the change.
            changes: `key=value` pairs, or the whole new spec.
            from_step: Number of steps that a rollback will leave; None without a rollback.

        Raises:
            RunSpecError: The changed run spec is not valid.
            UsageError: A key may not change, or the run has already taken more steps.
            StorageDamaged: A file is damaged.
            StorageFailed: A read or write failed.
        """
        if not changes:
            return None
        spec, changes_text = apply_changes(stored_run.spec, changes)
        if not changes_text:
            return None
        recovery = recover(directory)
        if recovery is None:
            raise UsageError(
                "--set: expected a run that has begun, got one without a saved state; submit it "
                "again with the other settings"
            )
        step = recovery.step if from_step is None else from_step
        steps = spec.steps_with(recovery.manifest.epoch_samples)
        if steps < step or (steps == step and directory.read_result() is not None):
            raise UsageError(
                f"{option('--set steps')}: the run has taken {step} steps, and the changed run "
                f"spec has {steps}: set steps (or epochs) to more, or roll back first "
                "(coordinator --resume --from-step N)"
            )
        document = spec.model_dump(mode="json")
        changed_run = StoredRun(stored_run.run_id, spec, document)
        return cls(directory, changed_run, directory.run_file_with(spec))

    def write(self, lock: DirectoryLock) -> tuple[StoredRun, tuple[str, ...]]:
        """Write `run.json`, and set aside the result of a finished run.

        Returns:
            The run with its new spec, and a note about the result if it was set aside.

        Raises:
            StorageFailed: A write failed; the call can be repeated.
        """
        notes: tuple[str, ...] = ()
        if self.directory.result_file.exists():
            notes = (set_result_aside(self.directory, lock.term),)
        journal = Journal(self.directory.journal, guard=lock.check)
        try:
            digests = present_digests(self.directory)
            old_or_new = (file_digest(self.directory.run_file), blake3(self.content).hexdigest())
            digests[self.directory.run_file.name] = old_or_new
            journal.append(FileDigests(term=lock.term, digests=digests))
            journal.sync()
        finally:
            journal.close()
        replace_file(self.directory.run_file, self.content)
        return self.stored, notes


def missing_spec_change(
    directory: RunDirectory, stored_run: StoredRun, term: int, step: int
) -> tuple[SpecChanged, ...]:
    """Return the line to add to the journal, if the newest spec in the journal differs from that in
    `run.json`; else an empty tuple."""
    earlier_spec = spec_in_journal(directory.journal)
    if earlier_spec is None or earlier_spec == stored_run.document:
        return ()
    earlier = parse_run_spec_bytes(json.dumps(earlier_spec).encode())
    line = SpecChanged(
        term=term,
        step=step,
        changes=tuple(changes_between(earlier, stored_run.spec)),
        before=json_digest(earlier_spec),
        spec=stored_run.document,
        spec_digest=json_digest(stored_run.document),
    )
    return (line,)


def spec_in_journal(path: Path) -> dict[str, Any] | None:
    """Return the newest run spec in a journal, as a document; None if it has not begun.

    Raises:
        StorageFailed: The journal cannot be read.
    """
    newest = newest_record(path, SpecChanged)
    if newest is not None:
        return newest.spec
    first = first_record(path)
    return first.spec if isinstance(first, RunStarted) else None
