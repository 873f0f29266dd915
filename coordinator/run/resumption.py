"""What a restarted coordinator knows of its run: where the logic goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.run.terms import Terms
from protocol.spec.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Resumption:
    """A run whose state after `step` steps can be had back.

    Attributes:
        manifest: What was settled.
        step: Steps committed; the run goes on with this one.
        optimizer_step: Updates among them.
        losses: Mean loss of each; NaN for a skipped one.
        state_digest: Of that state, where it is known before it is had back.
        saved: Steps of the newest whole checkpoint.
        redone: Steps that were committed before and are done again, with the digest of their
            averages; None for one that was skipped, and is to be skipped again.
        terms: What workers were accepted by; None if none had computed.
    """

    manifest: Manifest
    step: int
    optimizer_step: int
    losses: tuple[float, ...]
    state_digest: str | None
    saved: int
    redone: Mapping[int, str | None]
    terms: Terms | None
