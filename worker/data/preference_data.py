"""Preference pairs as tokens: the same conversation with either of two last answers."""

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
from protocol.datasets.disk_texts import Chosen
from protocol.datasets.preferences import Pair, read_preferences
from protocol.datasets.rows import BadRows
from protocol.spec.run_spec import DpoRun
from protocol.spec.sections.data import DataSpec
from worker.data import holdout
from worker.data.chat_template import ChatTemplate, Counted, Rendered
from worker.data.disk_arrays import DiskArrays
from worker.data.language_data import bad_rows_note, digest_stored, documents_digest, overlap
from worker.models.tokens import (
    NOTHING,
    Tokens,
    load_tokenizer,
    sampled_every,
    unknown_in,
)

_PADDING_TOKENS: Final = 16
"""Pairs are padded to a multiple of this: few shapes, little waste."""
_ENCODED_AT_ONCE: Final = 256
"""Pairs."""

Answer = tuple[Tokens, Counted]
"""A conversation's tokens, and which of them are its last answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceData(holdout.DividedData):
    """All that a run makes of its pairs.

    Attributes:
        pairs: All pairs that are used.
    """

    pairs: EncodedPairs


def read_preference_data(spec: DpoRun) -> PreferenceData:
    """Read, encode and divide what the run spec names.

    Raises:
        DataError: Data or tokenizer cannot be used.
    """
    data = spec.data
    read = read_preferences(data)
    tokenizer = load_tokenizer(spec.model.source, spec.model.added_tokens)
    template = ChatTemplate(tokenizer, data.chat_template, loss="last", else_all=False)
    pairs = EncodedPairs(data.max_tokens)
    documents = pairs.add(template, read, data)
    digests, notes = dict[str, str](), bad_rows_note(read, refused=pairs.refused)
    if data.validation is None:
        train, held_out = holdout.split(documents, spec.seed, data.holdout)
    else:
        measured = validation_data(data)
        found = read_preferences(measured)
        others = pairs.add(template, found, measured)
        train, held_out = [*range(len(documents))], [*range(len(documents), len(pairs))]
        digests["validation"] = documents_digest(found.documents)
        notes = {**bad_rows_note(read, found, refused=pairs.refused), **overlap(documents, others)}
    looked_at = range(0, len(read), sampled_every(len(read)))
    return PreferenceData(
        tokenizer=tokenizer,
        pairs=pairs,
        train=np.array(train, np.int64),
        held_out=np.array(held_out, np.int64),
        digests={
            **pairs.digests(len(tokenizer)),
            "data": documents_digest(read.documents),
            **digests,
        },
        notes={
            "pairs": len(read),
            "duplicates_removed": read.duplicates,
            "pairs_truncated": pairs.truncated,
            "left_out_as_no_answer_fits": pairs.left_out,
            "unknown_tokens_per_thousand": unknown_in(
                tokenizer, (read[n].chosen.messages[-1].content for n in looked_at)
            ),
            **notes,
        },
    )


class EncodedPairs:
    """Pairs of which both answers begin within `length` tokens; on disk.

    Attributes:
        length: `data.max_tokens`: longer conversations are truncated.
        left_out: How many pairs were dropped, as their answers begin too late.
        refused: How many bad rows were skipped, which the chat template refuses.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.left_out = 0
        self.refused = 0
        # Of each pair the chosen conversation, then the rejected one, of any length.
        self._tokens = DiskArrays("<u4", np.int64)
        self._counted = DiskArrays(np.uint8, np.bool_)

    def add(
        self, template: ChatTemplate, found: DistinctRows[Pair], data: DataSpec
    ) -> Sequence[str]:
        """Render, encode and append pairs.

        Returns:
            The documents of those that are used.

        Raises:
            DataError: The template refuses a conversation or makes both of a pair the same, or no
                pair is left.
        """
        numbers, longest, bad_rows = list[int](), 0, BadRows(skip=data.skip_bad_rows)
        for number, answers in _encoded(template, found, bad_rows):
            longest = max(longest, *(len(ids) for ids, _ in answers))
            if all(marks[1 : self.length].any() for _, marks in answers):
                numbers.append(number)
                for ids, marks in answers:
                    self._tokens.append(ids)
                    self._counted.append(marks)
        bad_rows.report()
        self.refused += bad_rows.count
        if not numbers:
            raise DataError(
                f"expected pairs in {data.train!r} whose first data.max_tokens = {self.length} "
                "tokens reach both answers, found none; raise it: --set "
                f"data.max_tokens={longest}"
            )
        self.left_out += len(found) - len(numbers) - bad_rows.count
        return Chosen(found.documents, numbers)

    def __len__(self) -> int:
        return len(self._tokens) // 2

    def pair(self, number: int) -> tuple[Answer, Answer]:
        """Return the chosen and the rejected conversation, each at most `length` tokens."""
        chosen, rejected = (
            (self._tokens[at][: self.length], self._counted[at][: self.length])
            for at in (2 * number, 2 * number + 1)
        )
        return chosen, rejected

    @property
    def truncated(self) -> int:
        """Return how many pairs were truncated."""
        longer = self._tokens.lengths.reshape(-1, 2) > self.length
        return int(longer.any(axis=1).sum())

    @property
    def highest(self) -> int:
        """Return the largest token id."""
        return self._tokens.highest

    def digests(self, padding: int) -> dict[str, str]:
        """Return the digests of the tokens and of the loss mask."""
        lengths = self._tokens.lengths.tolist()
        return {
            "tokenizer": digest_stored([self._tokens], lengths, padding),
            "counted_tokens": digest_stored([self._counted], lengths, 0),
        }

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """Make a batch of these pairs; its weight is their number."""
        pairs = [self.pair(row) for row in rows.tolist()]
        longest = max((len(ids) for pair in pairs for ids, _ in pair), default=2) - 1
        width = min(-(-longest // _PADDING_TOKENS) * _PADDING_TOKENS, self.length)
        inputs = np.zeros((len(pairs), 2, width), np.int64)
        labels = np.full((len(pairs), 2, width), NOTHING, np.int64)
        for row, pair in enumerate(pairs):
            for side, (ids, counts) in enumerate(pair):
                inputs[row, side, : len(ids) - 1] = ids[:-1]
                labels[row, side, : len(ids) - 1] = np.where(counts[1:], ids[1:], NOTHING)
        return Batch({"input_ids": inputs, "labels": labels}, float(len(pairs)))


def _encoded(
    template: ChatTemplate, found: DistinctRows[Pair], bad_rows: BadRows
) -> Iterator[tuple[int, tuple[Answer, Answer]]]:
    """Yield the number of each pair and both conversations, of which the last answer has loss."""

    def render(row: tuple[int, Pair]) -> tuple[Rendered, Rendered]:
        return template.render(row[1].chosen), template.render(row[1].rejected)

    rendered = bad_rows.usable(enumerate(found), render)
    while some := [*islice(rendered, _ENCODED_AT_ONCE)]:
        sides = (template.encode([both[side] for _, both in some]) for side in (0, 1))
        for ((number, pair), _), chosen_text, rejected_text in zip(some, *sides, strict=True):
            if np.array_equal(chosen_text[0], rejected_text[0]):
                bad_rows.add(_the_same(pair))
            else:
                yield number, (chosen_text, rejected_text)


def _the_same(pair: Pair) -> DataError:
    return DataError(
        f"{pair.chosen.location}: expected chosen and rejected to differ, got the same "
        "tokens of both by the chat template; leave the row out"
    )
