"""What the journal says of a run's course: records from the actions that its logic gives.

Pure: it sees each batch of actions as it is about to be done, and the run after that event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from coordinator.run.actions import Action, Adopt, Broadcast, Dismiss, Persist, Report, Send
from coordinator.run.commit_record import CommitRecord
from coordinator.run.course import Course
from coordinator.run.membership import MemberState
from coordinator.storage.journal_records import (
    Committed,
    Evaluated,
    Fault,
    Halted,
    ManifestSettled,
    MemberNoted,
    Planned,
    Record,
    ViewChanged,
)
from protocol.base.errors import ExitCode
from protocol.spec.manifest import Manifest
from protocol.wire.messages import Assign, Commit, StepPlan

_CHANGES: Final = (
    ("started", "started"),
    ("worker_lost", "lost"),
    ("worker_joined", "joined"),
)
_FAULTS: Final = {
    "worker_lost": "its unfinished nodes go to others",
    "worker_unready": "it takes no part",
    "straggler": "others go on without it",
    "redone_otherwise": "it goes on: all replicas are equal",
    "log_unreadable": "the worker gets the whole state",
    "speculated": "idle workers compute the same nodes; whoever is first counts",
    "restarted": "the step starts anew",
    "internal_error": "the run ends",
}


class Chronicle:
    """Turns one run's actions into records."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._view = 0
        self._committing: CommitRecord | None = None

    def records(self, actions: Sequence[Action]) -> list[Record]:
        """What these actions are worth noting for."""
        return [
            *self._of_single_actions(actions),
            *self._views(actions),
            *self._plans(actions),
        ]

    def failed(self, reason: str) -> Fault:
        """The run ends as failed."""
        return self._fault("failed", {"reason": reason}, "the run can be resumed")

    def _of_single_actions(self, actions: Sequence[Action]) -> Iterator[Record]:
        for action in actions:
            match action:
                case Adopt(manifest):
                    yield settled(manifest)
                case Persist(record):
                    self._committing = record
                case Broadcast(Commit()):
                    assert self._committing is not None
                    yield committed(self._committing)
                case Report(event, fields):
                    yield from self._of_report(event, fields)
                case Dismiss(worker, reason, exit_code) if exit_code != ExitCode.OK:
                    yield self._fault("refused", {"worker": worker, "reason": reason}, "dismissed")

    def _of_report(self, event: str, fields: Mapping[str, Any]) -> Iterator[Record]:
        if event == "halted":
            node = fields.get("microbatches")
            yield Halted(
                epoch=fields["epoch"],
                step=fields["step"],
                attempt=fields["attempt"],
                reason=fields["reason"],
                worker=fields.get("worker"),
                block=fields.get("block"),
                microbatches=tuple(node) if node is not None else None,
            )
        elif event == "evaluated":
            metrics = {name: value for name, value in fields.items() if name != "step"}
            yield Evaluated(epoch=self._course.epoch, step=fields["step"], metrics=metrics)
        elif event in _FAULTS:
            yield self._fault(event, fields, _FAULTS[event])

    def _fault(self, what: str, fields: Mapping[str, Any], response: str) -> Fault:
        reason = fields.get("reason") or fields.get("error")
        if reason is None and (details := {k: fields[k] for k in fields if k != "worker"}):
            reason = ", ".join(f"{name} {value}" for name, value in details.items())
        return Fault(
            epoch=self._course.epoch,
            step=self._course.step,
            what=what,
            worker=fields.get("worker"),
            reason=str(reason or "")[:2000],
            response=response,
        )

    def _views(self, actions: Sequence[Action]) -> Iterator[Record]:
        members = self._course.members
        if members.view == self._view:
            return
        self._view = members.view
        reports = {a.event: a.fields for a in actions if isinstance(a, Report)}
        change, worker, reason = "reseeded", None, ""
        for event, name in _CHANGES:
            if event in reports:
                change = name
                worker = reports[event].get("worker")
                reason = str(reports[event].get("reason", ""))[:2000]
                break
        computing = (MemberState.ACTIVE, MemberState.DRAINING)
        noted = tuple(
            MemberNoted(
                name=m.name,
                backend=m.backend,
                device=m.device,
                signature=m.signature,
                admitted_by=m.admitted_by,
            )
            for m in members
            if m.state in computing
        )
        yield ViewChanged.model_validate(
            {
                "epoch": self._course.epoch, "step": self._course.step, "view": members.view,
                "change": change, "worker": worker, "reason": reason, "members": noted,
            }
        )  # fmt: skip

    def _plans(self, actions: Sequence[Action]) -> Iterator[Record]:
        plans: dict[tuple[int, int], dict[str, tuple[tuple[int, int], ...]]] = {}
        for action in actions:
            match action:
                case Send(worker, StepPlan() | Assign() as message) if message.nodes:
                    given = plans.setdefault((message.step, message.attempt), {})
                    given[worker] = (*given.get(worker, ()), *message.nodes)
        if not plans:
            return
        events = {action.event for action in actions if isinstance(action, Report)}
        cause = "step"
        if "speculated" in events:
            cause = "speculative"
        elif "reassigned" in events:
            cause = "reassigned"
        progress = self._course.progress
        assert progress is not None
        for (step, attempt), nodes in plans.items():
            yield Planned.model_validate(
                {
                    "epoch": self._course.epoch, "step": step, "attempt": attempt,
                    "view": self._course.members.view, "cause": cause, "nodes": nodes,
                    "microbatches": progress.microbatches(step),
                }
            )  # fmt: skip


def settled(manifest: Manifest) -> ManifestSettled:
    """The journal's record of a manifest."""
    return ManifestSettled(
        manifest_digest=manifest.digest(),
        digests=manifest.digests,
        train_samples=manifest.train_samples,
        evaluation_parts=manifest.evaluation_parts,
        notes=manifest.notes,
    )


def committed(record: CommitRecord, *, recovered: bool = False) -> Committed:
    """The journal's record of a commit."""
    commit = record.commit
    return Committed(
        epoch=commit.epoch,
        step=commit.step,
        attempt=commit.attempt,
        optimizer_step=record.optimizer_step,
        loss=commit.loss,
        skipped=commit.scalars is None,
        averages_digest=commit.averages_digest,
        state_before=record.state_before,
        counted=record.counted,
        recovered=recovered,
    )
