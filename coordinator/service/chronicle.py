"""What the journal says of a run's course: a record for each fact that is worth one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from coordinator.run.outputs.actions import Action, Report
from coordinator.run.outputs.facts import (
    DeviceFault,
    EvaluationMissed,
    Fact,
    HeldOutMeasured,
    LossScaleHalved,
    ManifestAgreed,
    NodesPlanned,
    NodesSpeculated,
    RedoneOtherwise,
    RunHalted,
    SlicesOwned,
    StepCommitted,
    StepRestarted,
    ViewBegins,
    WorkerLate,
    WorkerLost,
    WorkerPutAside,
    WorkerRefused,
    WorkerUnready,
)
from coordinator.run.outputs.restart import CommitRecord
from coordinator.run.run import Run
from coordinator.service.listener import CopyFailed, InternalError, LogUnreadable, RunFails
from coordinator.service.repeated_ends import WorkerComesAndGoes
from coordinator.storage.directory.journal_records import (
    Committed,
    Evaluated,
    Fault,
    Halted,
    ManifestSettled,
    MemberNoted,
    Owned,
    Planned,
    Record,
    ViewChanged,
)
from protocol.spec.manifest import Manifest

_RESPONSES: Final[dict[type[Fact], tuple[str, str]]] = {
    WorkerLost: ("worker_lost", "its unfinished nodes go to others"),
    WorkerUnready: ("worker_unready", "it takes no part"),
    WorkerRefused: ("refused", "dismissed"),
    WorkerComesAndGoes: ("worker_comes_and_goes", "others go on without it"),
    WorkerLate: ("straggler", "others go on without it"),
    DeviceFault: ("device_fault", "its work goes to the host's others"),
    WorkerPutAside: ("worker_put_aside", "it takes no part for some steps"),
    RedoneOtherwise: ("redone_otherwise", "it goes on: all replicas are equal"),
    LogUnreadable: ("log_unreadable", "the worker gets the whole state"),
    NodesSpeculated: ("speculated", "idle workers compute the same nodes; whoever is first counts"),
    CopyFailed: ("copy_failed", "the run goes on; the next checkpoint is copied again"),
    StepRestarted: ("restarted", "the step starts anew"),
    EvaluationMissed: ("not_evaluated", "the next figures are of a later state"),
    LossScaleHalved: ("loss_scale_halved", "the same step is done again with half the scale"),
    InternalError: ("internal_error", "the run ends"),
    RunFails: ("failed", "the run can be resumed"),
}
"""What a fault is called in the journal, and what is done about it."""


def records_of(actions: Sequence[Action], run: Run) -> list[Record]:
    """What these actions, which are about to be done, are worth noting for."""
    facts = [action.fact for action in actions if isinstance(action, Report)]
    return [record for fact in facts if (record := record_of(fact, run)) is not None]


def record_of(fact: Fact, run: Run) -> Record | None:
    """The journal's record of a fact; None if it keeps none."""
    match fact:
        case ManifestAgreed(manifest):
            return settled(manifest)
        case StepCommitted(record):
            return committed(record)
        case HeldOutMeasured(step, metrics, digest):
            return Evaluated(epoch=run.epoch, step=step, metrics=metrics, state_digest=digest)
        case EvaluationMissed(step, reason):
            return _fault(replace(fact, reason=f"step {step}: {reason}"), run)
        case WorkerComesAndGoes(_, phase, count, reason, cause):
            told = f"{count} times in a row while {phase}: {reason}; {cause}"
            return _fault(replace(fact, reason=told), run)
        case RunHalted():
            return Halted.model_validate(fact.fields())
        case ViewBegins():
            return _view(fact, run.epoch)
        case SlicesOwned():
            return Owned(epoch=run.epoch, **fact.fields())
        case NodesPlanned():
            return _planned(fact, run.epoch)
        case _:
            return _fault(fact, run) if type(fact) in _RESPONSES else None


def _fault(fact: Fact, run: Run) -> Fault:
    what, response = _RESPONSES[type(fact)]
    fields = fact.fields()
    worker = fields.pop("worker", None)
    reason = fields.get("reason") or fields.get("error")
    if reason is None:
        reason = ", ".join(f"{name} {_in_words(value)}" for name, value in fields.items())
    return Fault(
        epoch=run.epoch,
        step=run.step,
        what=what,
        worker=None if worker is None else str(worker),
        reason=str(reason)[:2000],
        response=response,
    )


def _in_words(value: object) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _view(fact: ViewBegins, epoch: int) -> ViewChanged:
    members = tuple(
        MemberNoted(
            name=member.name,
            backend=member.backend,
            device=member.device,
            signature=member.signature,
            admitted_by=member.admitted_by,
        )
        for member in fact.members
    )
    return ViewChanged(
        epoch=epoch, step=fact.step, view=fact.view, change=fact.change, worker=fact.worker,
        reason=fact.reason[:2000], members=members,
    )  # fmt: skip


def _planned(fact: NodesPlanned, epoch: int) -> Planned:
    nodes = {name: tuple((node.lo, node.hi) for node in mine) for name, mine in fact.nodes.items()}
    return Planned(
        epoch=epoch, step=fact.step, attempt=fact.attempt, view=fact.view,
        microbatches=fact.microbatches, nodes=nodes, cause=fact.cause,
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
        norm=record.norm,
        rate=None if commit.scalars is None else commit.scalars.learning_rate,
        loss_scale=(commit.scalars.loss_scale or None) if commit.scalars is not None else None,
        skipped=commit.scalars is None,
        averages_digest=commit.averages_digest,
        state_before=record.state_before,
        own_digest=record.own_digest,
        counted=record.counted,
        recovered=recovered,
    )
