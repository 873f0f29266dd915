"""The loss of a trainer as a sum over samples and its divisor, or as a microbatch's mean.

A worker adds up gradients over samples and microbatches, so a mean must become a sum and a count.
Models that receive the number of items in the batch divide a sum by that number: for a sum they
receive 1. All other models return a mean over samples, or over the labels that are not -100.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from backends.checks.additivity import call_under_no_grad, seed_generators
from backends.checks.steady_draws import LEVELS, SteadyDraws
from backends.losses.vocabulary_loss import compute_large_logits_in_parts
from protocol.base.errors import DataError
from worker.tasks.checks.additivity import preserve_modes

SAMPLES: Final = "samestep.samples"
"""Name of an extra entry of a batch: the number of its samples, a float32 tensor."""
_TOLERANCE: Final = 1e-4


@contextmanager
def _preserving_buffers(model: Any) -> Iterator[None]:
    """Restore the model's buffers, such as running statistics, at exit."""
    saved_buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, values in saved_buffers:
            buffer.copy_(values)


class SummedLoss:
    """A trainer's `compute_loss` as a sum, and the weight to divide it by.

    Args:
        trainer: The trainer.
        samples: Batches of one sample each, or with `is_mean` of several; the first batch with a
            loss shows how the loss is divided.
        is_mean: Whether `loss` returns the mean of a microbatch instead of a sum.

    Raises:
        DataError: The loss cannot be converted to the sum that the trainer's own loop computes.
    """

    def __init__(
        self, trainer: Any, samples: Iterable[Mapping[str, Any]], *, is_mean: bool = False
    ) -> None:
        self._trainer, self._is_mean = trainer, is_mean
        self._divides_by_items, sample = self._find_divisor(samples)
        labels = sample.get("labels")
        self._has_labels = labels is not None
        label_dims = 0
        if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
            label_dims = labels.dim()
        self._is_mean_over_labels = label_dims > 0 and not self._divides_by_items
        microbatches = trainer.args.gradient_accumulation_steps
        if self._is_mean_over_labels and label_dims > 1 and microbatches > 1 and not is_mean:
            raise DataError(
                "gradient_accumulation_steps cannot be honored with this model, whose loss is "
                "a mean over the labels of each microbatch: write 1, a larger "
                'per_device_train_batch_size, and samestep={"microbatch": N}'
            )

    @property
    def stock_loop_adds_means(self) -> bool:
        """Whether transformers' loop adds up the means of accumulated microbatches.

        For a model that takes keywords, `Trainer.training_step` does not divide by the number of
        microbatches, even if the model ignores the number of items.
        """
        trainer = self._trainer
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            takes_items = trainer.model_accepts_loss_kwargs and self._has_labels
            is_scaled = takes_items or trainer.compute_loss_func is not None
        accumulates = trainer.args.gradient_accumulation_steps > 1
        return bool(is_scaled) and not self._divides_by_items and accumulates

    def loss(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Return the loss summed over the batch, or its mean."""
        if self._divides_by_items:
            items = max(1.0, self.weight(batch)) if self._is_mean else 1
            return self._compute(model, batch, torch.tensor(items))
        if self._is_mean:
            return self._compute(model, batch, None)
        mean, count = self._compute(model, batch, None), self._count(batch)
        if self._is_mean_over_labels:  # NaN without labels; its gradients must be zeros
            mean = torch.where(count > 0, mean, 0.0)
        return mean * count

    def weight(self, batch: Mapping[str, Any]) -> float:
        """Return the number of samples or labels that the sum is divided by."""
        if not self._divides_by_items:
            return float(self._count(batch))
        items = self._trainer._get_num_items_in_batch([batch], torch.device("cpu"))  # noqa: SLF001
        return float(items) if items is not None else float(self._count(batch))

    def _find_divisor(self, samples: Iterable[Mapping[str, Any]]) -> tuple[bool, Mapping[str, Any]]:
        """Return whether the loss is divided by the number of items, and the sample that shows
        it."""
        model = self._trainer.model
        sample: Mapping[str, Any] = {}
        with preserve_modes(model), _preserving_buffers(model):
            model.train()
            for sample in samples:
                loss_for_one, loss_for_two = (
                    self._value(sample, torch.tensor(items)) for items in (1, 2)
                )
                if loss_for_one and math.isfinite(loss_for_one) and math.isfinite(loss_for_two):
                    return abs(loss_for_one - 2 * loss_for_two) <= _TOLERANCE * abs(
                        loss_for_one
                    ), sample
        return False, sample

    def _value(self, sample: Mapping[str, Any], items: torch.Tensor) -> float:
        """Return the loss, with the same draws in every call."""
        with seed_generators(0), SteadyDraws(LEVELS[0]):
            loss = call_under_no_grad(lambda: self._compute(self._trainer.model, sample, items))
            return float(loss.detach())

    def _compute(self, model: Any, batch: Mapping[str, Any], items: Any) -> Any:
        inputs = {name: value for name, value in batch.items() if name != SAMPLES}
        with compute_large_logits_in_parts(model):
            return self._trainer.compute_loss(model, inputs, num_items_in_batch=items)

    def _count(self, batch: Mapping[str, Any]) -> Any:
        """Return the number of labels or samples, as a tensor: no device waits for the value."""
        return (batch["labels"] != -100).sum() if self._is_mean_over_labels else batch[SAMPLES]
