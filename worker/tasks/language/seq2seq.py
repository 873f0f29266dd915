"""Task seq2seq: an encoder-decoder (T5, BART) learns to make one text of another.

Summaries, translations, corrections: the decoder predicts each token of the target from those
before it and from the encoded source.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from backends.base.interface import Sums
from protocol.base.errors import DataError
from protocol.spec.run_spec import Seq2SeqRun
from worker.data import holdout
from worker.data.sequence_data import read_pair_data
from worker.models import pretrained
from worker.models.tokens import NOTHING, check_tokens, tokenizer_files
from worker.models.trainable_model import TrainableModel
from worker.tasks.base.transformer import Objective, Split, TransformerTask, in_parts
from worker.tasks.language.causal_lm import METRICS, PART_TOKENS

_PROBE: Final = torch.tensor([[7, 5, 9, 3, NOTHING]])


class Seq2Seq(TransformerTask):
    """Batches hold input_ids and attention_mask, (samples, tokens), and labels, (samples, tokens of
    targets), int64: see `SequenceData`."""

    def __init__(self, spec: Seq2SeqRun) -> None:
        data = read_pair_data(spec)
        loaded = pretrained.load_seq2seq(spec.model, 0 if spec.lora else spec.seed)
        pretrained.refuse_drawn_weights(loaded, spec.model.source, "take a pretrained one")
        pretrained.check_length(loaded.model, spec.data.max_tokens)
        check_tokens(max(data.highest, data.labels.highest), loaded.vocabulary)
        start = _start_token(loaded)
        tuned = TrainableModel.of(loaded, spec.model, spec.lora, "SEQ_2_SEQ_LM", spec.seed)
        measured = holdout.measured(len(data.held_out), spec.data.holdout_samples, spec.seed)
        parts = in_parts(data.held_out[measured], max(1, PART_TOKENS // spec.data.max_tokens))
        how: dict[str, Any] = {
            "start": start, "padding": data.padding, "options": loaded.forward_options,
        }  # fmt: skip
        super().__init__(
            spec,
            tuned,
            Split(len(data.train), lambda n: data.batch(data.train[n]), parts, data.batch),
            Objective(partial(target_loss, **how), partial(_evaluate, **how), METRICS),
            digests=data.digests,
            notes=data.notes,
            files=tokenizer_files(data.tokenizer),
        )


def shifted(labels: torch.Tensor, start: int, padding: int) -> torch.Tensor:
    """Return what the decoder reads: the start token, then all labels but the last."""
    first = torch.full_like(labels[:, :1], start)
    before = torch.where(labels[:, :-1] == NOTHING, padding, labels[:, :-1])
    return torch.cat([first, before], dim=1)


def _start_token(loaded: pretrained.Pretrained) -> int:
    """Return the token that a decoder begins with.

    Raises:
        DataError: The model begins its targets in another way.
    """
    model: Any = loaded.model
    start, padding = loaded.config.decoder_start_token_id, loaded.config.pad_token_id
    expected = model.prepare_decoder_input_ids_from_labels(labels=_PROBE.clone())
    if start is None or not torch.equal(expected, shifted(_PROBE, start, padding)):
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
    logits = module(
        input_ids=arrays["input_ids"],
        attention_mask=arrays["attention_mask"],
        decoder_input_ids=shifted(labels, start, padding),
        **options,
    ).logits
    return nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=NOTHING, reduction="sum"
    )


def _evaluate(module: nn.Module, arrays: Mapping[str, Any], **how: Any) -> Sums:
    tokens = int((arrays["labels"] != NOTHING).sum())
    return {"loss_sum": float(target_loss(module, arrays, **how)), "tokens": tokens}
