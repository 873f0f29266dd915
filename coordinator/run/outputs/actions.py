"""The actions that a run's decisions return; the shell executes them in the given order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from coordinator.run.outputs.events import Event
from coordinator.run.outputs.restart import AdmissionRecord, CommitRecord
from coordinator.run.outputs.side_outputs import Bytes
from protocol.base.errors import ExitCode
from protocol.exact.reduction.average import Array
from protocol.exact.update import StepScalars
from protocol.spec.manifest import Block, Manifest
from protocol.wire.messages import (
    InnerCheckpointChunk,
    InnerStateRequest,
    Message,
    Outcome,
    StateChunk,
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to one worker."""

    worker: str
    message: Message
    body: NDArray[Any] | bytes | None = None


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send a message to all subscribers, and keep it for joiners until the replica has the step.

    Attributes:
        served_by_peers: Workers that receive the same content from other workers, not this message.
    """

    message: Message
    body: Array | None = None
    served_by_peers: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class AdoptManifest:
    """Create the replica of the settled manifest."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class FillReplica:
    """Copy a chunk of state 0 into the replica."""

    message: StateChunk
    values: Array


@dataclass(frozen=True, slots=True)
class DigestReplica:
    """Compute the digest of the replica, which has all of this upload of state 0;
    `inputs.ReplicaLoaded` follows."""

    upload: int


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Subscribe a worker that has the newest state: send it all broadcasts since `step`, then every
    later one."""

    worker: str
    step: int


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Send the worker no broadcasts until it is subscribed again."""

    worker: str


@dataclass(frozen=True, slots=True)
class Seed:
    """Send the worker the run's state and all later steps, then subscribe it;
    `inputs.WorkerCaughtUp` follows.

    No broadcast may reach the worker before it has the state.
    """

    worker: str


@dataclass(frozen=True, slots=True)
class Replay:
    """Send the worker the logged steps, beginning with `step`, then subscribe it;
    `inputs.WorkerCaughtUp` follows.

    The worker is seeded instead if the log lacks these steps, or if `state_digest` is not None and
    differs from the digest of the state before `step`.
    """

    worker: str
    step: int
    state_digest: str | None


@dataclass(frozen=True, slots=True)
class SendAverages:
    """Send the worker the averages of a step that other workers failed to send."""

    worker: str
    step: int


@dataclass(frozen=True, slots=True)
class Summarize:
    """Compute norms and digests of blocks' averages, by number, in another thread;
    `inputs.Summarized` follows."""

    step: int
    attempt: int
    averages: Mapping[int, tuple[Block, Array]]


@dataclass(frozen=True, slots=True)
class Persist:
    """Make the commit durable; `inputs.CommitDurable` or `inputs.WriteFailed` follows.

    The `side_outputs` of the step's microbatches become durable before the commit.
    """

    record: CommitRecord
    side_outputs: Sequence[Bytes] = ()


@dataclass(frozen=True, slots=True)
class WriteInnerCheckpoint:
    """Write a piece of an inner checkpoint to disk, for the worker that continues the replica."""

    message: InnerCheckpointChunk
    content: Bytes


@dataclass(frozen=True, slots=True)
class AnswerInnerStateRequest:
    """Send the worker the known state of the inner phase that it is about to compute."""

    worker: str
    message: InnerStateRequest


@dataclass(frozen=True, slots=True)
class SaveAdmissionRecord:
    """Save the conditions under which workers were admitted, for a restart."""

    record: AdmissionRecord


@dataclass(frozen=True, slots=True)
class MakeCheckpoint:
    """Save the state after `step` steps, all committed by earlier actions;
    `inputs.CheckpointDurable` or `inputs.WriteFailed` follows."""

    step: int


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """Apply the committed step to the replica, off the critical path; without scalars, skip it."""

    step: int
    averages: Sequence[Array]
    scalars: StepScalars | None


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Close a worker's connection; the worker may not rejoin this run."""

    worker: str
    reason: str
    exit_code: ExitCode


@dataclass(frozen=True, slots=True)
class Report:
    """Pass an event to the journal and to all event sinks."""

    event: Event


@dataclass(frozen=True, slots=True)
class Finish:
    """End the run.

    Attributes:
        is_resumable: Whether its newest checkpoint is worth resuming from.
    """

    outcome: Outcome
    reason: str
    exit_code: int
    is_resumable: bool = True


Action = (
    Send | Broadcast | AdoptManifest | FillReplica | DigestReplica | Subscribe | Unsubscribe | Seed
    | Replay | SendAverages | Summarize | Persist | WriteInnerCheckpoint | AnswerInnerStateRequest
    | SaveAdmissionRecord | MakeCheckpoint | ApplyStep | Dismiss | Report | Finish
)  # fmt: skip
