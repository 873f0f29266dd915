"""Whether a loss is a sum over samples: its halves must add up to the whole.

Only the loss is computed, on made-up outputs of the model, whose shapes are those of the trace. So
the check costs little however large the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from backends.base.additivity import LossTrial, refuse_unlike_halves
from backends.wgpu.capture.capture import ModelResult
from backends.wgpu.capture.stand_in import StandIn
from protocol.base.errors import SamestepError

_SEED: Final = 5
_ROWS: Final = "samestep.rows"
"""Beside a batch's arrays: which samples they are of."""


def refuse_non_additive_loss(
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
    rows = torch.arange(samples)
    whole, half = {**arrays, _ROWS: rows}, samples // 2
    halves = [
        {name: array[part] for name, array in whole.items()}
        for part in (slice(0, half), slice(half, samples))
    ]
    trial = LossTrial(module, lambda _, given: made.loss(loss, given), {})
    with suppress(_NotBySample):
        refuse_unlike_halves(trial, whole, halves, samples)


class _NotBySample(Exception):
    """There is nothing to check: the model gives what is not by sample, or is not just called."""


class _MadeUp:
    """Gives the same made-up outputs for a sample, whatever part of the batch it is in."""

    def __init__(
        self, module: nn.Module, samples: int, results: Sequence[ModelResult | None]
    ) -> None:
        self._module = module
        self._rows = torch.arange(samples)
        self._calls = 0
        self._outputs = [_made_up(each, samples, number) for number, each in enumerate(results)]

    def loss(
        self, loss: Callable[[Any, Any], torch.Tensor], arrays: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Of some samples, whose rows are told beside them."""
        given = dict(arrays)
        self._rows, self._calls = given.pop(_ROWS), 0
        try:
            value = loss(StandIn(self._module, self._run), given)
        except (AttributeError, TypeError, RuntimeError, SamestepError):
            raise _NotBySample from None
        if value.dim():
            raise SamestepError(f"expected a loss that is one sum, got shape {tuple(value.shape)}")
        return value

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        del args, kwargs
        number, self._calls = self._calls, self._calls + 1
        made = self._outputs[number] if number < len(self._outputs) else None
        if made is None:
            raise _NotBySample
        return pytree.tree_unflatten([each[self._rows] for each in made[0]], made[1])


def _made_up(
    result: ModelResult | None, samples: int, number: int
) -> tuple[list[torch.Tensor], pytree.TreeSpec] | None:
    """Outputs of a call of the model; None if they are not by sample."""
    if result is None or any(not x.shape or x.shape[0] != samples for x in result.tensors):
        return None
    draws = torch.Generator().manual_seed(_SEED + number)
    made = [torch.rand(x.shape, generator=draws).to(x.dtype) for x in result.tensors]
    return made, result.structure
