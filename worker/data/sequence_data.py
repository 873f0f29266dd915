"""Samples whose labels are sequences: tags of words, or the target text of a source text."""

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
from worker.data.language_data import (
    bad_rows_note,
    count_overlap,
    digest_disk_arrays,
    documents_digest,
)
from worker.models.tokens import (
    IGNORED_LABEL,
    Tokens,
    load_tokenizer,
    measure_unknown_tokens,
    sampling_stride,
)

_PADDING_TOKENS: Final = 16
"""Batch widths are a multiple of this, or `max_tokens`: few shapes, and little padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceData(holdout.SplitData):
    """A run's data, tokenized and split.

    Attributes:
        inputs: Input tokens of each row.
        labels: For tags, the tag's number at each token that begins a word, and `IGNORED_LABEL` at
            other tokens. For pairs, the tokens of the target with its special tokens.
        padding: The padding token.
        max_tokens: Maximum width of a batch.
        names: Names of the tags, by number; empty for pairs.
    """

    inputs: DiskArrays
    labels: DiskArrays
    padding: int
    max_tokens: int
    names: tuple[str, ...]

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """Build a batch of input_ids, attention_mask and labels, int64, padded on the right.

        labels are as wide as input_ids for tags, and have the width of the longest target for
        pairs. The weight is the number of labels without `IGNORED_LABEL`.
        """
        inputs = [self.inputs[row] for row in rows]
        labels = [self.labels[row] for row in rows]
        width = self._width(inputs)
        arrays = {
            "input_ids": _pad(inputs, width, self.padding),
            "attention_mask": _pad([np.ones_like(tokens) for tokens in inputs], width, 0),
            "labels": _pad(labels, width if self.names else self._width(labels), IGNORED_LABEL),
        }
        return Batch(arrays, float(np.count_nonzero(arrays["labels"] != IGNORED_LABEL)))

    def _width(self, arrays: Sequence[Tokens]) -> int:
        longest = max((len(tokens) for tokens in arrays), default=1)
        return min(-(-longest // _PADDING_TOKENS) * _PADDING_TOKENS, self.max_tokens)

    @property
    def max_token(self) -> int:
        """The largest input token or padding token."""
        return max(self.padding, self.inputs.max_element)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairData(SequenceData):
    """Source and target texts.

    Attributes:
        pair_of: Returns a row's pair, neither tokenized nor truncated.
    """

    pair_of: Callable[[int], TextPair]

    def target(self, row: int) -> str:
        """Return the target text of a row, not truncated."""
        return self.pair_of(row).target


def _pad(arrays: Sequence[Tokens], width: int, filler: int) -> NDArray[np.int64]:
    matrix = np.full((len(arrays), width), filler, np.int64)
    for row, values in enumerate(arrays):
        matrix[row, : len(values)] = values
    return matrix


def read_tagged_data(spec: TagRun) -> SequenceData:
    """Read, tokenize and split words with tags.

    Raises:
        DataError: The data or the tokenizer cannot be used.
    """
    rows = read_tagged_words(spec.data)
    validation_rows = (
        None if spec.data.validation is None else read_tagged_words(validation_data(spec.data))
    )
    names = tuple(sorted({tag for row in rows for tag in row.tags}))
    tag_numbers = {name: index for index, name in enumerate(names)}
    tokenizer = load_tokenizer(spec.model.source, spec.model.added_tokens)

    def encode_row(row: TaggedWords) -> tuple[Tokens, Tokens, bool]:
        unknown_tags = {*row.tags} - tag_numbers.keys()
        if unknown_tags:
            raise DataError(
                f"{row.location}: expected a tag of the training data "
                f"({', '.join(names[:10])}), got {min(unknown_tags)!r}; correct it, or add "
                "training rows with it"
            )
        ids, words, is_cut = encode_words(tokenizer, row.words, spec.data.max_tokens)
        tags = np.array([tag_numbers[tag] for tag in row.tags], np.int64)
        return ids, np.where(words >= 0, tags[np.maximum(words, 0)], IGNORED_LABEL), is_cut

    texts = (" ".join(row.words) for row in rows)
    return _encode_and_split(
        spec, tokenizer, rows, validation_rows, encode_row, texts=texts, names=names
    )


def encode_words(
    tokenizer: Any, words: Sequence[str], max_tokens: int
) -> tuple[Tokens, NDArray[np.int64], bool]:
    """Tokenize words, joined by spaces.

    Returns:
        The tokens; for each token the index of the word that it begins, or -1; and whether words
        were truncated.

    Raises:
        DataError: The tokenizer does not report offsets.
    """
    if not tokenizer.is_fast:
        raise DataError(
            "expected a tokenizer that reports the offsets of its tokens, got one without; use a "
            "model with a tokenizer.json"
        )
    text = " ".join(words)
    encoding = tokenizer(
        text, truncation=True, max_length=max_tokens, return_offsets_mapping=True, verbose=False
    )
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])
    word_indices = np.full(len(encoding["input_ids"]), -1, np.int64)
    last_word = -1
    for position, (begin, end) in enumerate(encoding["offset_mapping"]):
        if not text[begin:end].strip():
            continue  # a special token, or only a space
        word = int(np.searchsorted(starts, end - 1, "right")) - 1
        if word > last_word:
            word_indices[position] = last_word = word
    is_cut = last_word + 1 < len(words)
    return np.array(encoding["input_ids"], np.int64), word_indices, is_cut


def read_pair_data(spec: Seq2SeqRun) -> PairData:
    """Read, tokenize and split source and target texts.

    Raises:
        DataError: The data or the tokenizer cannot be used.
    """
    rows = read_text_pairs(spec.data)
    validation_rows = (
        None if spec.data.validation is None else read_text_pairs(validation_data(spec.data))
    )
    tokenizer = load_tokenizer(spec.model.source, spec.model.added_tokens)
    options: dict[str, Any] = {
        "truncation": True,
        "max_length": spec.data.max_tokens,
        "verbose": False,
    }

    def encode_row(row: TextPair) -> tuple[Tokens, Tokens, bool]:
        source = tokenizer(row.source, **options)
        target = tokenizer(text_target=row.target, **options)
        is_cut = any(e.encodings and e.encodings[0].overflowing for e in (source, target))
        ids = (np.array(encoding["input_ids"], np.int64) for encoding in (source, target))
        return next(ids), next(ids), is_cut

    texts = (text for row in rows for text in (row.source, row.target))
    data = _encode_and_split(spec, tokenizer, rows, validation_rows, encode_row, texts=texts)

    def pair_of(row: int) -> TextPair:
        if validation_rows is None or row < len(rows):
            return rows[row]
        return validation_rows[row - len(rows)]

    fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
    return PairData(**fields, pair_of=pair_of)


def _encode_and_split(
    spec: ModelRun,
    tokenizer: Any,
    rows: DistinctRows[Any],
    validation: DistinctRows[Any] | None,
    encode: Callable[[Any], tuple[Tokens, Tokens, bool]],
    *,
    texts: Iterator[str],
    names: tuple[str, ...] = (),
) -> SequenceData:
    inputs, labels = DiskArrays("<u4", np.int64), DiskArrays("<i4", np.int64)
    truncated = 0
    for source in (rows, *([] if validation is None else [validation])):
        for row in source:
            ids, targets, is_cut = encode(row)
            inputs.append(ids)
            labels.append(targets)
            truncated += is_cut
    if validation is None:
        train, held_out = holdout.split(rows.documents, spec.seed, spec.data.holdout)
    else:
        train, held_out = [*range(len(rows))], [*range(len(rows), len(rows) + len(validation))]
    sampling_interval = sampling_stride(len(rows))
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
            "tokenizer": digest_disk_arrays([inputs], inputs.lengths.tolist(), padding),
            "labels": digest_disk_arrays([labels], labels.lengths.tolist(), len(names)),
            "data": documents_digest(rows.documents),
            **(
                {} if validation is None else {"validation": documents_digest(validation.documents)}
            ),
        },
        notes={
            "duplicates_removed": rows.duplicates,
            **bad_rows_note(rows, validation),
            "texts_truncated": truncated,
            "unknown_tokens_per_thousand": measure_unknown_tokens(
                tokenizer, (text for n, text in enumerate(texts) if n % sampling_interval == 0)
            ),
            **({} if validation is None else count_overlap(rows.documents, validation.documents)),
        },
    )
