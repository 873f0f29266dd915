"""Samples for language models, out of running text or conversations.

Documents of running text stand one after the other, an end token behind each, and are cut into
samples of `data.max_tokens` tokens; every token but the first is predicted once an epoch. A
conversation is a sample of its own, as the tokenizer's chat template writes it; what of it is
longer than `data.max_tokens` is cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from backends.base.interface import Batch
from protocol.base.errors import DataError
from protocol.data.conversations import Conversation, read_conversations
from protocol.data.text_corpus import read_text_corpus
from protocol.exact.digest import digest_arrays
from protocol.spec.run_spec import DataSpec, RunSpec, TokenizerSpec
from worker.data import holdout
from worker.data.chat_template import ChatTemplate, Counted
from worker.models.tokens import (
    Tokens,
    digest_tokens,
    encode_stream,
    load_tokenizer,
    train_tokenizer,
    unknown_per_thousand,
)

NOTHING: Final = -100
"""The label of what is not predicted."""
_PADDING_TOKENS: Final = 16
"""Conversations are padded to a multiple of this: few shapes, little waste."""


class Samples(Protocol):
    """What a run trains or measures on."""

    def __len__(self) -> int: ...

    def batch(self, rows: NDArray[np.int64] | slice) -> Batch:
        """input_ids and labels, (samples, tokens); the weight is the number of tokens predicted.

        A label is the token behind its input, or `NOTHING`.
        """
        ...

    def sample(self, number: int) -> tuple[Tokens, Counted]:
        """One sample's tokens, and which of them are predicted with loss."""
        ...


@dataclass(frozen=True, slots=True)
class LanguageData:
    """All that a run makes of its data.

    Attributes:
        tokenizer: The named one, the model's own, or one trained on the training part.
        train: What is trained on.
        held_out: What is measured on.
        highest: Of all tokens.
        digests: For the manifest: what was read, what the tokenizer made of it, what counts.
        notes: Counts, for the manifest.
    """

    tokenizer: Any
    train: Samples
    held_out: Samples
    highest: int
    digests: Mapping[str, str]
    notes: Mapping[str, int]


def read_language_data(spec: RunSpec, fraction: float, *, even: bool = False) -> LanguageData:
    """Read, divide and encode what the run spec names.

    Args:
        spec: Has the sections model and data.
        fraction: How much is held out.
        even: Every batch is `data.max_tokens` wide.

    Raises:
        DataError: Data or tokenizer cannot be used.
    """
    assert spec.data is not None
    if spec.data.format == "text":
        return _running_text(spec, spec.data, fraction)
    return _conversations(spec, spec.data, fraction, even=even)


def _running_text(spec: RunSpec, data: DataSpec, fraction: float) -> LanguageData:
    corpus = read_text_corpus(data)
    parts = holdout.split(corpus.documents, spec.seed, fraction)
    train, held_out = ([corpus.documents[n] for n in part] for part in parts)
    tokenizer = load_or_train_tokenizer(spec, train)
    streams = [encode_stream(tokenizer, texts) for texts in (train, held_out) if texts]
    return LanguageData(
        tokenizer=tokenizer,
        train=Windows.cut(streams[0], data.max_tokens),
        held_out=Windows.cut(streams[-1] if held_out else streams[0][:0], data.max_tokens),
        highest=max(int(stream.max()) for stream in streams),
        digests={
            "tokenizer": digest_tokens(streams, len(tokenizer)),
            "data": documents_digest(corpus.documents),
        },
        notes={
            "documents": len(train) + len(held_out),
            "duplicates_removed": corpus.duplicates,
            "train_tokens": len(streams[0]),
            "unknown_tokens_per_thousand": unknown_per_thousand(tokenizer, train),
        },
    )


def _conversations(spec: RunSpec, data: DataSpec, fraction: float, *, even: bool) -> LanguageData:
    conversations = read_conversations(data)
    documents = [each.document for each in conversations.found]
    parts = holdout.split(documents, spec.seed, fraction)
    train, held_out = ([conversations.found[n] for n in part] for part in parts)
    said = [message.content for each in train for message in each.messages]
    tokenizer = load_or_train_tokenizer(spec, said)
    template = ChatTemplate(tokenizer, data.chat_template, everything=data.loss == "all")
    pad_to = data.max_tokens if even else _PADDING_TOKENS
    encoded = [Turns.encode(template, part, data.max_tokens, pad_to) for part in (train, held_out)]
    trained, held = encoded
    if not len(trained):
        raise DataError(
            f"expected conversations in {data.train!r} whose first data.max_tokens = "
            f"{data.max_tokens} tokens reach an answer, found none; raise it: "
            f"--set data.max_tokens={max(each.longest for each in encoded)}"
        )
    tokens = [ids for part in encoded for ids in part.tokens]
    counted = [marks.astype(np.int64) for part in encoded for marks in part.counted]
    return LanguageData(
        tokenizer=tokenizer,
        train=trained,
        held_out=held,
        highest=max(int(ids.max()) for ids in tokens),
        digests={
            "tokenizer": digest_tokens(tokens, len(tokenizer)),
            "counted_tokens": digest_tokens(counted, 0),
            "data": documents_digest(documents),
        },
        notes={
            "conversations": len(documents),
            "duplicates_removed": conversations.duplicates,
            "conversations_truncated": trained.truncated + held.truncated,
            "left_out_as_no_answer_fits": trained.left_out + held.left_out,
            "train_tokens": sum(map(len, trained.tokens)),
            "train_tokens_with_loss": sum(int(marks.sum()) for marks in trained.counted),
            "unknown_tokens_per_thousand": unknown_per_thousand(tokenizer, said),
        },
    )


@dataclass(frozen=True, slots=True)
class Windows:
    """Samples cut out of a stream of tokens: inputs and labels, each (samples, length), int64.

    A label is the token behind its input. The last sample is padded with zeros and `NOTHING`.
    """

    inputs: Tokens
    labels: Tokens

    @staticmethod
    def cut(stream: Tokens, length: int) -> Windows:
        """All tokens but the first are predicted, each once; none from fewer than 2 tokens."""
        predicted = max(len(stream) - 1, 0)
        samples = -(-predicted // length)
        inputs = np.zeros(samples * length, np.int64)
        labels = np.full(samples * length, NOTHING, np.int64)
        inputs[:predicted] = stream[:predicted]
        labels[:predicted] = stream[1:]
        return Windows(inputs.reshape(samples, length), labels.reshape(samples, length))

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: NDArray[np.int64] | slice) -> Batch:
        """input_ids and labels; the weight is the number of tokens predicted."""
        labels = self.labels[rows]
        weight = float(np.count_nonzero(labels != NOTHING))
        return Batch({"input_ids": self.inputs[rows], "labels": labels}, weight)

    def sample(self, number: int) -> tuple[Tokens, Counted]:
        """See `Samples`."""
        labels = self.labels[number]
        tokens = np.append(self.inputs[number, :1], labels[labels != NOTHING])
        return tokens, np.arange(len(tokens)) > 0


@dataclass(frozen=True, slots=True)
class Turns:
    """Conversations as tokens; a batch is padded on the right with zeros and `NOTHING`.

    What pads comes last, so no token that counts attends to it.

    Attributes:
        tokens: Of each, at most `length`.
        counted: Which of them are predicted with loss; at least one of each, never the first.
        length: `data.max_tokens`.
        pad_to: A batch is as wide as a multiple of this, at most `length`.
        truncated: How many of these were cut.
        left_out: How many are not here: nothing that counts is in their first `length` tokens.
        longest: Tokens of the longest one before any was cut or left out.
    """

    tokens: Sequence[Tokens]
    counted: Sequence[Counted]
    length: int
    pad_to: int
    truncated: int
    left_out: int
    longest: int

    @staticmethod
    def encode(
        template: ChatTemplate, conversations: Sequence[Conversation], length: int, pad_to: int
    ) -> Turns:
        """Render, encode and cut.

        Raises:
            DataError: The template refuses a conversation.
        """
        rendered = [template.render(each) for each in conversations]
        tokens, counted = [], []
        truncated = longest = 0
        for ids, marks in template.encode(rendered):
            longest = max(longest, len(ids))
            marks[:1] = False  # there is nothing before it to predict it from
            if not marks[:length].any():
                continue
            truncated += len(ids) > length
            tokens.append(ids[:length])
            counted.append(marks[:length])
        left_out = len(rendered) - len(tokens)
        return Turns(tokens, counted, length, pad_to, truncated, left_out, longest)

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, rows: NDArray[np.int64] | slice) -> Batch:
        """See `Samples`."""
        chosen = np.arange(len(self))[rows].tolist()
        longest = max((len(self.tokens[number]) for number in chosen), default=2) - 1
        width = min(-(-longest // self.pad_to) * self.pad_to, self.length)
        inputs = np.zeros((len(chosen), width), np.int64)
        labels = np.full((len(chosen), width), NOTHING, np.int64)
        for row, number in enumerate(chosen):
            ids, marks = self.tokens[number], self.counted[number]
            inputs[row, : len(ids) - 1] = ids[:-1]
            labels[row, : len(ids) - 1] = np.where(marks[1:], ids[1:], NOTHING)
        weight = float(np.count_nonzero(labels != NOTHING))
        return Batch({"input_ids": inputs, "labels": labels}, weight)

    def sample(self, number: int) -> tuple[Tokens, Counted]:
        """See `Samples`."""
        return self.tokens[number], self.counted[number]


def load_or_train_tokenizer(spec: RunSpec, texts: Sequence[str]) -> Any:
    """The one that is named, the model's own, or one trained on the training documents."""
    assert spec.model is not None
    asked = spec.tokenizer or TokenizerSpec()
    source = asked.source or (spec.model.source if spec.tokenizer is None else None)
    return load_tokenizer(source) if source else train_tokenizer(texts, asked.vocab_size)


def documents_digest(documents: Sequence[str]) -> str:
    """Of texts and where each ends."""
    lengths = np.array([len(text) for text in documents], np.int64)
    text = np.frombuffer("".join(documents).encode(), np.uint8)
    return digest_arrays({"lengths": lengths, "text": text})
