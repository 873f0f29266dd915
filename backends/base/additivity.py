"""Whether a loss is a sum over samples: of a batch, what its parts give must add up to the whole.

Only then does a result not depend on how a step is cut into microbatches. The loss is compared and,
where asked, each trained tensor's gradient. Draws are steady (`backends.base.steady_draws`).
Rounding is measured: by how far the whole moves when its operators round otherwise.
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
from protocol.base.errors import SamestepError

T = TypeVar("T")

Arrays = Mapping[str, torch.Tensor]
LossFunction = Callable[[Any, Arrays], torch.Tensor]
Gradients = dict[str, torch.Tensor]

_SPREADS: Final = (11, 12, 13)
"""Seeds of the computations that measure rounding."""
_TIMES_SPREAD: Final = 64
"""More than so many times that spread is no rounding."""
_SPACINGS: Final = 4
"""Nor is more than so many spacings of the narrowest type that was computed in."""
_NEEDS_GRADIENTS: Final = "does not require grad"
"""What torch says to a loss that differentiates where no gradients are kept."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What a batch gives.

    Attributes:
        loss: Its value; `requires_grad` says whether it depends on what is trained.
        gradients: By tensor's name; those that the loss does not reach are left out.
        sizes: Of each gradient the largest element's.
        requires_grad: Whether a gradient comes from it.
        drew: Something was drawn.
        undecided: And in a way that cannot be made steady.
        epsilon: Spacing at 1 of the narrowest floating type seen.
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
        """Whether the batch moves anything."""
        return any(self.sizes.values())

    @property
    def is_finite(self) -> bool:
        """Loss and gradients are."""
        return math.isfinite(self.loss) and all(map(math.isfinite, self.sizes.values()))


class Parts:
    """What some parts of a batch give in all; of their gradients only the sum is kept."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: Gradients = {}
        self.sizes: dict[str, float] = {}
        """The largest elements of each tensor's gradients, added up."""
        self.drew = self.undecided = False
        self.is_finite = True
        self.epsilon = 0.0

    def add(self, part: Computed) -> None:
        """One more; the same one may be added again."""
        self.losses.append(part.loss)
        self.drew |= part.drew
        self.undecided |= part.undecided
        self.is_finite &= part.is_finite
        self.epsilon = max(self.epsilon, part.epsilon)
        for name, gradient in part.gradients.items():
            before = self.gradients.get(name)
            self.gradients[name] = gradient if before is None else before + gradient
            self.sizes[name] = self.sizes.get(name, 0.0) + part.sizes[name]

    @staticmethod
    def of(*parts: Computed) -> Parts:
        """All of these."""
        made = Parts()
        for each in parts:
            made.add(each)
        return made


@dataclass(frozen=True, slots=True)
class Apart:
    """A whole that its parts do not add up to.

    Attributes:
        whole: The batch's loss.
        parts: Each part's.
        tensor: The one whose gradient does not add up, where the loss does.
        off: The largest difference, of the loss or else of that gradient.
        near: What would have been rounding.
    """

    whole: float
    parts: tuple[float, ...]
    tensor: str | None
    off: float
    near: float

    @property
    def is_mean(self) -> bool:
        """Whether the whole looks like a mean of its parts."""
        lo, hi = min(self.parts) - self.near, max(self.parts) + self.near
        return self.tensor is None and lo <= self.whole <= hi


class LossTrial:
    """Computes a loss with steady draws, from the same state of all generators each time.

    Args:
        module: As it is to be called, in the mode in which it is to be tried.
        loss: Of it and a batch.
        trained: What gradients are compared of; empty for the loss alone.
        level: What is drawn; see `SteadyDraws`.
        accumulates: Gradients are taken where backward accumulates them, as a device does, so that
            every hook acts; the module's own gradients are put back.

    Attributes:
        given: The arrays of the batch that was computed last.
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

    def of(self, arrays: Arrays, jitter: int | None = None) -> Computed:
        """What a batch gives.

        Raises:
            TooManyDrawsError: It draws on and on.
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
        return Computed(value, found, sizes, reached, drew, mode.undecided, mode.epsilon)

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

    def apart(self, whole: Arrays, parts: Parts) -> Apart | None:
        """How a batch differs from the sum of its parts; None if it does not, or cannot be said."""
        together = self.of(whole)
        if any((together.undecided, parts.undecided, not together.is_finite, not parts.is_finite)):
            return None
        found, near = _differences(together, parts), _rounding(together, parts)
        if all(off <= near[name] for name, off in found.items()):
            return None
        for name, off in self._spread(whole, together).items():
            near[name] += _TIMES_SPREAD * off
        over = {name: off for name, off in found.items() if off > near[name]}
        if not over:
            return None
        name = None if None in over else max(over, key=lambda each: over[each])
        return Apart(together.loss, tuple(parts.losses), name, over[name], near[name])

    def _spread(self, batch: Arrays, as_it_is: Computed) -> dict[str | None, float]:
        """How far loss (None) and gradients move when operators round otherwise."""
        most: dict[str | None, float] = {}
        for seed in _SPREADS:
            for name, off in _differences(self.of(batch, seed), Parts.of(as_it_is)).items():
                most[name] = max(most.get(name, 0.0), off)
        return most


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


def _differences(together: Computed, parts: Parts) -> dict[str | None, float]:
    """The largest one of the loss (None) and of each gradient."""
    found: dict[str | None, float] = {
        None: abs(math.fsum([together.loss, *(-each for each in parts.losses)]))
    }
    for name in {**together.gradients, **parts.gradients}:
        mine, theirs = together.gradients.get(name), parts.gradients.get(name)
        if mine is None or theirs is None:
            one = mine if theirs is None else theirs
            assert one is not None
            found[name] = _largest(one)
        else:
            found[name] = _largest(mine - theirs)
    return found


def _rounding(together: Computed, parts: Parts) -> dict[str | None, float]:
    """What sums of these sizes are rounded by at least."""
    spacing = _SPACINGS * max(together.epsilon, parts.epsilon)
    sizes = dict(parts.sizes)
    for name, size in together.sizes.items():
        sizes[name] = sizes.get(name, 0.0) + size
    # A gradient that is nothing but rounding is so at the size of what cancels, not at its own.
    largest = max(sizes.values(), default=0.0)
    losses = abs(together.loss) + sum(map(abs, parts.losses))
    return {None: spacing * losses, **{n: spacing * (s + largest) for n, s in sizes.items()}}


def measured(measure: Callable[[], T]) -> T:
    """Call this without keeping gradients; with them, if the loss differentiates something itself.

    A gradient penalty, a force or a differential equation's residual is a derivative by the inputs.
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
        trial: Computes it.
        whole: A batch.
        halves: Both of them.
        samples: How many the batch has.

    Raises:
        SamestepError: They differ by more than rounding.
    """
    try:
        apart = trial.apart(whole, Parts.of(*map(trial.of, halves)))
    except TooManyDrawsError:
        return
    if apart is not None:
        raise SamestepError(
            f"expected a loss summed over samples, but {samples} samples give {apart.whole:g} and "
            f"their halves {sum(apart.parts):g}; a mean, a contrastive or a balancing loss cannot "
            "be split"
        )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global generators, seeded; afterwards as they were."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (the global generator is what collators draw from)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])
