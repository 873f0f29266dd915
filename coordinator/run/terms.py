"""What workers are accepted by, as the run's first workers settled it; kept for a restart."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from protocol.base.fields import Digest


class Terms(BaseModel):
    """The first worker's numeric signature, the run's initial state, and whose bits are in it.

    Attributes:
        signature: Of the first worker; the one that `exactness: require` asks for.
        initial_digest: Of the state after 0 steps.
        signatures: Of all workers that have computed, sorted.
        mixed: Whether there were several, or unlike initial states.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    signature: Digest
    initial_digest: Digest
    signatures: Annotated[tuple[Digest, ...], Field(max_length=4096)] = ()
    mixed: bool = False
