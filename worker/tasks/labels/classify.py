"""Task classify: an encoder or decoder learns labels of texts, or of pairs of texts.

A text has one label (`data.problem: single-label`), several (multi-label) or a number (regression).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from backends.base.interface import Sums
from protocol.exact.samples import permutation
from protocol.spec.earlier_run import RESULT_INFO_FILE
from protocol.spec.manifest import Metric, pair_sums
from protocol.spec.run_spec import ClassifyRun
from worker.data import holdout
from worker.data.disk_arrays import DiskArrays
from worker.data.labeled_data import LabeledTexts, read_labeled_texts
from worker.models import pretrained
from worker.models.tokens import add_tokens_to_model, check_tokens, tokenizer_files
from worker.models.trainable_model import TrainableModel
from worker.tasks.base.transformer import (
    ROWS,
    Objective,
    Rows,
    Split,
    TransformerTask,
    logits_of,
    split_into_parts,
    with_sample_numbers,
)
from worker.tasks.labels.class_counts import (
    PART_SAMPLES,
    class_metrics,
    confusion_sums,
    label_metrics,
    label_sums,
)
from worker.tasks.labels.result_info import result_info


class Classify(TransformerTask):
    """The task classify; its batches are those of `LabeledSamples`."""

    def __init__(self, spec: ClassifyRun) -> None:
        data = read_labeled_texts(spec)
        samples, problem = data.samples, spec.data.problem
        names = data.names or (VALUE,)
        loaded = pretrained.load_classifier(
            spec.model, names, samples.padding, spec.seed, problem=problem
        )
        loaded = add_tokens_to_model(loaded, spec.model, data.tokenizer)
        model = TrainableModel.of(loaded, spec.model, spec.lora, "SEQ_CLS", spec.seed)
        pretrained.check_length(loaded.model, spec.data.max_tokens)
        check_tokens(max(samples.padding, samples.tokens.max_element), loaded.vocabulary)
        subset = holdout.evaluation_subset(len(data.held_out), spec.data.holdout_samples, spec.seed)
        parts = parts_of_similar_length(samples.tokens, data.held_out[subset], spec.seed)
        info = result_info(
            spec,
            names,
            loaded.weights_digest,
            problem=problem,
            scale=(data.scale.mean, data.scale.deviation),
            has_pairs=spec.data.text_pair is not None,
        )
        super().__init__(
            spec,
            model,
            Split(
                len(data.train),
                lambda n: samples.batch(data.train[n]),
                parts,
                with_sample_numbers(samples.batch),
                data.sampling,
            ),
            _OBJECTIVES[problem](data, loaded.forward_options),
            digests=data.digests,
            notes=data.notes,
            files={RESULT_INFO_FILE: info.document(), **tokenizer_files(data.tokenizer)},
        )


VALUE: Final = "value"
"""The name of a regression's only output."""


def parts_of_similar_length(tokens: DiskArrays, held_out: Rows, seed: int) -> list[Rows]:
    """Divide held-out texts into parts of similar length, for less padding.

    The parts are shuffled, because neighboring parts go to the same worker: sorted by length, one
    worker gets all long texts.
    """
    lengths = tokens.lengths
    ranked = sorted(held_out.tolist(), key=lambda number: (lengths[number], number))
    parts = split_into_parts(np.array(ranked, np.int64), PART_SAMPLES)
    return [parts[number] for number in permutation(seed, 0, len(parts))]


def class_loss(
    module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> torch.Tensor:
    """Return the cross-entropy, weighted if the batch has weights, summed over samples."""
    logits, labels = logits_of(module, arrays, options), arrays["labels"]
    if "weights" not in arrays:
        return nn.functional.cross_entropy(logits, labels, reduction="sum")
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    weights: torch.Tensor = arrays["weights"]
    return (losses * weights).sum()


def multi_label_loss(
    module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> torch.Tensor:
    """Return each sample's mean binary cross-entropy over classes, summed over samples."""
    logits = logits_of(module, arrays, options)
    losses = nn.functional.binary_cross_entropy_with_logits(
        logits, arrays["labels"], reduction="none"
    )
    return losses.mean(dim=1).sum()


def regression_loss(
    module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> torch.Tensor:
    """Return the squared error, summed over samples."""
    error: torch.Tensor = logits_of(module, arrays, options)[:, 0] - arrays["labels"]
    return (error * error).sum()


def _single_label(data: LabeledTexts, options: Mapping[str, Any]) -> Objective:
    def evaluate(module: nn.Module, arrays: Mapping[str, Any]) -> Sums:
        predicted = logits_of(module, arrays, options).argmax(dim=1)
        return confusion_sums(arrays["labels"].tolist(), predicted.tolist(), len(data.names))

    # The class with the most training samples; in a tie, the one with the lowest number.
    majority = int(np.bincount(data.samples.targets[data.train]).argmax())
    metrics = class_metrics(data.names, majority)
    return Objective(partial(class_loss, options=options), evaluate, metrics)


def _multi_label(data: LabeledTexts, options: Mapping[str, Any]) -> Objective:
    def evaluate(module: nn.Module, arrays: Mapping[str, Any]) -> Sums:
        predicted = (
            (logits_of(module, arrays, options) > 0).cpu().numpy()
        )  # probability above one half
        return label_sums(arrays["labels"].cpu().numpy() > 0, predicted)

    metrics = label_metrics(data.names)
    return Objective(partial(multi_label_loss, options=options), evaluate, metrics)


def _regression(data: LabeledTexts, options: Mapping[str, Any]) -> Objective:
    def evaluate(module: nn.Module, arrays: Mapping[str, Any]) -> Sums:
        mean, deviation = data.scale.mean, data.scale.deviation
        x = logits_of(module, arrays, options)[:, 0].cpu().double() * deviation + mean
        y = arrays["labels"].cpu().double() * deviation + mean
        return {
            "samples": len(y),
            "squared_error": float(((x - y) ** 2).sum()),
            "absolute_error": float((x - y).abs().sum()),
            **pair_sums(arrays[ROWS].tolist(), x.tolist(), y.tolist()),
        }

    return Objective(partial(regression_loss, options=options), evaluate, _VALUE_METRICS)


_VALUE_METRICS: Final = (
    Metric(name="mse", numerator={"squared_error": 1}, denominator={"samples": 1}),
    Metric(name="mae", numerator={"absolute_error": 1}, denominator={"samples": 1}),
    Metric(name="pearson", pearson=True),
    Metric(name="spearman", spearman=True),
)
_OBJECTIVES: Final[Mapping[str, Callable[[LabeledTexts, Mapping[str, Any]], Objective]]] = {
    "single-label": _single_label,
    "multi-label": _multi_label,
    "regression": _regression,
}
