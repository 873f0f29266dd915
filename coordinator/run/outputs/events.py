"""The events of a run: one typed value for everything that happens.

The run emits each event once (`actions.Report`). Journal, console, page, event stream, structured
log, metrics, trackers and report render it. Pure values.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from coordinator.run.outputs.restart import CommitRecord, EmbeddingsRecord
from protocol.base import limits
from protocol.base.fields import Digest, Number, finite_or_none
from protocol.exact.reduction.tree import Subtree
from protocol.spec.manifest import Manifest

Change = Literal["started", "joined", "lost", "late", "drained", "reseeded"]
"""Why the set of computing workers changed."""
Cause = Literal["step", "embeddings", "reassigned", "speculative"]
"""Why subtrees were assigned."""
Name = Annotated[str, Field(max_length=limits.NAME_CHARACTERS)]
LongText = Annotated[str, Field(max_length=2_000)]
NullableFloat = Annotated[float | None, BeforeValidator(finite_or_none)]
"""JSON has no NaN: a value that is not finite is null."""
Subtrees = dict[Name, tuple[tuple[Number, Number], ...]]
"""Subtrees [lo, hi) of the reduction tree over a step's microbatches, by worker."""


class Event:
    """Base of all events.

    Attributes:
        name: The event's name in log and event stream; empty if the event appears in neither.
    """

    __slots__ = ()
    name: ClassVar[str] = ""

    def fields(self) -> dict[str, object]:
        """Return the values that log and event stream show, by name, without None."""
        assert dataclasses.is_dataclass(self)
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}


class Record(BaseModel, Event):
    """An event with a line in the journal; validated, since it is read back from files.

    Attributes:
        kind: The record's name in the journal.
        articles: The articles of the EU AI Act that a line supports; see `journal_records`.
        purpose: The purpose of a line, as reports print it.
        older_fields: Fields that older releases wrote, with the value null.
        streamed_fields: Fields that log and event stream show.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    articles: ClassVar[tuple[int, ...]]
    purpose: ClassVar[str]
    name: ClassVar[str] = ""
    older_fields: ClassVar[tuple[str, ...]] = ()
    streamed_fields: ClassVar[tuple[str, ...]] = ()

    def fields(self) -> dict[str, object]:
        values = {name: getattr(self, name) for name in self.streamed_fields}
        return {name: value for name, value in values.items() if value is not None}


# Workers.


@dataclass(frozen=True, slots=True)
class WorkerReady(Event):
    """A worker has built the task."""

    name = "worker_ready"
    worker: str
    device: str
    backend: str
    signature: str
    """The worker's numerics profile and its parity with torch, as text for users."""


@dataclass(frozen=True, slots=True)
class WorkerUnready(Event):
    """A worker cannot build the task."""

    name = "worker_unready"
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerRefused(Event):
    """A worker's task, state or messages are not the run's: it is dismissed from the run."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerJoined(Event):
    """A worker takes part from the next step on."""

    name = "worker_joined"
    worker: str
    step: int
    view: int


@dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    """A worker's connection has ended."""

    name = "worker_lost"
    worker: str
    reason: str
    view: int


@dataclass(frozen=True, slots=True)
class WorkerLeft(Event):
    """A worker asked to leave, and left."""

    name = "worker_left"
    worker: str
    reason: str
    view: int


@dataclass(frozen=True, slots=True)
class WorkerLate(Event):
    """A worker is late with an answer or with gradients."""

    name = "straggler"
    worker: str
    step: int
    owing: str


@dataclass(frozen=True, slots=True)
class DeviceFault(Event):
    """One device of a worker has a problem; the worker continues."""

    name = "device_fault"
    worker: str
    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerSetAside(Event):
    """A worker was passed over too often: it takes no part before step `until`."""

    name = "worker_put_aside"
    worker: str
    step: int
    until: int


class MemberInfo(BaseModel):
    """One worker in a `ViewChanged`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    backend: Name
    device: Name
    signature: Name
    admitted_by: LongText = ""
    """The credentials that admitted the worker: the join token, or its own key."""


class ViewChanged(Record):
    """The set of computing workers changed. `view` restarts from 0 with each term."""

    articles = (12, 15)
    purpose = "machines that took part, with times and numerics profiles"

    kind: Literal["view"] = "view"
    term: Number
    step: Number
    view: Number
    change: Change
    worker: Name | None = None
    reason: LongText = ""
    members: tuple[MemberInfo, ...]


# Steps.


class ManifestSettled(Record):
    """The workers agreed on data, base model and tokenizer: their digests, and counts."""

    articles = (10, 13)
    purpose = "proof of the exact data, base model and tokenizer; samples excluded from the data"

    kind: Literal["manifest"] = "manifest"
    manifest_digest: Digest
    digests: dict[Name, Name]
    train_samples: Annotated[int, Field(ge=1)]
    evaluation_parts: Number
    notes: dict[Name, int] = {}

    @staticmethod
    def of(manifest: Manifest) -> ManifestSettled:
        """Make the event of a settled manifest."""
        return ManifestSettled(
            manifest_digest=manifest.digest(),
            digests=manifest.digests,
            train_samples=manifest.train_samples,
            evaluation_parts=manifest.evaluation_parts,
            notes=manifest.notes,
        )


@dataclass(frozen=True, slots=True)
class CapturePlanned(Event):
    """How large the result of a capture will be; `size` is text for users."""

    name = "capture_planned"
    samples: int
    steps: int
    size: str
    token_bytes: int


@dataclass(frozen=True, slots=True)
class TrainingStarted(Event):
    """Enough workers are ready, and state 0 is available."""

    name = "started"
    workers: list[str]


class OwnersChanged(Record):
    """The fraction of all chunks that each worker averages, rounded to three decimals; empty if the
    coordinator averages all."""

    articles = (12, 15)
    purpose = "machines that summed the gradients of others, by step"

    name = "owners"
    streamed_fields = ("step", "number", "reason", "owners")

    kind: Literal["owners"] = "owners"
    term: Number
    step: Number
    number: Number
    reason: LongText = ""
    owners: dict[Name, Annotated[float, Field(ge=0, le=1)]]


class Planned(Record):
    """Each worker's subtrees of a step. Which samples these are follows from the run spec's seed
    and batch and the number of samples (`protocol.exact.samples`)."""

    articles = (10, 12)
    purpose = "samples assigned to each worker in each step"

    kind: Literal["plan"] = "plan"
    term: Number
    step: Number
    attempt: Number
    view: Number
    microbatches: Annotated[int, Field(ge=1, le=limits.MICROBATCHES_PER_STEP)]
    nodes: Subtrees
    cause: Cause = "step"

    def assigned_subtrees(self) -> list[Subtree]:
        """Return all assigned subtrees."""
        return [Subtree(lo, hi) for subtrees in self.nodes.values() for lo, hi in subtrees]


@dataclass(frozen=True, slots=True)
class SubtreesReassigned(Event):
    """The subtrees of a lost or late worker go to others."""

    name = "reassigned"
    step: int
    nodes: list[str]


@dataclass(frozen=True, slots=True)
class SubtreesSpeculated(Event):
    """Subtrees of late workers go to idle workers too."""

    name = "speculated"
    step: int
    nodes: list[str]
    late: list[str]


@dataclass(frozen=True, slots=True)
class StepRestarted(Event):
    """A worker left before its state was verified: its results may be wrong."""

    name = "restarted"
    term: int
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class LossScaleHalved(Event):
    """Gradients in float16 overflowed: the step is redone with half the loss scale.

    `reason` says where they overflowed.
    """

    name = "loss_scale_halved"
    term: int
    step: int
    attempt: int
    loss_scale: float
    reason: str


@dataclass(frozen=True, slots=True)
class StepRedoneDifferently(Event):
    """A step was redone after a restart, with other averages than before the restart."""

    name = "redone_otherwise"
    step: int
    before: str
    now: str


class Committed(Record):
    """A step was committed; or skipped: its samples count as used, and nothing was applied.

    Attributes:
        counted: The workers and subtrees in the sums, if known: each distinct combination; only one
            unless subtrees were assigned twice.
        state_before: Digest of the state that the step started from.
        norm: Norm of the averaged gradient before clipping.
        rate: The learning rate. Like `norm`, None for a skipped step and in older lines.
        own_digest: Digest of the per-replica state after the step (`replica_states`).
        loss_scale: The factor of the losses, if they were scaled.
        embedded: If the loss couples all samples of the step: the digest of their embeddings, and
            the workers that computed them.
    """

    articles = (10, 12, 15)
    purpose = "proof that every sample counted once; loss and digests of every step"
    older_fields = ("weights_before",)

    name = "committed"

    kind: Literal["commit"] = "commit"
    term: Number
    step: Number
    attempt: Number
    optimizer_step: Number
    loss: NullableFloat
    norm: NullableFloat = None
    rate: NullableFloat = None
    loss_scale: NullableFloat = None
    skipped: bool
    averages_digest: Digest
    state_before: Digest | None = None
    own_digest: Digest | None = None
    counted: tuple[Subtrees, ...] | None = None
    embedded: EmbeddingsRecord | None = None
    recovered: bool = False
    """Whether a restart wrote the line, from the gradient log."""

    @staticmethod
    def of(record: CommitRecord, *, recovered: bool = False) -> Committed:
        """Make the event of a commit that is durable in the gradient log."""
        commit = record.commit
        return Committed(
            term=commit.term,
            step=commit.step,
            attempt=commit.attempt,
            optimizer_step=record.optimizer_step,
            loss=commit.loss,
            norm=record.norm,
            rate=None if commit.scalars is None else commit.scalars.learning_rate,
            loss_scale=(commit.scalars.loss_scale or None) if commit.scalars is not None else None,
            skipped=commit.scalars is None,
            averages_digest=commit.averages_digest,
            state_before=record.state_before,
            own_digest=record.own_digest,
            counted=record.counted,
            embedded=record.embedded,
            recovered=recovered,
        )

    def fields(self) -> dict[str, object]:
        optional = {"norm": self.norm, "rate": self.rate}
        return {
            "step": self.step,
            "loss": math.nan if self.loss is None else self.loss,
            **{name: value for name, value in optional.items() if value is not None},
            "skipped": self.skipped,
        }


class Checkpointed(Record):
    """A checkpoint is durable. That of step 0 is the state that training started from."""

    articles = (12, 15)
    purpose = "saved states, with digests to prove each"

    name = "checkpoint"
    streamed_fields = ("step",)

    kind: Literal["checkpoint"] = "checkpoint"
    term: Number
    step: Number
    optimizer_step: Number
    weights_digest: Digest
    state_digest: Digest
    directory: Name


class Evaluated(Record):
    """Evaluation metrics of the state after `step` steps."""

    articles = (13, 15)
    purpose = "accuracy on held-out data over the course of training"

    name = "evaluated"

    kind: Literal["evaluation"] = "evaluation"
    term: Number
    step: Number
    metrics: dict[Name, NullableFloat]
    state_digest: Digest | None = None
    """Digest of that state, if the coordinator's replica had the state."""

    @property
    def metric_values(self) -> dict[str, float]:
        """The metrics as numbers; NaN for a metric that is not finite."""
        return {k: math.nan if v is None else v for k, v in self.metrics.items()}

    def fields(self) -> dict[str, object]:
        return {"step": self.step, **self.metric_values}


@dataclass(frozen=True, slots=True)
class RateLowered(Event):
    """A metric has stopped improving: from this step on, schedule `plateau` uses this rate."""

    name = "rate_lowered"
    step: int
    metric: str
    rate: float


@dataclass(frozen=True, slots=True)
class EvaluationMissed(Event):
    """An evaluation of the state after `step` steps was due and did not happen."""

    name = "not_evaluated"
    step: int
    reason: str


# Stops.


class Halted(Record):
    """The run stopped until an operator continues it: because of a non-finite value, unequal
    digests, a failed write, or a command. For a non-finite value, `microbatches` [lo, hi), `worker`
    and `block` say where it is, if known."""

    articles = (12, 15)
    purpose = "faults that halted the run, with worker, block, step and microbatches"

    name = "halted"
    streamed_fields = ("term", "step", "attempt", "reason", "microbatches", "worker", "block")

    kind: Literal["halt"] = "halt"
    term: Number
    step: Number
    attempt: Number
    reason: LongText
    worker: Name | None = None
    block: Name | None = None
    microbatches: tuple[Number, Number] | None = None


@dataclass(frozen=True, slots=True)
class RunContinued(Event):
    """A halt is over."""

    name = "continued"
    term: int
    step: int
    attempt: int
    skip_step: bool
