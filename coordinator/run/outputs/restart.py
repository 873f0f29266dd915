"""What is kept of a run so that a restart can go on with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgpack
from pydantic import BaseModel, ConfigDict, Field

from protocol.base.fields import Digest, Number, Small
from protocol.spec.manifest import Manifest
from protocol.wire.messages import Commit

Figures = Mapping[int, Mapping[str, float]]
"""Of evaluations, by the steps that were committed before."""


class Packed(BaseModel):
    """A record that is stored as msgpack."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_bytes(self) -> bytes:
        """The record's payload."""
        packed: bytes = msgpack.packb(self.model_dump(), use_bin_type=True)
        return packed


class CommitRecord(Packed):
    """A step is committed: the record is durable before anyone is told.

    `optimizer_step` counts updates, this one included if it is one. `state_before`
    is the digest of the state that the step starts from, where it was known. `norm` is the
    gradient's, before it was cut; None for a skipped step, and where an older release wrote it.
    `counted` says whose
    nodes [lo, hi) make up the sums. There is one sum for each chunk and one for the losses; where
    nodes were given out twice, one chunk may be of one worker and the next of another, so each of
    the distinct ways is told. None for a skipped step, or where it would be too much to tell.
    `own_digest` is that of what replicas have of their own after the step; None where they have
    nothing.
    """

    commit: Commit
    optimizer_step: Number
    state_before: Digest | None = None
    norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    own_digest: Digest | None = None
    counted: tuple[dict[Small, tuple[tuple[Number, Number], ...]], ...] | None = None


class Terms(BaseModel):
    """What workers are admitted by, as the run's first workers settled it.

    Attributes:
        signature: The first worker's; the one that `exactness: require` asks for.
        initial_digest: Of the state after 0 steps.
        signatures: Of all workers that have computed, sorted.
        mixed: Whether there were several, or unlike initial states.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    signature: Digest
    initial_digest: Digest
    signatures: Annotated[tuple[Digest, ...], Field(max_length=4096)] = ()
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where a restarted coordinator goes on: the state after `step` steps can be had back.

    Attributes:
        manifest: The run's.
        step: Steps committed; the run goes on with this one.
        optimizer_step: Updates among them.
        losses: Mean loss of each; NaN for a skipped one.
        state_digest: Of that state, where it is known before it is had back.
        saved: Steps of the newest whole checkpoint.
        redone: Steps that were committed before and are done again, with the digest of their
            averages; None for one that was skipped, and is to be skipped again.
        terms: What workers were admitted by; None if none had computed.
        figures: Of the evaluations so far, if the run may stop by them.
        loss_scale: Of the step that comes next, if losses are scaled.
    """

    manifest: Manifest
    step: int
    optimizer_step: int
    losses: tuple[float, ...]
    state_digest: str | None
    saved: int
    redone: Mapping[int, str | None]
    terms: Terms | None
    figures: Figures = field(default_factory=dict)
    loss_scale: float | None = None
