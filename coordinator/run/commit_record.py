"""What is made durable of a committed step, before anyone is told."""

from __future__ import annotations

import msgpack
from pydantic import BaseModel, ConfigDict

from protocol.base.fields import Digest, Number, Small
from protocol.wire.messages import Commit


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
    is the digest of the state that the step starts from, where it was known. `counted` says whose
    nodes [lo, hi) make up the sum, so that the journal can be brought up to date from the log.
    """

    commit: Commit
    optimizer_step: Number
    state_before: Digest | None = None
    counted: dict[Small, tuple[tuple[Number, Number], ...]] | None = None
