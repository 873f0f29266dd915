"""Outputs of the pure session, for its shell to carry out in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from backends.base.interface import Array
from protocol.exact.reduction.tree import Subtree
from protocol.exact.replica import PartKind
from protocol.exact.update import StepScalars
from protocol.spec.files.blob_list import BlobFile, BlobList
from protocol.spec.manifest import Block
from protocol.spec.run_spec import RunSpec
from protocol.spec.sections.exchange import Codecs
from protocol.wire.connection import Body
from protocol.wire.messages import Message
from worker.logic.events import StepId


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send a message."""

    message: Message
    body: NDArray[Any] | bytes | None = None


@dataclass(frozen=True, slots=True)
class OpenDevice:
    """Open the device now: an unusable device is reported before any run begins."""


@dataclass(frozen=True, slots=True)
class Build:
    """Build a run's task.

    Attributes:
        keep_state: Whether to keep the replica's state if it belongs to this run.
        inputs: Digest of the list of files that the task reads; None for files at the paths that
            the run spec names.
    """

    run_id: str
    spec: RunSpec
    keep_state: bool
    inputs: str | None = None


@dataclass(frozen=True, slots=True)
class Expect:
    """Decode gradients of these blocks from now on, with these codecs."""

    blocks: tuple[Block, ...]
    exchange: Codecs


@dataclass(frozen=True, slots=True)
class ForwardToExchange:
    """Pass a message of the coordinator to the gradient exchange."""

    message: Message
    body: Body | None = None


@dataclass(frozen=True, slots=True)
class AbandonAttempt:
    """Stop exchanging gradients of the current attempt."""


@dataclass(frozen=True, slots=True)
class Contribute:
    """Send a block's sum over a subtree to the owners of its chunks; `values` must not change."""

    subtree: Subtree
    block: int
    weight: float
    values: Array


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute a subtree."""

    step_id: StepId
    microbatches: int
    subtree: Subtree


@dataclass(frozen=True, slots=True)
class LoadInnerState:
    """Load the coordinator's state of an inner phase that is about to be computed.

    Attributes:
        replica: Number of the logical replica.
        inner: Inner steps that the checkpoint contains; 0 without a checkpoint.
        content: The carried state if `with_carried`, then the checkpoint; see `InnerPhases.load`.
    """

    step_id: StepId
    replica: int
    inner: int
    content: Body
    with_carried: bool


@dataclass(frozen=True, slots=True)
class LoadEmbeddings:
    """Load the embeddings of all samples of the step, which the loss reads.

    `rows` are flat uint8, in the order of microbatches (`protocol.exact.embedding_rows`).
    """

    step_id: StepId
    rows: Body


@dataclass(frozen=True, slots=True)
class CancelWork:
    """Abandon every subtree and evaluation."""


@dataclass(frozen=True, slots=True)
class CancelSubtree:
    """Abandon this subtree: another worker has computed it."""

    step_id: StepId
    subtree: Subtree


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply a step, or skip it if `scalars` is None; `attempt` is the committed attempt.

    The engine empties `averages` once it has applied them.
    """

    averages: list[Array]
    scalars: StepScalars | None
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class LoadChunk:
    """Copy a chunk of another replica's state into this worker's."""

    kind: PartKind
    block: int
    chunk: int
    values: Array


@dataclass(frozen=True, slots=True)
class Restore:
    """Finish loading a state: all its chunks have arrived."""

    step: int
    optimizer_step: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate one part of the evaluation data."""

    step: int
    part: int


@dataclass(frozen=True, slots=True)
class CopyState:
    """Copy the replica's state, for another worker or the coordinator."""


@dataclass(frozen=True, slots=True)
class PrintLine:
    """Print a line for the operator."""

    text: str


@dataclass(frozen=True, slots=True)
class Leave:
    """End the connection.

    Attributes:
        retry: Whether the worker connects again.
        exit_code: The process's exit code if it does not.
        is_failure: Whether this worker failed; the reason is then an error.
    """

    reason: str
    retry: bool
    exit_code: int
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class Locate:
    """Find the listed files on this machine."""

    list_digest: str
    spec: RunSpec
    listing: BlobList
    deferred_digests: frozenset[str] = frozenset()
    """Digests of files that are fetched only when a step needs them."""


@dataclass(frozen=True, slots=True)
class OpenPart:
    """Open a large file's partial download for writing."""

    file: BlobFile


@dataclass(frozen=True, slots=True)
class StoreChunk:
    """Write a chunk of a file to the cache."""

    file: BlobFile
    offset: int
    values: Body


@dataclass(frozen=True, slots=True)
class Assemble:
    """Link the files into the task's input directory; all but the deferred ones are present."""

    list_digest: str
    spec: RunSpec
    listing: BlobList
    deferred_digests: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DropFiles:
    """Stop fetching; results of earlier file actions are dropped."""


@dataclass(frozen=True, slots=True)
class ReadInitial:
    """Have one device of a group report the initial parameters."""


@dataclass(frozen=True, slots=True)
class AttachReplica:
    """Have a device read the group's replica from now on.

    Attributes:
        arrays: The replica's arrays by kind and block, in shared memory.
        step: Steps that the replica has taken.
        was_reset: Whether the replica was reset, so that the device drops state of an earlier run.
    """

    arrays: dict[str, list[Array]]
    step: int
    optimizer_step: int
    was_reset: bool


@dataclass(frozen=True, slots=True)
class TakeWeights:
    """Have a device load the parameters of the group's replica, which is at this step.

    Attributes:
        committed_attempt: -1 if the step was skipped; None if the state was loaded from another
            replica.
    """

    step: int
    optimizer_step: int
    committed_attempt: int | None


@dataclass(frozen=True, slots=True)
class ReleaseReplica:
    """Have a device stop reading the group's replica, which is about to change."""


ReplicaAction = Apply | LoadChunk | Restore
"""Actions that change the replica."""
DeviceAction = (
    OpenDevice | Build | Compute | LoadInnerState | LoadEmbeddings | CancelWork | CancelSubtree
    | Apply | LoadChunk | Restore | Evaluate | CopyState
)  # fmt: skip
"""Actions for the device, or for the group of devices."""
GroupOrder = (
    OpenDevice | Build | Compute | LoadInnerState | LoadEmbeddings | CancelWork | CancelSubtree
    | Evaluate | ReadInitial | AttachReplica | TakeWeights | ReleaseReplica
)  # fmt: skip
"""Orders to one device of a group."""
FileAction = Locate | OpenPart | StoreChunk | Assemble | DropFiles
ExchangeAction = ForwardToExchange | AbandonAttempt | Contribute
Action = Transmit | Expect | PrintLine | Leave | DeviceAction | ExchangeAction | FileAction
