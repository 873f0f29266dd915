"""Pairs of answers as tokens: one conversation up to its last answer, once with each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from backends.base.interface import Batch
from protocol.base.errors import DataError
from protocol.data.conversations import Conversation, DistinctRows
from protocol.data.data_check import validation_data
from protocol.data.disk_texts import Chosen
from protocol.data.preferences import Pair, read_preferences
from protocol.spec.run_spec import DataSpec, RunSpec
from worker.data import holdout
from worker.data.chat_template import ChatTemplate, Counted
from worker.data.disk_arrays import DiskArrays
from worker.data.language_data import digest_stored, documents_digest, overlap
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


@dataclass(frozen=True, slots=True)
class PreferenceData:
    """All that a run makes of its pairs.

    Attributes:
        tokenizer: The model's own.
        pairs: All that are used.
        train: Numbers of those that are trained on, rising, (samples,).
        held_out: Of those that may be measured on, likewise.
        digests: For the manifest: what the tokenizer made of them, what counts, what was read.
        notes: Counts, for the manifest.
    """

    tokenizer: Any
    pairs: EncodedPairs
    train: NDArray[np.int64]
    held_out: NDArray[np.int64]
    digests: Mapping[str, str]
    notes: Mapping[str, int]


def read_preference_data(spec: RunSpec) -> PreferenceData:
    """Read, encode and divide what the run spec names.

    Raises:
        DataError: Data or tokenizer cannot be used.
    """
    assert spec.model is not None
    assert spec.model.source is not None
    assert spec.data is not None
    data = spec.data
    read = read_preferences(data)
    tokenizer = load_tokenizer(spec.model.source)
    template = ChatTemplate(tokenizer, data.chat_template, everything=False, else_all=False)
    pairs = EncodedPairs(data.max_tokens)
    documents = pairs.add(template, read, data)
    digests, notes = dict[str, str](), dict[str, int]()
    if data.validation is None:
        train, held_out = holdout.split(documents, spec.seed, data.holdout)
    else:
        measured = validation_data(data)
        found = read_preferences(measured)
        others = pairs.add(template, found, measured)
        train, held_out = [*range(len(documents))], [*range(len(documents), len(pairs))]
        digests["validation"] = documents_digest(found.documents)
        notes = overlap(documents, others)
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
    """Those pairs both of whose answers begin within `length` tokens; on disk.

    Attributes:
        length: `data.max_tokens`: longer ones are cut.
        left_out: How many pairs are not here.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.left_out = 0
        # Of each pair the chosen conversation, then the rejected one, of any length.
        self._tokens = DiskArrays("<u4", np.int64)
        self._counted = DiskArrays(np.uint8, np.bool_)

    def add(
        self, template: ChatTemplate, found: DistinctRows[Pair], data: DataSpec
    ) -> Sequence[str]:
        """Render and encode these, some at a time, behind those that are here.

        Returns:
            What identifies each that is used.

        Raises:
            DataError: The template refuses a conversation or makes both of a pair the same, or no
                pair is left.
        """
        kept, longest = list[int](), 0
        for number, answers in enumerate(_encoded(template, found)):
            longest = max(longest, *(len(ids) for ids, _ in answers))
            if all(marks[1 : self.length].any() for _, marks in answers):
                kept.append(number)
                for ids, marks in answers:
                    self._tokens.append(ids)
                    self._counted.append(marks)
        if not kept:
            raise DataError(
                f"expected pairs in {data.train!r} whose first data.max_tokens = {self.length} "
                "tokens reach both answers, found none; raise it: --set "
                f"data.max_tokens={longest}"
            )
        self.left_out += len(found) - len(kept)
        return Chosen(found.documents, kept)

    def __len__(self) -> int:
        return len(self._tokens) // 2

    def pair(self, number: int) -> tuple[Answer, Answer]:
        """The chosen conversation and the rejected one, each at most `length` tokens."""
        chosen, rejected = (
            (self._tokens[at][: self.length], self._counted[at][: self.length])
            for at in (2 * number, 2 * number + 1)
        )
        return chosen, rejected

    @property
    def truncated(self) -> int:
        """How many were cut."""
        longer = self._tokens.lengths.reshape(-1, 2) > self.length
        return int(longer.any(axis=1).sum())

    @property
    def highest(self) -> int:
        """Of all tokens."""
        return self._tokens.highest

    def digests(self, padding: int) -> dict[str, str]:
        """Of the tokens, and of which of them count."""
        lengths = self._tokens.lengths.tolist()
        return {
            "tokenizer": digest_stored([self._tokens], lengths, padding),
            "counted_tokens": digest_stored([self._counted], lengths, 0),
        }

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """These pairs, padded together; the weight is how many."""
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


def _encoded(template: ChatTemplate, found: DistinctRows[Pair]) -> Iterator[tuple[Answer, Answer]]:
    pairs = iter(found)
    while some := [*islice(pairs, _ENCODED_AT_ONCE)]:
        chosen = _answers(template, [pair.chosen for pair in some])
        rejected = _answers(template, [pair.rejected for pair in some])
        for pair, liked, other in zip(some, chosen, rejected, strict=True):
            _refuse_the_same(pair, liked, other)
            yield liked, other


def _refuse_the_same(pair: Pair, liked: Answer, other: Answer) -> None:
    if np.array_equal(liked[0], other[0]):
        raise DataError(
            f"{pair.chosen.place}: expected chosen and rejected to differ, got the same tokens of "
            "both by the chat template; leave the row out"
        )


def _answers(template: ChatTemplate, conversations: Sequence[Conversation]) -> list[Answer]:
    """Only the last answer counts: those before are a part of the prompt."""
    rendered = [template.render(each) for each in conversations]
    return [*template.encode([replace(each, spans=each.spans[-1:]) for each in rendered])]
