"""What the pure session asks its shell to do, in the order given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from backends.base.interface import Array
from protocol.exact.replica import PartKind
from protocol.exact.tree import Node
from protocol.exact.update import StepScalars
from protocol.spec.blob_list import BlobFile, BlobList
from protocol.spec.manifest import Block
from protocol.spec.replicas_spec import Codecs
from protocol.spec.run_spec import RunSpec
from protocol.wire.connection import Body
from protocol.wire.messages import AveragedGradient, Message
from worker.logic.events import StepAttempt


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send a message."""

    message: Message
    body: NDArray[Any] | bytes | None = None


@dataclass(frozen=True, slots=True)
class OpenDevice:
    """Open the device if it is not open: one that cannot be used is not to wait for a run."""


@dataclass(frozen=True, slots=True)
class Build:
    """Build a run's task; `keep` the state that the replica has of this very run.

    `inputs` is the digest of the list of files that the task reads, if there is one.
    """

    run_id: str
    spec: RunSpec
    keep: bool
    inputs: str | None = None


@dataclass(frozen=True, slots=True)
class Expect:
    """From now on gradients have the shape of these blocks, and travel like this."""

    blocks: tuple[Block, ...]
    exchange: Codecs


@dataclass(frozen=True, slots=True)
class TellPeers:
    """What the coordinator says to those that average slices among themselves."""

    message: Message
    body: Body | None


@dataclass(frozen=True, slots=True)
class BeginSlices:
    """An attempt at a step whose slices have owners: sums go to those."""

    place: dict[str, int]
    microbatches: int


@dataclass(frozen=True, slots=True)
class DropSlices:
    """Nothing of such an attempt is wanted any more."""


@dataclass(frozen=True, slots=True)
class Contribute:
    """A block's sum over a node: its slices go to their owners; `values` stay as they are."""

    node: Node
    block: int
    weight: float
    values: Array


@dataclass(frozen=True, slots=True)
class GiveAverages:
    """A chunk of averages came from the coordinator, in such an attempt."""

    message: AveragedGradient
    values: Array


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute a node."""

    place: StepAttempt
    microbatches: int
    node: Node


@dataclass(frozen=True, slots=True)
class GiveStretch:
    """What the coordinator knows of a stretch that is about to be computed."""

    place: StepAttempt
    replica: int
    inner: int
    content: Body
    own: bool


@dataclass(frozen=True, slots=True)
class CancelWork:
    """Abandon every node and evaluation."""


@dataclass(frozen=True, slots=True)
class CancelNode:
    """Abandon this node: another worker has computed it."""

    place: StepAttempt
    node: Node


@dataclass(frozen=True, slots=True)
class Apply:
    """Take a step, or skip it without scalars; `attempt` is the one that was committed."""

    averages: list[Array]
    scalars: StepScalars | None
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class LoadChunk:
    """Write a chunk of another replica's state into ours."""

    kind: PartKind
    block: int
    chunk: int
    values: Array


@dataclass(frozen=True, slots=True)
class Restore:
    """The state is complete."""

    step: int
    optimizer_step: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate one held-out part."""

    step: int
    part: int


@dataclass(frozen=True, slots=True)
class CopyState:
    """Read the replica's state, to be sent."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Something a person at the console wants to know."""

    text: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The connection is over.

    Attributes:
        failed: Whether it is this worker that failed: then the reason is told as an error.
    """

    reason: str
    retry: bool
    exit_code: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Locate:
    """Find the listed files on this machine."""

    list_digest: str
    spec: RunSpec
    listing: BlobList
    later: frozenset[str] = frozenset()
    """Digests of files that are not needed yet."""


@dataclass(frozen=True, slots=True)
class OpenPart:
    """Take a large file's part, to be written."""

    file: BlobFile


@dataclass(frozen=True, slots=True)
class StoreChunk:
    """Write a chunk of a file into the cache."""

    file: BlobFile
    offset: int
    values: Body


@dataclass(frozen=True, slots=True)
class Assemble:
    """All files but those for later are there: put them where the task reads them."""

    list_digest: str
    spec: RunSpec
    listing: BlobList
    later: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DropFiles:
    """Leave the files; answers to earlier actions are dropped."""


DeviceAction = (
    OpenDevice | Build | Compute | GiveStretch | CancelWork | CancelNode | Apply | LoadChunk
    | Restore | Evaluate | CopyState
)  # fmt: skip
"""What is for the device."""
FileAction = Locate | OpenPart | StoreChunk | Assemble | DropFiles
PeerAction = TellPeers | BeginSlices | DropSlices | Contribute | GiveAverages
Action = Transmit | Expect | Tell | Leave | DeviceAction | PeerAction | FileAction
