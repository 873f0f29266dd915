"""Task seq2seq: an encoder-decoder (T5, BART) learns to turn one text into another.

Examples are summaries, translations and corrections. The decoder predicts each token of the target
from the previous ones and from the encoded source. With `data.generate_tokens`, evaluation
also generates a target for each held-out source and compares it with the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from backends.base.interface import Batch, Sums
from backends.losses.vocabulary_loss import token_losses
from protocol.base.errors import DataError
from protocol.spec.manifest import Metric
from protocol.spec.run_spec import Seq2SeqRun
from worker.data import holdout
from worker.data.sequence_data import PairData, read_pair_data
from worker.models import pretrained
from worker.models.tokens import (
    IGNORED_LABEL,
    add_tokens_to_model,
    check_tokens,
    end_tokens,
    tokenizer_files,
)
from worker.models.trainable_model import TrainableModel
from worker.tasks.base.transformer import (
    ROWS,
    Objective,
    Rows,
    Split,
    TransformerTask,
    split_into_parts,
    with_sample_numbers,
)
from worker.tasks.language.causal_lm import METRICS, PART_TOKENS
from worker.tasks.language.greedy_targets import GreedyDecoding
from worker.tasks.language.rouge import NAMES, rouge, words_of

_PROBE: Final = torch.tensor([[7, 5, 9, 3, IGNORED_LABEL]])


class Seq2Seq(TransformerTask):
    """Batches hold input_ids and attention_mask, (samples, tokens), and labels, (samples, tokens of
    targets), int64: see `SequenceData`."""

    def __init__(self, spec: Seq2SeqRun) -> None:
        data = read_pair_data(spec)
        loaded = pretrained.load_seq2seq(spec.model, 0 if spec.lora else spec.seed)
        pretrained.refuse_drawn_weights(loaded, spec.model.source, "take a pretrained one")
        pretrained.check_length(loaded.model, spec.data.max_tokens)
        loaded = add_tokens_to_model(loaded, spec.model, data.tokenizer)
        check_tokens(max(data.max_token, data.labels.max_element), loaded.vocabulary)
        start = _start_token(loaded)
        model = TrainableModel.of(loaded, spec.model, spec.lora, "SEQ_2_SEQ_LM", spec.seed)
        subset = holdout.evaluation_subset(len(data.held_out), spec.data.holdout_samples, spec.seed)
        parts = split_into_parts(data.held_out[subset], max(1, PART_TOKENS // spec.data.max_tokens))
        settings: dict[str, Any] = {
            "start": start, "padding": data.padding, "options": loaded.forward_options,
        }  # fmt: skip
        loss = partial(target_loss, **settings)
        objective = Objective(loss, partial(_evaluate, **settings), METRICS)
        batch: Callable[[Rows], Batch] = data.batch
        notes: dict[str, int] = {}
        if spec.data.generate_tokens is not None:
            generated = GeneratedTargets.of(data, loaded, start, spec.data.generate_tokens)
            objective, batch = generated.extend(objective), with_sample_numbers(data.batch)
            notes[NOTE] = generated.count_without_words(
                np.concatenate([*parts, np.zeros(0, np.int64)])
            )
        super().__init__(
            spec,
            model,
            Split(len(data.train), lambda n: data.batch(data.train[n]), parts, batch),
            objective,
            digests=data.digests,
            notes={**data.notes, **notes},
            files=tokenizer_files(data.tokenizer),
        )


NOTE: Final = "references_without_words_for_rouge"


@dataclass(frozen=True, slots=True)
class GeneratedTargets:
    """Compares targets that the model generates with the references.

    Attributes:
        data: The samples.
        decoding: Settings of the generation.
        tokenizer: The model's tokenizer.
    """

    data: PairData
    decoding: GreedyDecoding
    tokenizer: Any

    @staticmethod
    def of(
        data: PairData, loaded: pretrained.Pretrained, start: int, max_tokens: int
    ) -> GeneratedTargets:
        """Prepare the generation of targets of at most `max_tokens` tokens.

        Raises:
            DataError: The model has fewer positions.
        """
        max_positions = pretrained.max_sample_tokens(loaded.model)
        if max_tokens > max_positions:
            raise DataError(
                f"expected data.generate_tokens of at most {max_positions}, the model's positions, "
                f"got {max_tokens}; --set data.generate_tokens={max_positions}"
            )
        ends = end_tokens(loaded.model, data.tokenizer)
        return GeneratedTargets(
            data, GreedyDecoding(start, data.padding, ends, max_tokens), data.tokenizer
        )

    def extend(self, objective: Objective) -> Objective:
        """Return the objective extended by the metrics of generated targets."""

        def evaluate(module: nn.Module, arrays: Mapping[str, Any]) -> Sums:
            return {**objective.evaluate(module, arrays), **self._sums(module, arrays)}

        return replace(
            objective, evaluate=evaluate, metrics=(*objective.metrics, *GENERATED_METRICS)
        )

    def count_without_words(self, rows: Rows) -> int:
        """Count the references without a word that ROUGE counts."""
        return sum(not words_of(self.data.target(row)) for row in rows.tolist())

    def _sums(self, module: nn.Module, arrays: Mapping[str, Any]) -> Sums:
        sums = dict.fromkeys(("samples", "exact", *NAMES), 0.0)
        targets = self.decoding.targets(module, arrays)
        for row, ids in zip(arrays[ROWS].tolist(), targets, strict=True):
            generated = self.tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            reference = self.data.target(row)
            sums["samples"] += 1
            sums["exact"] += generated.split() == reference.split()
            for name, value in rouge(reference, generated).items():
                sums[name] += value
        return sums


GENERATED_METRICS: Final = (
    *(Metric(name=n, numerator={n: 1}, denominator={"samples": 1}) for n in NAMES),
    Metric(name="exact_match", numerator={"exact": 1}, denominator={"samples": 1}),
)


def shift_right(labels: torch.Tensor, start: int, padding: int) -> torch.Tensor:
    """Return the decoder's inputs: the start token, then all labels but the last."""
    start_column = torch.full_like(labels[:, :1], start)
    previous_labels = torch.where(labels[:, :-1] == IGNORED_LABEL, padding, labels[:, :-1])
    return torch.cat([start_column, previous_labels], dim=1)


def _start_token(loaded: pretrained.Pretrained) -> int:
    """Return the token with which the decoder starts.

    Raises:
        DataError: The decoder does not start with a single token.
    """
    model: Any = loaded.model
    start, padding = loaded.config.decoder_start_token_id, loaded.config.pad_token_id
    expected = model.prepare_decoder_input_ids_from_labels(labels=_PROBE.clone())
    if start is None or not torch.equal(expected, shift_right(_PROBE, start, padding)):
        raise DataError(
            f"expected a decoder that begins with one start token, got a {type(model).__name__}, "
            "which begins otherwise (mBART's languages); take a T5 or BART"
        )
    return int(start)


def target_loss(
    module: nn.Module,
    arrays: Mapping[str, Any],
    start: int,
    padding: int,
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Return the cross-entropy in float32, summed over the tokens of the targets."""
    labels = arrays["labels"]
    inputs = {
        "input_ids": arrays["input_ids"],
        "attention_mask": arrays["attention_mask"],
        "decoder_input_ids": shift_right(labels, start, padding),
    }
    return token_losses(module, {**inputs, **options}, labels)


def _evaluate(module: nn.Module, arrays: Mapping[str, Any], **settings: Any) -> Sums:
    tokens = int((arrays["labels"] != IGNORED_LABEL).sum())
    return {"loss_sum": float(target_loss(module, arrays, **settings)), "tokens": tokens}
