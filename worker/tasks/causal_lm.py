"""Language modelling: a decoder learns to say the next token of running text.

A new small model is trained whole from its configuration, an existing one whole or with LoRA. The
training documents stand one after the other, an end token behind each, and are cut into samples
of `data.max_tokens` tokens; every token but the first is predicted once an epoch. Held-out
documents likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from backends.base.interface import Array, Batch, Sums, Trainable
from protocol.data.text_corpus import read_text_corpus
from protocol.exact.digest import digest_arrays
from protocol.spec.manifest import Manifest, Metric
from protocol.spec.run_spec import RunSpec, TokenizerSpec
from worker.models import pretrained
from worker.models.blocks import cut_into_blocks
from worker.models.full_export import export_in_full
from worker.models.lora import Lora
from worker.models.tokens import (
    Tokens,
    check_tokens,
    digest_tokens,
    encode_stream,
    load_tokenizer,
    tokenizer_files,
    train_tokenizer,
    unknown_per_thousand,
)
from worker.tasks import holdout

PART_TOKENS: Final = 1_024
"""Held-out tokens in a part, if a sample is not longer: their logits must fit in memory."""
NOTHING: Final = -100
"""The label of what is not predicted: what pads the last sample."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Samples cut out of a stream of tokens: inputs and labels, each (samples, length), int64.

    A label is the token behind its input. The last sample is padded with zeros and `NOTHING`.
    """

    inputs: Tokens
    labels: Tokens

    @staticmethod
    def cut(stream: Tokens, length: int) -> Windows:
        """All tokens but the first are predicted, each once; none from fewer than 2 tokens."""
        predicted = max(len(stream) - 1, 0)
        samples = -(-predicted // length)
        inputs = np.zeros(samples * length, np.int64)
        labels = np.full(samples * length, NOTHING, np.int64)
        inputs[:predicted] = stream[:predicted]
        labels[:predicted] = stream[1:]
        return Windows(inputs.reshape(samples, length), labels.reshape(samples, length))

    def batch(self, rows: NDArray[np.int64] | slice) -> Batch:
        """input_ids and labels; the weight is the number of tokens predicted."""
        labels = self.labels[rows]
        weight = float(np.count_nonzero(labels != NOTHING))
        return Batch({"input_ids": self.inputs[rows], "labels": labels}, weight)


class CausalLM:
    """Batches hold input_ids and labels, both (samples, data.max_tokens), int64."""

    def __init__(self, spec: RunSpec) -> None:
        assert spec.model is not None
        assert spec.data is not None
        corpus = read_text_corpus(spec.data)
        parts = holdout.split(corpus.documents, spec.seed, spec.data.holdout)
        train, held_out = ([corpus.documents[n] for n in part] for part in parts)
        tokenizer = load_or_train_tokenizer(spec, train)
        loaded = load_model(spec, tokenizer)
        streams = [encode_stream(tokenizer, texts) for texts in (train, held_out) if texts]
        check_tokens(max(int(stream.max()) for stream in streams), loaded.vocabulary)
        length = spec.data.max_tokens
        self._train = Windows.cut(streams[0], length)
        self._held_out = Windows.cut(streams[-1] if held_out else streams[0][:0], length)
        self._measured = holdout.measured(
            len(self._held_out.inputs), spec.data.holdout_samples, spec.seed
        )
        self._part_samples = max(1, PART_TOKENS // length)
        lora: Lora | None = None
        module = loaded.model
        if spec.lora is not None:
            lora = Lora(module, spec.lora, "CAUSAL_LM", (), spec.seed)
            module = lora.module
        blocks = cut_into_blocks(module)
        self._initial = pretrained.initial_values(module, blocks)
        files = tokenizer_files(tokenizer)
        base = spec.model.name or spec.model.source or ""
        self.manifest = Manifest(
            blocks=blocks,
            train_samples=len(self._train.inputs),
            evaluation_parts=-(-len(self._measured) // self._part_samples),
            metrics=_METRICS,
            digests={
                "base_weights": loaded.weights_digest,
                "tokenizer": digest_tokens(streams, len(tokenizer)),
                "data": documents_digest(corpus.documents),
            },
            notes={
                "documents": len(train) + len(held_out),
                "duplicates_removed": corpus.duplicates,
                "train_tokens": len(streams[0]),
                "unknown_tokens_per_thousand": unknown_per_thousand(tokenizer, train),
            },
            export=lora.export(base, blocks, files) if lora else export_in_full(loaded, files),
        )
        self.trainable = Trainable(
            blocks=blocks,
            module=module,
            loss=partial(token_loss, options=loaded.forward_options),
            evaluate=partial(_evaluate, options=loaded.forward_options),
            seed=spec.seed,
            threads=spec.threads,
            precision=spec.model.precision,
            base_dtype=spec.model.base_dtype,
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


def load_or_train_tokenizer(spec: RunSpec, texts: Sequence[str]) -> Any:
    """The one that is named, the model's own, or one trained on the training documents."""
    assert spec.model is not None
    asked = spec.tokenizer or TokenizerSpec()
    source = asked.source or (spec.model.source if spec.tokenizer is None else None)
    return load_tokenizer(source) if source else train_tokenizer(texts, asked.vocab_size)


def load_model(spec: RunSpec, tokenizer: Any) -> pretrained.Pretrained:
    """The model that is named, or a new one for this tokenizer.

    Raises:
        DataError: It cannot be had, or has not the positions for a sample.
    """
    assert spec.model is not None
    assert spec.data is not None
    if spec.model.config is None:
        loaded = pretrained.load_causal_lm(spec.model, spec.seed)
    else:
        end = tokenizer.eos_token_id
        loaded = pretrained.start_causal_lm(spec.model, len(tokenizer), end, spec.seed)
    pretrained.check_length(loaded.config, spec.data.max_tokens)
    return loaded


def documents_digest(documents: Sequence[str]) -> str:
    """Of texts and where each ends."""
    lengths = np.array([len(text) for text in documents], np.int64)
    text = np.frombuffer("".join(documents).encode(), np.uint8)
    return digest_arrays({"lengths": lengths, "text": text})


def token_loss(
    module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> torch.Tensor:
    """Cross-entropy in float32, summed over the tokens predicted."""
    logits = module(input_ids=arrays["input_ids"], **options).logits
    return nn.functional.cross_entropy(
        logits.float().flatten(0, 1),  # (samples * length, vocabulary)
        arrays["labels"].flatten(),
        ignore_index=NOTHING,
        reduction="sum",
    )


def _evaluate(module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Sums:
    tokens = int((arrays["labels"] != NOTHING).sum())
    return {"loss_sum": float(token_loss(module, arrays, options)), "tokens": tokens}
