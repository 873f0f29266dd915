"""Task distil: a student learns the captured distribution of a teacher over each next token.

The samples come from the capture, in its shuffled order. The last ones are held out, unless the run
spec names another capture for evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from backends.base.interface import Array, Batch, Sums
from backends.losses.vocabulary_loss import logits_of, sum_over_tokens
from protocol.base.errors import DataError
from protocol.datasets.capture_check import (
    TOKENIZER,
    check_same_facts,
    tokenizer_mismatch,
    vocabulary_digest,
)
from protocol.datasets.data_check import count_training_samples
from protocol.datasets.logits_file import Records, record_dtype
from protocol.exact.digest import digest_arrays
from protocol.spec.manifest import Manifest, Metric
from protocol.spec.run_spec import DistilRun
from worker.data import holdout
from worker.distillation.captured_samples import CapturedSamples
from worker.distillation.distillation_loss import IGNORED_LABEL, DistillationLoss, teacher_arrays
from worker.models import pretrained
from worker.models.initial_values import InitialValues
from worker.models.tokens import load_saved_tokenizer, load_tokenizer, tokenizer_files
from worker.models.trainable_model import TrainableModel
from worker.tasks.language.causal_lm import METRICS

_PART_TOKENS: Final = 1_024
"""Tokens per evaluation part, unless one sample is longer: their logits must fit in memory."""

_METRICS: Final = (
    *METRICS,
    Metric(name="divergence_per_token", numerator={"divergence": 1}, denominator={"tokens": 1}),
)


class Distil:
    """Batches hold input_ids and labels, both (samples, the capture's tokens), int64, and the
    arrays of `distillation_loss.teacher_arrays`."""

    def __init__(self, spec: DistilRun) -> None:
        directory = Path(spec.data.train)
        self._samples = CapturedSamples(directory)
        capture_facts = self._samples.index.facts
        self._layout = layout = capture_facts.layout
        self._temperature = spec.distil.temperature
        self._loss = DistillationLoss.of(spec.distil, layout)
        tokenizer = _load_tokenizer(spec, directory, capture_facts.tokenizer)
        loaded = _load_student(spec, tokenizer, layout.vocabulary)
        _check_length(spec, loaded, layout.tokens)
        model = TrainableModel.of(loaded, spec.model, spec.lora, "CAUSAL_LM", spec.seed)
        self._initial = InitialValues(model.initial_values())
        files = {} if tokenizer is None else tokenizer_files(tokenizer)
        samples = self._samples.index.samples
        self._train = count_training_samples(samples, spec.data)
        self._held_out = self._samples
        if spec.data.validation is not None:
            self._held_out = CapturedSamples(Path(spec.data.validation))
            check_same_facts(self._samples.index, self._held_out.index, spec.data.validation)
        has_validation = self._held_out is not self._samples
        first_held_out = 0 if has_validation else self._train
        self._evaluated_samples = first_held_out + holdout.evaluation_subset(
            self._held_out.index.samples - first_held_out, spec.data.holdout_samples, spec.seed
        )
        self._part_samples = max(1, _PART_TOKENS // layout.tokens)
        self.manifest = Manifest(
            blocks=model.blocks,
            train_samples=self._train,
            evaluation_parts=-(-len(self._evaluated_samples) // self._part_samples),
            metrics=_METRICS,
            digests={
                **model.digests,
                "teacher": capture_facts.teacher,
                "vocabulary": capture_facts.tokenizer,
                "data": _files_digest(self._samples),
                **({"validation": _files_digest(self._held_out)} if has_validation else {}),
            },
            notes={
                "captured_samples": samples,
                "logits_of_each_token": layout.top_k,
                "student_padding_not_compared": max(0, loaded.vocabulary - layout.vocabulary),
                **model.notes,
            },
            export=model.export(files),
            row_groups=_row_groups(self._samples, self._train),
        )
        options = loaded.forward_options
        self.trainable = model.trainable(
            spec.seed,
            spec.threads,
            loss=partial(_loss_of, loss=self._loss, options=options),
            evaluate=partial(_evaluate, loss=self._loss, options=options),
        )

    def initial_parameters(self) -> list[Array]:
        """Return the checkpoint's values, or for a new model random values by the seed."""
        return self._initial.read()

    def batch(self, samples: Sequence[int]) -> Batch:
        """Make a batch of training samples, by their numbers in the capture.

        Raises:
            DataError: Their file is missing or damaged, or belongs to another capture.
        """
        return self._batch(self._samples.read(samples))

    def evaluation_batch(self, part: int) -> Batch:
        """Make a batch of about `_PART_TOKENS` held-out tokens.

        Raises:
            DataError: As in `batch`.
        """
        return self._batch(self._held_out.read(self._samples_of_part(part)))

    def missing(self, samples: Sequence[int]) -> tuple[str, ...]:
        """See `worker.tasks.base.task.ReadsFiles`."""
        return self._samples.missing(samples)

    def missing_of_part(self, part: int) -> tuple[str, ...]:
        """See `worker.tasks.base.task.ReadsFiles`."""
        if self._held_out is not self._samples:
            return ()  # a capture for evaluation is fetched in full before the run begins
        return self._samples.missing(self._samples_of_part(part))

    def blank(self, samples: int) -> Batch:
        """See `worker.tasks.base.task.ReadsFiles`."""
        records = np.zeros(samples, record_dtype(self._layout))
        records["rows"] = self._layout.tokens
        records["loss_mask"] = 1
        length, k, vocabulary = self._layout.tokens, self._layout.top_k, self._layout.vocabulary
        records["input_ids"] = np.arange(length + 1) % vocabulary
        records["topk_ids"] = np.arange(k) % vocabulary
        records["lse_1"] = records["lse_T"] = np.log(2 * k)
        return self._batch(records)

    def blank_part(self, part: int) -> Batch:
        """See `worker.tasks.base.task.ReadsFiles`."""
        return self.blank(len(self._samples_of_part(part)))

    def _samples_of_part(self, part: int) -> list[int]:
        lo = part * self._part_samples
        samples: list[int] = self._evaluated_samples[lo : lo + self._part_samples].tolist()
        return samples

    def _batch(self, records: Records) -> Batch:
        tokens = records["input_ids"].astype(np.int64)
        labels = np.where(records["loss_mask"] != 0, tokens[:, 1:], IGNORED_LABEL)
        arrays = {"input_ids": tokens[:, :-1].copy(), "labels": labels}
        arrays |= teacher_arrays(records, self._layout, self._temperature)
        return Batch(arrays, float(np.count_nonzero(labels != IGNORED_LABEL)))


def _load_tokenizer(spec: DistilRun, directory: Path, digest: str) -> Any:
    """Load the student's tokenizer, or for a new student the capture's; None if there is none.

    Raises:
        DataError: The student's tokenizer differs from the teacher's.
    """
    captured_tokenizer = (
        load_saved_tokenizer(directory) if (directory / TOKENIZER).is_file() else None
    )
    if spec.model.source is None:
        return captured_tokenizer
    tokenizer = load_tokenizer(spec.model.source)
    if vocabulary_digest(tokenizer.get_vocab()) != digest:
        raise tokenizer_mismatch(spec.model.name or spec.model.source)
    return tokenizer


def _load_student(spec: DistilRun, tokenizer: Any, vocabulary: int) -> pretrained.Pretrained:
    """Load the student, with at least the teacher's vocabulary.

    Raises:
        DataError: The student cannot be loaded, or has a smaller vocabulary.
    """
    if spec.model.config is None:
        loaded = pretrained.load_causal_lm(spec.model, spec.seed if spec.lora is None else 0)
    else:
        end = tokenizer.eos_token_id if tokenizer is not None else None
        loaded = pretrained.create_causal_lm(spec, vocabulary, end or 0)
    if loaded.vocabulary < vocabulary:
        raise DataError(
            f"expected a student with at least {vocabulary} tokens, the teacher's, got "
            f"{loaded.vocabulary}; set model.config.vocab_size, or take a student with the "
            "teacher's tokenizer"
        )
    return loaded


def _check_length(spec: DistilRun, student: pretrained.Pretrained, tokens: int) -> None:
    """Check that the student has a position for each token of a sample.

    Raises:
        DataError: The student has fewer positions.
    """
    max_positions = pretrained.max_sample_tokens(student.model)
    if tokens > max_positions:
        new_config = f"--set model.config.max_position_embeddings={tokens}"
        remedy = "take one with more" if spec.model.config is None else new_config
        raise DataError(
            f"expected a student with at least {tokens} positions, as many as a captured sample "
            f"has tokens, got {max_positions}: {remedy}, or capture with "
            f"data.max_tokens={max_positions}"
        )


def _row_groups(samples: CapturedSamples, train: int) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of the row groups of the training samples, by file."""
    sizes, samples_left = [], train
    for file in samples.index.files:
        groups = []
        for group in file.row_groups:
            if samples_left > 0:
                groups.append(min(group, samples_left))
            samples_left -= group
        if groups:
            sizes.append(tuple(groups))
    return tuple(sizes)


def _files_digest(samples: CapturedSamples) -> str:
    """Return the digest of the index, which lists the digest of each file."""
    return digest_arrays({"index": np.frombuffer(samples.index.to_bytes(), np.uint8)})


def _loss_of(
    module: nn.Module,
    arrays: Mapping[str, Any],
    *,
    loss: DistillationLoss,
    options: Mapping[str, Any],
) -> torch.Tensor:
    logits = logits_of(module, {"input_ids": arrays["input_ids"], **options}).float()
    return sum_over_tokens(loss.total, logits, arrays)


def _evaluate(
    module: nn.Module,
    arrays: Mapping[str, Any],
    *,
    loss: DistillationLoss,
    options: Mapping[str, Any],
) -> Sums:
    logits = logits_of(module, {"input_ids": arrays["input_ids"], **options}).float()
    return {
        "loss_sum": float(sum_over_tokens(loss.cross_entropy, logits, arrays)),
        "divergence": float(sum_over_tokens(loss.divergence, logits, arrays)),
        "tokens": int((arrays["labels"] != IGNORED_LABEL).sum()),
    }
