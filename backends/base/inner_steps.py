"""The inner steps of an inner phase: forward, backward and update without any exchange.

`HostInnerSteps` works for every device: the device computes gradients as in any run, and the host
applies the exact update. The program of a device that can update its own copy of the parameters has
a method `inner_steps` instead.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from backends.base.interface import Array, BlockGradient, Leaf, Loss, Program
from protocol.exact.parameter_groups import ClippedGroups
from protocol.exact.reduction.average import average
from protocol.exact.replica import Replica
from protocol.exact.update import step_scalars
from protocol.spec.manifest import Block
from protocol.spec.sections.optimizer import OptimizerSpec


@dataclass(frozen=True, slots=True)
class InnerState:
    """A replica's state between two inner steps.

    Attributes:
        parameters: One flat array per block.
        moments: For each moment of the optimizer, one flat array per block.
        missed_updates: By block, the updates that each tensor has missed (`Replica.missed`); empty
            if none.
    """

    parameters: list[Array]
    moments: list[list[Array]]
    missed_updates: list[Array] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SchedulePosition:
    """The position of an inner step in the schedule.

    Attributes:
        update: Number of updates since the moments were zero, including this one, from 1.
        step: Position in the schedule, from 0.
        steps: Length of the schedule.
    """

    update: int
    step: int
    steps: int


class InnerSteps(Protocol):
    """The inner steps of one replica on one device."""

    def begin(self, state: InnerState) -> None:
        """Continue from a copy of this state."""

    def step(
        self, leaves: Sequence[Leaf], position: SchedulePosition
    ) -> Generator[None, None, Loss]:
        """Take one step on these microbatches, yielding in between. The generator may be closed at
        any yield.

        Returns:
            The loss, summed over the batch.
        """

    def state(self) -> InnerState:
        """Return a copy of the current state."""

    def parameters(self) -> list[Array]:
        """Return a copy of the parameters."""


@runtime_checkable
class InnerStepsProgram(Protocol):
    """A program whose device updates its own copy of the parameters."""

    def inner_steps(self, optimizer: OptimizerSpec) -> InnerSteps:
        """Return the device's inner steps; only one is in use at a time, and `load` ends it."""


class HostInnerSteps:
    """Inner steps whose update runs on the host; see the module's docstring.

    Args:
        program: Computes the gradients.
        blocks: The manifest's blocks.
        optimizer: The inner optimizer.
    """

    def __init__(
        self, program: Program, blocks: tuple[Block, ...], optimizer: OptimizerSpec
    ) -> None:
        self._program = program
        self._blocks = blocks
        self._optimizer = optimizer
        self._replica = Replica(blocks, optimizer)

    def begin(self, state: InnerState) -> None:
        """See `InnerSteps`."""
        for new_arrays, own_arrays in zip(
            [state.parameters, *state.moments], self._arrays(), strict=True
        ):
            for own_values, new_values in zip(own_arrays, new_arrays, strict=True):
                np.copyto(own_values, new_values)
        self._replica.clear_missed()
        for own_values, new_values in zip(
            self._replica.missed, state.missed_updates, strict=bool(state.missed_updates)
        ):
            np.copyto(own_values, new_values)
        self._program.load(self._replica.parameters)

    def step(
        self, leaves: Sequence[Leaf], position: SchedulePosition
    ) -> Generator[None, None, Loss]:
        """See `InnerSteps`."""
        stream = self._program.gradients(leaves)
        gradients: list[Array] = [np.empty(0, np.float32)] * len(self._blocks)
        loss: Loss | None = None
        try:
            for item in stream:
                yield
                if isinstance(item, Loss):
                    loss = item
                elif isinstance(item, BlockGradient):
                    gradients[item.block] = item.values
        finally:
            stream.close()
        assert loss is not None
        for values in gradients:
            average(values, loss.weight, out=values)
        norms = ClippedGroups(self._optimizer).norms_of(self._blocks, gradients)
        if np.isfinite(norms.whole):  # otherwise the returned loss is NaN, which halts the run
            scalars = step_scalars(
                self._optimizer, position.update, position.step, position.steps, norms
            )
            self._replica.optimizer_step = position.update - 1
            self._replica.apply(gradients, scalars)
            self._program.load(self._replica.parameters)
            return loss
        return Loss(float("nan"), loss.weight)

    def state(self) -> InnerState:
        """See `InnerSteps`."""
        parameters, *moments = [[array.copy() for array in arrays] for arrays in self._arrays()]
        missed_updates = (
            [counts.copy() for counts in self._replica.missed]
            if self._replica.has_missed_updates
            else []
        )
        return InnerState(parameters, moments, missed_updates)

    def parameters(self) -> list[Array]:
        """See `InnerSteps`."""
        return [values.copy() for values in self._replica.parameters]

    def _arrays(self) -> list[list[Array]]:
        """Return the replica's own parameters, then each moment, by block."""
        return [self._replica.arrays(kind) for kind in self._replica.kinds]


def inner_steps(
    program: Program, blocks: tuple[Block, ...], optimizer: OptimizerSpec
) -> InnerSteps:
    """Return the device's inner steps if it offers them, else those of the host."""
    if isinstance(program, InnerStepsProgram):
        return program.inner_steps(optimizer)
    return HostInnerSteps(program, blocks, optimizer)
