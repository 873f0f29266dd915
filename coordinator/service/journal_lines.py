"""Convert events to records of the journal: a `Record` is written unchanged, some other events as a
`Fault`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from coordinator.run.outputs.actions import Action, Report
from coordinator.run.outputs.events import (
    DeviceFault,
    EvaluationMissed,
    Event,
    LossScaleHalved,
    Record,
    StepRedoneDifferently,
    StepRestarted,
    SubtreesSpeculated,
    WorkerLate,
    WorkerLost,
    WorkerRefused,
    WorkerSetAside,
    WorkerUnready,
)
from coordinator.run.run import Run
from coordinator.service.events import (
    CopyFailed,
    InternalError,
    LogUnreadable,
    RunFailing,
    WorkerOutpaced,
)
from coordinator.service.flapping import WorkerFlapping
from coordinator.storage.directory.journal_records import Fault

_RESPONSES: Final[dict[type[Event], tuple[str, str]]] = {
    WorkerLost: ("worker_lost", "its unfinished subtrees go to others"),
    WorkerUnready: ("worker_unready", "it takes no part"),
    WorkerRefused: ("refused", "dismissed"),
    WorkerFlapping: ("worker_flapping", "the others continue without it"),
    WorkerLate: ("straggler", "the others continue without it"),
    DeviceFault: ("device_fault", "its work goes to the machine's other devices"),
    WorkerSetAside: ("worker_put_aside", "it takes no part for some steps"),
    StepRedoneDifferently: ("redone_otherwise", "the run continues: all replicas are equal"),
    WorkerOutpaced: ("worker_outpaced", "it starts again from a newer checkpoint"),
    LogUnreadable: ("log_unreadable", "the worker gets the whole state"),
    SubtreesSpeculated: (
        "speculated",
        "idle workers compute the same subtrees; the first result counts",
    ),
    CopyFailed: ("copy_failed", "the run continues; the next checkpoint is copied"),
    StepRestarted: ("restarted", "the step restarts"),
    EvaluationMissed: ("not_evaluated", "the next metrics are of a later state"),
    LossScaleHalved: ("loss_scale_halved", "the step is done again with half the scale"),
    InternalError: ("internal_error", "the run ends"),
    RunFailing: ("failed", "the run can be resumed"),
}
"""The name of a fault in the journal, and the response to it."""


def records_of(actions: Sequence[Action], run: Run) -> list[Record]:
    """Return the journal's records of all events in these actions."""
    events = [action.event for action in actions if isinstance(action, Report)]
    return [record for event in events if (record := record_of(event, run)) is not None]


def record_of(event: Event, run: Run) -> Record | None:
    """Return the journal's record of an event; None if it has none."""
    match event:
        case Record():
            return event
        case EvaluationMissed(step, reason):
            return _fault(event, run, f"step {step}: {reason}")
        case WorkerLate(_, step, due_item):
            return _fault(event, run, f"step {step}: {due_item} overdue")
        case WorkerFlapping(_, phase, count, reason, cause):
            return _fault(event, run, f"{count} times in a row while {phase}: {reason}; {cause}")
        case _:
            return _fault(event, run) if type(event) in _RESPONSES else None


def _fault(event: Event, run: Run, reason: object = None) -> Fault:
    fault_name, response = _RESPONSES[type(event)]
    fields = event.fields()
    worker = fields.pop("worker", None)
    reason = reason or fields.get("reason") or fields.get("error")
    if reason is None:
        reason = ", ".join(f"{name} {_text_of(value)}" for name, value in fields.items())
    return Fault(
        term=run.term,
        step=run.steps_committed,
        what=fault_name,
        worker=None if worker is None else str(worker),
        reason=str(reason)[:2000],
        response=response,
    )


def _text_of(value: object) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
