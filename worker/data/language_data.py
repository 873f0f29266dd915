"""Samples for language models, made of running text or conversations.

Documents of running text are concatenated, each with the tokenizer's begin token before it and an
end token behind it, and cut into samples of `data.max_tokens` tokens; every token but the first and
the begin tokens is predicted once per epoch. A conversation is one sample, as the tokenizer's chat
template renders it, truncated to `data.max_tokens`.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from backends.base.interface import Batch
from protocol.base.errors import DataError
from protocol.datasets.conversations import Conversation, read_conversations
from protocol.datasets.data_check import validation_data
from protocol.datasets.disk_texts import Chosen, DiskTexts
from protocol.datasets.rows import BadRows
from protocol.datasets.text_corpus import TextCorpus, read_text_corpus
from protocol.exact.digest import Streamed, digest_arrays
from protocol.spec.run_spec import ModelRun, RunSpec
from protocol.spec.sections.data import DataSpec
from protocol.spec.sections.model import TokenizerSpec
from worker.data import holdout
from worker.data.chat_template import ChatTemplate, Counted, Rendered
from worker.data.disk_arrays import DiskArrays, joined
from worker.data.document_tokens import encode_documents
from worker.data.packing import PackedSamples
from worker.models.added_tokens import add_to_tokenizer
from worker.models.tokens import (
    NOTHING,
    Tokens,
    answer_ends,
    load_tokenizer,
    marks_around_text,
    sampled_every,
    train_tokenizer,
    unknown_in,
    unknown_per_thousand,
)

_ENCODED_AT_ONCE: Final = 256
"""Conversations."""
_PADDING_TOKENS: Final = 16
"""Conversations are padded to a multiple of this: few shapes, little waste."""


class Samples(Protocol):
    """The samples of a run."""

    def __len__(self) -> int: ...

    def batch(self, rows: NDArray[np.int64] | slice) -> Batch:
        """Make a batch of input_ids and labels, (samples, tokens); it weighs its number of labels.

        A label is the token after its input, or `NOTHING`.
        """
        ...

    def sample(self, number: int) -> tuple[Tokens, Counted]:
        """Return the tokens of a sample, and which of them have loss."""
        ...


@dataclass(frozen=True, slots=True)
class LanguageData:
    """All that a run makes of its data.

    Attributes:
        tokenizer: The named one, the model's own, or one trained on the training part.
        train: The training samples.
        held_out: The samples for evaluation.
        highest: The largest token id.
        digests: Of what was read, of its tokens and of the loss mask, for the manifest.
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
        fraction: The share that is held out.
        even: Make every batch `data.max_tokens` wide.

    Raises:
        DataError: Data or tokenizer cannot be used.
    """
    assert isinstance(spec, ModelRun)
    if spec.data.format == "text":
        return _running_text(spec, spec.data, fraction)
    return _conversations(spec, spec.data, fraction, even=even)


def _running_text(spec: ModelRun, data: DataSpec, fraction: float) -> LanguageData:
    corpus = read_text_corpus(data)
    found = corpus.documents
    measured = None if data.validation is None else read_text_corpus(validation_data(data))
    valid = None if measured is None else measured.documents
    both = _divided(corpus, measured, spec.seed, fraction)
    train, held_out = (Chosen(each.documents, numbers) for each, numbers in both)
    tokenizer = load_or_train_tokenizer(spec, train)
    if measured is None:
        streams = TextStream.of(tokenizer, corpus, *(numbers for _, numbers in both))
    else:
        streams = [TextStream.of(tokenizer, *each)[0] for each in both]
    there = [stream.tokens for stream in streams if len(stream.tokens)]
    trained, held = (_text_samples(stream, spec, data) for stream in streams)
    return LanguageData(
        tokenizer=tokenizer,
        train=trained,
        held_out=held,
        highest=max(stream.highest for stream in there),
        digests={
            "tokenizer": digest_stored(
                there, [stream.elements for stream in there], len(tokenizer)
            ),
            "data": documents_digest(found),
            **_validation_digest(valid),
        },
        notes={
            "documents": len(train) + len(held_out),
            "duplicates_removed": corpus.duplicates,
            **bad_rows_note(corpus, measured),
            "train_tokens": streams[0].tokens.elements,
            "unknown_tokens_per_thousand": unknown_per_thousand(tokenizer, train),
            **({} if valid is None else overlap(found, valid)),
            **_packed_notes(trained),
        },
    )


def _divided(
    found: TextCorpus, valid: TextCorpus | None, seed: int, fraction: float
) -> list[tuple[TextCorpus, Sequence[int]]]:
    """Return the training documents and those for evaluation: of another file, or a share."""
    if valid is not None:
        return [(each, range(len(each.documents))) for each in (found, valid)]
    return [(found, numbers) for numbers in holdout.split(found.documents, seed, fraction)]


@dataclass(frozen=True, slots=True)
class TextStream:
    """Running text as tokens.

    Attributes:
        tokens: Of each document, or of adjacent parts of one.
        marks: Offsets of the begin tokens, rising; they are never predicted.
    """

    tokens: DiskArrays
    marks: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @staticmethod
    def of(tokenizer: Any, corpus: TextCorpus, *divisions: Sequence[int]) -> list[TextStream]:
        """Make a stream of each division: documents and parts by number, each in at most one.

        Begin and end tokens stand where a document begins and ends.
        """
        before, behind = marks_around_text(tokenizer)
        found = [(DiskArrays("<u4", np.int64), array("q")) for _ in divisions]
        division = np.full(len(corpus.documents), -1)
        for each, numbers in enumerate(divisions):
            division[np.array(numbers, np.int64)] = each
        for number, ids in encode_documents(tokenizer, corpus, division >= 0):
            tokens, marks = found[division[number]]
            first = before if corpus.begins[number] else []
            marks.extend(range(tokens.elements, tokens.elements + len(first)))
            last = behind if corpus.ends[number] else []
            goes_on = not corpus.begins[number] and division[number - 1] == division[number]
            add = tokens.extend if goes_on else tokens.append
            add(np.array([*first, *ids, *last], np.int64))
        return [TextStream(tokens, np.array(marks, np.int64)) for tokens, marks in found]

    def read(self, lo: int, hi: int) -> tuple[Tokens, Counted]:
        """Return the tokens [lo, hi), and which of them are predicted from the one before."""
        counted = np.arange(hi - lo) > 0
        inside = slice(*np.searchsorted(self.marks, (lo, hi)))
        counted[self.marks[inside] - lo] = False
        return self.tokens.read(lo, hi), counted


def _text_samples(stream: TextStream, spec: ModelRun, data: DataSpec) -> Samples:
    if data.packing:
        return PackedSamples.of(
            CutDocuments.of(stream, data.max_tokens), data.max_tokens, spec.seed
        )
    return Windows(stream, data.max_tokens)


def _validation_digest(valid: DiskTexts | None) -> dict[str, str]:
    return {} if valid is None else {"validation": documents_digest(valid)}


def overlap(found: Iterable[str], valid: Sequence[str]) -> dict[str, int]:
    """Count the documents for evaluation, and those of them that are trained on too."""
    known = {blake3(text.encode()).digest() for text in valid}
    both = sum(blake3(text.encode()).digest() in known for text in found)
    return {"validation_documents": len(valid), "of_them_trained_on_too": both}


class HasBadRows(Protocol):
    """What was read of a file of rows."""

    @property
    def bad_rows(self) -> int:
        """How many rows were skipped."""


def bad_rows_note(*read: HasBadRows | None, refused: int = 0) -> dict[str, int]:
    """Return how many rows were skipped, for the manifest's notes; nothing where none were.

    Args:
        read: What was read.
        refused: How many rows were skipped afterwards, as the chat template refused them.
    """
    count = refused + sum(each.bad_rows for each in read if each is not None)
    return {"bad_rows_skipped": count} if count else {}


def _packed_notes(samples: Samples) -> dict[str, int]:
    if not isinstance(samples, PackedSamples):
        return {}
    room, used = len(samples) * samples.length, int(samples.pieces.lengths.sum())
    return {"packed_samples": len(samples), "padding_per_thousand": 1000 * (room - used) // room}


def _conversations(spec: ModelRun, data: DataSpec, fraction: float, *, even: bool) -> LanguageData:
    found = read_conversations(data)
    valid = None if data.validation is None else read_conversations(validation_data(data))
    if valid is None:
        chosen = [(found, part) for part in holdout.split(found.documents, spec.seed, fraction)]
    else:
        chosen = [(each, [*range(len(each))]) for each in (found, valid)]

    def said() -> Iterator[str]:
        messages = (message for n in chosen[0][1] for message in found[n].messages)
        return (message.content for message in messages if message.content)

    tokenizer = load_or_train_tokenizer(spec, said())
    template = ChatTemplate(tokenizer, data.chat_template, loss=data.loss)
    ends = answer_ends(tokenizer)
    pad_to = data.max_tokens if even else _PADDING_TOKENS
    bad_rows = BadRows(skip=data.skip_bad_rows)
    how: dict[str, Any] = {"grouped": data.group_by_length, "ends": ends, "bad_rows": bad_rows}
    both = [
        Turns.encode(template, (of[n] for n in part), data.max_tokens, pad_to, **how)
        for of, part in chosen
    ]
    bad_rows.report()
    if not len(both[0]):
        raise _no_answer(data, max(part.longest for part in both))
    _refuse_answers_without_end(tokenizer, both[0], ends)
    lengths = [int(length) for part in both for length in part.tokens.lengths]
    samples: list[Samples] = [
        PackedSamples.of(part, data.max_tokens, spec.seed) if data.packing else part
        for part in both
    ]
    documents = None if valid is None else valid.documents
    asked_every = sampled_every(sum(1 for _ in said()))
    return LanguageData(
        tokenizer=tokenizer,
        train=samples[0],
        held_out=samples[1],
        highest=max(part.tokens.highest for part in both if len(part)),
        digests={
            "tokenizer": digest_stored([p.tokens for p in both], lengths, len(tokenizer)),
            "counted_tokens": digest_stored([p.counted for p in both], lengths, 0),
            "data": documents_digest(found.documents),
            **_validation_digest(documents),
        },
        notes={
            "conversations": len(found),
            "duplicates_removed": found.duplicates,
            **bad_rows_note(found, valid, refused=bad_rows.count),
            **_turns_notes(*both),
            "unknown_tokens_per_thousand": unknown_in(
                tokenizer, islice(said(), 0, None, asked_every)
            ),
            **({} if documents is None else overlap(found.documents, documents)),
            **_packed_notes(samples[0]),
        },
    )


def _no_answer(data: DataSpec, longest: int) -> DataError:
    """Return why no conversation has anything to learn; the longest has so many tokens."""
    if longest <= data.max_tokens:
        return DataError(
            f"expected conversations in {data.train!r} with an answer to learn, found none: every "
            "answer has weight 0, or train false; leave that out of one"
        )
    return DataError(
        f"expected conversations in {data.train!r} whose first data.max_tokens = "
        f"{data.max_tokens} tokens reach an answer, found none; raise it: "
        f"--set data.max_tokens={longest}"
    )


def _refuse_answers_without_end(tokenizer: Any, trained: Turns, ends: frozenset[int]) -> None:
    """Check that the model learns to end its answers: generation stops at nothing else.

    Raises:
        DataError: No token that ends an answer has loss anywhere.
    """
    if trained.ended or trained.truncated == len(trained):
        return
    names = ", ".join(repr(tokenizer.decode([each])) for each in sorted(ends)) or "no token"
    raise DataError(
        f"expected answers that end with a stop token, got {len(trained)} conversations without: "
        f"generation stops at {names}, and no answer trains that token; write it after each answer "
        "in the chat template, inside {% generation %} where that is used: --set "
        "data.chat_template=JINJA"
    )


def _turns_notes(trained: Turns, held: Turns) -> dict[str, int]:
    return {
        "conversations_truncated": trained.truncated + held.truncated,
        "left_out_as_no_answer_fits": trained.left_out + held.left_out,
        "train_tokens": trained.tokens.elements,
        "train_tokens_with_loss": sum(int(piece.sum()) for piece in trained.counted.pieces()),
    }


@dataclass(frozen=True, slots=True)
class Windows:
    """Samples cut from a stream of tokens: inputs and labels, each (samples, length), int64.

    A label is the token after its input: every token but the first and the begin tokens is
    predicted once. The last sample is padded with zeros and `NOTHING`.
    """

    stream: TextStream
    length: int

    def __len__(self) -> int:
        return (max(self.stream.tokens.elements - 1, 0) + self.length - 1) // self.length

    def batch(self, rows: NDArray[np.int64] | slice) -> Batch:
        """Make a batch of input_ids and labels; its weight is the number of labels."""
        chosen = np.arange(len(self))[rows].tolist()
        inputs = np.zeros((len(chosen), self.length), np.int64)
        labels = np.full((len(chosen), self.length), NOTHING, np.int64)
        for row, number in enumerate(chosen):
            tokens, counted = self.sample(number)
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            labels[row, : len(tokens) - 1] = np.where(counted[1:], tokens[1:], NOTHING)
        weight = float(np.count_nonzero(labels != NOTHING))
        return Batch({"input_ids": inputs, "labels": labels}, weight)

    def sample(self, number: int) -> tuple[Tokens, Counted]:
        """See `Samples`."""
        lo = number * self.length
        return self.stream.read(lo, min(lo + self.length + 1, self.stream.tokens.elements))


@dataclass(frozen=True, slots=True)
class CutDocuments:
    """Documents as pieces to pack: a long one becomes several; each token but the first is
    predicted once."""

    stream: TextStream
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @staticmethod
    def of(stream: TextStream, length: int) -> CutDocuments:
        """Cut the documents of a stream into pieces."""
        predicted = np.maximum(stream.tokens.lengths - 1, 0)
        counts = -(-predicted // length)
        whole = np.repeat(np.cumsum(counts) - counts, counts)
        at = (np.arange(int(counts.sum())) - whole) * length
        starts = np.repeat(stream.tokens.starts, counts) + at
        return CutDocuments(stream, starts, np.minimum(length, np.repeat(predicted, counts) - at))

    def piece(self, number: int) -> tuple[Tokens, Tokens]:
        """See `Pieces`."""
        tokens, counted = self.sample(number)
        return tokens[:-1], np.where(counted[1:], tokens[1:], NOTHING)

    def sample(self, number: int) -> tuple[Tokens, Counted]:
        """See `Pieces`."""
        start = int(self.starts[number])
        return self.stream.read(start, start + int(self.lengths[number]) + 1)


@dataclass(frozen=True, slots=True)
class Turns:
    """Conversations as tokens; a batch is padded on the right with zeros and `NOTHING`.

    Padding comes last, so no token with loss attends to it.

    Attributes:
        tokens: Of each conversation, at most `length`.
        counted: Which of them have loss: at least one of each conversation, never the first token.
        order: The conversation of each sample; sorted by length to group similar lengths.
        length: `data.max_tokens`.
        pad_to: The width of a batch is a multiple of this, at most `length`.
        truncated: How many conversations were truncated.
        left_out: How many are not here: nothing that counts is in their first `length` tokens.
        longest: Tokens of the longest one before any was cut or left out.
        ended: In how many a token that ends an answer counts.
    """

    tokens: DiskArrays
    counted: DiskArrays
    order: NDArray[np.int64]
    length: int
    pad_to: int
    truncated: int
    left_out: int
    longest: int
    ended: int = 0

    @staticmethod
    def encode(
        template: ChatTemplate,
        conversations: Iterable[Conversation],
        length: int,
        pad_to: int,
        *,
        bad_rows: BadRows,
        grouped: bool = False,
        ends: Collection[int] = (),
    ) -> Turns:
        """Render, encode and cut; conversations that the template refuses are bad rows."""
        tokens, counted = DiskArrays("<u4", np.int64), DiskArrays(np.uint8, np.bool_)
        truncated = longest = given = ended = 0
        last = np.array(sorted(ends), np.int64)
        rendered = (each for _, each in bad_rows.usable(conversations, template.render))
        for some in _some_at_a_time(rendered):
            given += len(some)
            for ids, marks in template.encode(some):
                longest = max(longest, len(ids))
                marks[:1] = False  # there is nothing before it to predict it from
                if not marks[:length].any():
                    continue
                truncated += len(ids) > length
                ended += bool(np.isin(ids[:length][marks[:length]], last).any())
                tokens.append(ids[:length])
                counted.append(marks[:length])
        order = np.arange(len(tokens))
        if grouped:
            order = np.argsort(tokens.lengths, kind="stable")
        left_out = given - len(tokens)
        return Turns(tokens, counted, order, length, pad_to, truncated, left_out, longest, ended)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """See `Pieces`: the last token is predicted alone."""
        return self.tokens.lengths[self.order] - 1

    def batch(self, rows: NDArray[np.int64] | slice) -> Batch:
        """See `Samples`."""
        pieces = [self.piece(number) for number in np.arange(len(self))[rows].tolist()]
        longest = max((len(read) for read, _ in pieces), default=1)
        width = min(-(-longest // self.pad_to) * self.pad_to, self.length)
        inputs = np.zeros((len(pieces), width), np.int64)
        labels = np.full((len(pieces), width), NOTHING, np.int64)
        for row, (read, predicted) in enumerate(pieces):
            inputs[row, : len(read)] = read
            labels[row, : len(read)] = predicted
        weight = float(np.count_nonzero(labels != NOTHING))
        return Batch({"input_ids": inputs, "labels": labels}, weight)

    def piece(self, number: int) -> tuple[Tokens, Tokens]:
        """See `Pieces`."""
        ids, marks = self.sample(number)
        return ids[:-1], np.where(marks[1:], ids[1:], NOTHING)

    def sample(self, number: int) -> tuple[Tokens, Counted]:
        """See `Samples`."""
        at = int(self.order[number])
        return self.tokens[at], self.counted[at]


def _some_at_a_time(rendered: Iterable[Rendered]) -> Iterator[list[Rendered]]:
    given = iter(rendered)
    while some := [*islice(given, _ENCODED_AT_ONCE)]:
        yield some


def load_or_train_tokenizer(spec: ModelRun, texts: Iterable[str]) -> Any:
    """Load the named tokenizer or the model's own, or train one on the training documents."""
    asked = spec.tokenizer or TokenizerSpec()
    source = asked.source or (spec.model.source if spec.tokenizer is None else None)
    if source:
        return load_tokenizer(source, spec.model.added_tokens)
    tokenizer = train_tokenizer(texts, asked.vocab_size)
    add_to_tokenizer(tokenizer, spec.model.added_tokens)
    return tokenizer


def documents_digest(documents: Sequence[str]) -> str:
    """Return the digest of texts and their lengths."""
    kept = documents if isinstance(documents, DiskTexts) else DiskTexts.of(documents)
    text = (np.frombuffer(piece, np.uint8) for piece in kept.file.pieces())
    streamed = Streamed(np.dtype(np.uint8), (len(kept.file),), text)
    return digest_arrays({"lengths": np.array(kept.characters, np.int64), "text": streamed})


def digest_stored(arrays: Sequence[DiskArrays], lengths: Sequence[int], padding: int) -> str:
    """Return the digest of the tokens of all texts, however the tokenizer is stored."""
    return digest_arrays({
        "lengths": np.array(lengths, np.int64),
        "ids": joined(arrays),
        "padding": np.array([padding]),
    })  # fmt: skip
