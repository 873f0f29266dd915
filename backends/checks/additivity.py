"""Check that a loss is a sum over samples: the losses of a batch's parts add up to its own loss.

Otherwise results would depend on how a step is divided into microbatches. The check compares the
loss and, on request, the gradient of each trained tensor. Random draws are replaced by steady ones
(`steady_draws`). The tolerance for rounding is measured: it is a multiple of the change of the
batch's loss when its operators round differently.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import torch

from backends.checks.steady_draws import LEVELS, SteadyDraws, TooManyDrawsError
from backends.checks.trainable_checks import WHOLE_MICROBATCH
from protocol.base.errors import SamestepError

T = TypeVar("T")

Arrays = Mapping[str, torch.Tensor]
LossFunction = Callable[[Any, Arrays], torch.Tensor]
Gradients = dict[str, torch.Tensor]

_ROUNDING_SEEDS: Final = (11, 12, 13)
"""Seeds of the repeated computations that measure the effect of rounding."""
_SPREAD_MULTIPLE: Final = 64
"""Tolerance as a multiple of the measured spread."""
_SPACINGS: Final = 4
"""Smallest relative tolerance, in machine epsilons of the narrowest type in the computation."""
_NEEDS_GRADIENTS: Final = "does not require grad"
"""Part of torch's error for a loss that differentiates under no_grad."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The loss and gradients of a batch.

    Attributes:
        loss: The loss.
        gradients: Gradients by name, of the tensors that the loss reaches.
        sizes: The largest magnitude in each gradient.
        requires_grad: Whether the loss depends on a trained tensor.
        has_draws: Whether the computation draws random numbers.
        has_undecided_draws: Whether some draws cannot be made steady.
        epsilon: Machine epsilon of the narrowest floating type seen.
    """

    loss: float
    gradients: Gradients
    sizes: Mapping[str, float]
    requires_grad: bool
    has_draws: bool
    has_undecided_draws: bool
    epsilon: float

    @property
    def has_gradients(self) -> bool:
        """Whether any gradient is not zero."""
        return any(self.sizes.values())

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are finite."""
        return math.isfinite(self.loss) and all(map(math.isfinite, self.sizes.values()))


class Parts:
    """The losses of a batch's parts, and the sum of their gradients."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: Gradients = {}
        self.sizes: dict[str, float] = {}
        """The sum of the largest magnitudes of each tensor's gradients."""
        self.has_draws = self.has_undecided_draws = False
        self.is_finite = True
        self.epsilon = 0.0

    def add(self, part: Evaluation) -> None:
        """Add a part; the same part may be added several times."""
        self.losses.append(part.loss)
        self.has_draws |= part.has_draws
        self.has_undecided_draws |= part.has_undecided_draws
        self.is_finite &= part.is_finite
        self.epsilon = max(self.epsilon, part.epsilon)
        for name, gradient in part.gradients.items():
            previous = self.gradients.get(name)
            self.gradients[name] = gradient if previous is None else previous + gradient
            self.sizes[name] = self.sizes.get(name, 0.0) + part.sizes[name]

    @staticmethod
    def of(*parts: Evaluation) -> Parts:
        """Return the sum of these parts."""
        total = Parts()
        for part in parts:
            total.add(part)
        return total


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """A batch whose loss or gradient is not the sum over its parts.

    Attributes:
        batch_loss: The batch's loss.
        part_losses: The loss of each part.
        tensor: The tensor whose gradient does not add up; None if the loss does not.
        difference: The largest difference in the loss or in that gradient.
        tolerance: The tolerance that the difference exceeds.
    """

    batch_loss: float
    part_losses: tuple[float, ...]
    tensor: str | None
    difference: float
    tolerance: float

    @property
    def is_mean(self) -> bool:
        """Whether the batch's loss looks like a mean of its parts' losses."""
        lo, hi = min(self.part_losses) - self.tolerance, max(self.part_losses) + self.tolerance
        return self.tensor is None and lo <= self.batch_loss <= hi


class LossTrial:
    """Computes a loss with steady draws, and with the host's generators always in the same state.

    Args:
        module: The module, in training or evaluation mode.
        loss: The loss of the module and a batch.
        trained_tensors: Tensors whose gradients to compare; empty to compare only the loss.
        level: Quantile of the draws; see `SteadyDraws`.
        accumulates: Whether to compute gradients with backward, as a device does, so that all hooks
            run; the module's own gradients are restored.

    Attributes:
        last_batch: The arrays of the last batch.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: LossFunction,
        trained_tensors: Mapping[str, torch.Tensor],
        level: float = LEVELS[0],
        *,
        accumulates: bool = False,
    ) -> None:
        self._module = module
        self._loss = loss
        self._trained_tensors = trained_tensors
        self._level = level
        self._accumulates = accumulates
        self.last_batch: Arrays = {}

    def evaluate(self, arrays: Arrays, jitter: int | None = None) -> Evaluation:
        """Compute the loss and gradients of a batch.

        Raises:
            TooManyDrawsError: The loss draws too often.
            Exception: Whatever the loss or its backward raises.
        """
        mode = SteadyDraws(self._level, jitter)
        # The loss may make leaves of its inputs, or change them.
        self.last_batch = batch = {
            array_name: array.detach().clone() for array_name, array in arrays.items()
        }
        with seed_generators(0), mode:
            if not self._trained_tensors:
                loss = call_under_no_grad(lambda: self._loss(self._module, batch))
                gradients: Gradients = {}
            else:
                with torch.enable_grad():
                    loss = self._loss(self._module, batch)
                    gradients = self._gradients(loss)
        has_draws = mode.has_draws or mode.has_undecided_draws
        sizes = {name: _max_magnitude(gradient) for name, gradient in gradients.items()}
        requires_grad = loss.requires_grad
        value = float(loss.detach())
        return Evaluation(
            value,
            gradients,
            sizes,
            requires_grad,
            has_draws,
            mode.has_undecided_draws,
            mode.epsilon,
        )

    def _gradients(self, loss: torch.Tensor) -> Gradients:
        if not loss.requires_grad:
            return {}
        tensors = list(self._trained_tensors.values())
        gradients: Sequence[torch.Tensor | None]
        if self._accumulates:
            gradients = _accumulate_gradients(loss, tensors, self._module)
        else:
            gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
        return {
            name: (gradient.to_dense() if gradient.is_sparse else gradient).detach()
            for name, gradient in zip(self._trained_tensors, gradients, strict=True)
            if gradient is not None and gradient.numel()
        }

    def find_discrepancy(self, batch: Arrays, parts: Parts) -> Discrepancy | None:
        """Compare a batch with the sum of its parts; return None if they agree or cannot be
        compared."""
        evaluation = self.evaluate(batch)
        if any(
            (
                evaluation.has_undecided_draws,
                parts.has_undecided_draws,
                not evaluation.is_finite,
                not parts.is_finite,
            )
        ):
            return None
        differences, tolerances = (
            _differences(evaluation, parts),
            _smallest_tolerances(evaluation, parts),
        )
        if all(difference <= tolerances[name] for name, difference in differences.items()):
            return None
        for name, difference in self._measure_rounding(batch, evaluation).items():
            tolerances[name] += _SPREAD_MULTIPLE * difference
        excesses = {
            name: difference
            for name, difference in differences.items()
            if difference > tolerances[name]
        }
        if not excesses:
            return None
        name = (
            None
            if None in excesses
            else max(excesses, key=lambda tensor_name: excesses[tensor_name])
        )
        return Discrepancy(
            evaluation.loss, tuple(parts.losses), name, excesses[name], tolerances[name]
        )

    def _measure_rounding(self, batch: Arrays, reference: Evaluation) -> dict[str | None, float]:
        """Return how far the loss (key None) and gradients move with different rounding."""
        largest_by_name: dict[str | None, float] = {}
        for seed in _ROUNDING_SEEDS:
            for name, difference in _differences(
                self.evaluate(batch, seed), Parts.of(reference)
            ).items():
                largest_by_name[name] = max(largest_by_name.get(name, 0.0), difference)
        return largest_by_name


def _accumulate_gradients(
    loss: torch.Tensor, tensors: Sequence[torch.Tensor], module: torch.nn.Module
) -> list[torch.Tensor | None]:
    leaves = list({id(leaf): leaf for leaf in (*tensors, *module.parameters())}.values())
    saved_gradients = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        return [leaf.grad for leaf in tensors]
    finally:
        for leaf, gradient in zip(leaves, saved_gradients, strict=True):
            leaf.grad = gradient


def _max_magnitude(values: torch.Tensor) -> float:
    return float(values.abs().max())


def _differences(evaluation: Evaluation, parts: Parts) -> dict[str | None, float]:
    """Return the largest difference in the loss (key None) and in each gradient."""
    differences: dict[str | None, float] = {
        None: abs(math.fsum([evaluation.loss, *(-part_loss for part_loss in parts.losses)]))
    }
    for name in {**evaluation.gradients, **parts.gradients}:
        batch_gradient, parts_gradient = evaluation.gradients.get(name), parts.gradients.get(name)
        if batch_gradient is None or parts_gradient is None:
            only_gradient = batch_gradient if parts_gradient is None else parts_gradient
            assert only_gradient is not None
            differences[name] = _max_magnitude(only_gradient)
        else:
            differences[name] = _max_magnitude(batch_gradient - parts_gradient)
    return differences


def _smallest_tolerances(evaluation: Evaluation, parts: Parts) -> dict[str | None, float]:
    """Return the smallest tolerance for the loss (key None) and for each gradient, by their
    sizes."""
    spacing = _SPACINGS * max(evaluation.epsilon, parts.epsilon)
    sizes = dict(parts.sizes)
    for name, size in evaluation.sizes.items():
        sizes[name] = sizes.get(name, 0.0) + size
    # A gradient that is pure rounding error is as large as the terms that cancel.
    largest_size = max(sizes.values(), default=0.0)
    losses = abs(evaluation.loss) + sum(map(abs, parts.losses))
    return {
        None: spacing * losses,
        **{
            tensor_name: spacing * (tensor_size + largest_size)
            for tensor_name, tensor_size in sizes.items()
        },
    }


def call_under_no_grad(function: Callable[[], T]) -> T:
    """Call `function` under no_grad, or with gradients if the loss itself differentiates.

    A gradient penalty, a force or a PDE residual is a derivative with respect to inputs.
    """
    try:
        with torch.no_grad():
            return function()
    except RuntimeError as error:
        if _NEEDS_GRADIENTS not in str(error):
            raise
    with torch.enable_grad():
        return function()


def refuse_unlike_halves(
    trial: LossTrial, batch: Arrays, halves: Sequence[Arrays], samples: int
) -> None:
    """Refuse a loss that does not add up over samples.

    Args:
        trial: Computes the loss.
        batch: A batch.
        halves: The batch's two halves.
        samples: Number of samples in the batch.

    Raises:
        SamestepError: The losses differ by more than rounding.
    """
    try:
        discrepancy = trial.find_discrepancy(batch, Parts.of(*map(trial.evaluate, halves)))
    except TooManyDrawsError:
        return
    if discrepancy is not None:
        raise SamestepError(
            f"expected a loss summed over samples, got {discrepancy.batch_loss:g} for {samples} "
            f"samples and {sum(discrepancy.part_losses):g} for their halves; a mean, a contrastive "
            f"or a balancing loss cannot be split: {WHOLE_MICROBATCH}"
        )


@contextmanager
def seed_generators(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Context in which the global generators start from a seed; their states are restored after it.

    Args:
        seed: The seed.
        device: An accelerator whose generator is seeded as well.
    """
    saved_states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    device_module: Any = None
    if device is not None and device.type != "cpu":
        device_module = torch.get_device_module(device)
        state = device_module.get_rng_state(device)
        device_module.manual_seed(seed)
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (the global generator is what collators draw from)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(saved_states[0])
        np.random.set_state(saved_states[1])  # noqa: NPY002
        random.setstate(saved_states[2])
        if device_module is not None:
            device_module.set_rng_state(state, device)
