"""What comes of the device's work: the events that the pure session is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from backends.base.interface import Array, Loss, Sums
from protocol.base.errors import SamestepError
from protocol.exact.replica import StatePart
from protocol.exact.tree import Node
from protocol.spec.manifest import Manifest


@dataclass(frozen=True, slots=True)
class StepAttempt:
    """Which attempt at which step."""

    step: int
    attempt: int
    loss_scale: float = field(default=1.0, compare=False)


@dataclass(frozen=True, slots=True)
class Built:
    """The task is ready on the device."""

    run_id: str
    manifest: Manifest
    initial_digest: str
    step: int
    state_digest: str
    signature: str
    signature_text: str
    backend: str
    device: str
    memory: str = ""
    parity: str = ""
    devices: int = 1
    """Of a host."""
    left_out: str = ""
    """Why other devices of the host take no part; empty if all do."""


@dataclass(frozen=True, slots=True)
class BuildFailed:
    """The task cannot be built here; `own` if other devices or machines may be able to."""

    run_id: str
    error: SamestepError
    own: bool = False


@dataclass(frozen=True, slots=True)
class TaskRefused:
    """The task turned out to be no exact one after some steps: training moves something beside the
    replica, or the loss no longer adds up over samples. The run cannot be right any more."""

    run_id: str
    error: SamestepError


@dataclass(frozen=True, slots=True)
class BlockSum:
    """A block's sum over a node is final: flat float32, the receiver's own."""

    place: StepAttempt
    node: Node
    block: int
    values: Array
    weight: float


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A node's sum of a block, or its loss, has a value that is not finite: nothing is added to it,
    or nobody could tell any more whose it was."""

    place: StepAttempt
    node: Node
    block: int | None
    device: str = ""
    """Of a host: which of its devices."""


@dataclass(frozen=True, slots=True)
class MicrobatchRows:
    """What is kept of a microbatch of a node: uint8, (samples, bytes of one)."""

    place: StepAttempt
    node: Node
    microbatch: int
    rows: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StretchStep:
    """So many inner steps of a stretch are taken."""

    place: StepAttempt
    node: Node
    inner: int


@dataclass(frozen=True, slots=True)
class BoundaryReached:
    """Where a replica is after so many inner steps: all that going on from there takes."""

    place: StepAttempt
    node: Node
    inner: int
    content: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StretchStateWanted:
    """A stretch waits for what the coordinator knows of it; `own`: also for the replica's own."""

    place: StepAttempt
    microbatches: int
    node: Node
    own: bool


@dataclass(frozen=True, slots=True)
class NodeDone:
    """A node is computed."""

    place: StepAttempt
    node: Node
    loss: Loss
    elapsed_ms: float


@dataclass(frozen=True, slots=True)
class SlicesAveraged:
    """All averages of a committed step have come from the owners of its slices, and are right."""

    place: StepAttempt
    averages: list[Array]


@dataclass(frozen=True, slots=True)
class FilesWanted:
    """These files are needed: for a node or a held-out part that waits for them, or soon."""

    names: tuple[str, ...]
    for_node: tuple[StepAttempt, int, Node] | None = None
    """With the number of microbatches of its step."""
    for_part: tuple[int, int] | None = None
    """Step and part."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The replica has taken `step` steps."""

    step: int
    state_digest: str
    differing: Mapping[str, str] = field(default_factory=dict)
    """Digests of a host's devices that have another, by name."""


@dataclass(frozen=True, slots=True)
class PartEvaluated:
    """One held-out part is done."""

    step: int
    part: int
    sums: Sums


@dataclass(frozen=True, slots=True)
class StateCopied:
    """The state asked for: copies of the replica's arrays."""

    parts: list[StatePart]
    step: int
    optimizer_step: int


@dataclass(frozen=True, slots=True)
class DeviceFailed:
    """A job failed in a way that the device does not recover from."""

    error: Exception


@dataclass(frozen=True, slots=True)
class DevicesLost:
    """No device of a host has the run's state any more: it is to join anew."""

    reason: str


@dataclass(frozen=True, slots=True)
class DeviceNoted:
    """What went wrong with a device of a host that goes on, in words for people."""

    device: str
    text: str


Event = (
    Built
    | BuildFailed
    | TaskRefused
    | BlockSum
    | NotFinite
    | MicrobatchRows
    | NodeDone
    | SlicesAveraged
    | Applied
    | PartEvaluated
    | FilesWanted
    | StretchStep
    | BoundaryReached
    | StretchStateWanted
    | StateCopied
    | DeviceFailed
    | DevicesLost
    | DeviceNoted
)
