"""`samestep.Task`: a model with its data and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from protocol.spec.sections.tasks import Unit

Loss = Callable[[Any, Any], Any]
Metric = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class UserTask:
    """A model, its data and its loss in plain PyTorch.

    Attributes:
        module: A torch module on the CPU with trainable tensors in float32. The run starts from
            its values; frozen parameters do not change.
        train: A data set with a length and items by number (any map-style data set, or a list).
        sampler: A `torch.utils.data.WeightedRandomSampler` or `RandomSampler`: how many samples an
            epoch draws, with which weights, and whether with replacement. The run's seed
            determines the draws. Default: every sample once.
        held_out: A data set for evaluation, at the end and every `evaluate_every` steps; or several
            data sets by name, each with separate metrics such as `web_loss`.
        collate: Makes a batch from a list of items: tensors on the CPU in dicts, lists or tuples.
            Default: torch's. It may draw from torch's, numpy's and Python's global generators, and
            from the collator's generators. All are seeded for each microbatch; `seed` receives that
            seed.
        loss: Takes the module and a batch on the device; returns the loss *summed* over the batch,
            or with `unit="microbatch"` the microbatch's mean, which may depend on all its samples.
        embed: Instead of `loss`, for a loss that couples all samples of a step: takes the module
            and a batch; returns a dict of tensors of shape (samples, ...). Each row depends only on
            its own sample. Gradients flow through float tensors; integer tensors, such as labels,
            are only passed to `batch_loss`.
        batch_loss: With `embed`: takes the module and a dict of the same tensors for all samples of
            the step; returns a loss for each sample, (samples,).
        weight: Takes a batch; returns the number that it adds to the divisor of the gradient sum,
            such as the number of tokens that count. Default: the number of samples.
        metrics: More metrics by name: each takes the module and a held-out batch, and returns a
            sum, which is divided by the number of samples, or a pair of sums to be divided.
        evaluate: Takes the module and an iterator of held-out batches; returns metrics over all
            batches by name, such as F1, which is not a quotient of sums. One worker calls it, on
            cpu or cuda.
        unit: The samples on which a gradient may depend: `"sample"`, a single one; or
            `"microbatch"`, all samples of a microbatch (BatchNorm, contrastive losses), so that the
            result depends on the microbatch size.
    """

    module: nn.Module
    train: Any
    held_out: Any = None
    sampler: Any = None
    collate: Callable[..., Any] | None = None
    loss: Loss | None = None
    weight: Callable[[Any], Any] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    evaluate: Callable[[Any, Iterable[Any]], Mapping[str, Any]] | None = None
    unit: Unit = "sample"
    embed: Callable[[Any, Any], Mapping[str, Any]] | None = None
    batch_loss: Callable[[Any, Mapping[str, Any]], Any] | None = None
