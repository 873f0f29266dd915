"""Track the checkpoints that are due, being written, and durable. Pure."""

from __future__ import annotations

from coordinator.run.outputs.actions import Action, MakeCheckpoint
from protocol.spec.sections.checkpoint import CheckpointSpec


class CheckpointSchedule:
    """The checkpoints of one run, as far as the run's decisions depend on them.

    Attributes:
        saved_step: Step of the newest durable checkpoint; None before the first.
    """

    def __init__(self, spec: CheckpointSpec, saved_step: int | None = None) -> None:
        self.saved_step = saved_step
        self._spec = spec
        self._requested: int | None = None
        self._must_retry = False

    def save(self, step: int) -> list[Action]:
        """Request a checkpoint after `step` steps, unless it is durable or requested already."""
        if step in (self.saved_step, self._requested):
            return []
        self._requested = step
        return [MakeCheckpoint(step)]

    def save_if_due(self, step: int) -> list[Action]:
        """Request a checkpoint if one is due after `step` committed steps."""
        every = self._spec.every
        return self.save(step) if every and step % every == 0 else []

    def note_saved(self, step: int) -> None:
        """Note a durable checkpoint."""
        self.saved_step = step
        if self._requested == step:
            self._requested = None

    def note_failure(self) -> None:
        """Note a failed write: `retry` then requests the unfinished checkpoint again."""
        self._must_retry, self._requested = self._must_retry or self._requested is not None, None

    def retry(self, step: int) -> list[Action]:
        """After a halt, request a checkpoint of the current state if one could not be written."""
        must_retry, self._must_retry = self._must_retry, False
        return self.save(step) if must_retry else []
