"""Text classification: a Hugging Face encoder or decoder on labelled text, with LoRA or in full."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from backends.base.interface import Array, Batch, Sums
from protocol.base import limits
from protocol.base.errors import DataError
from protocol.base.fields import cut_text
from protocol.data.data_check import validation_data
from protocol.data.labelled_text import LabelledText, read_labelled_text
from protocol.exact.digest import Streamed, digest_arrays
from protocol.exact.samples import permutation
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import ClassWeights, DataSpec, RunSpec
from worker.data import holdout
from worker.data.disk_arrays import DiskArrays
from worker.data.language_data import digest_stored, overlap
from worker.models import pretrained
from worker.models.tokens import (
    Tokens,
    check_tokens,
    encode_cut,
    load_tokenizer,
    tokenizer_files,
    unknown_per_thousand,
)
from worker.models.tuned import Tuned
from worker.tasks.class_counts import PART_SAMPLES, class_metrics, confusion_sums
from worker.tasks.trained import FILE, Trained

PADDING_TOKENS: Final = 16
"""Texts are padded to a multiple of this: few shapes, little waste."""


class Classify:
    """Batches hold input_ids and attention_mask (samples, tokens), and labels (samples,), int64.

    A batch is padded on the right to a multiple of `PADDING_TOKENS` of its own longest text.
    With class weights it holds weights (samples,), float32, too, and weighs as much as they do
    together.
    """

    def __init__(self, spec: RunSpec) -> None:
        assert spec.model is not None
        assert spec.model.source is not None
        assert spec.data is not None
        data, valid = _read(spec.data)
        train, held_out = _divided(spec, data, valid)
        tokenizer = load_tokenizer(spec.model.source)
        self._padding = int(tokenizer.pad_token_id)
        loaded = pretrained.load_classifier(spec.model, data.names, self._padding, spec.seed)
        tuned = Tuned.of(loaded, spec.model, spec.lora, "SEQ_CLS", spec.seed)
        pretrained.check_length(loaded.model, spec.data.max_tokens)
        texts = itertools.chain(data.texts, valid.texts)
        self._tokens, cut = encoded(
            tokenizer, texts, spec.data.max_tokens, partial(_place, spec.data, data, valid)
        )
        check_tokens(max(self._padding, self._tokens.highest), loaded.vocabulary)
        self._labels = np.array([*data.labels, *valid.labels], np.int64)
        self._max_tokens = spec.data.max_tokens
        self._train = np.array(train, np.int64)
        if len(np.unique(self._labels[train])) < 2:
            raise DataError(
                f"only {data.names[int(self._labels[train[0]])]!r} is left to train on, all other "
                "labels are held out: give more samples of them, or lower data.holdout"
            )
        self._weights = class_weights(spec.data.class_weights, self._labels[train], data.names)
        measured = holdout.measured(len(held_out), spec.data.holdout_samples, spec.seed)
        self._parts = self._held_out_parts([held_out[n] for n in measured], spec.seed)
        self._initial = tuned.initial_values()
        trained = _trained(spec, data.names, loaded.weights_digest)
        self.manifest = Manifest(
            blocks=tuned.blocks,
            train_samples=len(train),
            evaluation_parts=len(self._parts),
            metrics=class_metrics(data.names, _commonest(self._labels[train])),
            digests={
                **tuned.digests,
                "tokenizer": digest_stored(
                    [self._tokens], self._tokens.lengths.tolist(), self._padding
                ),
                "data": data_digest(data),
                **({"validation": data_digest(valid)} if valid.texts else {}),
            },
            notes={
                "duplicates_removed": data.duplicates,
                "texts_truncated": cut,
                "unknown_tokens_per_thousand": unknown_per_thousand(tokenizer, data.texts),
                **(overlap(data.texts, valid.texts) if valid.texts else {}),
                **_label_notes(data, self._labels[train], self._labels[held_out]),
                **tuned.notes,
            },
            export=tuned.export({FILE: trained.document(), **tokenizer_files(tokenizer)}),
        )
        self.trainable = tuned.trainable(
            spec.seed,
            spec.threads,
            loss=partial(class_loss, options=loaded.forward_options),
            evaluate=partial(_evaluate, options=loaded.forward_options, classes=len(data.names)),
        )

    def initial_parameters(self) -> list[Array]:
        """The checkpoint's values; LoRA and a new head as drawn from the seed."""
        return [values.copy() for values in self._initial]

    def batch(self, samples: Sequence[int]) -> Batch:
        """Training samples by number, padded together."""
        return self._rows(self._train[np.asarray(samples, np.int64)])

    def evaluation_batch(self, part: int) -> Batch:
        """At most `PART_SAMPLES` held-out samples of like length."""
        return self._rows(self._parts[part])

    def _held_out_parts(self, held_out: list[int], seed: int) -> list[NDArray[np.int64]]:
        """Texts of like length together: less padding. Workers are given neighbouring parts, so
        short and long ones are mixed."""
        lengths = self._tokens.lengths
        ranked = sorted(held_out, key=lambda number: (lengths[number], number))
        rows = np.array(ranked, np.int64)
        parts = [rows[at : at + PART_SAMPLES] for at in range(0, len(rows), PART_SAMPLES)]
        return [parts[number] for number in permutation(seed, 0, len(parts))]

    def _rows(self, rows: NDArray[np.int64]) -> Batch:
        texts = [self._tokens[row] for row in rows]
        arrays = padded(texts, self._padding, self._max_tokens)
        labels = self._labels[rows]
        arrays["labels"] = labels
        if self._weights is None:
            return Batch(arrays, float(len(texts)))
        arrays["weights"] = self._weights[labels]
        return Batch(arrays, float(arrays["weights"].sum(dtype=np.float64)))


def _read(data: DataSpec) -> tuple[LabelledText, LabelledText]:
    """What is trained on, and the file that is measured on: empty where there is none."""
    found = read_labelled_text(data)
    if data.validation is None:
        return found, LabelledText((), (), found.names)
    return found, read_labelled_text(validation_data(data), found.names)


def _divided(spec: RunSpec, data: LabelledText, valid: LabelledText) -> tuple[list[int], list[int]]:
    """Which of both files' texts are trained on, and which may be measured on."""
    assert spec.data is not None
    if spec.data.validation is None:
        return holdout.split(data.texts, spec.seed, spec.data.holdout)
    trained = len(data.texts)
    return [*range(trained)], [*range(trained, trained + len(valid.texts))]


def _trained(spec: RunSpec, names: tuple[str, ...], base_weights: str) -> Trained:
    """What the result says of itself."""
    assert spec.model is not None
    assert spec.data is not None
    # A worker's own directory for what it was sent is no part of the result.
    source = spec.model.name or spec.model.source
    return Trained(
        task=spec.task,
        labels=names,
        max_tokens=spec.data.max_tokens,
        seed=spec.seed,
        model=spec.model.model_copy(update={"source": source, "name": None, "adapter": None}),
        lora=spec.lora,
        base_weights=base_weights,
    )


def padded(texts: Sequence[Tokens], padding: int, max_tokens: int) -> dict[str, NDArray[Any]]:
    """input_ids and attention_mask, as wide as the longest of these texts needs."""
    longest = max((len(text) for text in texts), default=1)
    width = min(-(-longest // PADDING_TOKENS) * PADDING_TOKENS, max_tokens)
    ids = np.full((len(texts), width), padding, np.int64)
    mask = np.zeros((len(texts), width), np.int64)
    for index, text in enumerate(texts):
        ids[index, : len(text)] = text
        mask[index, : len(text)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def class_weights(
    asked: ClassWeights | None, labels: NDArray[np.int64], names: Sequence[str]
) -> Array | None:
    """The weight of each class, float32.

    Args:
        asked: `balanced`: samples / (classes * samples of the class), so that every class weighs
            the same in all; or weights by name, 1 for those that are not named.
        labels: Of the training samples.
        names: Of the classes, in the order of their numbers.

    Raises:
        DataError: A class has no training sample to balance.
    """
    if asked is None:
        return None
    if asked == "balanced":
        counts = np.bincount(labels, minlength=len(names))
        if not counts.all():
            raise DataError(
                f"cannot balance classes: no training sample of {names[int(counts.argmin())]!r}"
            )
        return (len(labels) / (len(names) * counts)).astype(np.float32)
    return np.array([asked.get(name, 1.0) for name in names], np.float32)


def _commonest(labels: NDArray[np.int64]) -> int:
    """The class with the most training samples; the first one of equals."""
    return int(np.bincount(labels).argmax())


def _place(spec: DataSpec, data: LabelledText, valid: LabelledText, number: int) -> str:
    """File and line of a text."""
    if number < len(data.texts):
        return f"{spec.train!r} line {data.lines[number]}"
    return f"{spec.validation!r} line {valid.lines[number - len(data.texts)]}"


def _label_notes(
    data: LabelledText, trained: NDArray[np.int64], held: NDArray[np.int64]
) -> dict[str, int]:
    """What looks like a mistake in the labels, for the manifest: counts of samples."""
    counts = np.bincount([*data.labels], minlength=len(data.names))
    seen = {int(label) for label in trained}
    missed = Counter(int(label) for label in held if int(label) not in seen)
    numbers = {name: number for number, name in enumerate(data.names)}
    notes = {"conflicting_labels_left_out": data.conflicts} if data.conflicts else {}
    for names in data.alike:
        shown = cut_text(f"labels_alike[{'|'.join(names)}]", limits.NAME_CHARACTERS)
        notes[shown] = int(sum(counts[numbers[name]] for name in names))
    for label, count in sorted(missed.items()):
        shown = f"held_out_class_without_training_sample[{data.names[label]}]"
        notes[cut_text(shown, limits.NAME_CHARACTERS)] = count
    return notes


def encoded(
    tokenizer: Any, texts: Iterable[str], max_tokens: int, place: Callable[[int], str]
) -> tuple[DiskArrays, int]:
    """Tokens of each text, on disk, and how many were cut."""
    tokens, cut = DiskArrays("<u4", np.int64), 0
    for ids, was_cut in encode_cut(tokenizer, texts, max_tokens, place):
        tokens.append(ids)
        cut += was_cut
    return tokens, cut


def data_digest(data: LabelledText) -> str:
    """Of texts, labels and label names, in order: of a JSON document that is never there whole."""
    parts = (np.frombuffer(part.encode(), np.uint8) for part in _document(data))
    size = sum(map(len, _document(data)))
    return digest_arrays({"document": Streamed(np.dtype(np.uint8), (size,), parts)})


def _document(data: LabelledText) -> Iterator[str]:
    """As `json.dumps` writes it: ASCII."""
    yield "[["
    for number, text in enumerate(data.texts):
        yield ", " * (number > 0) + json.dumps(text)
    yield f"], {json.dumps([*data.labels])}, {json.dumps(data.names)}]"


def logits_of(
    module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> torch.Tensor:
    """(samples, classes), in float32 whatever forward computes in."""
    output = module(
        input_ids=arrays["input_ids"], attention_mask=arrays["attention_mask"], **options
    )
    logits: torch.Tensor = output.logits.float()
    return logits


def class_loss(
    module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> torch.Tensor:
    """Cross-entropy, weighted if the batch says so, summed over samples."""
    logits, labels = logits_of(module, arrays, options), arrays["labels"]
    if "weights" not in arrays:
        return nn.functional.cross_entropy(logits, labels, reduction="sum")
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    weights: torch.Tensor = arrays["weights"]
    return (losses * weights).sum()


def _evaluate(
    module: nn.Module, arrays: Mapping[str, Any], options: Mapping[str, Any], classes: int
) -> Sums:
    chosen = logits_of(module, arrays, options).argmax(dim=1)
    return confusion_sums(arrays["labels"].tolist(), chosen.tolist(), classes)
