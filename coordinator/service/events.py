"""The interface of event sinks, and the events of the service.

Console, event stream, log and all other sinks receive the same typed events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coordinator.run.outputs.events import Event


class EventSink(Protocol):
    """Receives events."""

    def emit(self, event: Event, run_id: str = "") -> None:
        """Receive an event; `run_id` is the ID of its run, or empty."""


def event_fields(event: Event, run_id: str = "") -> dict[str, object]:
    """Return an event's fields, with the run's ID if the event belongs to a run."""
    fields = event.fields()
    return {"run_id": run_id, **fields} if run_id else fields


# Workers.


@dataclass(frozen=True, slots=True)
class WorkerConnected(Event):
    """A worker became a member."""

    name = "worker_connected"
    worker: str
    backend: str
    admitted_by: str
    workers: int


@dataclass(frozen=True, slots=True)
class WorkerDisconnected(Event):
    """A member's connection has ended."""

    name = "worker_disconnected"
    worker: str
    reason: str
    workers: int


# Secrets.


@dataclass(frozen=True, slots=True)
class SecretsDamaged(Event):
    """A file of keys or of the join token is missing or damaged; its last valid content counts."""

    name = "secrets_trouble"
    reason: str


@dataclass(frozen=True, slots=True)
class SecretsRestored(Event):
    """All files of keys and token are usable again."""

    name = "secrets_sound"


# Runs.


@dataclass(frozen=True, slots=True)
class RunAccepted(Event):
    """A new run begins; `steps` is None if it follows from the number of samples."""

    name = "run_accepted"
    task: str
    steps: int | None


@dataclass(frozen=True, slots=True)
class RunWaitsForDisk(Event):
    """The next run cannot begin because its directory cannot be used; it is retried."""

    name = "run_waits_for_disk"
    reason: str


@dataclass(frozen=True, slots=True)
class RunResumed(Event):
    """A run continues after `step` steps; `notes` describe data that was cut off or set aside."""

    name = "run_resumed"
    task: str
    steps: int | None
    step: int
    notes: list[str]


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """A run is over, and its files are written; or a queued run could not begin."""

    name = "run_ended"
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunFailing(Event):
    """A run is about to end as failed; this event goes only to the journal."""

    reason: str


@dataclass(frozen=True, slots=True)
class LogUnreadable(Event):
    """The steps that a worker missed cannot be read."""

    name = "log_unreadable"
    error: str


@dataclass(frozen=True, slots=True)
class WorkerOutpaced(Event):
    """A worker reads the state more slowly than the run takes steps: its transfer restarts.

    Attributes:
        worker: The worker.
        reached: Number of steps of the worker's state.
        step: Number of steps committed by the run.
    """

    name = "worker_outpaced"
    worker: str
    reached: int
    step: int


@dataclass(frozen=True, slots=True)
class InternalError(Event):
    """An internal error of the coordinator, which ends the run as failed."""

    name = "internal_error"
    error: str


@dataclass(frozen=True, slots=True)
class EventLoopBlocked(Event):
    """The event loop was blocked for `held_ms` milliseconds."""

    name = "event_loop_held"
    held_ms: int


@dataclass(frozen=True, slots=True)
class CheckpointCopied(Event):
    """A checkpoint was copied to another directory."""

    name = "checkpoint_copied"
    step: int
    to: str


@dataclass(frozen=True, slots=True)
class CopyRecovered(Event):
    """Copies to a directory work again."""

    name = "copied_again"
    step: int
    to: str


@dataclass(frozen=True, slots=True)
class CopyFailed(Event):
    """From this checkpoint on, copies to a directory fail; the run continues."""

    name = "copy_failed"
    step: int
    to: str
    error: str


@dataclass(frozen=True, slots=True)
class Draining(Event):
    """The service ends once the step in progress, if any, is finished."""

    name = "draining"
