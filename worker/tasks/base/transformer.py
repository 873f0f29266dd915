"""Base class of the tasks that train a transformer, whole or with LoRA.

A task reads its data, loads its model, and passes both on with its loss:

    class MyTask(TransformerTask):
        def __init__(self, spec: MyRun) -> None:
            data = read_my_data(spec)
            loaded = load_my_model(spec.model)
            tuned = TrainableModel.of(loaded, spec.model, spec.lora, "CAUSAL_LM", spec.seed)
            super().__init__(
                spec,
                tuned,
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

from backends.base.coupled_loss import with_backward_loss
from backends.base.interface import Array, Batch, CoupledLoss, Sums
from protocol.spec.manifest import Manifest, Metric
from protocol.spec.run_spec import ModelRun
from protocol.spec.sampling import Sampling
from worker.models.trainable_model import TrainableModel

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Split:
    """The samples of a task.

    Attributes:
        train_samples: How many are trained on.
        batch: Makes a batch of training samples, given their numbers below `train_samples`.
        parts: The held-out samples of each evaluation part.
        evaluation_batch: Makes a batch of held-out samples.
        sampling: How an epoch's training samples are drawn; None: each one once.
    """

    train_samples: int
    batch: Callable[[Rows], Batch]
    parts: Sequence[Rows]
    evaluation_batch: Callable[[Rows], Batch]
    sampling: Sampling | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """What a task minimizes and reports.

    Attributes:
        loss: Of the module and a batch: a float32 scalar, summed over the weight of the batch; None
            where the loss couples all samples of a step.
        evaluate: Of the module and a batch: the sums that `metrics` are made of.
        metrics: The evaluation metrics.
    """

    loss: Callable[[nn.Module, Mapping[str, Any]], torch.Tensor] | None
    evaluate: Callable[[nn.Module, Mapping[str, Any]], Sums]
    metrics: tuple[Metric, ...]


def in_parts(rows: Rows, samples: int) -> list[Rows]:
    """Cut held-out samples into evaluation parts of at most `samples` each."""
    return [rows[lo : lo + samples] for lo in range(0, len(rows), samples)]


ROWS: Final = "rows"
"""In an evaluation batch: the numbers of its samples, (samples,) int64."""


def numbered(batch: Callable[[Rows], Batch]) -> Callable[[Rows], Batch]:
    """Return what makes the same batches with the numbers of their samples."""

    def batch_with_rows(rows: Rows) -> Batch:
        made = batch(rows)
        return replace(made, arrays={**made.arrays, ROWS: np.array(rows, np.int64)})

    return batch_with_rows


def logits_of(
    module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> torch.Tensor:
    """Return the logits of a batch of texts, in float32 whatever forward computes in."""
    inputs = {name: arrays[name] for name in _INPUTS if name in arrays}
    logits: torch.Tensor = module(**inputs, **options).logits.float()
    return logits


_INPUTS: Final = ("input_ids", "attention_mask", "token_type_ids")


class TransformerTask:
    """See `worker.tasks.base.task.Task`.

    Args:
        spec: The run spec.
        tuned: The model, and what of it is trained.
        split: The samples.
        objective: The loss and the metrics.
        digests: Of what was read, for the manifest.
        notes: Counts that a user should see, for the manifest.
        files: Text files that are saved with the result.
        coupled: A loss over all samples of a step.
    """

    def __init__(
        self,
        spec: ModelRun,
        tuned: TrainableModel,
        split: Split,
        objective: Objective,
        *,
        digests: Mapping[str, str],
        notes: Mapping[str, int],
        files: Mapping[str, str],
        coupled: CoupledLoss | None = None,
    ) -> None:
        self._split = split
        self._initial = tuned.initial_values()
        self.manifest = Manifest(
            blocks=tuned.blocks,
            train_samples=split.train_samples,
            sampling=split.sampling,
            evaluation_parts=len(split.parts),
            metrics=objective.metrics,
            digests={**tuned.digests, **digests},
            notes={**notes, **tuned.notes},
            export=tuned.export(files),
            embeddings=None if coupled is None else coupled.layout,
        )
        trainable = tuned.trainable(
            spec.seed, spec.threads, loss=objective.loss, evaluate=objective.evaluate
        )
        self.trainable = with_backward_loss(replace(trainable, coupled=coupled))

    def initial_parameters(self) -> list[Array]:
        """Return the checkpoint's values; LoRA matrices and new heads as drawn from the seed."""
        return [values.copy() for values in self._initial]

    def batch(self, samples: Sequence[int]) -> Batch:
        """Make a batch of these training samples."""
        return self._split.batch(np.asarray(samples, np.int64))

    def evaluation_batch(self, part: int) -> Batch:
        """Make the batch of one held-out part."""
        return self._split.evaluation_batch(self._split.parts[part])
