"""Pairs and triplets of texts as tokens, for the task embed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from backends.base.interface import Batch
from protocol.base.errors import DataError
from protocol.base.fields import cut_text
from protocol.datasets.data_check import validation_data
from protocol.datasets.embedding_pairs import TextGroup, read_text_groups
from protocol.spec.run_spec import EmbedRun
from worker.data import holdout
from worker.data.disk_arrays import DiskArrays
from worker.data.language_data import (
    bad_rows_note,
    count_overlap,
    digest_disk_arrays,
    documents_digest,
)
from worker.models.tokens import (
    Tokens,
    encode_truncated,
    load_tokenizer,
    measure_unknown_tokens,
    sampling_stride,
)

PADDING_TOKENS: Final = 16
"""Batch widths are a multiple of this, or `max_tokens`: few shapes, and little padding."""
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EmbeddingData:
    """A run's data, tokenized and split.

    Attributes:
        tokenizer: The model's tokenizer.
        texts: Tokens of each distinct text.
        rows: Indices of each row's texts, (rows, 2 + negatives): anchor, positive, negatives.
        train: Indices of the training rows.
        held_out: Indices of the evaluation rows.
        padding: The padding token.
        max_tokens: Maximum width of a batch.
        digests: Digests for the manifest.
        notes: Counts by name, for the manifest's `notes`.
    """

    tokenizer: Any
    texts: DiskArrays
    rows: Int64Array
    train: Int64Array
    held_out: Int64Array
    padding: int
    max_tokens: int
    digests: Mapping[str, str]
    notes: Mapping[str, int]

    def batch(self, row_indices: Int64Array) -> Batch:
        """Build a batch of these rows; its weight is their number.

        All arrays are int64: `anchor_ids` and `anchor_mask`, (samples, tokens), `passage_ids` and
        `passage_mask`, (samples, 1 + negatives, tokens), and the texts' indices, equal for equal
        texts: `anchor_number`, (samples,), and `passage_numbers`,
        (samples, 1 + negatives).
        """
        rows = self.rows[row_indices]
        anchors, anchor_mask = self._pad(rows[:, 0])
        passages, passage_mask = self._pad(rows[:, 1:].reshape(-1))
        shape = (*rows[:, 1:].shape, passages.shape[-1])
        arrays = {
            "anchor_ids": anchors,
            "anchor_mask": anchor_mask,
            "passage_ids": passages.reshape(shape),
            "passage_mask": passage_mask.reshape(shape),
            "anchor_number": rows[:, 0].copy(),
            "passage_numbers": rows[:, 1:].copy(),
        }
        return Batch(arrays, float(len(rows)))

    def _pad(self, text_indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the tokens of texts, padded on the right, and their mask; both (texts, tokens)."""
        texts: list[Tokens] = [self.texts[number] for number in text_indices.tolist()]
        longest = max((len(tokens) for tokens in texts), default=1)
        width = min(-(-longest // PADDING_TOKENS) * PADDING_TOKENS, self.max_tokens)
        ids = np.full((len(texts), width), self.padding, np.int64)
        mask = np.zeros_like(ids)
        for row, tokens in enumerate(texts):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        return ids, mask


def read_embedding_data(spec: EmbedRun) -> EmbeddingData:
    """Read, tokenize and split the data of a run spec.

    Raises:
        DataError: The data or the tokenizer cannot be used.
    """
    data = spec.data
    groups = read_text_groups(data)
    validation = (
        None if data.validation is None else read_text_groups(validation_data(data), groups[0])
    )
    tokenizer = load_tokenizer(spec.model.source, spec.model.added_tokens)
    table = _TextTable()
    rows = np.array([table.indices_of(row) for row in chain(groups, validation or ())], np.int64)
    texts, truncated = DiskArrays("<u4", np.int64), 0
    for ids, is_cut in encode_truncated(tokenizer, table.texts, data.max_tokens):
        if not len(ids):
            raise _no_tokens_error(
                table.texts[len(texts)], len(texts), rows, chain(groups, validation or ())
            )
        texts.append(ids)
        truncated += is_cut
    rows = _first_equal_texts(texts)[rows]
    if validation is None:
        train, held_out = holdout.split(groups.documents, spec.seed, data.holdout)
    else:
        train, held_out = [*range(len(groups))], [*range(len(groups), len(rows))]
    padding = int(tokenizer.pad_token_id)
    sampled_texts = table.texts[:: sampling_stride(len(table.texts))]
    return EmbeddingData(
        tokenizer,
        texts,
        rows,
        np.array(train, np.int64),
        np.array(held_out, np.int64),
        padding,
        data.max_tokens,
        digests={
            "tokenizer": digest_disk_arrays([texts], texts.lengths.tolist(), padding),
            "data": documents_digest(groups.documents),
            **(
                {} if validation is None else {"validation": documents_digest(validation.documents)}
            ),
        },
        notes={
            "distinct_texts": len(np.unique(rows)),
            "hard_negatives_per_pair": rows.shape[1] - 2,
            "duplicates_removed": groups.duplicates,
            **bad_rows_note(groups, validation),
            "texts_truncated": truncated,
            "unknown_tokens_per_thousand": measure_unknown_tokens(tokenizer, sampled_texts),
            **({} if validation is None else count_overlap(groups.documents, validation.documents)),
        },
    )


def _no_tokens_error(
    text: str, number: int, rows: Int64Array, groups: Iterator[TextGroup]
) -> DataError:
    """Return the error for a text without tokens."""
    row = int(np.nonzero((rows == number).any(axis=1))[0][0])
    location = next(islice(groups, row, None)).location
    return DataError(
        f"{location}: expected text, got {cut_text(text, 40)!r}, for which the model's tokenizer "
        "returns no tokens; leave the row out"
    )


def _first_equal_texts(texts: DiskArrays) -> Int64Array:
    """Return for each text the index of the first text with the same tokens, (texts,).

    Texts that differ only beyond `max_tokens`, or only in characters that the tokenizer drops, are
    the same to the model, so that they cannot be negatives of each other.
    """
    numbers_by_digest: dict[bytes, int] = {}
    digests = (blake3(texts[number].tobytes()).digest() for number in range(len(texts)))
    numbers = [
        numbers_by_digest.setdefault(digest, number) for number, digest in enumerate(digests)
    ]
    return np.array(numbers, np.int64)


class _TextTable:
    """Distinct texts, numbered in the order of their first occurrence."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._indices: dict[bytes, int] = {}

    def indices_of(self, row: TextGroup) -> list[int]:
        """Return the indices of a row's texts; add those that are new."""
        return [self._index_of(text) for text in (row.anchor, *row.passages)]

    def _index_of(self, text: str) -> int:
        index = self._indices.setdefault(blake3(text.encode()).digest(), len(self.texts))
        if index == len(self.texts):
            self.texts.append(text)
        return index
