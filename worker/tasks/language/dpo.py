"""Task dpo: an adapter learns to prefer chosen answers over rejected ones, relative to the base.

Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290), the sigmoid loss, summed
over pairs. The reference is the same model with its adapter disabled, computed in the same step.
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
from protocol.spec.run_spec import DpoRun
from worker.data import holdout
from worker.data.preference_data import read_preference_data
from worker.models import pretrained
from worker.models.tokens import add_tokens_to_model, check_tokens, tokenizer_files
from worker.models.trainable_model import TrainableModel
from worker.tasks.base.transformer import Objective, Split, TransformerTask, split_into_parts

PART_PAIRS: Final = 4
"""Pairs per evaluation part."""


class Dpo(TransformerTask):
    """Batches hold input_ids and labels, both (pairs, 2, tokens), int64: chosen, then rejected.

    A label is the token after its input if that is part of the last answer, else `IGNORED_LABEL`.
    """

    def __init__(self, spec: DpoRun) -> None:
        data = read_preference_data(spec)
        loaded = pretrained.load_causal_lm(spec.model, 0)
        pretrained.refuse_drawn_weights(loaded, spec.model.source, "train it by causal-lm first")
        pretrained.check_length(loaded.model, spec.data.max_tokens)
        loaded = add_tokens_to_model(loaded, spec.model, data.tokenizer)
        check_tokens(data.pairs.max_token, loaded.vocabulary)
        model = TrainableModel.of(loaded, spec.model, spec.lora, "CAUSAL_LM", spec.seed)
        subset = holdout.evaluation_subset(len(data.held_out), spec.data.holdout_samples, spec.seed)
        settings: dict[str, Any] = {"beta": spec.dpo.beta, "options": loaded.forward_options}
        super().__init__(
            spec,
            model,
            Split(
                len(data.train),
                lambda samples: data.pairs.batch(data.train[samples]),
                split_into_parts(data.held_out[subset], PART_PAIRS),
                data.pairs.batch,
            ),
            Objective(
                partial(dpo_loss, **settings),
                partial(_evaluate, **settings),
                _METRICS,
            ),
            digests=data.digests,
            notes=data.notes,
            files=tokenizer_files(data.tokenizer),
        )


_METRICS: Final = (
    Metric(name="loss_per_pair", numerator={"loss_sum": 1}, denominator={"pairs": 1}),
    Metric(name="reward_accuracy", numerator={"preferred": 1}, denominator={"pairs": 1}),
    Metric(name="reward_margin", numerator={"margin_sum": 1}, denominator={"pairs": 1}),
)


def dpo_loss(
    module: nn.Module, arrays: Mapping[str, Any], beta: float, options: Mapping[str, Any]
) -> torch.Tensor:
    """Sum -log sigmoid of the margins over pairs."""
    return -nn.functional.logsigmoid(_margins(module, arrays, beta, options)).sum()


def _margins(
    module: Any, arrays: Mapping[str, Any], beta: float, options: Mapping[str, Any]
) -> torch.Tensor:
    """Return the reward of each chosen answer minus that of the rejected, (pairs,), float32."""
    was_training = module.training
    # Without dropout in the base: its noise looks like a preference of the adapter.
    module.eval()
    with torch.no_grad(), module.disable_adapter():
        reference = _log_likelihoods(module, arrays, options)
    for name, submodule in module.named_modules():
        if "lora_dropout" in name:
            submodule.train(was_training)
    rewards = beta * (_log_likelihoods(module, arrays, options) - reference)  # (pairs, 2)
    module.train(was_training)
    return rewards[:, 0] - rewards[:, 1]


def _log_likelihoods(
    module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> torch.Tensor:
    """Return the log-probability of each answer, summed over its tokens: (pairs, 2), float32."""
    labels = arrays["labels"]  # (pairs, 2, tokens)
    inputs = {"input_ids": arrays["input_ids"].flatten(0, 1), **options}
    losses = token_losses(module, inputs, labels.flatten(0, 1), "none")
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
