"""Task causal-lm: a decoder learns to predict the next token of running text or conversations.

A model that is initialized from a configuration is trained in full, a loaded one in full or with
LoRA. `worker.data.language_data` makes the samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from backends.base.interface import Sums
from backends.losses.vocabulary_loss import token_losses
from protocol.spec.manifest import Metric
from protocol.spec.run_spec import CausalLmRun, ModelRun
from worker.data import holdout
from worker.data.language_data import read_language_data
from worker.data.packing import check_packing
from worker.models import pretrained
from worker.models.tokens import IGNORED_LABEL, add_tokens_to_model, check_tokens, tokenizer_files
from worker.models.trainable_model import TrainableModel
from worker.tasks.base.transformer import Objective, Split, TransformerTask, split_into_parts

PART_TOKENS: Final = 1_024
"""Tokens per evaluation part, unless one sample is longer: their logits must fit in memory."""


class CausalLM(TransformerTask):
    """The task; batches hold input_ids and labels, and position_ids if samples are packed.

    All are (samples, tokens), int64: see `language_data` and `packing`.
    """

    def __init__(self, spec: CausalLmRun) -> None:
        data = read_language_data(spec, spec.data.holdout)
        loaded = load_model(spec, data.tokenizer)
        check_tokens(data.max_token, loaded.vocabulary)
        model = TrainableModel.of(loaded, spec.model, spec.lora, "CAUSAL_LM", spec.seed)
        options = loaded.forward_options
        if spec.data.packing:
            check_packing(model.module, loaded.vocabulary, options)
        subset = holdout.evaluation_subset(len(data.held_out), spec.data.holdout_samples, spec.seed)
        parts = split_into_parts(subset, max(1, PART_TOKENS // spec.data.max_tokens))
        super().__init__(
            spec,
            model,
            Split(len(data.train), data.train.batch, parts, data.held_out.batch),
            Objective(
                partial(token_loss, options=options),
                partial(_evaluate, options=options),
                METRICS,
            ),
            digests=data.digests,
            notes=data.notes,
            files=tokenizer_files(data.tokenizer),
        )


METRICS: Final = (
    Metric(
        name="perplexity",
        numerator={"loss_sum": 1},
        denominator={"tokens": 1},
        exponential=True,
    ),
    Metric(name="loss_per_token", numerator={"loss_sum": 1}, denominator={"tokens": 1}),
)


def load_model(spec: ModelRun, tokenizer: Any) -> pretrained.Pretrained:
    """Load the model that the run spec names, or initialize one for this tokenizer.

    Raises:
        DataError: The model cannot be loaded, or has fewer positions than a sample has tokens.
    """
    if spec.model.config is None:
        # An adapter's base must be loadable without the run's seed.
        loaded = pretrained.load_causal_lm(spec.model, spec.seed if spec.lora is None else 0)
    else:
        end = tokenizer.eos_token_id
        loaded = pretrained.create_causal_lm(spec, len(tokenizer), end)
    pretrained.check_length(loaded.model, spec.data.max_tokens)
    source = None if spec.tokenizer is None else spec.tokenizer.source
    return add_tokens_to_model(loaded, spec.model, tokenizer, source)


def token_loss(
    module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> torch.Tensor:
    """Return the cross-entropy in float32, summed over predicted tokens; see `vocabulary_loss`."""
    inputs = {name: arrays[name] for name in ("input_ids", "position_ids") if name in arrays}
    return token_losses(module, {**inputs, **options}, arrays["labels"])


def _evaluate(module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Sums:
    tokens = int((arrays["labels"] != IGNORED_LABEL).sum())
    return {"loss_sum": float(token_loss(module, arrays, options)), "tokens": tokens}
