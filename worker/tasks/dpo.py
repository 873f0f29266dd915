"""Preferences: an adapter learns to find chosen answers likelier, against the base, than rejected.

Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), its sigmoid loss, summed
over pairs. The reference is the same model with its adapter left out, computed beside it.
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
from worker.data.preference_data import read_preference_data
from worker.models import pretrained
from worker.models.tokens import NOTHING, check_tokens, tokenizer_files
from worker.models.tuned import Tuned

PART_PAIRS: Final = 4


class Dpo:
    """Batches hold input_ids and labels, both (pairs, 2, tokens), int64: chosen, then rejected.

    A label is the token behind its input where that is part of the last answer, else `NOTHING`.
    """

    def __init__(self, spec: RunSpec) -> None:
        assert spec.model is not None
        assert spec.model.source is not None
        assert spec.data is not None
        data = read_preference_data(spec)
        self._pairs, self._train = data.pairs, data.train
        count = len(data.held_out)
        self._measured = data.held_out[
            holdout.measured(count, spec.data.holdout_samples, spec.seed)
        ]
        loaded = pretrained.load_causal_lm(spec.model, 0)
        pretrained.refuse_drawn_weights(loaded, spec.model.source, "train it by causal-lm first")
        pretrained.check_length(loaded.model, spec.data.max_tokens)
        check_tokens(self._pairs.highest, loaded.vocabulary)
        tuned = Tuned.of(loaded, spec.model, spec.lora, "CAUSAL_LM", spec.seed)
        self._initial = tuned.initial_values()
        self.manifest = Manifest(
            blocks=tuned.blocks,
            train_samples=len(self._train),
            evaluation_parts=-(-len(self._measured) // PART_PAIRS),
            metrics=_METRICS,
            digests={**tuned.digests, **data.digests},
            notes=data.notes,
            export=tuned.export(tokenizer_files(data.tokenizer)),
        )
        how: dict[str, Any] = {"beta": spec.dpo.beta, "options": loaded.forward_options}
        self.trainable = tuned.trainable(
            spec.seed,
            spec.threads,
            loss=partial(dpo_loss, **how),
            evaluate=partial(_evaluate, **how),
        )

    def initial_parameters(self) -> list[Array]:
        """LoRA as drawn from the seed: the loss begins at log 2."""
        return [values.copy() for values in self._initial]

    def batch(self, samples: Sequence[int]) -> Batch:
        """Training pairs by number; the weight is how many."""
        return self._pairs.batch(self._train[np.asarray(samples, np.int64)])

    def evaluation_batch(self, part: int) -> Batch:
        """At most `PART_PAIRS` held-out pairs."""
        return self._pairs.batch(self._measured[part * PART_PAIRS :][:PART_PAIRS])


_METRICS: Final = (
    Metric(name="loss_per_pair", numerator={"loss_sum": 1}, denominator={"pairs": 1}),
    Metric(name="reward_accuracy", numerator={"preferred": 1}, denominator={"pairs": 1}),
    Metric(name="reward_margin", numerator={"margin_sum": 1}, denominator={"pairs": 1}),
)


def dpo_loss(
    module: nn.Module, arrays: Mapping[str, Any], beta: float, options: Mapping[str, Any]
) -> torch.Tensor:
    """-log sigmoid of the margins, summed over pairs."""
    return -nn.functional.logsigmoid(_margins(module, arrays, beta, options)).sum()


def _margins(
    module: Any, arrays: Mapping[str, Any], beta: float, options: Mapping[str, Any]
) -> torch.Tensor:
    """How much more the chosen answers are rewarded than the rejected, (pairs,), float32."""
    training = module.training
    # No dropout of the base in either: its noise would be taken for what the adapter has learned.
    module.eval()
    with torch.no_grad(), module.disable_adapter():
        reference = _log_likelihoods(module, arrays, options)
    for name, each in module.named_modules():
        if "lora_dropout" in name:
            each.train(training)
    rewards = beta * (_log_likelihoods(module, arrays, options) - reference)  # (pairs, 2)
    module.train(training)
    return rewards[:, 0] - rewards[:, 1]


def _log_likelihoods(
    module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> torch.Tensor:
    """Of each answer, the sum over its tokens: (pairs, 2), float32."""
    labels = arrays["labels"]  # (pairs, 2, tokens)
    logits = module(input_ids=arrays["input_ids"].flatten(0, 1), **options).logits
    losses = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=NOTHING, reduction="none"
    )
    return -losses.reshape(labels.shape).sum(dim=-1)


def _evaluate(
    module: nn.Module, arrays: Mapping[str, Any], beta: float, options: Mapping[str, Any]
) -> Sums:
    margins = _margins(module, arrays, beta, options)
    return {
        "loss_sum": float(-nn.functional.logsigmoid(margins).sum()),
        "preferred": int((margins > 0).sum()),
        "margin_sum": float(margins.sum()),
        "pairs": len(margins),
    }
