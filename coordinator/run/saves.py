"""Which states are saved as checkpoints: when one is due, on its way, and durable. Pure."""

from __future__ import annotations

from coordinator.run.outputs.actions import Action, MakeCheckpoint
from protocol.spec.run_spec import CheckpointSpec


class Saves:
    """The checkpoints of one run, as far as the logic of the run has to know them.

    Attributes:
        saved: Steps of the newest durable checkpoint; None before the first.
    """

    def __init__(self, spec: CheckpointSpec, saved: int | None = None) -> None:
        self.saved = saved
        self._spec = spec
        self._asked: int | None = None
        self._owed = False

    def save(self, step: int) -> list[Action]:
        """Save the state after so many steps, unless it is or is about to be."""
        if step in (self.saved, self._asked):
            return []
        self._asked = step
        return [MakeCheckpoint(step)]

    def committed(self, step: int) -> list[Action]:
        """So many steps are committed: is a checkpoint due?"""
        every = self._spec.every
        return self.save(step) if every and step % every == 0 else []

    def done(self, step: int) -> None:
        """A checkpoint is durable."""
        self.saved = step
        if self._asked == step:
            self._asked = None

    def failed(self) -> None:
        """The disk refused. What was asked for is asked for again (`again`)."""
        self._owed, self._asked = self._owed or self._asked is not None, None

    def again(self, step: int) -> list[Action]:
        """After a halt: what the disk refused, of the present state."""
        owed, self._owed = self._owed, False
        return self.save(step) if owed else []
