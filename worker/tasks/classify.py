"""Text classification: a Hugging Face encoder on labelled text, with LoRA or in full."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from backends.interface import Array, Batch, Sums, Trainable
from protocol.errors import DataError
from protocol.manifest import Block, Export, Manifest, Metric
from protocol.run_spec import RunSpec
from worker.blocks import cut_into_blocks
from worker.labelled_text import LabelledText, read_labelled_text
from worker.tasks import pretrained
from worker.tasks.digest import digest_arrays

PART_SAMPLES: Final = 32
PADDING_TOKENS: Final = 16
"""Texts are padded to a multiple of this: few shapes, little waste."""

Tokens = NDArray[np.int64]


class Classify:
    """Batches hold input_ids and attention_mask (samples, tokens), and labels (samples,), int64.

    A batch is padded on the right to a multiple of `PADDING_TOKENS` of its own longest text.
    """

    def __init__(self, spec: RunSpec) -> None:
        assert spec.model is not None
        assert spec.data is not None
        data = read_labelled_text(spec.data)
        train, held_out = data.split(spec.seed, spec.data.holdout)
        loaded = pretrained.load(spec.model, data.names, spec.seed)
        self._tokens = _tokenise(loaded, data.texts, spec.data.max_tokens)
        self._labels = np.array(data.labels, np.int64)
        self._padding = int(loaded.tokenizer.pad_token_id)
        self._max_tokens = spec.data.max_tokens
        self._train = np.array(train)
        # Texts of like length together: less padding.
        held_out.sort(key=lambda number: (len(self._tokens[number]), number))
        self._held_out = np.array(held_out, np.int64)
        module = loaded.model
        if spec.lora is not None:
            module = pretrained.add_lora(loaded, spec.lora, spec.seed)
        blocks = cut_into_blocks(module)
        positive = _rarer(self._labels[self._train], len(data.names))
        self._initial = _values(module, blocks)
        self.manifest = Manifest(
            blocks=blocks,
            train_samples=len(train),
            evaluation_parts=-(-len(held_out) // PART_SAMPLES),
            metrics=_metrics(data.names, positive),
            digests={
                "base_weights": loaded.weights_digest,
                "tokenizer": _tokens_digest(self._tokens, self._padding),
                "data": _data_digest(data),
            },
            export=_export(spec, loaded, blocks, data.names),
        )
        self.trainable = Trainable(
            blocks=blocks,
            module=module,
            loss=_loss,
            evaluate=partial(_evaluate, positive=positive),
            seed=spec.seed,
            threads=spec.threads,
        )

    def initial_parameters(self) -> list[Array]:
        """The checkpoint's values; LoRA and a new head as drawn from the seed."""
        return [values.copy() for values in self._initial]

    def batch(self, samples: Sequence[int]) -> Batch:
        """Training samples by number, padded together."""
        return self._rows(self._train[np.asarray(samples, np.int64)])

    def evaluation_batch(self, part: int) -> Batch:
        """`PART_SAMPLES` held-out samples; the last part may have fewer."""
        return self._rows(self._held_out[part * PART_SAMPLES : (part + 1) * PART_SAMPLES])

    def _rows(self, rows: NDArray[np.int64]) -> Batch:
        texts = [self._tokens[row] for row in rows]
        longest = max((len(text) for text in texts), default=1)
        width = min(-(-longest // PADDING_TOKENS) * PADDING_TOKENS, self._max_tokens)
        ids = np.full((len(texts), width), self._padding, np.int64)
        mask = np.zeros((len(texts), width), np.int64)
        for index, text in enumerate(texts):
            ids[index, : len(text)] = text
            mask[index, : len(text)] = 1
        arrays = {"input_ids": ids, "attention_mask": mask, "labels": self._labels[rows]}
        return Batch(arrays, float(len(texts)))


def _tokenise(loaded: pretrained.Pretrained, texts: Sequence[str], max_tokens: int) -> list[Tokens]:
    longest = getattr(loaded.config, "max_position_embeddings", None)
    if longest is not None and max_tokens > longest:
        raise DataError(
            f"expected data.max_tokens of at most {longest}, the model's positions, "
            f"got {max_tokens}"
        )
    encoded = loaded.tokenizer(list(texts), truncation=True, max_length=max_tokens)
    tokens = [np.array(ids, np.int64) for ids in encoded["input_ids"]]
    if not all(len(text) for text in tokens):
        raise DataError("expected text in every sample; the tokenizer makes nothing of one")
    return tokens


def _rarer(labels: NDArray[np.int64], classes: int) -> int:
    """The class with the fewest training samples; the later one of equals."""
    counts = Counter(labels.tolist())
    return min(range(classes), key=lambda number: (counts[number], -number))


def _values(module: nn.Module, blocks: Sequence[Block]) -> list[Array]:
    parameters = dict(module.named_parameters())
    return [
        np.concatenate([parameters[t.name].detach().numpy().reshape(-1) for t in block.tensors])
        for block in blocks
    ]


def _metrics(names: Sequence[str], positive: int) -> tuple[Metric, ...]:
    accuracy = Metric(name="accuracy", numerator={"correct": 1}, denominator={"samples": 1})
    if len(names) != 2:
        return (accuracy,)
    f1 = Metric(
        name=f"f1[{names[positive]}]",
        numerator={"tp": 2},
        denominator={"tp": 2, "fp": 1, "fn": 1},
    )
    return (accuracy, f1)


def _export(
    spec: RunSpec, loaded: pretrained.Pretrained, blocks: Sequence[Block], names: Sequence[str]
) -> Export:
    """PEFT's layout for LoRA, Hugging Face's for a whole model; and the labels in order."""
    assert spec.model is not None
    labels = {"labels.json": _document(list(names))}
    if spec.lora is None:
        config = loaded.config.to_diff_dict()
        config.pop("transformers_version", None)
        config.pop("_name_or_path", None)
        config["architectures"] = [type(loaded.model).__name__]
        return Export(files={"config.json": _document(config), **labels})
    heads = pretrained.head_modules(loaded.model)
    config = pretrained.adapter_config(spec.lora, spec.model.source, heads)
    tensors = (tensor.name for block in blocks for tensor in block.tensors)
    return Export(
        directory="adapter",
        weights_file="adapter_model.safetensors",
        names={name: pretrained.adapter_name(name) for name in tensors},
        files={"adapter_config.json": _document(config), **labels},
    )


def _document(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, default=str) + "\n"


def _tokens_digest(tokens: Sequence[Tokens], padding: int) -> str:
    """Of what the tokenizer made of all texts: that is what decides, not how it is stored."""
    lengths = np.array([len(text) for text in tokens], np.int64)
    ids = np.concatenate(tokens)
    return digest_arrays({"lengths": lengths, "ids": ids, "padding": np.array([padding])})


def _data_digest(data: LabelledText) -> str:
    """Of texts, labels and label names, in order."""
    document = json.dumps([data.texts, data.labels, data.names]).encode()
    return digest_arrays({"document": np.frombuffer(document, np.uint8)})


def _logits(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    output = module(input_ids=arrays["input_ids"], attention_mask=arrays["attention_mask"])
    logits: torch.Tensor = output.logits
    return logits


def _loss(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    """Cross-entropy, summed over samples."""
    logits = _logits(module, arrays)
    return nn.functional.cross_entropy(logits, arrays["labels"], reduction="sum")


def _evaluate(module: nn.Module, arrays: Mapping[str, Any], positive: int) -> Sums:
    """Counts: samples, correct, and tp, fp, fn of the class `positive`."""
    chosen = _logits(module, arrays).argmax(dim=1)
    labels = arrays["labels"]
    said, true = chosen == positive, labels == positive
    return {
        "samples": len(labels),
        "correct": int((chosen == labels).sum()),
        "tp": int((said & true).sum()),
        "fp": int((said & ~true).sum()),
        "fn": int((~said & true).sum()),
    }
