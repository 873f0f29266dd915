"""Records from which a restarted coordinator continues a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgpack
from pydantic import BaseModel, ConfigDict, Field

from protocol.base.fields import Digest, Number, ShortText
from protocol.exact.reduction.reducer import Origin
from protocol.spec.manifest import Manifest
from protocol.wire.messages import Commit

MetricsByStep = Mapping[int, Mapping[str, float]]
"""Metrics of evaluations, by the step of the evaluated state."""


class MsgpackRecord(BaseModel):
    """Base class of records that are stored as msgpack."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_bytes(self) -> bytes:
        """Encode the record."""
        packed: bytes = msgpack.packb(self.model_dump(), use_bin_type=True)
        return packed


class EmbeddingsRecord(BaseModel):
    """The digest and origin of the embeddings that a step's loss used.

    Attributes:
        digest: BLAKE3 of all rows, in the order of microbatches.
        of: The subtrees [lo, hi) of each worker that computed them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: Digest
    of: dict[ShortText, tuple[tuple[Number, Number], ...]]

    @staticmethod
    def from_origin(digest: str, origin: Origin) -> EmbeddingsRecord:
        """Make the record of embeddings with this origin."""
        workers = dict.fromkeys(worker for worker, _ in origin)
        parts = {name: tuple(part for by, part in origin if by == name) for name in workers}
        return EmbeddingsRecord(digest=digest, of=parts)


class CommitRecord(MsgpackRecord):
    """The commit of a step; it is durable before any worker receives it.

    Attributes:
        commit: The message to the workers.
        optimizer_step: Number of updates, including this one.
        state_before: Digest of the state that the step starts from, if known.
        norm: Norm of the gradient, before clipping; None for a skipped step and in older records.
        own_digest: Digest of the per-replica state after the step; None without such state.
        counted: The subtrees [lo, hi) of each worker in the sums. Each chunk has a sum, and so has
            the loss. Where subtrees were assigned twice, these sums can contain results of
            different workers: each distinct combination is listed. None for a skipped step, or if
            the list would be too long.
        embedded: The embeddings that the loss has read, if it couples all samples of the step.
    """

    commit: Commit
    optimizer_step: Number
    state_before: Digest | None = None
    norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    own_digest: Digest | None = None
    counted: tuple[dict[ShortText, tuple[tuple[Number, Number], ...]], ...] | None = None
    embedded: EmbeddingsRecord | None = None


class AdmissionRecord(BaseModel):
    """The conditions by which workers are admitted, as the run's first workers settled them.

    Attributes:
        signature: The first worker's numerics profile, which `exactness: require` demands.
        initial_digest: Digest of the state after 0 steps.
        signatures: The numerics profiles of all workers that have computed, sorted.
        mixed: Whether profiles or initial states differed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    signature: Digest
    initial_digest: Digest
    signatures: Annotated[tuple[Digest, ...], Field(max_length=4096)] = ()
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class Resumption:
    """The point from which a restarted coordinator continues.

    Attributes:
        manifest: The run's manifest.
        step: Number of committed steps whose state can be restored; the run continues with this
            step.
        optimizer_step: Number of updates among these steps.
        losses: Mean loss of each of these steps; NaN for a skipped step.
        state_digest: Digest of the state after these steps, if it is known before the state is
            restored.
        saved: Step of the newest intact checkpoint.
        redone: The committed steps that are redone, with the digest of their averages; None for a
            skipped step, which is skipped again.
        admission: The admission record; None if no worker had computed.
        initial_digest: Digest of state 0, if it is the newest state and there is no admission
            record.
        metrics: Metrics of the evaluations so far, if they can stop the run or lower the learning
            rate.
        loss_scale: Loss scale of the next step, if losses are scaled.
    """

    manifest: Manifest
    step: int
    optimizer_step: int
    losses: tuple[float, ...]
    state_digest: str | None
    saved: int
    redone: Mapping[int, str | None]
    admission: AdmissionRecord | None
    initial_digest: str | None = None
    metrics: MetricsByStep = field(default_factory=dict)
    loss_scale: float | None = None
