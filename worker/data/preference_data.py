"""Pairs of answers as tokens: one conversation up to its last answer, once with each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from backends.base.interface import Batch
from protocol.base.errors import DataError
from protocol.data.conversations import Conversation
from protocol.data.data_check import validation_data
from protocol.data.preferences import Pair, read_preferences
from protocol.spec.run_spec import DataSpec, RunSpec
from worker.data import holdout
from worker.data.chat_template import ChatTemplate, Counted
from worker.data.language_data import documents_digest, overlap
from worker.models.tokens import (
    NOTHING,
    Tokens,
    digest_tokens,
    load_tokenizer,
    unknown_per_thousand,
)

_PADDING_TOKENS: Final = 16
"""Pairs are padded to a multiple of this: few shapes, little waste."""

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
    pairs = EncodedPairs.of(template, read.found, data)
    train, held_out = holdout.split(pairs.documents, spec.seed, data.holdout)
    digests, notes = dict[str, str](), dict[str, int]()
    if data.validation is not None:
        measured = validation_data(data)
        documents, found = pairs.documents, read_preferences(measured).found
        pairs = pairs.and_then(EncodedPairs.of(template, found, measured))
        train, held_out = [*range(len(documents))], [*range(len(documents), len(pairs))]
        digests["validation"] = documents_digest([pair.document for pair in found])
        notes = overlap(documents, pairs.documents[len(documents) :])
    said = [pair.chosen.messages[-1].content for pair in read.found]
    return PreferenceData(
        tokenizer=tokenizer,
        pairs=pairs,
        train=np.array(train, np.int64),
        held_out=np.array(held_out, np.int64),
        digests={
            **pairs.digests(len(tokenizer)),
            "data": documents_digest([pair.document for pair in read.found]),
            **digests,
        },
        notes={
            "pairs": len(read.found),
            "duplicates_removed": read.duplicates,
            "pairs_truncated": pairs.truncated,
            "left_out_as_no_answer_fits": pairs.left_out,
            "unknown_tokens_per_thousand": unknown_per_thousand(tokenizer, said),
            **notes,
        },
    )


@dataclass(frozen=True, slots=True)
class EncodedPairs:
    """Those pairs both of whose answers begin within `length` tokens.

    Attributes:
        documents: What identifies each.
        pairs: Of each the chosen conversation and the rejected one, of any length.
        length: `data.max_tokens`: longer ones are cut.
        left_out: How many pairs are not here.
    """

    documents: Sequence[str]
    pairs: Sequence[tuple[Answer, Answer]]
    length: int
    left_out: int

    @staticmethod
    def of(template: ChatTemplate, found: Sequence[Pair], data: DataSpec) -> EncodedPairs:
        """Render and encode.

        Raises:
            DataError: The template refuses a conversation or makes both of a pair the same, or no
                pair is left.
        """
        length = data.max_tokens
        chosen = _encode(template, [pair.chosen for pair in found])
        rejected = _encode(template, [pair.rejected for pair in found])
        every = list(zip(chosen, rejected, strict=True))
        for pair, ((liked, _), (other, _)) in zip(found, every, strict=True):
            if np.array_equal(liked, other):
                raise DataError(
                    f"{pair.chosen.place}: expected chosen and rejected to differ, got the same "
                    "tokens of both by the chat template; leave the row out"
                )
        kept = [
            (pair.document, answers)
            for pair, answers in zip(found, every, strict=True)
            if all(marks[1:length].any() for _, marks in answers)
        ]
        if not kept:
            longest = max(len(ids) for answers in every for ids, _ in answers)
            raise DataError(
                f"expected pairs in {data.train!r} whose first data.max_tokens = {length} tokens "
                f"reach both answers, found none; raise it: --set data.max_tokens={longest}"
            )
        documents, pairs = zip(*kept, strict=True)
        return EncodedPairs(documents, pairs, length, len(found) - len(kept))

    def and_then(self, others: EncodedPairs) -> EncodedPairs:
        """These, and behind them the others."""
        return EncodedPairs(
            [*self.documents, *others.documents], [*self.pairs, *others.pairs], self.length,
            self.left_out + others.left_out,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.pairs)

    def pair(self, number: int) -> tuple[Answer, Answer]:
        """The chosen conversation and the rejected one, each at most `length` tokens."""
        chosen, rejected = (
            (ids[: self.length], counts[: self.length]) for ids, counts in self.pairs[number]
        )
        return chosen, rejected

    @property
    def truncated(self) -> int:
        """How many were cut."""
        return sum(any(len(ids) > self.length for ids, _ in pair) for pair in self.pairs)

    @property
    def highest(self) -> int:
        """Of all tokens."""
        return max(int(ids.max()) for pair in self.pairs for ids, _ in pair)

    def digests(self, padding: int) -> dict[str, str]:
        """Of the tokens, and of which of them count."""
        tokens = [ids for pair in self.pairs for ids, _ in pair]
        counted = [marks.astype(np.int64) for pair in self.pairs for _, marks in pair]
        return {
            "tokenizer": digest_tokens(tokens, padding),
            "counted_tokens": digest_tokens(counted, 0),
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


def _encode(template: ChatTemplate, conversations: Sequence[Conversation]) -> list[Answer]:
    """Only the last answer counts: those before are a part of the prompt."""
    rendered = [template.render(each) for each in conversations]
    return [*template.encode([replace(each, spans=each.spans[-1:]) for each in rendered])]
