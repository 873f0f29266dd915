"""Language modelling: a decoder learns to say the next token of running text.

A new small model is trained whole from its configuration, an existing one whole or with LoRA, on
running text or on conversations: `worker.data.language_data` makes samples of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from backends.base.interface import Array, Batch, Sums
from protocol.spec.manifest import Manifest, Metric
from protocol.spec.run_spec import RunSpec
from worker.data import holdout
from worker.data.language_data import read_language_data
from worker.data.packing import check_packing
from worker.models import pretrained
from worker.models.tokens import NOTHING, check_tokens, tokenizer_files
from worker.models.tuned import Tuned

PART_TOKENS: Final = 1_024
"""Held-out tokens in a part, if a sample is not longer: their logits must fit in memory."""


class CausalLM:
    """Batches hold input_ids and labels, both (samples, tokens), int64: see `language_data`."""

    def __init__(self, spec: RunSpec) -> None:
        assert spec.model is not None
        assert spec.data is not None
        data = read_language_data(spec, spec.data.holdout)
        tokenizer = data.tokenizer
        loaded = load_model(spec, tokenizer)
        check_tokens(data.highest, loaded.vocabulary)
        length = spec.data.max_tokens
        self._train, self._held_out = data.train, data.held_out
        self._measured = holdout.measured(len(self._held_out), spec.data.holdout_samples, spec.seed)
        self._part_samples = max(1, PART_TOKENS // length)
        tuned = Tuned.of(loaded, spec.model, spec.lora, "CAUSAL_LM", spec.seed)
        if spec.data.packing:
            check_packing(tuned.module, loaded.vocabulary, loaded.forward_options)
        self._initial = tuned.initial_values()
        self.manifest = Manifest(
            blocks=tuned.blocks,
            train_samples=len(self._train),
            evaluation_parts=-(-len(self._measured) // self._part_samples),
            metrics=_METRICS,
            digests={**tuned.digests, **data.digests},
            notes={**data.notes, **tuned.notes},
            export=tuned.export(tokenizer_files(tokenizer)),
        )
        self.trainable = tuned.trainable(
            spec.seed,
            spec.threads,
            loss=partial(token_loss, options=loaded.forward_options),
            evaluate=partial(_evaluate, options=loaded.forward_options),
        )

    def initial_parameters(self) -> list[Array]:
        """The checkpoint's values, or those drawn from the seed."""
        return [values.copy() for values in self._initial]

    def batch(self, samples: Sequence[int]) -> Batch:
        """Training samples by number."""
        return self._train.batch(np.asarray(samples, np.int64))

    def evaluation_batch(self, part: int) -> Batch:
        """About `PART_TOKENS` held-out tokens."""
        lo = part * self._part_samples
        return self._held_out.batch(self._measured[lo : lo + self._part_samples])


_METRICS: Final = (
    Metric(
        name="perplexity",
        numerator={"loss_sum": 1},
        denominator={"tokens": 1},
        exponential=True,
    ),
    Metric(name="loss_per_token", numerator={"loss_sum": 1}, denominator={"tokens": 1}),
)


def load_model(spec: RunSpec, tokenizer: Any) -> pretrained.Pretrained:
    """The model that is named, or a new one for this tokenizer.

    Raises:
        DataError: It cannot be had, or has not the positions for a sample.
    """
    assert spec.model is not None
    assert spec.data is not None
    if spec.model.config is None:
        loaded = pretrained.load_causal_lm(spec.model, spec.seed if spec.lora is None else 0)
    else:
        end = tokenizer.eos_token_id
        loaded = pretrained.start_causal_lm(spec, len(tokenizer), end)
    pretrained.check_length(loaded.model, spec.data.max_tokens)
    return loaded


def token_loss(
    module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> torch.Tensor:
    """Cross-entropy in float32, summed over the tokens predicted."""
    packed = {name: arrays[name] for name in ("position_ids",) if name in arrays}
    logits = module(input_ids=arrays["input_ids"], **packed, **options).logits
    return nn.functional.cross_entropy(
        logits.float().flatten(0, 1),  # (samples * length, vocabulary)
        arrays["labels"].flatten(),
        ignore_index=NOTHING,
        reduction="sum",
    )


def _evaluate(module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Sums:
    tokens = int((arrays["labels"] != NOTHING).sum())
    return {"loss_sum": float(token_loss(module, arrays, options)), "tokens": tokens}
