"""The loss of a script that couples all samples of a step: `samestep.Task(embed=, batch_loss=)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from pydantic import ValidationError

from backends.base.interface import CoupledLoss
from backends.losses.coupled_loss import check_losses, copy_for_in_place_changes
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
    """Build the loss over a step from a user's functions, and test it.

    Args:
        user: The task, with `embed` and `batch_loss`.
        embed: Calls the user's `embed` with a module and arrays.
        arrays: A batch.
        sizes: Numbers of samples of a step, for which the loss is tested with repeated rows of the
            batch.

    Raises:
        DataError: The functions' results cannot be used.
    """
    assert user.batch_loss is not None

    def checked_embed(module: Any, arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return check_embedded(embed(module, arrays))

    embeddings = checked_embed(user.module, arrays)
    fields = [
        EmbeddingField(name=name, dtype=_dtype(values), shape=tuple(values.shape[1:]))
        for name, values in embeddings.items()
    ]
    try:
        layout = EmbeddingLayout(fields=tuple(sorted(fields, key=lambda f: f.dtype != "float32")))
    except ValidationError as error:
        raise DataError(
            f"embed: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
        ) from None
    for size in sizes:
        check_losses(user.batch_loss(user.module, _repeat_rows(embeddings, size)), size)
    return CoupledLoss(checked_embed, user.batch_loss, layout)


def _repeat_rows(fields: Fields, samples: int) -> dict[str, torch.Tensor]:
    """Repeat rows until there is one for each sample of a step, as input of `batch_loss`."""
    repeated_fields = {}
    for name, values in fields.items():
        numbers = torch.arange(samples, device=values.device) % len(values)
        rows = values.detach()[numbers]
        repeated_fields[name] = rows.requires_grad_(rows.is_floating_point())
    return copy_for_in_place_changes(repeated_fields)


def check_embedded(embeddings: object) -> dict[str, torch.Tensor]:
    """Check the result of `embed`; integers become int64, other dtypes float32.

    Raises:
        DataError: The result is not a dict of tensors with the same number of rows.
    """
    expectation = "embed: expected a dict of tensors with the samples first"
    if not isinstance(embeddings, Mapping) or not embeddings:
        raise DataError(
            f"{expectation}, got {type(embeddings).__name__}: write return {{'text': ...}}"
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, values in embeddings.items():
        if not isinstance(values, torch.Tensor) or not values.dim():
            raise DataError(f"{expectation}, got {type(values).__name__} as {name!r}")
        tensors[str(name)] = values.float() if values.is_floating_point() else values.long()
    lengths = {len(values) for values in tensors.values()}
    if len(lengths) > 1:
        raise DataError(f"{expectation}, got tensors of {sorted(lengths)} rows")
    return tensors


def _dtype(values: torch.Tensor) -> Any:
    return "float32" if values.is_floating_point() else "int64"
