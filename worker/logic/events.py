"""Results of the device's work: the inputs of the session and of the device group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from backends.base.interface import Array, Loss, Sums
from protocol.base.errors import SamestepError
from protocol.exact.reduction.reducer import NonFinite
from protocol.exact.reduction.tree import Subtree
from protocol.exact.replica import StatePart
from protocol.spec.manifest import Manifest


@dataclass(frozen=True, slots=True)
class StepId:
    """One attempt at a step. Step and attempt determine `loss_scale` (float16) and `phase`."""

    step: int
    attempt: int
    loss_scale: float = field(default=1.0, compare=False)
    phase: Literal["embeddings", "gradients"] = field(default="gradients", compare=False)


@dataclass(frozen=True, slots=True)
class Built:
    """The task is ready on the device."""

    run_id: str
    manifest: Manifest
    initial_digest: str
    step: int
    state_digest: str
    numerics_profile: str
    numerics_text: str
    backend: str
    device: str
    memory: str = ""
    parity: str = ""
    devices: int = 1
    """Devices that compute: more than 1 in a multi-device worker."""
    left_out: str = ""
    """Why other devices of this worker are left out; empty if none is."""


@dataclass(frozen=True, slots=True)
class BuildFailed:
    """The task cannot be built on this device.

    Attributes:
        is_local: Whether the task may work on another device or machine.
    """

    run_id: str
    error: SamestepError
    is_local: bool = False


@dataclass(frozen=True, slots=True)
class TaskRefused:
    """A check after some steps shows that training is inexact, so the run must end.

    Either training changes something besides the replica, or the loss is not a sum over samples.
    """

    run_id: str
    error: SamestepError


@dataclass(frozen=True, slots=True)
class BlockSum:
    """A block's gradient sum over a subtree: flat float32; the receiver owns the array."""

    step_id: StepId
    subtree: Subtree
    block: int
    values: Array
    weight: float


@dataclass(frozen=True, slots=True)
class NonFiniteSum:
    """A sum with NaN or infinity, which is reported instead of added: a total hides its origin."""

    step_id: StepId
    location: NonFinite

    @property
    def subtree(self) -> Subtree:
        return self.location.subtree


@dataclass(frozen=True, slots=True)
class MicrobatchRows:
    """Captured output, or embeddings, of one microbatch of a subtree.

    Attributes:
        rows: uint8, (samples, bytes per sample).
    """

    step_id: StepId
    subtree: Subtree
    microbatch: int
    rows: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class InnerPhaseStep:
    """Progress of an inner phase: it has taken `inner` steps."""

    step_id: StepId
    subtree: Subtree
    inner: int


@dataclass(frozen=True, slots=True)
class InnerCheckpoint:
    """A replica's state after `inner` steps, from which another worker can continue."""

    step_id: StepId
    subtree: Subtree
    inner: int
    content: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class InnerStateNeeded:
    """An inner phase waits for a state from the coordinator.

    Attributes:
        with_carried: Whether the phase also needs the replica's carried state.
    """

    step_id: StepId
    microbatches: int
    subtree: Subtree
    with_carried: bool


@dataclass(frozen=True, slots=True)
class SubtreeDone:
    """All microbatches of a subtree are computed."""

    step_id: StepId
    subtree: Subtree
    loss: Loss
    elapsed_ms: float
    unlike_microbatches: tuple[int, ...] = ()
    """Microbatches whose embeddings, computed again here, differ from those of the step."""


@dataclass(frozen=True, slots=True)
class AveragesReady:
    """All averages of a committed step have arrived."""

    step_id: StepId
    averages: list[Array]


@dataclass(frozen=True, slots=True)
class FilesNeeded:
    """Files that a subtree or evaluation part waits for, or that the next steps read."""

    names: tuple[str, ...]
    for_subtree: tuple[StepId, int, Subtree] | None = None
    """The waiting subtree, with the number of microbatches of its step."""
    for_part: tuple[int, int] | None = None
    """The waiting evaluation: step and part."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The replica has taken `step` steps."""

    step: int
    state_digest: str


@dataclass(frozen=True, slots=True)
class InitialParameters:
    """Initial parameters by block, from one device of a group."""

    values: list[Array]


@dataclass(frozen=True, slots=True)
class WeightsTaken:
    """One device of a group has loaded the parameters of this step.

    Attributes:
        keeps_reading: Whether the device keeps reading the group's replica until `ReleaseReplica`.
    """

    step: int
    keeps_reading: bool


@dataclass(frozen=True, slots=True)
class ReplicaReleased:
    """One device of a group has stopped reading the replica."""


@dataclass(frozen=True, slots=True)
class PartEvaluated:
    """Evaluation sums over one part of the evaluation data."""

    step: int
    part: int
    sums: Sums


@dataclass(frozen=True, slots=True)
class StateCopied:
    """Copies of the replica's arrays, as `CopyState` requested."""

    parts: list[StatePart]
    step: int
    optimizer_step: int


@dataclass(frozen=True, slots=True)
class DeviceFailed:
    """The device failed and cannot continue."""

    error: Exception


@dataclass(frozen=True, slots=True)
class DevicesLost:
    """No device of the group computes any more, so the worker must join again."""

    reason: str


@dataclass(frozen=True, slots=True)
class DeviceWarning:
    """A fault of one device, for the operator; the rest of the group continues."""

    device: str
    text: str


Event = (
    Built
    | BuildFailed
    | TaskRefused
    | BlockSum
    | NonFiniteSum
    | MicrobatchRows
    | SubtreeDone
    | AveragesReady
    | Applied
    | PartEvaluated
    | FilesNeeded
    | InnerPhaseStep
    | InnerCheckpoint
    | InnerStateNeeded
    | StateCopied
    | DeviceFailed
    | DevicesLost
    | DeviceWarning
)
GroupReport = (
    Built
    | BuildFailed
    | TaskRefused
    | BlockSum
    | NonFiniteSum
    | MicrobatchRows
    | SubtreeDone
    | PartEvaluated
    | FilesNeeded
    | InnerPhaseStep
    | InnerCheckpoint
    | InnerStateNeeded
    | DeviceFailed
    | InitialParameters
    | WeightsTaken
    | ReplicaReleased
)
"""Reports of one device in a group."""
