"""Inner steps on torch's device: parameters and moments stay there from one step to the next.

The rules are those of `protocol.exact.update`, with torch's operations: elementwise ones and sums
in a fixed order, so the same on like machines. They are not the exact update's bits, and need not
be: a stretch is one machine's work, as a gradient is.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, Protocol

import numpy as np
import torch

from backends.base.inner_steps import InnerPlace, InnerState
from backends.base.interface import Array, Batch, Leaf, Loss
from protocol.exact.update import (
    StepScalars,
    counts_updates,
    decays,
    moment_count,
    scalars_after,
    step_scalars,
)
from protocol.spec.manifest import Block
from protocol.spec.run_spec import OptimizerSpec

Tensors = list[torch.Tensor]


class Accumulates(Protocol):
    """What of an eager program the steps take; both run in the device's thread."""

    def load_blocks(self, parameters: list[Array]) -> None:
        """Copy values into the parameters."""

    def accumulate(self, batch: Batch, seed: int) -> torch.Tensor:
        """Forward and backward; gradients are added to those that are there. Gives the loss."""


class _Chosen(NamedTuple):
    """Tensors that are updated alike: values, gradients, each moment, and which of them decay."""

    parameters: Tensors
    gradients: Tensors
    moments: list[Tensors]
    decayed: list[int]


class EagerInnerSteps:
    """See the module's text, and `backends.base.inner_steps.InnerSteps`.

    Args:
        program: Computes gradients.
        parameters: By tensor's name.
        blocks: Those of the manifest.
        optimizer: Of the inner steps.
        thread: The device's.
    """

    def __init__(
        self,
        program: Accumulates,
        parameters: dict[str, torch.nn.Parameter],
        blocks: tuple[Block, ...],
        optimizer: OptimizerSpec,
        thread: Executor,
    ) -> None:
        self._program = program
        self._blocks = blocks
        self._optimizer = optimizer
        self._thread = thread
        names = [tensor.name for block in blocks for tensor in block.tensors]
        self._parameters = [parameters[name] for name in names]
        self._decays = [decays(name, optimizer) for name in names]
        self._moments: list[Tensors] = []
        self._missed: list[int] = []
        """By tensor, as `Replica.missed`."""

    def begin(self, state: InnerState) -> None:
        """See `InnerSteps`."""
        self._thread.submit(self._begin, state).result()

    def step(self, leaves: Sequence[Leaf], place: InnerPlace) -> Generator[None, None, Loss]:
        """See `InnerSteps`."""
        losses = []
        try:
            for batch, seed in leaves:
                losses.append(self._thread.submit(self._program.accumulate, batch, seed).result())
                yield
        except GeneratorExit:
            self._thread.submit(self._clear).result()
            raise
        weight = sum(batch.weight for batch, _ in leaves)
        total = self._thread.submit(self._update, losses, weight, place).result()
        return Loss(total, weight)

    def state(self) -> InnerState:
        """See `InnerSteps`."""
        return self._thread.submit(self._state).result()

    def parameters(self) -> list[Array]:
        """See `InnerSteps`."""
        return self._thread.submit(self._flat, [p.data for p in self._parameters]).result()

    # In the device's thread.

    def _begin(self, state: InnerState) -> None:
        self._program.load_blocks(state.parameters)
        self._moments = [self._tensors(moment) for moment in state.moments]
        counts = [int(count) for block in state.missed for count in block]
        self._missed = counts or [0] * len(self._parameters)
        self._clear()

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _tensors(self, arrays: Sequence[Array]) -> Tensors:
        device = self._parameters[0].device
        return [
            torch.tensor(values[place].reshape(tensor.shape), device=device)
            for block, values in zip(self._blocks, arrays, strict=True)
            for tensor, place in block.slices()
        ]

    def _flat(self, tensors: Sequence[torch.Tensor]) -> list[Array]:
        left = iter(tensors)
        found = []
        for block in self._blocks:
            values = np.empty(block.elements, np.float32)
            for _, place in block.slices():
                values[place] = next(left).detach().reshape(-1).cpu().numpy()
            found.append(values)
        return found

    def _state(self) -> InnerState:
        parameters = self._flat([p.data for p in self._parameters])
        moments = [self._flat(moment) for moment in self._moments]
        return InnerState(parameters, moments, self._missed_by_block())

    def _missed_by_block(self) -> list[Array]:
        if not any(self._missed):
            return []
        left = iter(self._missed)
        return [np.array([next(left) for _ in b.tensors], np.float32) for b in self._blocks]

    @torch.no_grad()
    def _update(self, losses: Tensors, weight: float, place: InnerPlace) -> float:
        spec = self._optimizer
        assert len(self._moments) == moment_count(spec)
        reached = {n: p.grad for n, p in enumerate(self._parameters) if p.grad is not None}
        self._clear()
        if gradients := list(reached.values()):
            torch._foreach_mul_(gradients, 1.0 / weight if weight else 0.0)
        if gradients and spec.clip_norm is not None:
            squares = torch.stack([g.double().square().sum() for g in gradients])
            norm = squares.sum().sqrt()
            clip = torch.clamp(spec.clip_norm / (norm + 1e-6), max=1.0).float()
            torch._foreach_mul_(gradients, clip)
        # The clip is taken above, on the device: none is left.
        scalars = step_scalars(
            spec.model_copy(update={"clip_norm": None}), place.update, place.step, place.steps, 0.0
        )
        for chosen, own_scalars in self._updates(reached, scalars, place.update):
            match spec.name:
                case "sgd":
                    self._sgd(chosen, own_scalars)
                case "momentum" | "nesterov":
                    self._momentum(chosen, own_scalars)
                case "adamw":
                    self._adamw(chosen, own_scalars)
        total = float(torch.stack(losses).double().sum())
        return total if math.isfinite(total) else math.nan

    def _updates(
        self, reached: dict[int, torch.Tensor], scalars: StepScalars, update: int
    ) -> list[tuple[_Chosen, StepScalars]]:
        """The tensors that have a gradient, those together that have missed as many updates."""
        by_count: dict[int, list[int]] = {}
        for number in range(len(self._parameters)):
            if number in reached:
                by_count.setdefault(self._missed[number], []).append(number)
            elif counts_updates(self._optimizer):
                self._missed[number] += 1
        return [
            (
                self._chosen(numbers, reached),
                scalars_after(self._optimizer, scalars, update - missed) if missed else scalars,
            )
            for missed, numbers in by_count.items()
        ]

    def _chosen(self, numbers: list[int], reached: dict[int, torch.Tensor]) -> _Chosen:
        parameters = [self._parameters[n].data for n in numbers]
        decayed = [i for i, n in enumerate(numbers) if self._decays[n]]
        moments = [[moment[n] for n in numbers] for moment in self._moments]
        return _Chosen(parameters, [reached[n] for n in numbers], moments, decayed)

    def _with_decay(self, chosen: _Chosen, weight_decay: float) -> None:
        if not weight_decay or not chosen.decayed:
            return
        gradients = [chosen.gradients[i] for i in chosen.decayed]
        parameters = [chosen.parameters[i] for i in chosen.decayed]
        torch._foreach_add_(gradients, parameters, alpha=weight_decay)

    def _sgd(self, chosen: _Chosen, scalars: StepScalars) -> None:
        self._with_decay(chosen, scalars.weight_decay)
        torch._foreach_add_(chosen.parameters, chosen.gradients, alpha=-scalars.learning_rate)

    def _momentum(self, chosen: _Chosen, scalars: StepScalars) -> None:
        (velocity,), gradients = chosen.moments, chosen.gradients
        self._with_decay(chosen, scalars.weight_decay)
        torch._foreach_mul_(velocity, scalars.momentum)
        torch._foreach_add_(velocity, gradients)
        if self._optimizer.name == "nesterov":
            torch._foreach_add_(gradients, velocity, alpha=scalars.momentum)
            velocity = gradients
        torch._foreach_add_(chosen.parameters, velocity, alpha=-scalars.learning_rate)

    def _adamw(self, chosen: _Chosen, scalars: StepScalars) -> None:
        (first, second), gradients = chosen.moments, chosen.gradients
        if decayed := [chosen.parameters[i] for i in chosen.decayed]:
            torch._foreach_mul_(decayed, scalars.decay_factor)
        torch._foreach_lerp_(first, gradients, scalars.one_minus_beta1)
        torch._foreach_mul_(second, scalars.beta2)
        torch._foreach_addcmul_(second, gradients, gradients, scalars.one_minus_beta2)
        roots = [values.sqrt() for values in second]
        torch._foreach_mul_(roots, scalars.root_correction)
        torch._foreach_add_(roots, scalars.epsilon)
        torch._foreach_addcdiv_(chosen.parameters, first, roots, -scalars.step_size)
