"""Base class of the tasks that train a transformer, whole or with LoRA.

A task reads its data, loads its model, and passes both on with its loss:

    class MyTask(TransformerTask):
        def __init__(self, spec: MyRun) -> None:
            data = read_my_data(spec)
            loaded = load_my_model(spec.model)
            model = TrainableModel.of(loaded, spec.model, spec.lora, "CAUSAL_LM", spec.seed)
            super().__init__(
                spec,
                model,
                Split(len(data.train), data.train.batch, data.parts, data.held_out.batch),
                Objective(my_loss, my_evaluation, METRICS),
                digests=data.digests,
                notes=data.notes,
                files=tokenizer_files(data.tokenizer),
            )
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from backends.base.interface import Array, Batch, CoupledLoss, Sums
from backends.losses.coupled_loss import with_backward_loss
from backends.losses.vocabulary_loss import token_losses
from protocol.spec.manifest import Manifest, Metric
from protocol.spec.run_spec import ModelRun
from protocol.spec.sampling import Sampling
from worker.models.initial_values import InitialValues
from worker.models.trainable_model import TrainableModel

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Split:
    """The training and evaluation samples of a task.

    Attributes:
        train_samples: Number of training samples.
        batch: Makes a batch of training samples, given their numbers below `train_samples`.
        parts: The held-out samples of each evaluation part.
        evaluation_batch: Makes a batch of held-out samples.
        sampling: How an epoch samples the training data; None: each sample once.
    """

    train_samples: int
    batch: Callable[[Rows], Batch]
    parts: Sequence[Rows]
    evaluation_batch: Callable[[Rows], Batch]
    sampling: Sampling | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss that a task minimizes, and the metrics that it reports.

    Attributes:
        loss: Maps the module and a batch to the batch's summed loss, a float32 scalar; None if the
            loss couples all samples of a step.
        evaluate: Maps the module and a batch to the sums from which `metrics` are computed.
        metrics: The evaluation metrics.
    """

    loss: Callable[[nn.Module, Mapping[str, Any]], torch.Tensor] | None
    evaluate: Callable[[nn.Module, Mapping[str, Any]], Sums]
    metrics: tuple[Metric, ...]


def split_into_parts(rows: Rows, samples: int) -> list[Rows]:
    """Cut held-out samples into evaluation parts of at most `samples` each."""
    return [rows[lo : lo + samples] for lo in range(0, len(rows), samples)]


ROWS: Final = "rows"
"""The array of an evaluation batch with its samples' numbers, (samples,) int64."""


def with_sample_numbers(batch: Callable[[Rows], Batch]) -> Callable[[Rows], Batch]:
    """Wrap a function that makes batches: its batches have the array `ROWS` too."""

    def batch_with_rows(rows: Rows) -> Batch:
        original = batch(rows)
        return replace(original, arrays={**original.arrays, ROWS: np.array(rows, np.int64)})

    return batch_with_rows


def logits_of(
    module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> torch.Tensor:
    """Return the logits of a batch of texts in float32, whatever the precision of forward."""
    logits: torch.Tensor = module(**_inputs_of(arrays), **options).logits.float()
    return logits


_INPUTS: Final = ("input_ids", "attention_mask", "token_type_ids")


def labeled_loss(
    module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> torch.Tensor:
    """Return the cross-entropy in float32, summed over the tokens that have a label."""
    return token_losses(module, {**_inputs_of(arrays), **options}, arrays["labels"])


def _inputs_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arrays[name] for name in _INPUTS if name in arrays}


class TransformerTask:
    """See `worker.tasks.base.task.Task`.

    Args:
        spec: The run spec.
        model: The model and its trained parameters.
        split: The samples.
        objective: The loss and the metrics.
        digests: Digests of the inputs, for the manifest.
        notes: Counts to report to the user, for the manifest.
        files: Text files that are saved with the result.
        coupled: A loss over all samples of a step.
    """

    def __init__(
        self,
        spec: ModelRun,
        model: TrainableModel,
        split: Split,
        objective: Objective,
        *,
        digests: Mapping[str, str],
        notes: Mapping[str, int],
        files: Mapping[str, str],
        coupled: CoupledLoss | None = None,
    ) -> None:
        self._split = split
        self._initial = InitialValues(model.initial_values())
        self.manifest = Manifest(
            blocks=model.blocks,
            train_samples=split.train_samples,
            sampling=split.sampling,
            evaluation_parts=len(split.parts),
            metrics=objective.metrics,
            digests={**model.digests, **digests},
            notes={**notes, **model.notes},
            export=model.export(files),
            embeddings=None if coupled is None else coupled.layout,
        )
        trainable = model.trainable(
            spec.seed, spec.threads, loss=objective.loss, evaluate=objective.evaluate
        )
        self.trainable = with_backward_loss(replace(trainable, coupled=coupled))

    def initial_parameters(self) -> list[Array]:
        """Return the checkpoint's values; LoRA matrices and new heads are drawn from the seed."""
        return self._initial.read()

    def batch(self, samples: Sequence[int]) -> Batch:
        """Make a batch of these training samples."""
        return self._split.batch(np.asarray(samples, np.int64))

    def evaluation_batch(self, part: int) -> Batch:
        """Make the batch of one evaluation part."""
        return self._split.evaluation_batch(self._split.parts[part])
