"""Samples whose labels are sequences of tokens: tags of words, or the text to be made of a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from backends.base.interface import Batch
from protocol.base.errors import DataError
from protocol.datasets.conversations import DistinctRows
from protocol.datasets.data_check import validation_data
from protocol.datasets.sequences import (
    TaggedWords,
    TextPair,
    read_tagged_words,
    read_text_pairs,
)
from protocol.spec.run_spec import ModelRun, Seq2SeqRun, TagRun
from worker.data import holdout
from worker.data.disk_arrays import DiskArrays
from worker.data.language_data import bad_rows_note, digest_stored, documents_digest, overlap
from worker.models.tokens import NOTHING, Tokens, load_tokenizer, sampled_every, unknown_in

_PADDING_TOKENS: Final = 16
"""Batches are padded to a multiple of this: few shapes, little waste."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceData(holdout.DividedData):
    """All that a run makes of its data.

    Attributes:
        inputs: Tokens that the model reads, of each row.
        labels: Of tags: the label of each token that begins a word, else `NOTHING`. Of pairs: the
            tokens of the target, with the end token.
        padding: The padding token.
        max_tokens: The width of the widest batch.
        names: Of the tags, by number; of pairs none.
    """

    inputs: DiskArrays
    labels: DiskArrays
    padding: int
    max_tokens: int
    names: tuple[str, ...]

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """input_ids, attention_mask and labels, int64, each padded on the right.

        labels are as wide as input_ids for tags, and as wide as the longest target for pairs. The
        weight is the number of labels.
        """
        inputs = [self.inputs[row] for row in rows]
        labels = [self.labels[row] for row in rows]
        width = self._width(inputs)
        arrays = {
            "input_ids": _padded(inputs, width, self.padding),
            "attention_mask": _padded([np.ones_like(each) for each in inputs], width, 0),
            "labels": _padded(labels, width if self.names else self._width(labels), NOTHING),
        }
        return Batch(arrays, float(np.count_nonzero(arrays["labels"] != NOTHING)))

    def _width(self, arrays: Sequence[Tokens]) -> int:
        longest = max((len(each) for each in arrays), default=1)
        return min(-(-longest // _PADDING_TOKENS) * _PADDING_TOKENS, self.max_tokens)

    @property
    def highest(self) -> int:
        """Of all tokens that are read."""
        return max(self.padding, self.inputs.highest)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairData(SequenceData):
    """Texts with the texts they become.

    Attributes:
        pairs: As they were read, by number.
    """

    pairs: Callable[[int], TextPair]

    def target(self, row: int) -> str:
        """Return the text of a target, whole."""
        return self.pairs(row).target


def _padded(arrays: Sequence[Tokens], width: int, filler: int) -> NDArray[np.int64]:
    made = np.full((len(arrays), width), filler, np.int64)
    for row, values in enumerate(arrays):
        made[row, : len(values)] = values
    return made


def read_tagged_data(spec: TagRun) -> SequenceData:
    """Read, encode and divide words with tags.

    Raises:
        DataError: Data or tokenizer cannot be used.
    """
    found = read_tagged_words(spec.data)
    valid = None if spec.data.validation is None else read_tagged_words(validation_data(spec.data))
    names = tuple(sorted({tag for row in found for tag in row.tags}))
    number = {name: index for index, name in enumerate(names)}
    tokenizer = load_tokenizer(spec.model.source, spec.model.added_tokens)

    def encoded(row: TaggedWords) -> tuple[Tokens, Tokens, bool]:
        unknown = {*row.tags} - number.keys()
        if unknown:
            raise DataError(
                f"{row.location}: expected a tag of the training data, got {min(unknown)!r}; there "
                f"are {', '.join(names[:10])}"
            )
        ids, words, is_cut = encode_words(tokenizer, row.words, spec.data.max_tokens)
        tags = np.array([number[tag] for tag in row.tags], np.int64)
        return ids, np.where(words >= 0, tags[np.maximum(words, 0)], NOTHING), is_cut

    texts = (" ".join(row.words) for row in found)
    return _divided(spec, tokenizer, found, valid, encoded, texts=texts, names=names)


def encode_words(
    tokenizer: Any, words: Sequence[str], max_tokens: int
) -> tuple[Tokens, NDArray[np.int64], bool]:
    """Encode words with spaces between them.

    Returns:
        The tokens; for each the number of the word that it begins, or -1; whether they were cut.

    Raises:
        DataError: The tokenizer does not say where its tokens stand in a text.
    """
    if not tokenizer.is_fast:
        raise DataError(
            "expected a tokenizer that reports the offsets of its tokens, got one without; use a "
            "model with a tokenizer.json"
        )
    text = " ".join(words)
    made = tokenizer(
        text, truncation=True, max_length=max_tokens, return_offsets_mapping=True, verbose=False
    )
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])
    numbers = np.full(len(made["input_ids"]), -1, np.int64)
    last = -1
    for at, (begin, end) in enumerate(made["offset_mapping"]):
        if not text[begin:end].strip():
            continue  # a mark, or a space alone
        word = int(np.searchsorted(starts, end - 1, "right")) - 1
        if word > last:
            numbers[at] = last = word
    is_cut = last + 1 < len(words)
    return np.array(made["input_ids"], np.int64), numbers, is_cut


def read_pair_data(spec: Seq2SeqRun) -> PairData:
    """Read, encode and divide texts with the texts they become.

    Raises:
        DataError: Data or tokenizer cannot be used.
    """
    found = read_text_pairs(spec.data)
    valid = None if spec.data.validation is None else read_text_pairs(validation_data(spec.data))
    tokenizer = load_tokenizer(spec.model.source, spec.model.added_tokens)
    how: dict[str, Any] = {"truncation": True, "max_length": spec.data.max_tokens, "verbose": False}

    def encoded(row: TextPair) -> tuple[Tokens, Tokens, bool]:
        source = tokenizer(row.source, **how)
        target = tokenizer(text_target=row.target, **how)
        is_cut = any(each.encodings and each.encodings[0].overflowing for each in (source, target))
        ids = (np.array(each["input_ids"], np.int64) for each in (source, target))
        return next(ids), next(ids), is_cut

    texts = (text for row in found for text in (row.source, row.target))
    data = _divided(spec, tokenizer, found, valid, encoded, texts=texts)

    def pair(row: int) -> TextPair:
        if valid is None or row < len(found):
            return found[row]
        return valid[row - len(found)]

    fields = {each.name: getattr(data, each.name) for each in dataclasses.fields(data)}
    return PairData(**fields, pairs=pair)


def _divided(
    spec: ModelRun,
    tokenizer: Any,
    found: DistinctRows[Any],
    valid: DistinctRows[Any] | None,
    encoded: Callable[[Any], tuple[Tokens, Tokens, bool]],
    *,
    texts: Iterator[str],
    names: tuple[str, ...] = (),
) -> SequenceData:
    inputs, labels = DiskArrays("<u4", np.int64), DiskArrays("<i4", np.int64)
    truncated = 0
    for rows in (found, *([] if valid is None else [valid])):
        for row in rows:
            ids, targets, is_cut = encoded(row)
            inputs.append(ids)
            labels.append(targets)
            truncated += is_cut
    if valid is None:
        train, held_out = holdout.split(found.documents, spec.seed, spec.data.holdout)
    else:
        train, held_out = [*range(len(found))], [*range(len(found), len(found) + len(valid))]
    every = sampled_every(len(found))
    padding = int(tokenizer.pad_token_id)
    return SequenceData(
        tokenizer=tokenizer,
        inputs=inputs,
        labels=labels,
        train=np.array(train, np.int64),
        held_out=np.array(held_out, np.int64),
        padding=padding,
        max_tokens=spec.data.max_tokens,
        names=names,
        digests={
            "tokenizer": digest_stored([inputs], inputs.lengths.tolist(), padding),
            "labels": digest_stored([labels], labels.lengths.tolist(), len(names)),
            "data": documents_digest(found.documents),
            **({} if valid is None else {"validation": documents_digest(valid.documents)}),
        },
        notes={
            "duplicates_removed": found.duplicates,
            **bad_rows_note(found, valid),
            "texts_truncated": truncated,
            "unknown_tokens_per_thousand": unknown_in(
                tokenizer, (text for n, text in enumerate(texts) if n % every == 0)
            ),
            **({} if valid is None else overlap(found.documents, valid.documents)),
        },
    )
