"""Who hears what happens, and what the service itself tells beside a run's own facts.

The console, the event stream, the log and whoever else listens get the same typed facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coordinator.run.outputs.facts import Fact


class Listener(Protocol):
    """Hears facts."""

    def reported(self, fact: Fact, run_id: str = "") -> None:
        """Something worth telling, of this run if it is one's."""


def document(fact: Fact, run_id: str = "") -> dict[str, object]:
    """A fact's fields, with the run's id if it is one's."""
    fields = fact.fields()
    return {"run_id": run_id, **fields} if run_id else fields


# Workers.


@dataclass(frozen=True, slots=True)
class WorkerConnected(Fact):
    """A worker is a member."""

    event = "worker_connected"
    worker: str
    backend: str
    admitted_by: str
    workers: int


@dataclass(frozen=True, slots=True)
class WorkerDisconnected(Fact):
    """A member's connection is over."""

    event = "worker_disconnected"
    worker: str
    reason: str
    workers: int


# Secrets.


@dataclass(frozen=True, slots=True)
class SecretsTrouble(Fact):
    """A file of keys or of the join token is missing or damaged; what was read last counts."""

    event = "secrets_trouble"
    reason: str


@dataclass(frozen=True, slots=True)
class SecretsSound(Fact):
    """All files of keys and token can be used again."""

    event = "secrets_sound"


# Runs.


@dataclass(frozen=True, slots=True)
class RunAccepted(Fact):
    """A new run begins; `steps` is None if they are as many as there are samples for."""

    event = "run_accepted"
    task: str
    steps: int | None


@dataclass(frozen=True, slots=True)
class RunWaitsForDisk(Fact):
    """The next run cannot begin while its directory cannot be used; it is tried again."""

    event = "run_waits_for_disk"
    reason: str


@dataclass(frozen=True, slots=True)
class RunResumed(Fact):
    """A run goes on after so many steps; `notes` say what its files lacked."""

    event = "run_resumed"
    task: str
    steps: int | None
    step: int
    notes: list[str]


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Fact):
    """A checkpoint is durable."""

    event = "checkpoint"
    step: int


@dataclass(frozen=True, slots=True)
class RunEnded(Fact):
    """A run is over, and its files are written."""

    event = "run_ended"
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunFails(Fact):
    """A run is about to end as failed; for the journal alone."""

    reason: str


@dataclass(frozen=True, slots=True)
class LogUnreadable(Fact):
    """What a worker has missed cannot be read."""

    event = "log_unreadable"
    error: str


@dataclass(frozen=True, slots=True)
class InternalError(Fact):
    """An error of our own."""

    event = "internal_error"
    error: str


@dataclass(frozen=True, slots=True)
class LoopHeld(Fact):
    """Nobody was heard for so many milliseconds of work."""

    event = "event_loop_held"
    held_ms: int


@dataclass(frozen=True, slots=True)
class CheckpointCopied(Fact):
    """A copy of a checkpoint is whole in another directory."""

    event = "checkpoint_copied"
    step: int
    to: str


@dataclass(frozen=True, slots=True)
class CopiedAgain(Fact):
    """A place that took no copies has one now."""

    event = "copied_again"
    step: int
    to: str


@dataclass(frozen=True, slots=True)
class CopyFailed(Fact):
    """From this checkpoint on none could be copied to another directory; the run goes on."""

    event = "copy_failed"
    step: int
    to: str
    error: str


@dataclass(frozen=True, slots=True)
class Draining(Fact):
    """The step in progress is finished, then the service ends."""

    event = "draining"
