"""Inner steps on a torch device, where parameters and moments stay from step to step.

The equations are those of `protocol.exact.update`, computed with torch's elementwise operations and
with sums in a fixed order, so machines with equal numerics profiles agree. The bits differ from
those of the exact update. That is harmless, because one machine computes an inner phase, like a
gradient.
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
    adapt_scalars,
    counts_updates,
    moment_count,
    step_scalars,
)
from protocol.spec.manifest import Block
from protocol.spec.sections.optimizer import OptimizerSpec

Tensors = list[torch.Tensor]


class AccumulatingProgram(Protocol):
    """The part of an eager program that inner steps use, in the device thread."""

    def load_blocks(self, parameters: list[Array]) -> None:
        """Copy values into the parameters."""

    def accumulate(self, batch: Batch, seed: int) -> torch.Tensor:
        """Run forward and backward, add to the accumulated gradients, and return the loss."""


class _TensorGroup(NamedTuple):
    """Tensors with the same scalars: parameters, gradients, each moment, and whether weights
    decay."""

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
        program: AccumulatingProgram,
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
        self._wide_dtype = torch.float64 if has_float64(device) else torch.float32
        self._moments: list[Tensors] = []
        self._missed_updates: list[int] = []
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
        return self._thread.submit(
            self._flatten_blocks, [p.data for p in self._parameters]
        ).result()

    # The following methods run in the device's thread.

    def _begin(self, state: InnerState) -> None:
        self._program.load_blocks(state.parameters)
        self._moments = [self._tensors(moment) for moment in state.moments]
        counts = [int(count) for block in state.missed_updates for count in block]
        self._missed_updates = counts or [0] * len(self._parameters)
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

    def _flatten_blocks(self, tensors: Sequence[torch.Tensor]) -> list[Array]:
        remaining = iter(tensors)
        flat_blocks = []
        for block in self._blocks:
            values = np.empty(block.elements, np.float32)
            for _, part in block.slices():
                values[part] = next(remaining).detach().reshape(-1).cpu().numpy()
            flat_blocks.append(values)
        return flat_blocks

    def _state(self) -> InnerState:
        parameters = self._flatten_blocks([p.data for p in self._parameters])
        moments = [self._flatten_blocks(moment) for moment in self._moments]
        return InnerState(parameters, moments, self._missed_by_block())

    def _missed_by_block(self) -> list[Array]:
        if not any(self._missed_updates):
            return []
        remaining = iter(self._missed_updates)
        return [np.array([next(remaining) for _ in b.tensors], np.float32) for b in self._blocks]

    @torch.no_grad()
    def _update(self, losses: Tensors, weight: float, position: SchedulePosition) -> float:
        spec = self._optimizer
        assert len(self._moments) == moment_count(spec)
        gradients_by_number = {
            index: parameter.grad
            for index, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        }
        self._clear()
        if gradients := list(gradients_by_number.values()):
            torch._foreach_mul_(gradients, 1.0 / weight if weight else 0.0)
            self._clip(gradients_by_number)
        # Clipping is done above, on the device.
        scalars = step_scalars(
            self._unclipped,
            position.update,
            position.step,
            position.steps,
            0.0,
        )
        for group, group_scalars in self._group_updates(
            gradients_by_number, scalars, position.update
        ):
            self._update_group(group, group_scalars)
        total = float(torch.stack(losses).to(self._wide_dtype).sum())
        return total if math.isfinite(total) else math.nan

    def _clip(self, gradients: dict[int, torch.Tensor]) -> None:
        """Clip by value, or by norm: each group with a clip_norm by its own norm, and all other
        tensors by their common norm."""
        spec = self._optimizer
        if spec.clip_value is not None:
            torch._foreach_clamp_min_(list(gradients.values()), -spec.clip_value)
            torch._foreach_clamp_max_(list(gradients.values()), spec.clip_value)
        limits: dict[int | None, float | None] = {None: spec.clip_norm}
        limits |= {n: clip_group.clip_norm for n, clip_group in enumerate(spec.clipped_groups)}
        for number, limit in limits.items():
            group_gradients = [g for n, g in gradients.items() if self._clip_groups[n] == number]
            if limit is None or not group_gradients:
                continue
            norm = (
                torch.stack([g.to(self._wide_dtype).square().sum() for g in group_gradients])
                .sum()
                .sqrt()
            )
            torch._foreach_mul_(
                group_gradients, torch.clamp(limit / (norm + 1e-6), max=1.0).float()
            )

    def _update_group(self, group: _TensorGroup, scalars: StepScalars) -> None:
        match self._optimizer.name:
            case "sgd":
                self._update_sgd(group, scalars)
            case "momentum" | "nesterov":
                self._update_momentum(group, scalars)
            case "adam" | "adamw":
                self._update_adam(group, scalars)
            case "rmsprop":
                self._update_rmsprop(group, scalars)
            case "adagrad":
                self._update_adagrad(group, scalars)
            case "lion":
                self._update_lion(group, scalars)
            case _:
                raise AssertionError(f"no inner step of {self._optimizer.name}")

    def _group_updates(
        self, gradients: dict[int, torch.Tensor], scalars: StepScalars, update: int
    ) -> list[tuple[_TensorGroup, StepScalars]]:
        """Group the tensors with gradients by rule and by the number of updates missed."""
        numbers_by_rule: dict[tuple[TensorRule, int], list[int]] = {}
        for number, rule in enumerate(self._rules):
            if number in gradients:
                numbers_by_rule.setdefault((rule, self._missed_updates[number]), []).append(number)
            elif counts_updates(self._optimizer):
                self._missed_updates[number] += 1
        groups_with_scalars = []
        for (rule, missed_count), numbers in numbers_by_rule.items():
            group_scalars = (
                adapt_scalars(self._optimizer, scalars, update - missed_count)
                if missed_count
                else scalars
            )
            groups_with_scalars.append(
                (self._tensor_group(numbers, gradients, rule), rule.scalars(group_scalars))
            )
        return groups_with_scalars

    def _tensor_group(
        self, numbers: list[int], gradients: dict[int, torch.Tensor], rule: TensorRule
    ) -> _TensorGroup:
        parameters = [self._parameters[n].data for n in numbers]
        moments = [[moment[n] for n in numbers] for moment in self._moments]
        return _TensorGroup(parameters, [gradients[n] for n in numbers], moments, rule.decays)

    def _add_decay(self, group: _TensorGroup, weight_decay: float) -> None:
        if group.decays:
            torch._foreach_add_(group.gradients, group.parameters, alpha=weight_decay)

    def _update_sgd(self, group: _TensorGroup, scalars: StepScalars) -> None:
        self._add_decay(group, scalars.weight_decay)
        torch._foreach_add_(group.parameters, group.gradients, alpha=-scalars.learning_rate)

    def _update_momentum(self, group: _TensorGroup, scalars: StepScalars) -> None:
        (velocity,), gradients = group.moments, group.gradients
        self._add_decay(group, scalars.weight_decay)
        torch._foreach_mul_(velocity, scalars.momentum)
        torch._foreach_add_(velocity, gradients)
        if self._optimizer.name == "nesterov":
            torch._foreach_add_(gradients, velocity, alpha=scalars.momentum)
            velocity = gradients
        torch._foreach_add_(group.parameters, velocity, alpha=-scalars.learning_rate)

    def _update_adam(self, group: _TensorGroup, scalars: StepScalars) -> None:
        first_moment, second_moment = group.moments[:2]
        gradients = group.gradients
        if self._optimizer.name == "adam":
            self._add_decay(group, scalars.weight_decay)
        elif group.decays:
            torch._foreach_mul_(group.parameters, scalars.decay_factor)
        torch._foreach_lerp_(first_moment, gradients, scalars.one_minus_beta1)
        torch._foreach_mul_(second_moment, scalars.beta2)
        torch._foreach_addcmul_(second_moment, gradients, gradients, scalars.one_minus_beta2)
        if self._optimizer.amsgrad:
            torch._foreach_maximum_(group.moments[2], second_moment)
            second_moment = group.moments[2]
        roots = [values.sqrt() for values in second_moment]
        torch._foreach_mul_(roots, scalars.root_correction)
        torch._foreach_add_(roots, scalars.epsilon)
        torch._foreach_addcdiv_(group.parameters, first_moment, roots, -scalars.step_size)

    def _update_adagrad(self, group: _TensorGroup, scalars: StepScalars) -> None:
        (squares,), gradients = group.moments, group.gradients
        self._add_decay(group, scalars.weight_decay)
        torch._foreach_addcmul_(squares, gradients, gradients, 1.0)
        roots = [values.sqrt() for values in squares]
        torch._foreach_add_(roots, scalars.epsilon)
        torch._foreach_addcdiv_(group.parameters, gradients, roots, -scalars.learning_rate)

    def _update_rmsprop(self, group: _TensorGroup, scalars: StepScalars) -> None:
        squares, gradients = group.moments[0], group.gradients
        self._add_decay(group, scalars.weight_decay)
        torch._foreach_mul_(squares, scalars.beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, scalars.one_minus_beta2)
        variances = squares
        if self._optimizer.centered:
            means = group.moments[-1]
            torch._foreach_lerp_(means, gradients, scalars.one_minus_beta2)
            variances = [v.addcmul(m, m, value=-1.0) for v, m in zip(squares, means, strict=True)]
            torch._foreach_clamp_min_(variances, 0.0)
        roots = [values.sqrt() for values in variances]
        torch._foreach_add_(roots, scalars.epsilon)
        if not self._optimizer.momentum:
            torch._foreach_addcdiv_(group.parameters, gradients, roots, -scalars.learning_rate)
            return
        velocity = group.moments[1]
        torch._foreach_mul_(velocity, scalars.momentum)
        torch._foreach_addcdiv_(velocity, gradients, roots)
        torch._foreach_add_(group.parameters, velocity, alpha=-scalars.learning_rate)

    def _update_lion(self, group: _TensorGroup, scalars: StepScalars) -> None:
        (moment,), gradients = group.moments, group.gradients
        if group.decays:
            torch._foreach_mul_(group.parameters, scalars.decay_factor)
        mixed = [values * scalars.beta1 for values in moment]
        torch._foreach_add_(mixed, gradients, alpha=scalars.one_minus_beta1)
        signs = [values.sign() for values in mixed]
        torch._foreach_add_(group.parameters, signs, alpha=-scalars.learning_rate)
        torch._foreach_mul_(moment, scalars.beta2)
        torch._foreach_add_(moment, gradients, alpha=scalars.one_minus_beta2)
