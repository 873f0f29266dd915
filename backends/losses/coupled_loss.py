"""Carry a loss over all samples of a step into the backward of each microbatch.

With embeddings e of all samples and a loss L(e, p), where p are parameters that the loss itself
reads, the gradient with respect to the model's weights is that of <e_i, dL/de_i>, summed over
microbatches i, with dL/de held constant (GradCache, Gao et al. 2021, arXiv:2101.06983). So a
microbatch carries dL/de of its samples as one more array per field, and its loss, <e_i, dL/de_i>,
is a sum over samples, like the loss of every task. The step's first microbatch also carries dL/dp.

Embeddings and the loss over them are computed in float32, whatever the type of a model's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from backends.base.interface import (
    EMBEDDING_GRADIENT,
    PARAMETER_GRADIENT,
    CoupledLoss,
    StepLoss,
    Trainable,
)
from protocol.base.errors import DataError
from protocol.exact.embedding_rows import Rows, join_fields, split_fields

_PATTERN_LENGTH: Final = 7
"""Number of distinct factors of the placeholder loss."""


def with_backward_loss(
    trainable: Trainable, observe: Callable[[Mapping[str, Any]], None] = lambda _: None
) -> Trainable:
    """Return the trainable with the microbatch loss that follows from its coupled loss.

    Args:
        trainable: The task.
        observe: Called with the fields of each microbatch that carries gradients.
    """
    coupled = trainable.coupled
    if coupled is None:
        return trainable

    return replace(trainable, loss=partial(backward_loss, coupled, observe=observe))


def is_carried_gradient(name: str) -> bool:
    """Whether an array of a batch is a gradient of the step's loss, not data of the batch."""
    return name.startswith((EMBEDDING_GRADIENT, PARAMETER_GRADIENT))


def embed_batch(coupled: CoupledLoss, module: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the fields of a microbatch; embeddings are float32.

    Raises:
        DataError: The user's function does not return a field of the layout.
    """
    inputs = {name: array for name, array in arrays.items() if not is_carried_gradient(name)}
    fields = dict(coupled.embed(module, inputs))
    for field_spec in coupled.layout.fields:
        if field_spec.name not in fields:
            raise DataError(
                f"embed: expected {field_spec.name!r} for every batch, got {sorted(fields)}"
            )
        if fields[field_spec.name].is_floating_point():
            fields[field_spec.name] = fields[field_spec.name].float()
    return fields


def backward_loss(
    coupled: CoupledLoss,
    module: Any,
    arrays: Mapping[str, Any],
    observe: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> torch.Tensor:
    """Return <e, dL/de> of a microbatch, a sum over its samples.

    If the arrays carry no gradients, as in a check or a probe of the device, the loss is a
    placeholder.
    """
    fields = embed_batch(coupled, module, arrays)
    if any(name.startswith(EMBEDDING_GRADIENT) for name in arrays):
        observe(fields)
    total = torch.zeros((), device=fields[coupled.layout.fields[0].name].device)
    for field_spec in coupled.layout.fields:
        if field_spec.dtype != "float32":
            continue
        embeddings = fields[field_spec.name]
        gradient = arrays.get(EMBEDDING_GRADIENT + field_spec.name)
        total = (
            total
            + (_placeholder_loss(embeddings) if gradient is None else embeddings * gradient).sum()
        )
    parameter_gradients = {
        name.removeprefix(PARAMETER_GRADIENT): array
        for name, array in arrays.items()
        if name.startswith(PARAMETER_GRADIENT)
    }
    for name, parameter in module.named_parameters() if parameter_gradients else ():
        if name in parameter_gradients:
            total = total + (parameter * parameter_gradients[name]).sum()
    return total


def _placeholder_loss(embeddings: torch.Tensor) -> torch.Tensor:
    """Return terms whose sum shows whether a row depends on samples other than its own.

    The terms include squares, because a dependence on the batch (a mean) may cancel without them.
    """
    count = embeddings[0].numel()
    pattern = torch.arange(count, device=embeddings.device) % _PATTERN_LENGTH - _PATTERN_LENGTH // 2
    factors = pattern.to(embeddings.dtype).reshape(embeddings.shape[1:])
    return (embeddings + embeddings * embeddings) * factors


def join_rows(coupled: CoupledLoss, fields: Mapping[str, Any]) -> Rows:
    """Return a microbatch's fields as rows on the host."""
    names = [field_spec.name for field_spec in coupled.layout.fields]
    host_arrays = {name: fields[name].detach().cpu().numpy() for name in names}
    return join_fields(coupled.layout, host_arrays)


def step_loss(
    coupled: CoupledLoss,
    module: Any,
    parameters: Mapping[str, torch.nn.Parameter],
    rows: Rows,
    device: torch.device,
) -> StepLoss:
    """Compute the loss of a step and its gradients; `grad` of the parameters does not change.

    Raises:
        DataError: The loss is not one float for each sample.
    """
    samples = len(rows)
    fields = {
        name: torch.tensor(values, device=device)
        for name, values in split_fields(coupled.layout, rows).items()
    }
    embeddings = {
        field_spec.name: fields[field_spec.name].requires_grad_()
        for field_spec in coupled.layout.fields
        if field_spec.dtype == "float32"
    }
    losses = coupled.loss(module, copy_for_in_place_changes(fields))
    check_losses(losses, samples)
    targets = [*embeddings.values(), *parameters.values()]
    gradients: Sequence[torch.Tensor | None] = torch.autograd.grad(
        losses.float().sum(), targets, allow_unused=True
    )
    target_gradients = [
        None if gradient is None else gradient.detach().cpu().numpy() for gradient in gradients
    ]
    embedding_gradients = {
        name: np.zeros(tuple(values.shape), np.float32) if gradient is None else gradient
        for (name, values), gradient in zip(embeddings.items(), target_gradients, strict=False)
    }
    loss_gradients = target_gradients[len(embeddings) :]
    parameter_gradients = {
        name: gradient
        for name, gradient in zip(parameters, loss_gradients, strict=True)
        if gradient is not None
    }
    return StepLoss(losses.detach().float().cpu().numpy(), embedding_gradients, parameter_gradients)


def copy_for_in_place_changes(fields: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies that a loss may change in place; torch forbids this for leaves with
    gradients."""
    return {name: x.clone() if x.requires_grad else x for name, x in fields.items()}


def check_losses(losses: object, samples: int) -> None:
    """Check that there is one loss for each sample.

    Raises:
        DataError: The losses have another type or shape, or no gradient.
    """
    expected = (
        f"batch_loss: expected one loss for each of the {samples} samples, shape ({samples},)"
    )
    if not isinstance(losses, torch.Tensor):
        raise DataError(f"{expected}, got {type(losses).__name__}")
    if losses.shape != (samples,):
        raise DataError(
            f"{expected}, got shape {tuple(losses.shape)}; neither sum nor average them: "
            "reduction='none'"
        )
    if not losses.requires_grad:
        raise DataError("batch_loss: expected losses that depend on the embeddings")
