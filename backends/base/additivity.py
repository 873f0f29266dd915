"""Check that a loss is a sum over samples: the losses of a batch's parts add up to the batch's.

Otherwise results would depend on how a step is divided into microbatches. The check compares the
loss and, on request, the gradient of each trained tensor. Random draws are replaced by steady ones
(`backends.base.steady_draws`). The tolerance for rounding is measured: by how far the batch's loss
moves when its operators round differently.
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

from backends.base.steady_draws import LEVELS, SteadyDraws, TooManyDrawsError
from backends.base.trainable_checks import WHOLE_MICROBATCH
from protocol.base.errors import SamestepError

T = TypeVar("T")

Arrays = Mapping[str, torch.Tensor]
LossFunction = Callable[[Any, Arrays], torch.Tensor]
Gradients = dict[str, torch.Tensor]

_SPREADS: Final = (11, 12, 13)
"""Seeds of the computations that measure rounding."""
_TIMES_SPREAD: Final = 64
"""Tolerance as a multiple of the measured spread."""
_SPACINGS: Final = 4
"""Smallest tolerance, in spacings of the narrowest type that was computed in."""
_NEEDS_GRADIENTS: Final = "does not require grad"
"""Part of torch's error for a loss that differentiates under no_grad."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The loss and gradients of a batch.

    Attributes:
        loss: The loss.
        gradients: Gradients by tensor name, of those that the loss reaches.
        sizes: The largest magnitude in each gradient.
        requires_grad: Whether the loss depends on a trained tensor.
        drew: Whether anything was drawn at random.
        undecided: Whether some draws cannot be made steady.
        epsilon: Machine epsilon of the narrowest floating type seen.
    """

    loss: float
    gradients: Gradients
    sizes: Mapping[str, float]
    requires_grad: bool
    drew: bool
    undecided: bool
    epsilon: float

    @property
    def counts(self) -> bool:
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
        self.drew = self.undecided = False
        self.is_finite = True
        self.epsilon = 0.0

    def add(self, part: Evaluation) -> None:
        """Add a part; the same part may be added several times."""
        self.losses.append(part.loss)
        self.drew |= part.drew
        self.undecided |= part.undecided
        self.is_finite &= part.is_finite
        self.epsilon = max(self.epsilon, part.epsilon)
        for name, gradient in part.gradients.items():
            previous = self.gradients.get(name)
            self.gradients[name] = gradient if previous is None else previous + gradient
            self.sizes[name] = self.sizes.get(name, 0.0) + part.sizes[name]

    @staticmethod
    def of(*parts: Evaluation) -> Parts:
        """Return the sum of these parts."""
        made = Parts()
        for each in parts:
            made.add(each)
        return made


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """A batch whose parts do not add up to it.

    Attributes:
        whole: The batch's loss.
        parts: The loss of each part.
        tensor: The tensor whose gradient does not add up; None if the loss does not.
        off: The largest difference in the loss or in that gradient.
        near: The tolerance.
    """

    whole: float
    parts: tuple[float, ...]
    tensor: str | None
    off: float
    near: float

    @property
    def is_mean(self) -> bool:
        """Whether the batch's loss looks like a mean of its parts' losses."""
        lo, hi = min(self.parts) - self.near, max(self.parts) + self.near
        return self.tensor is None and lo <= self.whole <= hi


class LossTrial:
    """Computes a loss with steady draws, always from the same state of all generators.

    Args:
        module: The module, in training or evaluation mode.
        loss: The loss of the module and a batch.
        trained: Tensors whose gradients to compare; empty to compare only the loss.
        level: Quantile of the draws; see `SteadyDraws`.
        accumulates: Compute gradients with backward, as a device does, so that all hooks run; the
            module's own gradients are restored.

    Attributes:
        given: The arrays of the last batch.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: LossFunction,
        trained: Mapping[str, torch.Tensor],
        level: float = LEVELS[0],
        *,
        accumulates: bool = False,
    ) -> None:
        self._module = module
        self._loss = loss
        self._trained = trained
        self._level = level
        self._accumulates = accumulates
        self.given: Arrays = {}

    def of(self, arrays: Arrays, jitter: int | None = None) -> Evaluation:
        """Compute the loss and gradients of a batch.

        Raises:
            TooManyDrawsError: It draws too often.
            Exception: Whatever the loss or its backward raises.
        """
        mode = SteadyDraws(self._level, jitter)
        # The loss may make leaves of its inputs, or change them.
        self.given = given = {n: array.detach().clone() for n, array in arrays.items()}
        with seeded(0), mode:
            if not self._trained:
                loss = measured(lambda: self._loss(self._module, given))
                found: Gradients = {}
            else:
                with torch.enable_grad():
                    loss = self._loss(self._module, given)
                    found = self._gradients(loss)
        drew = mode.drew or mode.undecided
        sizes = {name: _largest(gradient) for name, gradient in found.items()}
        reached = loss.requires_grad
        value = float(loss.detach())
        return Evaluation(value, found, sizes, reached, drew, mode.undecided, mode.epsilon)

    def _gradients(self, loss: torch.Tensor) -> Gradients:
        if not loss.requires_grad:
            return {}
        tensors = list(self._trained.values())
        found: Sequence[torch.Tensor | None]
        if self._accumulates:
            found = _accumulated(loss, tensors, self._module)
        else:
            found = torch.autograd.grad(loss, tensors, allow_unused=True)
        return {
            name: (each.to_dense() if each.is_sparse else each).detach()
            for name, each in zip(self._trained, found, strict=True)
            if each is not None and each.numel()
        }

    def apart(self, whole: Arrays, parts: Parts) -> Discrepancy | None:
        """Compare a batch with the sum of its parts; None if they agree or cannot be compared."""
        together = self.of(whole)
        if any((together.undecided, parts.undecided, not together.is_finite, not parts.is_finite)):
            return None
        differences, rounding = _differences(together, parts), _rounding(together, parts)
        if all(off <= rounding[name] for name, off in differences.items()):
            return None
        for name, off in self._spread(whole, together).items():
            rounding[name] += _TIMES_SPREAD * off
        over = {name: off for name, off in differences.items() if off > rounding[name]}
        if not over:
            return None
        name = None if None in over else max(over, key=lambda each: over[each])
        return Discrepancy(together.loss, tuple(parts.losses), name, over[name], rounding[name])

    def _spread(self, batch: Arrays, reference: Evaluation) -> dict[str | None, float]:
        """Return how far the loss (key None) and gradients move with different rounding."""
        largest: dict[str | None, float] = {}
        for seed in _SPREADS:
            for name, off in _differences(self.of(batch, seed), Parts.of(reference)).items():
                largest[name] = max(largest.get(name, 0.0), off)
        return largest


def _accumulated(
    loss: torch.Tensor, tensors: Sequence[torch.Tensor], module: torch.nn.Module
) -> list[torch.Tensor | None]:
    leaves = list({id(each): each for each in (*tensors, *module.parameters())}.values())
    before = [each.grad for each in leaves]
    try:
        for each in leaves:
            each.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        return [each.grad for each in tensors]
    finally:
        for each, gradient in zip(leaves, before, strict=True):
            each.grad = gradient


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max())


def _differences(together: Evaluation, parts: Parts) -> dict[str | None, float]:
    """Return the largest difference in the loss (key None) and in each gradient."""
    differences: dict[str | None, float] = {
        None: abs(math.fsum([together.loss, *(-each for each in parts.losses)]))
    }
    for name in {**together.gradients, **parts.gradients}:
        whole_gradient, parts_gradient = together.gradients.get(name), parts.gradients.get(name)
        if whole_gradient is None or parts_gradient is None:
            present = whole_gradient if parts_gradient is None else parts_gradient
            assert present is not None
            differences[name] = _largest(present)
        else:
            differences[name] = _largest(whole_gradient - parts_gradient)
    return differences


def _rounding(together: Evaluation, parts: Parts) -> dict[str | None, float]:
    """Return the smallest tolerance for sums of these sizes."""
    spacing = _SPACINGS * max(together.epsilon, parts.epsilon)
    sizes = dict(parts.sizes)
    for name, size in together.sizes.items():
        sizes[name] = sizes.get(name, 0.0) + size
    # A gradient that is pure rounding has the size of what cancels, which exceeds its own.
    largest = max(sizes.values(), default=0.0)
    losses = abs(together.loss) + sum(map(abs, parts.losses))
    return {None: spacing * losses, **{n: spacing * (s + largest) for n, s in sizes.items()}}


def measured(measure: Callable[[], T]) -> T:
    """Call `measure` under no_grad, or with gradients if the loss itself differentiates.

    A gradient penalty, a force or a PDE residual is a derivative with respect to inputs.
    """
    try:
        with torch.no_grad():
            return measure()
    except RuntimeError as error:
        if _NEEDS_GRADIENTS not in str(error):
            raise
    with torch.enable_grad():
        return measure()


def refuse_unlike_halves(
    trial: LossTrial, whole: Arrays, halves: Sequence[Arrays], samples: int
) -> None:
    """Refuse a loss that does not add up over samples.

    Args:
        trial: Computes the loss.
        whole: A batch.
        halves: The batch's two halves.
        samples: Number of samples in the batch.

    Raises:
        SamestepError: The losses differ by more than rounding.
    """
    try:
        apart = trial.apart(whole, Parts.of(*map(trial.of, halves)))
    except TooManyDrawsError:
        return
    if apart is not None:
        raise SamestepError(
            f"expected a loss summed over samples, but {samples} samples give {apart.whole:g} and "
            f"their halves {sum(apart.parts):g}; a mean, a contrastive or a balancing loss cannot "
            f"be split: {WHOLE_MICROBATCH}"
        )


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators, and restore them when the block ends.

    Args:
        seed: The seed.
        device: An accelerator whose generator is seeded as well.
    """
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    on_device: Any = None
    if device is not None and device.type != "cpu":
        on_device = torch.get_device_module(device)
        state = on_device.get_rng_state(device)
        on_device.manual_seed(seed)
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (the global generator is what collators draw from)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])
        if on_device is not None:
            on_device.set_rng_state(state, device)
