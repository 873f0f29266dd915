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
from protocol.exact.digest import StreamedArray, digest_arrays
from protocol.spec.run_spec import ClassifyRun
from protocol.spec.sampling import Sampling
from protocol.spec.sections.data import ClassWeights, DataSpec, Problem
from worker.data import holdout
from worker.data.disk_arrays import DiskArrays
from worker.data.language_data import bad_rows_note, count_overlap, digest_disk_arrays
from worker.models.tokens import (
    Tokens,
    encode_truncated,
    load_tokenizer,
    measure_unknown_tokens,
    sampling_stride,
)

PADDING_TOKENS: Final = 16
"""Batch widths are a multiple of this, or `max_tokens`: few shapes, and little padding."""
_PAIRS_PER_CALL: Final = 256


@dataclass(frozen=True, slots=True)
class LabeledSamples:
    """Tokenized texts with their targets.

    A batch has input_ids and attention_mask, (samples, tokens) int64; for pairs also
    token_type_ids, if the tokenizer has them; labels, (samples,) int64 (single-label), (samples,
    classes) float32 (multi-label) or (samples,) float32 (regression); and with class weights also
    weights, (samples,) float32. It is padded on the right to the length of its longest text,
    rounded up to a multiple of `PADDING_TOKENS`. Its weight is the number of samples, or the sum of
    their weights.

    Attributes:
        tokens: Tokens of each text.
        types: For each token, the text of the pair to which it belongs (0 or 1); None if the
            tokenizer does not report it.
        targets: Target of each text, in the format of a batch.
        weights: Weight of each class, float32; None without class weights.
        padding: The padding token.
        max_tokens: Maximum width of a batch.
    """

    tokens: DiskArrays
    types: DiskArrays | None
    targets: NDArray[Any]
    weights: Array | None
    padding: int
    max_tokens: int

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """Build a batch of these texts."""
        texts = [self.tokens[row] for row in rows]
        arrays = pad_texts(texts, self.padding, self.max_tokens)
        if self.types is not None:
            types = pad_texts([self.types[row] for row in rows], 0, self.max_tokens)
            arrays["token_type_ids"] = types["input_ids"]
        targets = self.targets[rows]
        arrays["labels"] = targets
        if self.weights is None:
            return Batch(arrays, float(len(texts)))
        arrays["weights"] = self.weights[targets]
        return Batch(arrays, float(arrays["weights"].sum(dtype=np.float64)))


@dataclass(frozen=True, slots=True)
class Scale:
    """Mean and standard deviation of regression targets."""

    mean: float = 0.0
    deviation: float = 1.0

    @staticmethod
    def of(numbers: NDArray[np.float64]) -> Scale:
        """Measure the scale of numbers, (samples,).

        Raises:
            DataError: All numbers are equal.
        """
        deviation = float(numbers.std())
        if not deviation > 0:
            raise DataError(
                f"expected labels that differ, got only {numbers[0]:g} in the training data; "
                "check data.label"
            )
        return Scale(float(numbers.mean()), deviation)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledTexts(holdout.SplitData):
    """A run's data, tokenized and split.

    Attributes:
        samples: Training and evaluation samples.
        names: Names of the classes, by number; empty for regression.
        sampling: How an epoch samples the training data by class; None for each sample once.
        scale: Scale of regression targets: value = target * deviation + mean.
    """

    samples: LabeledSamples
    names: tuple[str, ...]
    sampling: Sampling | None
    scale: Scale = Scale()


def read_labeled_texts(spec: ClassifyRun) -> LabeledTexts:
    """Read, split and tokenize the data of a run spec.

    Raises:
        DataError: The data or the tokenizer cannot be used.
    """
    section = spec.data
    data, validation = _read_data(section)
    train, held_out = (np.array(rows, np.int64) for rows in _split(spec, data, validation))
    tokenizer = load_tokenizer(spec.model.source, spec.model.added_tokens)
    padding = int(tokenizer.pad_token_id)
    texts = itertools.chain(data.texts, validation.texts)
    location_of = partial(_location, data, validation)
    types = None
    if section.text_pair is None:
        tokens, truncated = encode_texts(tokenizer, texts, section.max_tokens, location_of)
        sampled_texts: Iterable[str] = data.texts[:: sampling_stride(len(data.texts))]
    else:
        pairs = [split_pair(text) for text in texts]
        tokens, types, truncated = encode_pairs(tokenizer, pairs, section.max_tokens, location_of)
        sampled_texts = itertools.chain(*pairs[:: sampling_stride(len(pairs))])
    targets = _targets(section.problem, [*data.labels, *validation.labels], len(data.names))
    scale = Scale.of(targets[train]) if section.standardize else Scale()
    if section.problem == "regression":
        targets = ((targets - scale.mean) / scale.deviation).astype(np.float32)
    weights = sampling = None
    label_notes: dict[str, int] = {}
    if section.problem == "single-label":
        _check_labels(targets[train], data.names)
        weights = class_weights(section.class_weights, targets[train], data.names)
        sampling_weights = class_weights(section.sampling, targets[train], data.names)
        if sampling_weights is not None:
            sampling = Sampling.by_weight(sampling_weights[targets[train]])
        label_notes = _label_notes(data, targets[train], targets[held_out])
    return LabeledTexts(
        tokenizer=tokenizer,
        samples=LabeledSamples(tokens, types, targets, weights, padding, section.max_tokens),
        names=data.names,
        sampling=sampling,
        scale=scale,
        train=train,
        held_out=held_out,
        digests={
            "tokenizer": digest_disk_arrays([tokens], tokens.lengths.tolist(), padding),
            "data": data_digest(data),
            **({"validation": data_digest(validation)} if validation.texts else {}),
        },
        notes={
            "duplicates_removed": data.duplicates,
            **bad_rows_note(data, validation),
            "texts_truncated": truncated,
            "unknown_tokens_per_thousand": measure_unknown_tokens(tokenizer, sampled_texts),
            **(count_overlap(data.texts, validation.texts) if validation.texts else {}),
            **label_notes,
        },
    )


def _check_labels(labels: NDArray[np.int64], names: Sequence[str]) -> None:
    if len(np.unique(labels)) < 2:
        raise DataError(
            "expected at least two labels in the training data, got only "
            f"{names[int(labels[0])]!r}, because all samples of other labels are held out; add "
            "samples of other labels, or lower data.holdout"
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
    location_of: Callable[[int], str] = "pair {}".format,
) -> tuple[DiskArrays, DiskArrays | None, int]:
    """Tokenize pairs of texts with the model's special tokens.

    Args:
        tokenizer: The model's tokenizer.
        pairs: The pairs.
        max_tokens: The longer text of a pair is truncated until both together have this length.
        location_of: Returns the location of a pair, given its number.

    Returns:
        The tokens; for each token the text to which it belongs, if the tokenizer reports it; and
        the number of truncated pairs.

    Raises:
        DataError: A text of a pair is empty.
    """
    tokens, types = DiskArrays("<u4", np.int64), DiskArrays(np.uint8, np.int64)
    truncated, has_types = 0, False
    for lo in range(0, len(pairs), _PAIRS_PER_CALL):
        batch = pairs[lo : lo + _PAIRS_PER_CALL]
        for number, texts in enumerate(batch, start=lo):
            if not all(texts):
                raise DataError(
                    f"{location_of(number)}: expected two texts, got an empty one; leave the row "
                    "out"
                )
        encodings_of_pairs = tokenizer(
            [first for first, _ in batch],
            [second for _, second in batch],
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


def _read_data(data: DataSpec) -> tuple[LabeledText, LabeledText]:
    """Read the training data and the validation data, which is empty if there is none."""
    training = read_labeled_text(data)
    if data.validation is None:
        return training, LabeledText((), (), training.names)
    return training, read_labeled_text(validation_data(data), training.names)


def _split(
    spec: ClassifyRun, data: LabeledText, validation: LabeledText
) -> tuple[list[int], list[int]]:
    """Return the indices of the training samples and of the evaluation samples."""
    if spec.data.stratify:
        return holdout.split_by_class(data.texts, data.labels, spec.seed, spec.data.holdout)
    if spec.data.validation is None:
        return holdout.split(data.texts, spec.seed, spec.data.holdout)
    count = len(data.texts)
    return [*range(count)], [*range(count, count + len(validation.texts))]


def pad_texts(texts: Sequence[Tokens], padding: int, max_tokens: int) -> dict[str, NDArray[Any]]:
    """Return input_ids and attention_mask, (texts, tokens) int64, padded on the right.

    The width is that of the longest text, rounded up to a multiple of `PADDING_TOKENS`, at most
    `max_tokens`.
    """
    longest = max((len(text) for text in texts), default=1)
    width = min(-(-longest // PADDING_TOKENS) * PADDING_TOKENS, max_tokens)
    ids = np.full((len(texts), width), padding, np.int64)
    mask = np.zeros((len(texts), width), np.int64)
    for index, text in enumerate(texts):
        ids[index, : len(text)] = text
        mask[index, : len(text)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def class_weights(
    setting: ClassWeights | None, labels: NDArray[np.int64], names: Sequence[str]
) -> Array | None:
    """Return the weight of each class, float32.

    Args:
        setting: `balanced`: samples / (classes * samples of the class), so that every class has
            the same total weight; or weights by name, with 1 for classes that are not named.
        labels: Labels of the training samples.
        names: Names of the classes, by number.

    Raises:
        DataError: The setting is `balanced`, and a class has no training sample.
    """
    if setting is None:
        return None
    if setting == "balanced":
        counts = np.bincount(labels, minlength=len(names))
        if not counts.all():
            raise DataError(
                "expected training samples of every class to balance them, found none of "
                f"{names[int(counts.argmin())]!r}; add some, or lower data.holdout"
            )
        return (len(labels) / (len(names) * counts)).astype(np.float32)
    return np.array([setting.get(name, 1.0) for name in names], np.float32)


def _location(data: LabeledText, validation: LabeledText, number: int) -> str:
    """Return the file and row of a text."""
    training_samples = len(data.texts)
    return (
        data.locations[number]
        if number < training_samples
        else validation.locations[number - training_samples]
    )


def _label_notes(
    data: LabeledText, training_labels: NDArray[np.int64], evaluation_labels: NDArray[np.int64]
) -> dict[str, int]:
    """Count samples with labels that look like mistakes, for the manifest."""
    counts = np.bincount([*data.labels], minlength=len(data.names))
    trained_classes = {int(label) for label in training_labels}
    untrained_counts = Counter(
        int(label) for label in evaluation_labels if int(label) not in trained_classes
    )
    numbers = {name: number for number, name in enumerate(data.names)}
    notes = {"conflicting_labels_left_out": data.conflicts} if data.conflicts else {}
    for names in data.similar_labels:
        note = cut_text(f"labels_alike[{'|'.join(names)}]", limits.NAME_CHARACTERS)
        notes[note] = int(sum(counts[numbers[name]] for name in names))
    for label, count in sorted(untrained_counts.items()):
        note = f"held_out_class_without_training_sample[{data.names[label]}]"
        notes[cut_text(note, limits.NAME_CHARACTERS)] = count
    return notes


def encode_texts(
    tokenizer: Any, texts: Iterable[str], max_tokens: int, location_of: Callable[[int], str]
) -> tuple[DiskArrays, int]:
    """Return the tokens of each text, on disk, and the number of truncated texts."""
    tokens, truncated = DiskArrays("<u4", np.int64), 0
    for ids, is_cut in encode_truncated(tokenizer, texts, max_tokens, location_of):
        tokens.append(ids)
        truncated += is_cut
    return tokens, truncated


def data_digest(data: LabeledText) -> str:
    """Return the digest of texts, labels and names, computed from their JSON as a stream."""
    parts = (np.frombuffer(part.encode(), np.uint8) for part in _document(data))
    size = sum(map(len, _document(data)))
    return digest_arrays({"document": StreamedArray(np.dtype(np.uint8), (size,), parts)})


def _document(data: LabeledText) -> Iterator[str]:
    """Yield the parts of the JSON, as `json.dumps` writes it in ASCII."""
    yield "[["
    for number, text in enumerate(data.texts):
        yield ", " * (number > 0) + json.dumps(text)
    yield f"], {json.dumps([*data.labels])}, {json.dumps(data.names)}]"
