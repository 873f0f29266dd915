"""Read, split and encode labeled texts, or pairs of texts."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from backends.base.interface import Array, Batch
from protocol.base import limits
from protocol.base.errors import DataError
from protocol.base.fields import cut_text
from protocol.datasets.data_check import validation_data
from protocol.datasets.labeled_text import LabeledText, read_labeled_text, split_pair
from protocol.exact.digest import Streamed, digest_arrays
from protocol.spec.run_spec import ClassifyRun
from protocol.spec.sampling import Sampling
from protocol.spec.sections.data import ClassWeights, DataSpec, Problem
from worker.data import holdout
from worker.data.disk_arrays import DiskArrays
from worker.data.language_data import bad_rows_note, digest_stored, overlap
from worker.models.tokens import Tokens, encode_cut, load_tokenizer, sampled_every, unknown_in

PADDING_TOKENS: Final = 16
"""Texts are padded to a multiple of this: few shapes, little waste."""
_PAIRS_AT_ONCE: Final = 256


@dataclass(frozen=True, slots=True)
class LabeledSamples:
    """Encoded texts with their targets.

    A batch holds input_ids and attention_mask (samples, tokens), int64; of pairs token_type_ids,
    too, where the tokenizer has them; labels, (samples,) int64 (single-label), (samples, classes)
    float32 (multi-label) or (samples,) float32 (regression); and with class weights weights,
    (samples,) float32. It is padded on the right to a multiple of `PADDING_TOKENS` of its longest
    text. Its weight is the number of samples, or the sum of their weights.

    Attributes:
        tokens: Of each text.
        types: Of each token, which text of a pair it is of; None where the model is not told.
        targets: Of each text, as in a batch.
        weights: Of each class, float32; None without class weights.
        padding: The padding token.
        max_tokens: The width of the widest batch.
    """

    tokens: DiskArrays
    types: DiskArrays | None
    targets: NDArray[Any]
    weights: Array | None
    padding: int
    max_tokens: int

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """Make a batch of these texts."""
        texts = [self.tokens[row] for row in rows]
        arrays = padded(texts, self.padding, self.max_tokens)
        if self.types is not None:
            types = padded([self.types[row] for row in rows], 0, self.max_tokens)
            arrays["token_type_ids"] = types["input_ids"]
        targets = self.targets[rows]
        arrays["labels"] = targets
        if self.weights is None:
            return Batch(arrays, float(len(texts)))
        arrays["weights"] = self.weights[targets]
        return Batch(arrays, float(arrays["weights"].sum(dtype=np.float64)))


@dataclass(frozen=True, slots=True)
class Scale:
    """Mean and deviation of numbers that a model learns."""

    mean: float = 0.0
    deviation: float = 1.0

    @staticmethod
    def of(numbers: NDArray[np.float64]) -> Scale:
        """Measure numbers, (samples,).

        Raises:
            DataError: All are equal.
        """
        deviation = float(numbers.std())
        if not deviation > 0:
            raise DataError(
                f"expected labels that differ, got {numbers[0]:g} alone in the training data; "
                "check data.label"
            )
        return Scale(float(numbers.mean()), deviation)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledTexts(holdout.DividedData):
    """All that a run makes of its data.

    Attributes:
        samples: Of training and evaluation data.
        names: Of the classes, in the order of their numbers; of regression none.
        sampling: How an epoch's training samples are drawn, by their class.
        scale: Of numbers: a target times its deviation, plus its mean, is the number.
    """

    samples: LabeledSamples
    names: tuple[str, ...]
    sampling: Sampling | None
    scale: Scale = Scale()


def read_labeled_texts(spec: ClassifyRun) -> LabeledTexts:
    """Read, divide and encode what the run spec names.

    Raises:
        DataError: Data or tokenizer cannot be used.
    """
    section = spec.data
    data, valid = _read(section)
    train, held_out = (np.array(rows, np.int64) for rows in _divided(spec, data, valid))
    tokenizer = load_tokenizer(spec.model.source, spec.model.added_tokens)
    padding = int(tokenizer.pad_token_id)
    texts = itertools.chain(data.texts, valid.texts)
    where = partial(_location, data, valid)
    types = None
    if section.text_pair is None:
        tokens, truncated = encoded(tokenizer, texts, section.max_tokens, where)
        looked_at: Iterable[str] = data.texts[:: sampled_every(len(data.texts))]
    else:
        pairs = [split_pair(text) for text in texts]
        tokens, types, truncated = encode_pairs(tokenizer, pairs, section.max_tokens, where)
        looked_at = itertools.chain(*pairs[:: sampled_every(len(pairs))])
    targets = _targets(section.problem, [*data.labels, *valid.labels], len(data.names))
    scale = Scale.of(targets[train]) if section.standardize else Scale()
    if section.problem == "regression":
        targets = ((targets - scale.mean) / scale.deviation).astype(np.float32)
    weights = sampling = None
    notes: dict[str, int] = {}
    if section.problem == "single-label":
        if len(np.unique(targets[train])) < 2:
            raise DataError(
                f"only {data.names[int(targets[train[0]])]!r} is left to train on, all other "
                "labels are held out: give more samples of them, or lower data.holdout"
            )
        weights = class_weights(section.class_weights, targets[train], data.names)
        chances = class_weights(section.sampling, targets[train], data.names)
        if chances is not None:
            sampling = Sampling.by_weight(chances[targets[train]])
        notes = _label_notes(data, targets[train], targets[held_out])
    return LabeledTexts(
        tokenizer=tokenizer,
        samples=LabeledSamples(tokens, types, targets, weights, padding, section.max_tokens),
        names=data.names,
        sampling=sampling,
        scale=scale,
        train=train,
        held_out=held_out,
        digests={
            "tokenizer": digest_stored([tokens], tokens.lengths.tolist(), padding),
            "data": data_digest(data),
            **({"validation": data_digest(valid)} if valid.texts else {}),
        },
        notes={
            "duplicates_removed": data.duplicates,
            **bad_rows_note(data, valid),
            "texts_truncated": truncated,
            "unknown_tokens_per_thousand": unknown_in(tokenizer, looked_at),
            **(overlap(data.texts, valid.texts) if valid.texts else {}),
            **notes,
        },
    )


def _targets(problem: Problem, labels: Sequence[Any], classes: int) -> NDArray[Any]:
    if problem == "single-label":
        return np.array(labels, np.int64)
    if problem == "regression":
        return np.array(labels, np.float64)
    targets = np.zeros((len(labels), classes), np.float32)
    for row, classes_of_sample in enumerate(labels):
        targets[row, [*classes_of_sample]] = 1.0
    return targets


def encode_pairs(
    tokenizer: Any,
    pairs: Sequence[tuple[str, str]],
    max_tokens: int,
    where: Callable[[int], str] = "pair {}".format,
) -> tuple[DiskArrays, DiskArrays | None, int]:
    """Encode pairs of texts with the model's own marks.

    Args:
        tokenizer: Of the model.
        pairs: Any number.
        max_tokens: The longer text of a pair is cut until both have so many.
        where: Where a pair stands, in words, by its number.

    Returns:
        The tokens; which text each is of, where the tokenizer says; how many pairs were cut.

    Raises:
        DataError: A text of a pair is empty.
    """
    tokens, types = DiskArrays("<u4", np.int64), DiskArrays(np.uint8, np.int64)
    truncated, has_types = 0, False
    for lo in range(0, len(pairs), _PAIRS_AT_ONCE):
        some = pairs[lo : lo + _PAIRS_AT_ONCE]
        for number, (first, second) in enumerate(some, start=lo):
            if not first or not second:
                raise DataError(f"{where(number)}: expected two texts, got an empty one")
        encodings_of_pairs = tokenizer(
            [first for first, _ in some],
            [second for _, second in some],
            truncation="longest_first",
            max_length=max_tokens,
        )
        has_types = "token_type_ids" in encodings_of_pairs
        for number, ids in enumerate(encodings_of_pairs["input_ids"]):
            tokens.append(np.array(ids, np.int64))
            if has_types:
                types.append(np.array(encodings_of_pairs["token_type_ids"][number], np.int64))
            encodings = encodings_of_pairs.encodings
            truncated += encodings is not None and bool(encodings[number].overflowing)
    return tokens, types if has_types else None, truncated


def _read(data: DataSpec) -> tuple[LabeledText, LabeledText]:
    """Read the training data and the evaluation data, which is empty if there is none."""
    found = read_labeled_text(data)
    if data.validation is None:
        return found, LabeledText((), (), found.names)
    return found, read_labeled_text(validation_data(data), found.names)


def _divided(
    spec: ClassifyRun, data: LabeledText, valid: LabeledText
) -> tuple[list[int], list[int]]:
    """Return the numbers of the training samples and of those for evaluation."""
    if spec.data.stratify:
        return holdout.split_by_class(data.texts, data.labels, spec.seed, spec.data.holdout)
    if spec.data.validation is None:
        return holdout.split(data.texts, spec.seed, spec.data.holdout)
    trained = len(data.texts)
    return [*range(trained)], [*range(trained, trained + len(valid.texts))]


def padded(texts: Sequence[Tokens], padding: int, max_tokens: int) -> dict[str, NDArray[Any]]:
    """Return input_ids and attention_mask, as wide as the longest text needs."""
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
    """Return the weight of each class, float32.

    Args:
        asked: `balanced`: samples / (classes * samples of the class), so that every class has
            the same total weight; or weights by name, 1 for the others.
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
                "expected training samples of every class to balance them, found none of "
                f"{names[int(counts.argmin())]!r}; add some, or lower data.holdout"
            )
        return (len(labels) / (len(names) * counts)).astype(np.float32)
    return np.array([asked.get(name, 1.0) for name in names], np.float32)


def _location(data: LabeledText, valid: LabeledText, number: int) -> str:
    """Return file and row of a text."""
    training_samples = len(data.texts)
    return (
        data.locations[number]
        if number < training_samples
        else valid.locations[number - training_samples]
    )


def _label_notes(
    data: LabeledText, training_labels: NDArray[np.int64], evaluation_labels: NDArray[np.int64]
) -> dict[str, int]:
    """Count samples with labels that look like mistakes, for the manifest."""
    counts = np.bincount([*data.labels], minlength=len(data.names))
    trained_classes = {int(label) for label in training_labels}
    missed = Counter(int(label) for label in evaluation_labels if int(label) not in trained_classes)
    numbers = {name: number for number, name in enumerate(data.names)}
    notes = {"conflicting_labels_left_out": data.conflicts} if data.conflicts else {}
    for names in data.alike:
        note = cut_text(f"labels_alike[{'|'.join(names)}]", limits.NAME_CHARACTERS)
        notes[note] = int(sum(counts[numbers[name]] for name in names))
    for label, count in sorted(missed.items()):
        note = f"held_out_class_without_training_sample[{data.names[label]}]"
        notes[cut_text(note, limits.NAME_CHARACTERS)] = count
    return notes


def encoded(
    tokenizer: Any, texts: Iterable[str], max_tokens: int, location_of: Callable[[int], str]
) -> tuple[DiskArrays, int]:
    """Return the tokens of each text, on disk, and how many texts were truncated."""
    tokens, truncated = DiskArrays("<u4", np.int64), 0
    for ids, was_cut in encode_cut(tokenizer, texts, max_tokens, location_of):
        tokens.append(ids)
        truncated += was_cut
    return tokens, truncated


def data_digest(data: LabeledText) -> str:
    """Return the digest of texts, labels and names: of their JSON, streamed."""
    parts = (np.frombuffer(part.encode(), np.uint8) for part in _document(data))
    size = sum(map(len, _document(data)))
    return digest_arrays({"document": Streamed(np.dtype(np.uint8), (size,), parts)})


def _document(data: LabeledText) -> Iterator[str]:
    """Yield the JSON as `json.dumps` writes it, in ASCII."""
    yield "[["
    for number, text in enumerate(data.texts):
        yield ", " * (number > 0) + json.dumps(text)
    yield f"], {json.dumps([*data.labels])}, {json.dumps(data.names)}]"
