"""Preferences: an adapter learns to find chosen answers likelier, against the base, than rejected.

Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), its sigmoid loss, summed
over pairs. The reference is the same model with its adapter left out, computed beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from backends.base.interface import Array, Batch, Sums
from protocol.base.errors import DataError
from protocol.data.conversations import Conversation
from protocol.data.preferences import Pair, read_preferences
from protocol.spec.manifest import Manifest, Metric
from protocol.spec.run_spec import DataSpec, RunSpec
from worker.data import holdout
from worker.data.chat_template import ChatTemplate, Counted
from worker.data.language_data import NOTHING, documents_digest
from worker.models import pretrained
from worker.models.tokens import (
    Tokens,
    check_tokens,
    digest_tokens,
    load_tokenizer,
    tokenizer_files,
    unknown_per_thousand,
)
from worker.models.tuned import Tuned

PART_PAIRS: Final = 4
_PADDING_TOKENS: Final = 16
"""Pairs are padded to a multiple of this: few shapes, little waste."""

Answer = tuple[Tokens, Counted]
"""A conversation's tokens, and which of them are its last answer."""


class Dpo:
    """Batches hold input_ids and labels, both (pairs, 2, tokens), int64: chosen, then rejected.

    A label is the token behind its input where that is part of the last answer, else `NOTHING`.
    """

    def __init__(self, spec: RunSpec) -> None:
        assert spec.model is not None
        assert spec.model.source is not None
        assert spec.data is not None
        read = read_preferences(spec.data)
        tokenizer = load_tokenizer(spec.model.source)
        template = ChatTemplate(tokenizer, spec.data.chat_template, everything=False)
        self._pairs = EncodedPairs.of(template, read.found, spec.data)
        train, held_out = holdout.split(self._pairs.documents, spec.seed, spec.data.holdout)
        self._train = np.array(train, np.int64)
        measured = holdout.measured(len(held_out), spec.data.holdout_samples, spec.seed)
        self._measured = np.array(held_out, np.int64)[measured]
        loaded = pretrained.load_causal_lm(spec.model, spec.seed)
        pretrained.check_length(loaded.config, spec.data.max_tokens)
        check_tokens(self._pairs.highest, loaded.vocabulary)
        tuned = Tuned.of(loaded, spec.model, spec.lora, "CAUSAL_LM", spec.seed)
        self._initial = tuned.initial_values()
        said = [pair.chosen.messages[-1].content for pair in read.found]
        self.manifest = Manifest(
            blocks=tuned.blocks,
            train_samples=len(train),
            evaluation_parts=-(-len(self._measured) // PART_PAIRS),
            metrics=_METRICS,
            digests={
                "base_weights": loaded.weights_digest,
                **self._pairs.digests(len(tokenizer)),
                "data": documents_digest([pair.document for pair in read.found]),
            },
            notes={
                "pairs": len(read.found),
                "duplicates_removed": read.duplicates,
                "pairs_truncated": self._pairs.truncated,
                "left_out_as_no_answer_fits": len(read.found) - len(self._pairs.pairs),
                "unknown_tokens_per_thousand": unknown_per_thousand(tokenizer, said),
            },
            export=tuned.export(tokenizer_files(tokenizer)),
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


@dataclass(frozen=True, slots=True)
class EncodedPairs:
    """Those pairs both of whose answers begin within `length` tokens.

    Attributes:
        documents: What identifies each.
        pairs: Of each the chosen conversation and the rejected one, of any length.
        length: `data.max_tokens`: longer ones are cut.
    """

    documents: Sequence[str]
    pairs: Sequence[tuple[Answer, Answer]]
    length: int

    @staticmethod
    def of(template: ChatTemplate, found: Sequence[Pair], data: DataSpec) -> EncodedPairs:
        """Render and encode.

        Raises:
            DataError: The template refuses a conversation, or no pair is left.
        """
        length = data.max_tokens
        chosen = _encode(template, [pair.chosen for pair in found])
        rejected = _encode(template, [pair.rejected for pair in found])
        every = list(zip(chosen, rejected, strict=True))
        kept = [
            (pair.document, answers)
            for pair, answers in zip(found, every, strict=True)
            if all(marks[1:length].any() for _, marks in answers)
        ]
        if not kept:
            longest = max(len(ids) for answers in every for ids, _ in answers)
            raise DataError(
                f"expected pairs in {data.train!r} whose first data.max_tokens = {length} tokens "
                f"reach both answers, found none; raise it: --set data.max_tokens={longest}"
            )
        documents, pairs = zip(*kept, strict=True)
        return EncodedPairs(documents, pairs, length)

    @property
    def truncated(self) -> int:
        """How many were cut."""
        return sum(any(len(ids) > self.length for ids, _ in pair) for pair in self.pairs)

    @property
    def highest(self) -> int:
        """Of all tokens."""
        return max(int(ids.max()) for pair in self.pairs for ids, _ in pair)

    def digests(self, padding: int) -> dict[str, str]:
        """Of the tokens, and of which of them count."""
        tokens = [ids for pair in self.pairs for ids, _ in pair]
        counted = [marks.astype(np.int64) for pair in self.pairs for _, marks in pair]
        return {
            "tokenizer": digest_tokens(tokens, padding),
            "counted_tokens": digest_tokens(counted, 0),
        }

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """These pairs, padded together; the weight is how many."""
        pairs = [self.pairs[row] for row in rows]
        lengths = (min(len(ids), self.length) for pair in pairs for ids, _ in pair)
        longest = max(lengths, default=2) - 1
        width = min(-(-longest // _PADDING_TOKENS) * _PADDING_TOKENS, self.length)
        inputs = np.zeros((len(pairs), 2, width), np.int64)
        labels = np.full((len(pairs), 2, width), NOTHING, np.int64)
        for row, pair in enumerate(pairs):
            for side, (every, marks) in enumerate(pair):
                ids, counts = every[: self.length], marks[: self.length]
                inputs[row, side, : len(ids) - 1] = ids[:-1]
                labels[row, side, : len(ids) - 1] = np.where(counts[1:], ids[1:], NOTHING)
        return Batch({"input_ids": inputs, "labels": labels}, float(len(pairs)))


_METRICS: Final = (
    Metric(name="loss_per_pair", numerator={"loss_sum": 1}, denominator={"pairs": 1}),
    Metric(name="reward_accuracy", numerator={"preferred": 1}, denominator={"pairs": 1}),
    Metric(name="reward_margin", numerator={"margin_sum": 1}, denominator={"pairs": 1}),
)


def _encode(template: ChatTemplate, conversations: Sequence[Conversation]) -> list[Answer]:
    """Only the last answer counts: those before are a part of the prompt."""
    rendered = [template.render(each) for each in conversations]
    return [*template.encode([replace(each, spans=each.spans[-1:]) for each in rendered])]


def dpo_loss(
    module: nn.Module, arrays: Mapping[str, Any], beta: float, options: Mapping[str, Any]
) -> torch.Tensor:
    """-log sigmoid of the margins, summed over pairs."""
    return -nn.functional.logsigmoid(_margins(module, arrays, beta, options)).sum()


def _margins(
    module: Any, arrays: Mapping[str, Any], beta: float, options: Mapping[str, Any]
) -> torch.Tensor:
    """How much more the chosen answers are rewarded than the rejected, (pairs,), float32."""
    with torch.no_grad(), module.disable_adapter():
        training = module.training
        module.eval()  # without the dropout of the base, too
        reference = _log_likelihoods(module, arrays, options)
        module.train(training)
    rewards = beta * (_log_likelihoods(module, arrays, options) - reference)  # (pairs, 2)
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
