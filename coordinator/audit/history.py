"""The history of a run from its journal: the valid commits, and the plans for them.

A restart may roll back commits (see `Resumed.step`); their steps are repeated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from coordinator.disk.canonical_json import json_digest
from coordinator.run.outputs.events import (
    Checkpointed,
    Committed,
    Evaluated,
    ManifestSettled,
    Planned,
    Record,
)
from coordinator.storage.directory.journal import Entry
from coordinator.storage.directory.journal_records import (
    Ended,
    FileDigests,
    Resumed,
    RunStarted,
    SpecChanged,
)

T = TypeVar("T", bound=Record)


class Attempt(NamedTuple):
    """One attempt at a step, by one coordinator."""

    term: int
    step: int
    attempt: int


@dataclass(slots=True)
class History:
    """The valid records of a journal: those that no restart has rolled back.

    Attributes:
        start: How the run began.
        specs: The run specs, as documents, each with the first step that it applies to.
        changes: The changes of the run spec.
        manifest: The run's manifest.
        commits: The valid commits, in order, each with its line.
        plans: The plans, by attempt.
        checkpoints: The newest record of each checkpoint, by step.
        evaluations: The newest evaluation of each step.
        files: The newest digests of the run's small files.
        resume_count: How many times a coordinator has resumed the run.
        rolled_back_commits: How many commits restarts have rolled back.
        end: How the run ended, with its line; None if it has not, or was resumed after that.
        faults: Contradictions between lines of the journal.
    """

    start: RunStarted | None = None
    specs: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    changes: list[SpecChanged] = field(default_factory=list)
    manifest: ManifestSettled | None = None
    commits: list[tuple[int, Committed]] = field(default_factory=list)
    plans: dict[Attempt, list[Planned]] = field(default_factory=dict)
    checkpoints: dict[int, Checkpointed] = field(default_factory=dict)
    evaluations: dict[int, Evaluated] = field(default_factory=dict)
    files: FileDigests | None = None
    resume_count: int = 0
    rolled_back_commits: int = 0
    end: tuple[int, Ended] | None = None
    faults: list[str] = field(default_factory=list)

    @property
    def spec(self) -> dict[str, Any] | None:
        """The newest run spec, as a document."""
        return self.specs[-1][1] if self.specs else None

    def commit_of(self, step: int) -> Committed | None:
        """Return a step's valid commit, or None."""
        return self.commits[step][1] if step < len(self.commits) else None


def read_history(entries: Iterable[Entry]) -> History:
    """Read a journal's lines in order."""
    history = History()
    for entry in entries:
        if not isinstance(entry.record, Ended):
            history.end = None
        match entry.record:
            case RunStarted() as record:
                history.start = _require_single(history, history.start, record, entry.number)
                history.specs = history.specs or [(0, record.spec)]
            case ManifestSettled() as record:
                history.manifest = _require_single(history, history.manifest, record, entry.number)
            case Planned() as record:
                attempt = Attempt(record.term, record.step, record.attempt)
                history.plans.setdefault(attempt, []).append(record)
            case Resumed() as record:
                _resume(history, record, entry.number)
            case SpecChanged() as record:
                _change_spec(history, record, entry.number)
            case Committed() as record:
                _commit(history, record, entry.number)
            case Checkpointed() as record:
                history.checkpoints[record.step] = record
            case Evaluated() as record:
                history.evaluations[record.step] = record
            case FileDigests() as record:
                history.files = record
            case Ended() as record:
                history.end = entry.number, record
    return history


def _require_single(history: History, earlier: T | None, record: T, number: int) -> T:
    if earlier is not None and earlier != record:
        name = type(record).__name__
        history.faults.append(f"line {number}: a second {name}, which differs from the first")
    return earlier or record


def _resume(history: History, record: Resumed, number: int) -> None:
    history.resume_count += 1
    if record.step > len(history.commits):
        history.faults.append(
            f"line {number}: resumed after {record.step} steps, but the preceding lines "
            f"contain {len(history.commits)} commits"
        )
    history.rolled_back_commits += len(history.commits[record.step :])
    del history.commits[record.step :]
    for records in (history.checkpoints, history.evaluations):
        for step in [step for step in records if step > record.step]:
            del records[step]

    if history.specs and history.specs[-1][0] > record.step:
        # The newest spec applies to the repeated steps.
        earlier_entries = [entry for entry in history.specs if entry[0] < record.step]
        history.specs = [*earlier_entries, (record.step, history.specs[-1][1])]


def _change_spec(history: History, record: SpecChanged, number: int) -> None:
    if history.spec is None or json_digest(history.spec) != record.before:
        history.faults.append(
            f"line {number}: the run spec before this change does not match the journal"
        )
    if json_digest(record.spec) != record.spec_digest:
        history.faults.append(f"line {number}: the changed run spec does not match its digest")
    if record.step != len(history.commits):
        history.faults.append(
            f"line {number}: the run spec changed after {record.step} steps, but the preceding "
            f"lines contain {len(history.commits)} commits"
        )
    earlier_entries = [entry for entry in history.specs if entry[0] < record.step]
    history.specs = [*earlier_entries, (record.step, record.spec)]
    history.changes.append(record)


def _commit(history: History, record: Committed, number: int) -> None:
    expected = len(history.commits)
    if record.step != expected:
        history.faults.append(
            f"line {number}: expected the commit of step {expected}, got that of {record.step}"
        )
        return
    if history.commits and record.term < history.commits[-1][1].term:
        history.faults.append(f"line {number}: a commit of an older term than the previous commit")
    history.commits.append((number, record))
