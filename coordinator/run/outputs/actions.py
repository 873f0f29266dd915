"""What the pure run logic asks its shell to do, in the order given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from coordinator.run.outputs.facts import Fact
from coordinator.run.outputs.kept import Bytes
from coordinator.run.outputs.restart import CommitRecord, Terms
from protocol.base.errors import ExitCode
from protocol.exact.update import Array, StepScalars
from protocol.spec.manifest import Block, Manifest
from protocol.wire.messages import Boundary, Message, Outcome, StateChunk, StretchRequest


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to one worker."""

    worker: str
    message: Message
    body: NDArray[Any] | bytes | None = None


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send a message to all followers, and keep it for joiners until the replica has the step.

    Attributes:
        had_by: Those that have it from others.
    """

    message: Message
    body: Array | None = None
    had_by: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Adopt:
    """The run's manifest is settled: make the replica."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class FillReplica:
    """Copy a chunk of state 0 into the replica."""

    message: StateChunk
    values: Array


@dataclass(frozen=True, slots=True)
class DigestReplica:
    """All chunks of this upload of state 0 are in the replica; `Run.replica_loaded` follows."""

    upload: int


@dataclass(frozen=True, slots=True)
class Follow:
    """The worker has the run's state after so many steps, the newest: send it what was broadcast
    since; it hears broadcasts from now on."""

    worker: str
    step: int


@dataclass(frozen=True, slots=True)
class Withhold:
    """The worker hears no broadcasts until it follows again."""

    worker: str


@dataclass(frozen=True, slots=True)
class Seed:
    """Send the worker the run's state and all that came since; then it follows, and
    `Run.replayed` says so.

    Until it has the state no broadcast may reach it.
    """

    worker: str


@dataclass(frozen=True, slots=True)
class Replay:
    """Send the worker what it has missed since `step`, from the log; then it follows, and
    `Run.replayed` says so.

    Where the log does not have it, or its state then was not this one (if it is not known to be
    right), it is seeded instead.
    """

    worker: str
    step: int
    state_digest: str | None


@dataclass(frozen=True, slots=True)
class SendAverages:
    """Send the worker again what a step averaged, which others were to send it."""

    worker: str
    step: int


@dataclass(frozen=True, slots=True)
class Summarise:
    """Take norms and digests of blocks' averages, by number, in another thread; `Run.summarised`
    says what they are."""

    step: int
    attempt: int
    averages: Mapping[int, tuple[Block, Array]]


@dataclass(frozen=True, slots=True)
class Persist:
    """Make the commit durable; `Run.durable` follows, or `Run.storage_failed`.

    `kept` is what the step's microbatches gave to be kept: durable before the commit.
    """

    record: CommitRecord
    kept: Sequence[Bytes] = ()


@dataclass(frozen=True, slots=True)
class KeepBoundary:
    """Write a piece of a boundary to disk, to be sent to whoever goes on with the stretch."""

    message: Boundary
    content: Bytes


@dataclass(frozen=True, slots=True)
class AnswerStretch:
    """Send the worker what is known of the stretch that it is about to compute."""

    worker: str
    message: StretchRequest


@dataclass(frozen=True, slots=True)
class Remember:
    """Keep for a restart what workers were admitted by."""

    terms: Terms


@dataclass(frozen=True, slots=True)
class MakeCheckpoint:
    """Save the state after `step` steps, all of which were committed by actions before this one;
    `Run.checkpointed` follows, or `Run.storage_failed`."""

    step: int


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """Apply the committed step to the replica, off the critical path; no scalars: skip it."""

    step: int
    averages: Sequence[Array]
    scalars: StepScalars | None


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Say goodbye to a worker for good."""

    worker: str
    reason: str
    exit_code: ExitCode


@dataclass(frozen=True, slots=True)
class Report:
    """Something worth telling, to people and to the journal."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over.

    Attributes:
        is_resumable: Whether its newest checkpoint is worth going on from.
    """

    outcome: Outcome
    reason: str
    exit_code: int
    is_resumable: bool = True


Action = (
    Send | Broadcast | Adopt | FillReplica | DigestReplica | Follow | Withhold | Seed | Replay
    | SendAverages | Summarise | Persist | KeepBoundary | AnswerStretch | Remember | MakeCheckpoint
    | ApplyStep | Dismiss | Report | Finish
)  # fmt: skip
