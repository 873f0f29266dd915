"""Task embed: an encoder or decoder learns embeddings of texts for retrieval.

Each anchor should score highest with its own passage among all passages of the step, even those
embedded by other workers: the loss couples all samples of a step (`backends.losses.coupled_loss`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from backends.base.interface import CoupledLoss, Sums
from protocol.spec.manifest import EmbeddingField, EmbeddingLayout, Metric
from protocol.spec.run_spec import EmbedRun
from protocol.spec.sections.tasks import EmbedSpec
from worker.data import holdout
from worker.data.embedding_data import PADDING_TOKENS, read_embedding_data
from worker.models import pretrained
from worker.models.blocks import cut_into_blocks
from worker.models.lora import LOG_SCALE
from worker.models.tokens import add_tokens_to_model, check_tokens, tokenizer_files
from worker.models.trainable_model import TrainableModel
from worker.tasks.base.transformer import Objective, Split, TransformerTask

_LARGEST_LOG_SCALE: Final = math.log(100.0)
_TEXTS_AT_ONCE: Final = 64
"""Texts that evaluation embeds at once, and anchors that it ranks at once."""
_RANKS: Final = (1, 5, 10)


class Embed(TransformerTask):
    """The task embed. Batches are those of `EmbeddingData`; all held-out rows are one part."""

    def __init__(self, spec: EmbedRun) -> None:
        data = read_embedding_data(spec)
        loaded = pretrained.freeze_pooler(pretrained.load_encoder(spec.model))
        pretrained.refuse_drawn_weights(loaded, str(spec.model.source), "take a pretrained one")
        pretrained.check_length(loaded.model, spec.data.max_tokens)
        loaded = add_tokens_to_model(loaded, spec.model, data.tokenizer)
        check_tokens(max(data.padding, data.texts.max_element), loaded.vocabulary)
        model = TrainableModel.of(loaded, spec.model, spec.lora, "FEATURE_EXTRACTION", spec.seed)
        if spec.embed.learn_temperature:
            scale = torch.tensor(-math.log(spec.embed.temperature), dtype=torch.float32)
            model.module.register_parameter(LOG_SCALE, nn.Parameter(scale))
            model = replace(model, blocks=cut_into_blocks(model.module))
        subset = holdout.evaluation_subset(len(data.held_out), spec.data.holdout_samples, spec.seed)
        parts = [data.held_out[subset]] if len(subset) else []
        encoder = Encoder(spec.embed, loaded.forward_options)
        width = int(loaded.config.get_text_config().hidden_size)
        passages = data.rows.shape[1] - 1
        layout = EmbeddingLayout(
            fields=(
                EmbeddingField(name="anchor", dtype="float32", shape=(width,)),
                EmbeddingField(name="passages", dtype="float32", shape=(passages, width)),
                EmbeddingField(name="anchor_number", dtype="int64"),
                EmbeddingField(name="passage_numbers", dtype="int64", shape=(passages,)),
            )
        )
        super().__init__(
            spec,
            model,
            Split(len(data.train), lambda n: data.batch(data.train[n]), parts, data.batch),
            Objective(None, encoder.evaluate, encoder.metrics),
            digests=data.digests,
            notes=data.notes,
            files={**encoder.files(width, spec.data.max_tokens), **tokenizer_files(data.tokenizer)},
            coupled=CoupledLoss(encoder.embed, encoder.losses, layout),
        )


@dataclass(frozen=True, slots=True)
class Encoder:
    """Embeddings from a model's states, their losses, and the ranks of passages.

    Attributes:
        spec: The section `embed`.
        options: Arguments of every forward.
    """

    spec: EmbedSpec
    options: Mapping[str, Any]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The evaluation metrics, with the temperature if it is learned."""
        return METRICS if self.spec.learn_temperature else METRICS[:-1]

    def encode(self, module: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Embed texts: return (texts, width) float32 for ids and mask of (texts, tokens)."""
        states = module(input_ids=ids, attention_mask=mask, **self.options).last_hidden_state
        states = states.float()
        match self.spec.pooling:
            case "cls":
                pooled = states[:, 0]
            case "last":
                pooled = states[torch.arange(len(ids), device=ids.device), mask.sum(dim=1) - 1]
            case "mean":
                weights = mask[..., None].to(states.dtype)
                pooled = (states * weights).sum(dim=1) / weights.sum(dim=1)
        return normalize(pooled, dim=-1) if self.spec.normalize else pooled

    def embed(self, module: nn.Module, arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the fields of a microbatch: see `backends.base.interface.CoupledLoss`."""
        ids, mask = arrays["passage_ids"], arrays["passage_mask"]
        passages = self.encode(module, ids.flatten(0, 1), mask.flatten(0, 1))
        return {
            "anchor": self.encode(module, arrays["anchor_ids"], arrays["anchor_mask"]),
            "passages": passages.reshape(*ids.shape[:2], -1),
            "anchor_number": arrays["anchor_number"],
            "passage_numbers": arrays["passage_numbers"],
        }

    def losses(self, module: nn.Module, fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of each pair of a step, (pairs,), over all passages of the step."""
        return self._losses(module, fields, slice(0, len(fields["anchor"])))

    def _losses(
        self, module: nn.Module, fields: Mapping[str, torch.Tensor], part: slice
    ) -> torch.Tensor:
        anchors, passages = fields["anchor"], fields["passages"]
        # All positives, then all negatives: pair i's positive is passage i.
        candidates = passages.transpose(0, 1).flatten(0, 1)
        numbers = fields["passage_numbers"].transpose(0, 1).flatten()
        target = torch.arange(len(anchors), device=anchors.device)[part]
        scale = self._scale(module)
        scores = scale * (anchors[part] @ candidates.T)
        excluded = _excluded_candidates(fields, numbers, part)
        losses = cross_entropy(scores.masked_fill(excluded, -torch.inf), target, reduction="none")
        if not self.spec.symmetric:
            return losses
        # The reverse direction: anchors as candidates for each positive, with the same exclusions.
        scores = scale * (candidates[: len(anchors)][part] @ anchors.T)
        excluded = excluded[:, : len(anchors)]
        reverse_losses = cross_entropy(
            scores.masked_fill(excluded, -torch.inf), target, reduction="none"
        )
        return (losses + reverse_losses) / 2

    def _scale(self, module: nn.Module) -> torch.Tensor | float:
        if not self.spec.learn_temperature:
            return 1.0 / self.spec.temperature
        scale: torch.Tensor = getattr(module, LOG_SCALE)  # in a trace it is not an nn.Parameter
        return scale.clamp(max=_LARGEST_LOG_SCALE).exp()

    def evaluate(self, module: nn.Module, arrays: Mapping[str, Any]) -> Sums:
        """Rank the distinct passages of all held-out rows for each anchor; return metric sums."""
        fields = {
            "anchor": self._encode_in_batches(module, arrays["anchor_ids"], arrays["anchor_mask"]),
            "passages": self._passages(module, arrays),
            "anchor_number": arrays["anchor_number"],
            "passage_numbers": arrays["passage_numbers"],
        }
        count = len(fields["anchor"])
        sums = dict.fromkeys(["loss_sum", "reciprocal", *(f"within_{k}" for k in _RANKS)], 0.0)
        for part in _slices(count):
            sums["loss_sum"] += float(self._losses(module, fields, part).cpu().double().sum())
        for rank in ranks(fields):
            sums["reciprocal"] += 1.0 / rank if rank <= _RANKS[-1] else 0.0
            for k in _RANKS:
                sums[f"within_{k}"] += rank <= k
        scale = self._scale(module)
        return {**sums, "pairs": count, "temperature": 1.0 / float(scale), "parts": 1}

    def _encode_in_batches(
        self, module: nn.Module, ids: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Embed texts in batches, without most of the columns that hold only padding.

        Widths are multiples of `PADDING_TOKENS`: a device that compiles needs a program for each.
        """
        embeddings = []
        for part in _slices(len(ids)):
            longest_text = int(mask[part].sum(dim=1).max())
            width = -(-longest_text // PADDING_TOKENS) * PADDING_TOKENS
            embeddings.append(self.encode(module, ids[part, :width], mask[part, :width]))
        return torch.cat(embeddings)

    def _passages(self, module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
        ids, mask = arrays["passage_ids"], arrays["passage_mask"]
        flat = self._encode_in_batches(module, ids.flatten(0, 1), mask.flatten(0, 1))
        return flat.reshape(*ids.shape[:2], -1)

    def files(self, width: int, max_tokens: int) -> dict[str, str]:
        """Return the files with which sentence-transformers loads the result."""
        package = "sentence_transformers.models."
        modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
        if self.spec.normalize:
            modules.append(("Normalize", "2_Normalize"))
        pooling = {
            "word_embedding_dimension": width,
            "pooling_mode_cls_token": self.spec.pooling == "cls",
            "pooling_mode_mean_tokens": self.spec.pooling == "mean",
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
            "pooling_mode_weightedmean_tokens": False,
            "pooling_mode_lasttoken": self.spec.pooling == "last",
            "include_prompt": True,
        }
        documents: dict[str, Any] = {
            "modules.json": [
                {"idx": number, "name": str(number), "path": path, "type": package + name}
                for number, (name, path) in enumerate(modules)
            ],
            "1_Pooling/config.json": pooling,
            "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
            "config_sentence_transformers.json": {
                "prompts": {},
                "default_prompt_name": None,
                "similarity_fn_name": "cosine" if self.spec.normalize else "dot",
            },
        }
        return {name: json.dumps(document, indent=2) + "\n" for name, document in documents.items()}


def _excluded_candidates(
    fields: Mapping[str, torch.Tensor], numbers: torch.Tensor, part: slice
) -> torch.Tensor:
    """Return a mask of the candidates that are false negatives, (anchors, candidates) bool.

    A candidate is excluded if it equals the anchor's positive, or if it is the positive of a pair
    with an equal anchor. The anchor's own positive stays.
    """
    anchors, positives = fields["anchor_number"], fields["passage_numbers"][:, 0]
    count, positions = len(anchors), torch.arange(len(numbers), device=anchors.device)
    same_passage = positives[part, None] == numbers[None]
    of_same_anchor = anchors[part, None] == anchors.repeat(len(numbers) // count)[None]
    own_positive = positions[:count][part, None] == positions[None]
    return (same_passage | (of_same_anchor & (positions < count)[None])) & ~own_positive


def ranks(fields: Mapping[str, torch.Tensor]) -> Iterator[int]:
    """Yield the rank of the best passage that answers each anchor, from 1.

    All distinct passages are ranked; on equal scores, wrong passages come first.
    """
    numbers = fields["passage_numbers"].cpu().numpy()
    anchors = fields["anchor_number"].cpu().numpy()
    _, first_rows, passage_numbers = np.unique(numbers, return_index=True, return_inverse=True)
    positives = passage_numbers.reshape(numbers.shape)[:, 0]
    candidates = fields["passages"].flatten(0, 1)[torch.from_numpy(first_rows)]
    for part in _slices(len(anchors)):
        is_answer = np.zeros((len(anchors[part]), len(first_rows)), np.bool_)
        rows, pairs = np.nonzero(anchors[part, None] == anchors[None])
        is_answer[rows, positives[pairs]] = True
        scores = (fields["anchor"][part] @ candidates.T).cpu().numpy()
        best_scores = np.where(is_answer, scores, -np.inf).max(axis=1, keepdims=True)
        yield from (1 + ((scores >= best_scores) & ~is_answer).sum(axis=1)).tolist()


def _slices(count: int) -> Iterator[slice]:
    for lo in range(0, count, _TEXTS_AT_ONCE):
        yield slice(lo, min(lo + _TEXTS_AT_ONCE, count))


METRICS: Final = (
    Metric(name="loss_per_pair", numerator={"loss_sum": 1}, denominator={"pairs": 1}),
    Metric(name="mrr_at_10", numerator={"reciprocal": 1}, denominator={"pairs": 1}),
    *(
        Metric(name=f"recall_at_{k}", numerator={f"within_{k}": 1}, denominator={"pairs": 1})
        for k in _RANKS
    ),
    Metric(name="temperature", numerator={"temperature": 1}, denominator={"parts": 1}),
)
"""MRR and recall count the best-ranked passage that answers, among all held-out passages."""
