"""Check that a loss is a sum over samples: the losses of a batch's halves must add up to its loss.

The check calls the loss with random model outputs of the traced shapes, so it is cheap for any
model size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from backends.checks.additivity import LossTrial, refuse_unlike_halves
from backends.wgpu.capture.capture import ModelResult
from backends.wgpu.capture.model_proxy import ModelProxy
from protocol.base.errors import SamestepError

_SEED: Final = 5
_ROWS: Final = "samestep.rows"
"""Name of an additional array with the sample numbers."""


def refuse_non_additive_loss(
    module: nn.Module,
    loss: Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor],
    arrays: Mapping[str, torch.Tensor],
    results: Sequence[ModelResult | None],
) -> None:
    """Refuse a loss that is not a sum, if all arrays and outputs have a leading sample dimension.

    Args:
        module: The model.
        loss: The loss, a function of the model and the arrays.
        arrays: A microbatch.
        results: Outputs of each call of the model by the loss.

    Raises:
        SamestepError: The loss of the batch is not the sum of its halves' losses.
    """
    counts = {len(array) if array.dim() else 0 for array in arrays.values()}
    samples = counts.pop() if len(counts) == 1 else 0
    if samples < 2:
        return
    random_outputs = _RandomOutputs(module, samples, results)
    rows = torch.arange(samples)
    batch, half_count = {**arrays, _ROWS: rows}, samples // 2
    halves = [
        {name: array[rows_of_half] for name, array in batch.items()}
        for rows_of_half in (slice(0, half_count), slice(half_count, samples))
    ]
    trial = LossTrial(module, lambda _, trial_arrays: random_outputs.loss(loss, trial_arrays), {})
    with suppress(_NotComparable):
        refuse_unlike_halves(trial, batch, halves, samples)


class _NotComparable(Exception):
    """The loss cannot be checked: outputs have no sample dimension, or the loss does more than call
    the model."""


class _RandomOutputs:
    """Random outputs that are the same for a sample in any part of the batch."""

    def __init__(
        self, module: nn.Module, samples: int, results: Sequence[ModelResult | None]
    ) -> None:
        self._module = module
        self._rows = torch.arange(samples)
        self._calls = 0
        self._outputs = [
            _random_outputs(result, samples, number) for number, result in enumerate(results)
        ]

    def loss(
        self, loss: Callable[[Any, Any], torch.Tensor], arrays: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the loss of the samples whose numbers are in the array `_ROWS`."""
        batch = dict(arrays)
        self._rows, self._calls = batch.pop(_ROWS), 0
        try:
            value = loss(ModelProxy(self._module, self._run), batch)
        except (AttributeError, TypeError, RuntimeError, SamestepError):
            raise _NotComparable from None
        if value.dim():
            raise SamestepError(f"expected a loss that is one sum, got shape {tuple(value.shape)}")
        return value

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        del args, kwargs
        number, self._calls = self._calls, self._calls + 1
        outputs = self._outputs[number] if number < len(self._outputs) else None
        if outputs is None:
            raise _NotComparable
        return pytree.tree_unflatten([tensor[self._rows] for tensor in outputs[0]], outputs[1])


def _random_outputs(
    result: ModelResult | None, samples: int, number: int
) -> tuple[list[torch.Tensor], pytree.TreeSpec] | None:
    """Return random outputs of a call; None if they have no sample dimension."""
    if result is None or any(not x.shape or x.shape[0] != samples for x in result.tensors):
        return None
    generator = torch.Generator().manual_seed(_SEED + number)
    tensors = [torch.rand(x.shape, generator=generator).to(x.dtype) for x in result.tensors]
    return tensors, result.structure
