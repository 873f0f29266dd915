"""Task masked-lm: an encoder (BERT, RoBERTa) learns to fill in masked tokens of running text.

A fraction of the tokens of each sample is selected. Of those, 80 % become the mask token, 10 % a
random token, and 10 % are unchanged (Devlin et al. 2018, arXiv:1810.04805). A microbatch's masks
depend only on its seed, so they are the same on every worker. Evaluation masks never change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import nn

from backends.base import draws
from backends.base.interface import Batch, Sums
from protocol.base.errors import DataError
from protocol.spec.run_spec import MaskedLmRun
from worker.data import holdout
from worker.data.language_data import Samples, read_language_data
from worker.models import pretrained
from worker.models.tokens import IGNORED_LABEL, add_tokens_to_model, check_tokens, tokenizer_files
from worker.models.trainable_model import TrainableModel
from worker.tasks.base.transformer import (
    Objective,
    Rows,
    Split,
    TransformerTask,
    labeled_loss,
    split_into_parts,
)
from worker.tasks.language.causal_lm import METRICS, PART_TOKENS

_MASK_SHARE: Final = 0.8
_RANDOM_SHARE: Final = 0.1


class MaskedLM(TransformerTask):
    """Batches hold input_ids, attention_mask and labels, all (samples, tokens), int64."""

    def __init__(self, spec: MaskedLmRun) -> None:
        data = read_language_data(spec, spec.data.holdout)
        loaded = pretrained.load_masked_lm(spec.model)
        pretrained.refuse_drawn_weights(loaded, spec.model.source, "take one with its head")
        pretrained.check_length(loaded.model, spec.data.max_tokens)
        loaded = add_tokens_to_model(loaded, spec.model, data.tokenizer)
        check_tokens(data.max_token, loaded.vocabulary)
        self._masks = masks = Masks.of(data.tokenizer, loaded.vocabulary, spec.data.mask_share)
        self._train, self._length = data.train, spec.data.max_tokens
        model = TrainableModel.of(loaded, spec.model, spec.lora, "MASKED_LM", spec.seed)
        subset = holdout.evaluation_subset(len(data.held_out), spec.data.holdout_samples, spec.seed)
        parts = split_into_parts(subset, max(1, PART_TOKENS // self._length))

        def batch_of(samples: Samples, purpose: str, rows: Rows) -> Batch:
            key = draws.derive_key(spec.seed, purpose, *rows.tolist())
            return masks.batch(samples, rows, self._length, key)

        super().__init__(
            spec,
            model,
            Split(
                len(data.train),
                partial(batch_of, data.train, "mask"),
                parts,
                partial(batch_of, data.held_out, "held-out mask"),
            ),
            Objective(
                partial(labeled_loss, options=loaded.forward_options),
                partial(_evaluate, options=loaded.forward_options),
                METRICS,
            ),
            digests=data.digests,
            notes=data.notes,
            files=tokenizer_files(data.tokenizer),
        )

    def drawn_batch(self, samples: Sequence[int], seed: int) -> Batch:
        """See `worker.tasks.base.task.DrawsBatches`."""
        rows = np.asarray(samples, np.int64)
        return self._masks.batch(self._train, rows, self._length, draws.derive_key(seed, "mask"))


@dataclass(frozen=True, slots=True)
class Masks:
    """The rules for masking tokens.

    Attributes:
        mask: The mask token.
        padding: The padding token.
        special: Tokens that are never masked.
        vocabulary: Number of tokens; random tokens are below it.
        share: Fraction of tokens to predict.
    """

    mask: int
    padding: int
    special: NDArray[np.int64]
    vocabulary: int
    share: float

    @staticmethod
    def of(tokenizer: Any, vocabulary: int, share: float) -> Masks:
        """Derive the rules from a tokenizer.

        Raises:
            DataError: The tokenizer has no mask token.
        """
        if tokenizer.mask_token_id is None:
            raise DataError(
                "expected a tokenizer with a mask token, got one without: take an encoder such as "
                "BERT, or train a decoder by causal-lm"
            )
        special = np.array(tokenizer.all_special_ids, np.int64)
        tokens = min(len(tokenizer), vocabulary)
        padding = int(tokenizer.pad_token_id)
        return Masks(int(tokenizer.mask_token_id), padding, special, tokens, share)

    def batch(self, samples: Samples, rows: Rows, length: int, key: int) -> Batch:
        """Mask at least one token of each sample, with random draws from this key."""
        tokens = [samples.sample(row)[0][:length] for row in rows.tolist()]
        width = max((len(text_tokens) for text_tokens in tokens), default=1)
        ids = np.full((len(tokens), width), self.padding, np.int64)
        attention = np.zeros_like(ids)
        for row, text_tokens in enumerate(tokens):
            ids[row, : len(text_tokens)] = text_tokens
            attention[row, : len(text_tokens)] = 1
        is_maskable = (attention == 1) & ~np.isin(ids, self.special)
        selection_draws, replacement_draws, token_draws = draws.uniforms(key, 3 * ids.size).reshape(
            3, *ids.shape
        )
        ranked = np.where(is_maskable, selection_draws, np.float32(2))
        is_masked = is_maskable & (
            (ranked < self.share) | (ranked == ranked.min(axis=1, keepdims=True))
        )
        other_ids = np.minimum(
            token_draws.astype(np.float64) * self.vocabulary, self.vocabulary - 1
        )
        input_ids = np.where(is_masked & (replacement_draws < _MASK_SHARE), self.mask, ids)
        is_other = is_masked & (replacement_draws >= 1 - _RANDOM_SHARE)
        input_ids = np.where(is_other, other_ids.astype(np.int64), input_ids)
        labels = np.where(is_masked, ids, IGNORED_LABEL)
        arrays = {"input_ids": input_ids, "attention_mask": attention, "labels": labels}
        return Batch(arrays, float(np.count_nonzero(is_masked)))


def _evaluate(module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Sums:
    tokens = int((arrays["labels"] != IGNORED_LABEL).sum())
    return {"loss_sum": float(labeled_loss(module, arrays, options)), "tokens": tokens}
