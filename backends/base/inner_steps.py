"""The inner steps of a stretch: forward, backward and update, with nothing exchanged between them.

`HostInnerSteps` works on every device: it computes gradients as for any run, and the host applies
the exact update. A device that can update its own copy offers `Program.inner_steps` instead.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from backends.base.interface import Array, BlockGradient, Leaf, Loss, Program
from protocol.exact.replica import KINDS, Replica
from protocol.exact.update import average, global_norm, moment_count, square_sum, step_scalars
from protocol.spec.manifest import Block
from protocol.spec.run_spec import OptimizerSpec


@dataclass(frozen=True, slots=True)
class InnerState:
    """What a replica has after some inner steps.

    Attributes:
        parameters: One flat array per block.
        moments: The same, for each moment of the optimizer.
        missed: By block, the updates that each tensor has missed (`Replica.missed`); empty: none.
    """

    parameters: list[Array]
    moments: list[list[Array]]
    missed: list[Array] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class InnerPlace:
    """Which inner step it is.

    Attributes:
        update: Counts the updates since the moments were zeros, with this one, from 1.
        step: Where the schedule is, from 0.
        steps: How long the schedule is.
    """

    update: int
    step: int
    steps: int


class InnerSteps(Protocol):
    """Steps of one replica on one device."""

    def begin(self, state: InnerState) -> None:
        """Go on from this state; it is copied."""

    def step(self, leaves: Sequence[Leaf], place: InnerPlace) -> Generator[None, None, Loss]:
        """Take one step on these microbatches; between two pieces it may be closed.

        Returns:
            The loss, summed over the batch.
        """

    def state(self) -> InnerState:
        """A copy of what there is now."""

    def parameters(self) -> list[Array]:
        """A copy of the parameters alone."""


@runtime_checkable
class OffersInnerSteps(Protocol):
    """A program whose device updates its own copy of the parameters."""

    def inner_steps(self, optimizer: OptimizerSpec) -> InnerSteps:
        """They; one at a time is in use, and `load` ends it."""


class HostInnerSteps:
    """See the module's text.

    Args:
        program: Computes gradients.
        blocks: Those of the manifest.
        optimizer: Of the inner steps.
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
        for values, part in zip([state.parameters, *state.moments], self._arrays(), strict=True):
            for mine, given in zip(part, values, strict=True):
                np.copyto(mine, given)
        self._replica.clear_missed()
        for mine, given in zip(self._replica.missed, state.missed, strict=bool(state.missed)):
            np.copyto(mine, given)
        self._program.load(self._replica.parameters)

    def step(self, leaves: Sequence[Leaf], place: InnerPlace) -> Generator[None, None, Loss]:
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
        norm = global_norm(square_sum(values) for values in gradients)
        if np.isfinite(norm):  # else the loss tells, or the parameters at the end do
            scalars = step_scalars(self._optimizer, place.update, place.step, place.steps, norm)
            self._replica.optimizer_step = place.update - 1
            self._replica.apply(gradients, scalars)
            self._program.load(self._replica.parameters)
            return loss
        return Loss(float("nan"), loss.weight)

    def state(self) -> InnerState:
        """See `InnerSteps`."""
        parameters, *moments = [[a.copy() for a in arrays] for arrays in self._arrays()]
        missed = [c.copy() for c in self._replica.missed] if self._replica.has_missed else []
        return InnerState(parameters, moments, missed)

    def parameters(self) -> list[Array]:
        """See `InnerSteps`."""
        return [values.copy() for values in self._replica.parameters]

    def _arrays(self) -> list[list[Array]]:
        """Parameters, then each moment: the replica's own, by block."""
        kinds = KINDS[: 1 + moment_count(self._optimizer)]
        return [self._replica.arrays(kind) for kind in kinds]


def inner_steps(
    program: Program, blocks: tuple[Block, ...], optimizer: OptimizerSpec
) -> InnerSteps:
    """On the device if it can, else with the host's update."""
    if isinstance(program, OffersInnerSteps):
        return program.inner_steps(optimizer)
    return HostInnerSteps(program, blocks, optimizer)
