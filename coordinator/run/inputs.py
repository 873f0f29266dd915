"""The inputs of a run: one frozen dataclass for each type of input. Pure.

`Run.step` takes an input and returns actions. Time and the results of actions are inputs
too, so a run reads no clock and waits for no disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from coordinator.run.exchange.round import Summary
from protocol.base.errors import ExitCode
from protocol.wire.messages import Message

# From workers.


@dataclass(frozen=True, slots=True)
class WorkerAvailable:
    """A worker is connected and free: ask it to build the task.

    Attributes:
        worker: The worker's name.
        admitted_by: The credentials that admitted the worker.
        host: The address from which the worker connects; empty on the coordinator's machine.
        devices: Number of devices.
        evaluates: Whether the worker only evaluates, and computes no gradients.
    """

    worker: str
    admitted_by: str = ""
    host: str = ""
    devices: int = 1
    evaluates: bool = False


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """A worker sent a message.

    Attributes:
        worker: The worker's name.
        message: The message.
        body: float32 values of a gradient or of state, the uint8 bytes of a stored chunk, or a
            JSON document.
    """

    worker: str
    message: Message
    body: NDArray[Any] | bytes | None = None


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker's session is over; its unfinished subtrees go to others within the step.

    Attributes:
        worker: The worker's name.
        reason: Why the session is over.
        exit_code: The exit code that the worker reported: OK; MISMATCH if it cannot take part in
            this run; any other if its device failed or cannot be used.
    """

    worker: str
    reason: str
    exit_code: int = ExitCode.OK


# From the shell: time, and the results of actions.


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of the shell's monotonic clock, in milliseconds."""

    now_ms: float


@dataclass(frozen=True, slots=True)
class Resume:
    """The coordinator has restarted: continue with the step that follows the newest commit."""


@dataclass(frozen=True, slots=True)
class ReplicaLoaded:
    """The replica holds all of an upload of state 0.

    Attributes:
        upload: Number of the upload.
        initial_digest: Digest of the state, as the uploader announced it in `Ready`.
        digest: Digest of the state, as replicas compare it.
    """

    upload: int
    initial_digest: str
    digest: str


@dataclass(frozen=True, slots=True)
class ReplicaApplied:
    """The coordinator's replica has applied `step` steps; its digest arbitrates.

    Attributes:
        step: Number of applied steps.
        digest: Digest of the state after them.
        not_finite: Location of a non-finite value in that state; empty if all values are finite.
    """

    step: int
    digest: str
    not_finite: str = ""


@dataclass(frozen=True, slots=True)
class WorkerCaughtUp:
    """A worker was sent the state, or the steps it missed, and now receives broadcasts."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerFellBehind:
    """A worker whose answer is not awaited reads too slowly: from `step` on, its averages come from
    the log."""

    worker: str
    step: int


@dataclass(frozen=True, slots=True)
class Summarized:
    """Norms and digests of some blocks' averages, by block number."""

    step: int
    attempt: int
    summaries: Mapping[int, Summary]


@dataclass(frozen=True, slots=True)
class CommitDurable:
    """The commit of a step is on disk: it may be sent to workers.

    Attributes:
        step: The step.
        own_digest: The digest of the per-replica state, as in the commit.
    """

    step: int
    own_digest: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointDurable:
    """The checkpoint of the state after `step` steps is on disk."""

    step: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The disk refused a write; nothing is damaged.

    Attributes:
        reason: The error.
        is_commit_lost: Whether the write was a step's commit: the step is still in progress. If
            not, a commit that is being written may still become durable.
    """

    reason: str
    is_commit_lost: bool = False


@dataclass(frozen=True, slots=True)
class ResultNotWritten:
    """The run is complete, but the disk refused its result."""

    reason: str


# From an operator, or from the service on an operator's behalf.


@dataclass(frozen=True, slots=True)
class HaltRun:
    """Stop now and apply nothing.

    A commit that is being written still becomes durable; the next step then waits.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class ContinueRun:
    """End a halt with another attempt at the halted step, or skip that step."""

    skip_step: bool = False


@dataclass(frozen=True, slots=True)
class SaveState:
    """Write a checkpoint of the current state."""


@dataclass(frozen=True, slots=True)
class DrainRun:
    """Stop after the step in progress."""


@dataclass(frozen=True, slots=True)
class FailRun:
    """End as failed: the run cannot continue."""

    reason: str


Input = (
    WorkerAvailable | WorkerMessage | WorkerGone | Tick | Resume | ReplicaLoaded
    | ReplicaApplied | WorkerCaughtUp | WorkerFellBehind | Summarized | CommitDurable
    | CheckpointDurable | WriteFailed | ResultNotWritten | HaltRun | ContinueRun | SaveState
    | DrainRun | FailRun
)  # fmt: skip
