"""Preference pairs as tokens: a conversation with either of two last answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from backends.base.interface import Batch
from protocol.base.errors import DataError
from protocol.datasets.conversations import DistinctRows
from protocol.datasets.data_check import validation_data
from protocol.datasets.disk_texts import SelectedTexts
from protocol.datasets.preferences import PreferencePair, read_preferences
from protocol.datasets.rows import BadRows
from protocol.spec.run_spec import DpoRun
from protocol.spec.sections.data import DataSpec
from worker.data import holdout
from worker.data.chat_template import ChatTemplate, LossMask, RenderedConversation
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
"""Batch widths are a multiple of this, or `data.max_tokens`: few shapes, and little padding."""
_PAIRS_PER_CALL: Final = 256
"""Number of pairs that are tokenized in one call."""

EncodedConversation = tuple[Tokens, LossMask]
"""A conversation's tokens, and which of them belong to the last answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceData(holdout.SplitData):
    """A run's pairs, tokenized and split.

    Attributes:
        pairs: All usable pairs.
    """

    pairs: EncodedPairs


def read_preference_data(spec: DpoRun) -> PreferenceData:
    """Read, tokenize and split the data of a run spec.

    Raises:
        DataError: The data or the tokenizer cannot be used.
    """
    data = spec.data
    rows = read_preferences(data)
    tokenizer = load_tokenizer(spec.model.source, spec.model.added_tokens)
    template = ChatTemplate(tokenizer, data.chat_template, loss="last", suggest_all=False)
    pairs = EncodedPairs(data.max_tokens)
    documents = pairs.add(template, rows, data)
    digests, notes = dict[str, str](), bad_rows_note(rows, refused=pairs.refused_rows)
    if data.validation is None:
        train, held_out = holdout.split(documents, spec.seed, data.holdout)
    else:
        validation = validation_data(data)
        validation_rows = read_preferences(validation)
        validation_documents = pairs.add(template, validation_rows, validation)
        train, held_out = [*range(len(documents))], [*range(len(documents), len(pairs))]
        digests["validation"] = documents_digest(validation_rows.documents)
        notes = {
            **bad_rows_note(rows, validation_rows, refused=pairs.refused_rows),
            **count_overlap(documents, validation_documents),
        }
    sampled_rows = range(0, len(rows), sampling_stride(len(rows)))
    return PreferenceData(
        tokenizer=tokenizer,
        pairs=pairs,
        train=np.array(train, np.int64),
        held_out=np.array(held_out, np.int64),
        digests={
            **pairs.digests(len(tokenizer)),
            "data": documents_digest(rows.documents),
            **digests,
        },
        notes={
            "pairs": len(rows),
            "duplicates_removed": rows.duplicates,
            "pairs_truncated": pairs.truncated_pairs,
            "left_out_as_no_answer_fits": pairs.left_out_pairs,
            "unknown_tokens_per_thousand": measure_unknown_tokens(
                tokenizer, (rows[n].chosen.messages[-1].content for n in sampled_rows)
            ),
            **notes,
        },
    )


class EncodedPairs:
    """Pairs, on disk, both of whose answers begin within `length` tokens.

    Attributes:
        length: `data.max_tokens`, to which conversations are truncated.
        left_out_pairs: Number of pairs that were dropped because their answers begin too late.
        refused_rows: Number of rows that were skipped because the chat template refuses them.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.left_out_pairs = 0
        self.refused_rows = 0
        # For each pair the chosen conversation, then the rejected one; not truncated.
        self._tokens = DiskArrays("<u4", np.int64)
        self._loss_masks = DiskArrays(np.uint8, np.bool_)

    def add(
        self, template: ChatTemplate, rows: DistinctRows[PreferencePair], data: DataSpec
    ) -> Sequence[str]:
        """Render, tokenize and append pairs.

        Returns:
            The documents of the usable pairs.

        Raises:
            DataError: The template refuses a conversation or renders both conversations of a pair
                the same, or no pair is usable.
        """
        numbers, longest, bad_rows = list[int](), 0, BadRows(skip=data.skip_bad_rows)
        for number, answers in _encode_rows(template, rows, bad_rows):
            longest = max(longest, *(len(ids) for ids, _ in answers))
            if all(loss_mask[1 : self.length].any() for _, loss_mask in answers):
                numbers.append(number)
                for ids, loss_mask in answers:
                    self._tokens.append(ids)
                    self._loss_masks.append(loss_mask)
        bad_rows.report()
        self.refused_rows += bad_rows.count
        if not numbers:
            raise DataError(
                f"expected pairs in {data.train!r} whose first data.max_tokens = {self.length} "
                "tokens reach both answers, found none; raise that limit: --set "
                f"data.max_tokens={longest}"
            )
        self.left_out_pairs += len(rows) - len(numbers) - bad_rows.count
        return SelectedTexts(rows.documents, numbers)

    def __len__(self) -> int:
        return len(self._tokens) // 2

    def pair(self, number: int) -> tuple[EncodedConversation, EncodedConversation]:
        """Return the chosen and the rejected conversation, each at most `length` tokens."""
        chosen_answer, rejected_answer = (
            (self._tokens[index][: self.length], self._loss_masks[index][: self.length])
            for index in (2 * number, 2 * number + 1)
        )
        return chosen_answer, rejected_answer

    @property
    def truncated_pairs(self) -> int:
        """Return the number of truncated pairs."""
        is_longer = self._tokens.lengths.reshape(-1, 2) > self.length
        return int(is_longer.any(axis=1).sum())

    @property
    def max_token(self) -> int:
        """Return the largest token id."""
        return self._tokens.max_element

    def digests(self, padding: int) -> dict[str, str]:
        """Return the digests of tokens and loss masks."""
        lengths = self._tokens.lengths.tolist()
        return {
            "tokenizer": digest_disk_arrays([self._tokens], lengths, padding),
            "counted_tokens": digest_disk_arrays([self._loss_masks], lengths, 0),
        }

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """Build a batch of input_ids and labels, (pairs, 2, tokens), int64.

        The chosen conversation of a pair comes first. Only the last answers have labels; all other
        labels are `IGNORED_LABEL`. The weight is the number of pairs.
        """
        pairs = [self.pair(row) for row in rows.tolist()]
        longest = max((len(ids) for pair in pairs for ids, _ in pair), default=2) - 1
        width = min(-(-longest // _PADDING_TOKENS) * _PADDING_TOKENS, self.length)
        inputs = np.zeros((len(pairs), 2, width), np.int64)
        labels = np.full((len(pairs), 2, width), IGNORED_LABEL, np.int64)
        for row, pair in enumerate(pairs):
            for index, (ids, loss_mask) in enumerate(pair):
                length = len(ids) - 1
                inputs[row, index, :length] = ids[:-1]
                labels[row, index, :length] = np.where(loss_mask[1:], ids[1:], IGNORED_LABEL)
        return Batch({"input_ids": inputs, "labels": labels}, float(len(pairs)))


def _encode_rows(
    template: ChatTemplate, rows: DistinctRows[PreferencePair], bad_rows: BadRows
) -> Iterator[tuple[int, tuple[EncodedConversation, EncodedConversation]]]:
    """Yield the number of each pair and both conversations, whose last answers have loss."""

    def render(
        row: tuple[int, PreferencePair],
    ) -> tuple[RenderedConversation, RenderedConversation]:
        return template.render(row[1].chosen), template.render(row[1].rejected)

    rendered = bad_rows.apply(enumerate(rows), render)
    while batch := [*islice(rendered, _PAIRS_PER_CALL)]:
        encodings = (template.encode([texts[index] for _, texts in batch]) for index in (0, 1))
        for ((number, pair), _), chosen_answer, rejected_answer in zip(
            batch, *encodings, strict=True
        ):
            if np.array_equal(chosen_answer[0], rejected_answer[0]):
                bad_rows.add(_equal_answers_error(pair))
            else:
                yield number, (chosen_answer, rejected_answer)


def _equal_answers_error(pair: PreferencePair) -> DataError:
    return DataError(
        f"{pair.chosen.location}: expected chosen and rejected to differ, got the same tokens for "
        "both from the chat template; leave the row out"
    )
