"""Whether a loss is a sum over samples: its halves must add up to the whole.

Only the loss is computed, on made-up outputs of the model, whose shapes are those of the trace. So
the check costs little however large the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from backends.base.trainable_checks import refuse_unlike
from backends.wgpu.capture.capture import ModelResult
from backends.wgpu.capture.stand_in import StandIn
from protocol.base.errors import SamestepError

_SEED: Final = 5


def refuse_loss_that_does_not_add_up(
    module: nn.Module,
    loss: Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor],
    arrays: Mapping[str, torch.Tensor],
    results: Sequence[ModelResult | None],
) -> None:
    """Where all arrays, and all that the model gives, have samples first.

    Args:
        module: The model.
        loss: Of the model and the arrays.
        arrays: A microbatch.
        results: What each of the loss's calls of the model gave for it.

    Raises:
        SamestepError: The loss of the whole is not the sum of its halves' losses.
    """
    counts = {len(array) if array.dim() else 0 for array in arrays.values()}
    samples = counts.pop() if len(counts) == 1 else 0
    if samples < 2:
        return
    made = _MadeUp(module, samples, results)
    try:
        whole = made.loss(loss, arrays, slice(0, samples))
        half = samples // 2
        parts = [made.loss(loss, arrays, s) for s in (slice(0, half), slice(half, samples))]
    except _NotBySample:
        return
    refuse_unlike(whole, sum(parts), samples)


class _NotBySample(Exception):
    """There is nothing to check: the model gives what is not by sample, or is not just called."""


class _MadeUp:
    """Gives the same made-up outputs for a sample, whatever part of the batch it is in."""

    def __init__(
        self, module: nn.Module, samples: int, results: Sequence[ModelResult | None]
    ) -> None:
        self._module = module
        self._results = results
        self._samples = samples
        self._part = slice(0, samples)
        self._calls = 0
        self._outputs: list[tuple[list[torch.Tensor], pytree.TreeSpec]] = []

    def loss(
        self, loss: Callable[[Any, Any], torch.Tensor], arrays: Mapping[str, torch.Tensor],
        part: slice,
    ) -> float:  # fmt: skip
        """Of a part of the samples."""
        self._part, self._calls = part, 0
        given = {name: array[part].clone() for name, array in arrays.items()}
        with torch.no_grad():
            try:
                value = loss(StandIn(self._module, self._run), given)
            except (AttributeError, TypeError, SamestepError):
                raise _NotBySample from None
        if value.dim():
            raise SamestepError(f"expected a loss that is one sum, got shape {tuple(value.shape)}")
        return float(value)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        del args, kwargs
        number, self._calls = self._calls, self._calls + 1
        if number == len(self._outputs):
            result = self._results[number] if number < len(self._results) else None
            if result is None:
                raise _NotBySample
            draws = torch.Generator().manual_seed(_SEED + number)
            made = []
            for like in result.tensors:
                if not like.shape or like.shape[0] != self._samples:
                    raise _NotBySample
                value = torch.rand(like.shape, generator=draws)
                made.append(value.to(like.dtype))
            self._outputs.append((made, result.structure))
        made, structure = self._outputs[number]
        # Copies, as those of the batch: a loss may change in place what it is given.
        return pytree.tree_unflatten([x[self._part].clone() for x in made], structure)
