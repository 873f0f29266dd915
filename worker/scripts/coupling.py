"""The loss of a script that couples all samples of a step: `samestep.Task(embed=, batch_loss=)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from pydantic import ValidationError

from backends.base.coupled_loss import changeable, check_losses
from backends.base.interface import CoupledLoss
from protocol.base.errors import DataError
from protocol.spec.manifest import EmbeddingField, EmbeddingLayout
from worker.scripts.user_task import UserTask

Fields = Mapping[str, torch.Tensor]


def coupled_loss(
    user: UserTask,
    embed: Callable[[Any, Mapping[str, Any]], Any],
    arrays: Mapping[str, torch.Tensor],
    sizes: Iterable[int],
) -> CoupledLoss:
    """Make the loss of a step of a user's functions, and try it.

    Args:
        user: The task, with `embed` and `batch_loss`.
        embed: Calls the user's `embed` with arrays.
        arrays: A batch.
        sizes: Numbers of samples of steps, for each of which the loss is tried, on the batch's rows
            again and again.

    Raises:
        DataError: What the functions return cannot be used.
    """
    assert user.batch_loss is not None

    def embedded(module: Any, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return check_embedded(embed(module, given))

    first = embedded(user.module, arrays)
    fields = [
        EmbeddingField(name=name, dtype=_dtype(values), shape=tuple(values.shape[1:]))
        for name, values in first.items()
    ]
    try:
        layout = EmbeddingLayout(fields=tuple(sorted(fields, key=lambda f: f.dtype != "float32")))
    except ValidationError as error:
        raise DataError(
            f"embed: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
        ) from None
    for size in sizes:
        check_losses(user.batch_loss(user.module, _repeated(first, size)), size)
    return CoupledLoss(embedded, user.batch_loss, layout)


def _repeated(fields: Fields, samples: int) -> dict[str, torch.Tensor]:
    """Return as many rows as a step has, as `batch_loss` is given them."""
    found = {}
    for name, values in fields.items():
        numbers = torch.arange(samples, device=values.device) % len(values)
        rows = values.detach()[numbers]
        found[name] = rows.requires_grad_(rows.is_floating_point())
    return changeable(found)


def check_embedded(found: object) -> dict[str, torch.Tensor]:
    """Check what `embed` returned; integers become int64, all others float32.

    Raises:
        DataError: It is no dict of tensors with the same number of rows.
    """
    expected = "embed: expected a dict of tensors with the samples first"
    if not isinstance(found, Mapping) or not found:
        raise DataError(f"{expected}, got {type(found).__name__}: write return {{'text': ...}}")
    tensors: dict[str, torch.Tensor] = {}
    for name, values in found.items():
        if not isinstance(values, torch.Tensor) or not values.dim():
            raise DataError(f"{expected}, got {type(values).__name__} as {name!r}")
        tensors[str(name)] = values.float() if values.is_floating_point() else values.long()
    lengths = {len(values) for values in tensors.values()}
    if len(lengths) > 1:
        raise DataError(f"{expected}, got tensors of {sorted(lengths)} rows")
    return tensors


def _dtype(values: torch.Tensor) -> Any:
    return "float32" if values.is_floating_point() else "int64"
