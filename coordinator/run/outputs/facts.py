"""What a run tells: one typed record for each thing worth telling.

The run emits each once (`actions.Report`); log, console, event stream and journal are made of
them. Pure values.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from coordinator.run.outputs.restart import CommitRecord
from protocol.exact.tree import Node
from protocol.spec.manifest import Manifest

Change = Literal["started", "joined", "lost", "late", "drained", "reseeded"]
"""Why others compute from now on."""
Cause = Literal["step", "reassigned", "speculative"]
"""Why nodes were given out."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Base of all.

    Attributes:
        event: Its name in the log and on the event stream; empty if it is for the journal alone.
    """

    event: ClassVar[str] = ""

    def fields(self) -> dict[str, object]:
        """Its values by name, as log and event stream give them; what is not known is left out."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}


# Workers.


@dataclass(frozen=True, slots=True)
class WorkerReady(Fact):
    """It has built the task."""

    event = "worker_ready"
    worker: str
    device: str
    backend: str
    signature: str
    """What decides its bits, and how far it is from torch, in words."""


@dataclass(frozen=True, slots=True)
class WorkerUnready(Fact):
    """It cannot build the task."""

    event = "worker_unready"
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerRefused(Fact):
    """What it has built, or sent, is not the run's: it is sent away for good."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerJoined(Fact):
    """It takes part from the next step on."""

    event = "worker_joined"
    worker: str
    step: int
    view: int


@dataclass(frozen=True, slots=True)
class WorkerLost(Fact):
    """Its connection is over."""

    event = "worker_lost"
    worker: str
    reason: str
    view: int


@dataclass(frozen=True, slots=True)
class WorkerLeft(Fact):
    """It wanted to leave, and was let go: it owed nothing."""

    event = "worker_left"
    worker: str
    reason: str
    view: int


@dataclass(frozen=True, slots=True)
class WorkerLate(Fact):
    """It is silent about what it owes: an answer, or gradients."""

    event = "straggler"
    worker: str
    step: int
    owing: str


@dataclass(frozen=True, slots=True)
class DeviceFault(Fact):
    """Something is wrong with one device of a worker's host; the worker goes on."""

    event = "device_fault"
    worker: str
    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerPutAside(Fact):
    """It was passed over too often: it takes no part before step `until`."""

    event = "worker_put_aside"
    worker: str
    step: int
    until: int


@dataclass(frozen=True, slots=True)
class ComputingWorker:
    """One worker as a view lists it."""

    name: str
    backend: str
    device: str
    signature: str
    admitted_by: str


@dataclass(frozen=True, slots=True)
class ViewBegins(Fact):
    """Who computes from now on."""

    step: int
    view: int
    change: Change
    worker: str | None
    reason: str
    members: tuple[ComputingWorker, ...]


# Steps.


@dataclass(frozen=True, slots=True)
class ManifestAgreed(Fact):
    """The first ready worker's manifest is the run's."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class CapturePlanned(Fact):
    """How large the result of a capture is going to be, in words, before it begins."""

    event = "capture_planned"
    samples: int
    steps: int
    size: str
    token_bytes: int


@dataclass(frozen=True, slots=True)
class TrainingStarted(Fact):
    """Enough workers are ready, and state 0 is there."""

    event = "started"
    workers: list[str]


@dataclass(frozen=True, slots=True)
class SlicesOwned(Fact):
    """Which part of every block each member averages from now on; none: the coordinator does."""

    event = "owners"
    step: int
    number: int
    reason: str
    owners: dict[str, float]


@dataclass(frozen=True, slots=True)
class NodesPlanned(Fact):
    """Nodes of a step were given to workers."""

    step: int
    attempt: int
    view: int
    microbatches: int
    cause: Cause
    nodes: dict[str, tuple[Node, ...]]


@dataclass(frozen=True, slots=True)
class NodesReassigned(Fact):
    """What a lost or late worker leaves goes to others."""

    event = "reassigned"
    step: int
    nodes: list[str]


@dataclass(frozen=True, slots=True)
class NodesSpeculated(Fact):
    """What late workers owe is given to idle ones as well."""

    event = "speculated"
    step: int
    nodes: list[str]
    late: list[str]


@dataclass(frozen=True, slots=True)
class StepRestarted(Fact):
    """A worker left before its state was compared: what it delivered may be wrong."""

    event = "restarted"
    epoch: int
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class LossScaleHalved(Fact):
    """Gradients in float16 overflowed: the step is done again, with half the scale.

    `reason` says where.
    """

    event = "loss_scale_halved"
    epoch: int
    step: int
    attempt: int
    loss_scale: float
    reason: str


@dataclass(frozen=True, slots=True)
class RedoneOtherwise(Fact):
    """A step that is done again after a restart has another digest of averages than before."""

    event = "redone_otherwise"
    step: int
    before: str
    now: str


@dataclass(frozen=True, slots=True)
class StepCommitted(Fact):
    """The step's commit is durable."""

    event = "committed"
    record: CommitRecord

    def fields(self) -> dict[str, object]:
        commit = self.record.commit
        told: dict[str, object] = {"step": commit.step, "loss": commit.loss}
        if self.record.norm is not None:
            told["norm"] = self.record.norm
        if commit.scalars is not None:
            told["rate"] = commit.scalars.learning_rate
        return {**told, "skipped": commit.scalars is None}


@dataclass(frozen=True, slots=True)
class HeldOutMeasured(Fact):
    """Figures on the held-out data, of the state after so many steps."""

    event = "evaluated"
    step: int
    metrics: dict[str, float]
    state_digest: str | None

    def fields(self) -> dict[str, object]:
        return {"step": self.step, **self.metrics}


@dataclass(frozen=True, slots=True)
class EvaluationMissed(Fact):
    """Held-out figures of the state after so many steps were due, and do not come."""

    event = "not_evaluated"
    step: int
    reason: str


# Stops.


@dataclass(frozen=True, slots=True)
class RunHalted(Fact):
    """The run has stopped until an operator's word.

    Where a value was not finite, `microbatches` [lo, hi), `worker` and `block` say so, as far as
    it is one's.
    """

    event = "halted"
    epoch: int
    step: int
    attempt: int
    reason: str
    microbatches: tuple[int, int] | None = None
    worker: str | None = None
    block: str | None = None


@dataclass(frozen=True, slots=True)
class RunContinued(Fact):
    """A halt is over."""

    event = "continued"
    epoch: int
    step: int
    attempt: int
    skip_step: bool
