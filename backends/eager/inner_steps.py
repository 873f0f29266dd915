"""Inner steps on a torch device, where parameters and moments stay from step to step.

The rules are those of `protocol.exact.update` in torch's operations: elementwise ones, and sums in
a fixed order, so machines with equal numerics profiles agree. The bits differ from those of the
exact update, which is fine: like a gradient, an inner phase is computed by one machine.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, Protocol

import numpy as np
import torch

from backends.base.inner_steps import InnerState, SchedulePosition
from backends.base.interface import Array, Batch, Leaf, Loss
from backends.eager.torch_devices import has_float64
from protocol.exact.parameter_groups import TensorRule, tensor_rule
from protocol.exact.update import (
    StepScalars,
    counts_updates,
    moment_count,
    scalars_after,
    step_scalars,
)
from protocol.spec.manifest import Block
from protocol.spec.sections.optimizer import OptimizerSpec

Tensors = list[torch.Tensor]


class Accumulates(Protocol):
    """The part of an eager program that inner steps use, in the device thread."""

    def load_blocks(self, parameters: list[Array]) -> None:
        """Copy values into the parameters."""

    def accumulate(self, batch: Batch, seed: int) -> torch.Tensor:
        """Run forward and backward, add to the accumulated gradients, and return the loss."""


class _Chosen(NamedTuple):
    """Tensors with the same scalars: values, gradients, each moment, and whether they decay."""

    parameters: Tensors
    gradients: Tensors
    moments: list[Tensors]
    decays: bool


class EagerInnerSteps:
    """Implements `backends.base.inner_steps.InnerSteps`; see the module's docstring.

    Args:
        program: Computes the gradients.
        parameters: Trained parameters by tensor name.
        blocks: The manifest's blocks.
        optimizer: The inner optimizer.
        thread: The device's thread.
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
        groups = tuple(g.model_copy(update={"clip_norm": None}) for g in optimizer.groups)
        self._unclipped = optimizer.model_copy(
            update={"clip_norm": None, "clip_value": None, "groups": groups}
        )
        self._thread = thread
        names = [tensor.name for block in blocks for tensor in block.tensors]
        self._parameters = [parameters[name] for name in names]
        self._rules = [tensor_rule(name, self._unclipped) for name in names]
        self._clip_groups = [tensor_rule(name, optimizer).clip_group for name in names]
        device = next(iter(parameters.values())).device
        self._wide = torch.float64 if has_float64(device) else torch.float32
        self._moments: list[Tensors] = []
        self._missed: list[int] = []
        """Missed updates by tensor, as in `Replica.missed`."""

    def begin(self, state: InnerState) -> None:
        """See `InnerSteps`."""
        self._thread.submit(self._begin, state).result()

    def step(
        self, leaves: Sequence[Leaf], position: SchedulePosition
    ) -> Generator[None, None, Loss]:
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
        total = self._thread.submit(self._update, losses, weight, position).result()
        return Loss(total, weight)

    def state(self) -> InnerState:
        """See `InnerSteps`."""
        return self._thread.submit(self._state).result()

    def parameters(self) -> list[Array]:
        """See `InnerSteps`."""
        return self._thread.submit(self._flat, [p.data for p in self._parameters]).result()

    # The following methods run in the device's thread.

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
            torch.tensor(values[part].reshape(tensor.shape), device=device)
            for block, values in zip(self._blocks, arrays, strict=True)
            for tensor, part in block.slices()
        ]

    def _flat(self, tensors: Sequence[torch.Tensor]) -> list[Array]:
        left = iter(tensors)
        found = []
        for block in self._blocks:
            values = np.empty(block.elements, np.float32)
            for _, part in block.slices():
                values[part] = next(left).detach().reshape(-1).cpu().numpy()
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
    def _update(self, losses: Tensors, weight: float, position: SchedulePosition) -> float:
        spec = self._optimizer
        assert len(self._moments) == moment_count(spec)
        reached = {n: p.grad for n, p in enumerate(self._parameters) if p.grad is not None}
        self._clear()
        if gradients := list(reached.values()):
            torch._foreach_mul_(gradients, 1.0 / weight if weight else 0.0)
            self._clip(reached)
        # Clipping is done above, on the device.
        scalars = step_scalars(
            self._unclipped,
            position.update,
            position.step,
            position.steps,
            0.0,
        )
        for chosen, own_scalars in self._updates(reached, scalars, position.update):
            self._take(chosen, own_scalars)
        total = float(torch.stack(losses).to(self._wide).sum())
        return total if math.isfinite(total) else math.nan

    def _clip(self, reached: dict[int, torch.Tensor]) -> None:
        """Clip by value, or by the norm of each group with a clip_norm and of the rest."""
        spec = self._optimizer
        if spec.clip_value is not None:
            torch._foreach_clamp_min_(list(reached.values()), -spec.clip_value)
            torch._foreach_clamp_max_(list(reached.values()), spec.clip_value)
        limits: dict[int | None, float | None] = {None: spec.clip_norm}
        limits |= {n: group.clip_norm for n, group in enumerate(spec.clipped_groups)}
        for number, limit in limits.items():
            chosen = [g for n, g in reached.items() if self._clip_groups[n] == number]
            if limit is None or not chosen:
                continue
            norm = torch.stack([g.to(self._wide).square().sum() for g in chosen]).sum().sqrt()
            torch._foreach_mul_(chosen, torch.clamp(limit / (norm + 1e-6), max=1.0).float())

    def _take(self, chosen: _Chosen, scalars: StepScalars) -> None:
        match self._optimizer.name:
            case "sgd":
                self._sgd(chosen, scalars)
            case "momentum" | "nesterov":
                self._momentum(chosen, scalars)
            case "adam" | "adamw":
                self._adam(chosen, scalars)
            case "rmsprop":
                self._rmsprop(chosen, scalars)
            case "adagrad":
                self._adagrad(chosen, scalars)
            case "lion":
                self._lion(chosen, scalars)
            case _:
                raise AssertionError(f"no inner step of {self._optimizer.name}")

    def _updates(
        self, reached: dict[int, torch.Tensor], scalars: StepScalars, update: int
    ) -> list[tuple[_Chosen, StepScalars]]:
        """Group the tensors with gradients by rule and by the number of updates missed."""
        groups: dict[tuple[TensorRule, int], list[int]] = {}
        for number, rule in enumerate(self._rules):
            if number in reached:
                groups.setdefault((rule, self._missed[number]), []).append(number)
            elif counts_updates(self._optimizer):
                self._missed[number] += 1
        found = []
        for (rule, missed), numbers in groups.items():
            own = scalars_after(self._optimizer, scalars, update - missed) if missed else scalars
            found.append((self._chosen(numbers, reached, rule), rule.scalars(own)))
        return found

    def _chosen(
        self, numbers: list[int], reached: dict[int, torch.Tensor], rule: TensorRule
    ) -> _Chosen:
        parameters = [self._parameters[n].data for n in numbers]
        moments = [[moment[n] for n in numbers] for moment in self._moments]
        return _Chosen(parameters, [reached[n] for n in numbers], moments, rule.decays)

    def _with_decay(self, chosen: _Chosen, weight_decay: float) -> None:
        if chosen.decays:
            torch._foreach_add_(chosen.gradients, chosen.parameters, alpha=weight_decay)

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

    def _adam(self, chosen: _Chosen, scalars: StepScalars) -> None:
        first, second = chosen.moments[:2]
        gradients = chosen.gradients
        if self._optimizer.name == "adam":
            self._with_decay(chosen, scalars.weight_decay)
        elif chosen.decays:
            torch._foreach_mul_(chosen.parameters, scalars.decay_factor)
        torch._foreach_lerp_(first, gradients, scalars.one_minus_beta1)
        torch._foreach_mul_(second, scalars.beta2)
        torch._foreach_addcmul_(second, gradients, gradients, scalars.one_minus_beta2)
        if self._optimizer.amsgrad:
            torch._foreach_maximum_(chosen.moments[2], second)
            second = chosen.moments[2]
        roots = [values.sqrt() for values in second]
        torch._foreach_mul_(roots, scalars.root_correction)
        torch._foreach_add_(roots, scalars.epsilon)
        torch._foreach_addcdiv_(chosen.parameters, first, roots, -scalars.step_size)

    def _adagrad(self, chosen: _Chosen, scalars: StepScalars) -> None:
        (squares,), gradients = chosen.moments, chosen.gradients
        self._with_decay(chosen, scalars.weight_decay)
        torch._foreach_addcmul_(squares, gradients, gradients, 1.0)
        roots = [values.sqrt() for values in squares]
        torch._foreach_add_(roots, scalars.epsilon)
        torch._foreach_addcdiv_(chosen.parameters, gradients, roots, -scalars.learning_rate)

    def _rmsprop(self, chosen: _Chosen, scalars: StepScalars) -> None:
        squares, gradients = chosen.moments[0], chosen.gradients
        self._with_decay(chosen, scalars.weight_decay)
        torch._foreach_mul_(squares, scalars.beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, scalars.one_minus_beta2)
        variances = squares
        if self._optimizer.centered:
            means = chosen.moments[-1]
            torch._foreach_lerp_(means, gradients, scalars.one_minus_beta2)
            variances = [v.addcmul(m, m, value=-1.0) for v, m in zip(squares, means, strict=True)]
            torch._foreach_clamp_min_(variances, 0.0)
        roots = [values.sqrt() for values in variances]
        torch._foreach_add_(roots, scalars.epsilon)
        if not self._optimizer.momentum:
            torch._foreach_addcdiv_(chosen.parameters, gradients, roots, -scalars.learning_rate)
            return
        velocity = chosen.moments[1]
        torch._foreach_mul_(velocity, scalars.momentum)
        torch._foreach_addcdiv_(velocity, gradients, roots)
        torch._foreach_add_(chosen.parameters, velocity, alpha=-scalars.learning_rate)

    def _lion(self, chosen: _Chosen, scalars: StepScalars) -> None:
        (moment,), gradients = chosen.moments, chosen.gradients
        if chosen.decays:
            torch._foreach_mul_(chosen.parameters, scalars.decay_factor)
        mixed = [values * scalars.beta1 for values in moment]
        torch._foreach_add_(mixed, gradients, alpha=scalars.one_minus_beta1)
        signs = [values.sign() for values in mixed]
        torch._foreach_add_(chosen.parameters, signs, alpha=-scalars.learning_rate)
        torch._foreach_mul_(moment, scalars.beta2)
        torch._foreach_add_(moment, gradients, alpha=scalars.one_minus_beta2)
