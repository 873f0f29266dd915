"""Samples for language models, from running text or conversations.

Documents of running text are concatenated, each with the tokenizer's begin token before and its end
token after it, and cut into samples of `data.max_tokens` tokens. Every token except the first and
the begin tokens is predicted once per epoch. A conversation is one sample: the text that the
tokenizer's chat template renders, truncated to `data.max_tokens`. With `data.packing`, a sample has
several documents or conversations; see `packing`.
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
from protocol.datasets.disk_texts import DiskTexts, SelectedTexts
from protocol.datasets.rows import BadRows
from protocol.datasets.text_corpus import TextCorpus, read_text_corpus
from protocol.exact.digest import StreamedArray, digest_arrays
from protocol.spec.run_spec import ModelRun, RunSpec
from protocol.spec.sections.data import DataSpec
from protocol.spec.sections.model import TokenizerSpec
from worker.data import holdout
from worker.data.chat_template import ChatTemplate, LossMask, RenderedConversation
from worker.data.disk_arrays import DiskArrays, concatenate
from worker.data.document_tokens import encode_documents
from worker.data.packing import PackedSamples
from worker.models.added_tokens import add_to_tokenizer
from worker.models.tokens import (
    IGNORED_LABEL,
    Tokens,
    answer_end_tokens,
    load_tokenizer,
    marks_around_text,
    measure_unknown_tokens,
    measure_unknown_tokens_in_sample,
    sampling_stride,
    train_tokenizer,
)

_CONVERSATIONS_PER_CALL: Final = 256
"""Number of conversations that are tokenized in one call."""
_PADDING_TOKENS: Final = 16
"""Batch widths of conversations are a multiple of this, or `data.max_tokens`: few shapes, and
little padding."""


class Samples(Protocol):
    """The samples of a run."""

    def __len__(self) -> int: ...

    def batch(self, rows: NDArray[np.int64] | slice) -> Batch:
        """Build a batch of input_ids and labels, (samples, tokens).

        A label is the token after its input, or `IGNORED_LABEL`. The weight is the number of
        labels without those that are ignored.
        """
        ...

    def sample(self, number: int) -> tuple[Tokens, LossMask]:
        """Return the tokens of a sample, and which of them have loss."""
        ...


@dataclass(frozen=True, slots=True)
class LanguageData:
    """A run's data, tokenized and split.

    Attributes:
        tokenizer: The tokenizer of the run spec, that of the model, or one trained on the training
            samples.
        train: The training samples.
        held_out: The evaluation samples.
        max_token: The largest token id.
        digests: Digests of the data, its tokens and the loss mask, for the manifest.
        notes: Counts by name, for the manifest's `notes`.
    """

    tokenizer: Any
    train: Samples
    held_out: Samples
    max_token: int
    digests: Mapping[str, str]
    notes: Mapping[str, int]


def read_language_data(
    spec: RunSpec, fraction: float, *, is_fixed_width: bool = False
) -> LanguageData:
    """Read, split and tokenize the data of a run spec.

    Args:
        spec: A run spec with the sections model and data.
        fraction: Share of the samples to hold out.
        is_fixed_width: Whether every batch is `data.max_tokens` wide.

    Raises:
        DataError: The data or the tokenizer cannot be used.
    """
    assert isinstance(spec, ModelRun)
    if spec.data.format == "text":
        return _read_running_text(spec, spec.data, fraction)
    return _read_conversations(spec, spec.data, fraction, is_fixed_width=is_fixed_width)


def _read_running_text(spec: ModelRun, data: DataSpec, fraction: float) -> LanguageData:
    corpus = read_text_corpus(data)
    documents = corpus.documents
    validation = None if data.validation is None else read_text_corpus(validation_data(data))
    validation_documents = None if validation is None else validation.documents
    splits = _split(corpus, validation, spec.seed, fraction)
    train, held_out = (SelectedTexts(part.documents, numbers) for part, numbers in splits)
    tokenizer = load_or_train_tokenizer(spec, train)
    if validation is None:
        streams = TextStream.of(tokenizer, corpus, *(numbers for _, numbers in splits))
    else:
        streams = [TextStream.of(tokenizer, *split)[0] for split in splits]
    stores = [stream.tokens for stream in streams if len(stream.tokens)]
    train_samples, held_out_samples = (_text_samples(stream, spec, data) for stream in streams)
    return LanguageData(
        tokenizer=tokenizer,
        train=train_samples,
        held_out=held_out_samples,
        max_token=max(store.max_element for store in stores),
        digests={
            "tokenizer": digest_disk_arrays(stores, [s.elements for s in stores], len(tokenizer)),
            "data": documents_digest(documents),
            **_validation_digest(validation_documents),
        },
        notes={
            "documents": len(train) + len(held_out),
            "duplicates_removed": corpus.duplicates,
            **bad_rows_note(corpus, validation),
            "train_tokens": streams[0].tokens.elements,
            "unknown_tokens_per_thousand": measure_unknown_tokens_in_sample(tokenizer, train),
            **_overlap_note(documents, validation_documents),
            **_packed_notes(train_samples),
        },
    )


def _split(
    corpus: TextCorpus, validation: TextCorpus | None, seed: int, fraction: float
) -> list[tuple[TextCorpus, Sequence[int]]]:
    """Return the training and the evaluation documents: each has a file, or one file is split."""
    if validation is not None:
        return [(part, range(len(part.documents))) for part in (corpus, validation)]
    return [(corpus, numbers) for numbers in holdout.split(corpus.documents, seed, fraction)]


@dataclass(frozen=True, slots=True)
class TextStream:
    """Running text as tokens.

    Attributes:
        tokens: Tokens of each document, or of adjacent parts of a document.
        begin_offsets: Offsets of the begin tokens in ascending order; they are never predicted.
    """

    tokens: DiskArrays
    begin_offsets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @staticmethod
    def of(tokenizer: Any, corpus: TextCorpus, *divisions: Sequence[int]) -> list[TextStream]:
        """Build a stream for each division, a list of indices of documents or parts of documents.

        Each document or part may be in one division at most. Begin and end tokens are added where a
        document begins and ends.
        """
        begin_tokens, end_tokens = marks_around_text(tokenizer)
        streams = [(DiskArrays("<u4", np.int64), array("q")) for _ in divisions]
        division_of = np.full(len(corpus.documents), -1)
        for division, numbers in enumerate(divisions):
            division_of[np.array(numbers, np.int64)] = division
        for number, ids in encode_documents(tokenizer, corpus, division_of >= 0):
            tokens, begin_offsets = streams[division_of[number]]
            prefix = begin_tokens if corpus.begins[number] else []
            begin_offsets.extend(range(tokens.elements, tokens.elements + len(prefix)))
            suffix = end_tokens if corpus.ends[number] else []
            continues_document = (
                not corpus.begins[number] and division_of[number - 1] == division_of[number]
            )
            add = tokens.extend if continues_document else tokens.append
            add(np.array([*prefix, *ids, *suffix], np.int64))
        return [
            TextStream(tokens, np.array(begin_offsets, np.int64))
            for tokens, begin_offsets in streams
        ]

    def read(self, lo: int, hi: int) -> tuple[Tokens, LossMask]:
        """Return the tokens [lo, hi), and which of them are predicted from the token before."""
        loss_mask = np.arange(hi - lo) > 0
        is_in_range = slice(*np.searchsorted(self.begin_offsets, (lo, hi)))
        loss_mask[self.begin_offsets[is_in_range] - lo] = False
        return self.tokens.read(lo, hi), loss_mask


def _text_samples(stream: TextStream, spec: ModelRun, data: DataSpec) -> Samples:
    if data.packing:
        return PackedSamples.of(
            CutDocuments.of(stream, data.max_tokens), data.max_tokens, spec.seed
        )
    return Windows(stream, data.max_tokens)


def _validation_digest(documents: DiskTexts | None) -> dict[str, str]:
    return {} if documents is None else {"validation": documents_digest(documents)}


def _overlap_note(train: Iterable[str], validation: Sequence[str] | None) -> dict[str, int]:
    return {} if validation is None else count_overlap(train, validation)


def count_overlap(train: Iterable[str], validation: Sequence[str]) -> dict[str, int]:
    """Count the validation documents, and those of them that are training documents too."""
    digests = {blake3(text.encode()).digest() for text in validation}
    common = sum(blake3(text.encode()).digest() in digests for text in train)
    return {"validation_documents": len(validation), "of_them_trained_on_too": common}


class HasBadRows(Protocol):
    """The content of a file, with its number of skipped rows."""

    @property
    def bad_rows(self) -> int:
        """Number of skipped rows."""


def bad_rows_note(*sources: HasBadRows | None, refused: int = 0) -> dict[str, int]:
    """Return the number of skipped rows for the manifest's notes; empty if there are none.

    Args:
        sources: Contents of files.
        refused: Number of rows that were skipped later, because the chat template refused them.
    """
    count = refused + sum(source.bad_rows for source in sources if source is not None)
    return {"bad_rows_skipped": count} if count else {}


def _packed_notes(samples: Samples) -> dict[str, int]:
    if not isinstance(samples, PackedSamples):
        return {}
    capacity, used_tokens = len(samples) * samples.length, int(samples.pieces.lengths.sum())
    return {
        "packed_samples": len(samples),
        "padding_per_thousand": 1000 * (capacity - used_tokens) // capacity,
    }


def _read_conversations(
    spec: ModelRun, data: DataSpec, fraction: float, *, is_fixed_width: bool
) -> LanguageData:
    rows = read_conversations(data)
    validation = None if data.validation is None else read_conversations(validation_data(data))
    if validation is None:
        splits = [(rows, part) for part in holdout.split(rows.documents, spec.seed, fraction)]
    else:
        splits = [(source, [*range(len(source))]) for source in (rows, validation)]

    def training_texts() -> Iterator[str]:
        messages = (message for n in splits[0][1] for message in rows[n].messages)
        return (message.content for message in messages if message.content)

    tokenizer = load_or_train_tokenizer(spec, training_texts())
    template = ChatTemplate(tokenizer, data.chat_template, loss=data.loss)
    ends = answer_end_tokens(tokenizer)
    pad_to = data.max_tokens if is_fixed_width else _PADDING_TOKENS
    options: dict[str, Any] = {"should_sort": data.group_by_length, "ends": ends}
    options["bad_rows"] = bad_rows = BadRows(skip=data.skip_bad_rows)
    encoded_splits = [
        ConversationSamples.encode(
            template, (source[n] for n in numbers), data.max_tokens, pad_to, **options
        )
        for source, numbers in splits
    ]
    bad_rows.report()
    if not len(encoded_splits[0]):
        raise _no_answer_error(data, max(split.longest for split in encoded_splits))
    _refuse_answers_without_end(tokenizer, encoded_splits[0], ends)
    tokens, loss_masks = zip(*((s.tokens, s.loss_masks) for s in encoded_splits), strict=True)
    lengths = [int(length) for arrays in tokens for length in arrays.lengths]
    samples: list[Samples] = [
        PackedSamples.of(split, data.max_tokens, spec.seed) if data.packing else split
        for split in encoded_splits
    ]
    validation_documents = None if validation is None else validation.documents
    stride = sampling_stride(sum(1 for _ in training_texts()))
    sampled_texts = islice(training_texts(), 0, None, stride)
    return LanguageData(
        tokenizer=tokenizer,
        train=samples[0],
        held_out=samples[1],
        max_token=max(arrays.max_element for arrays in tokens if len(arrays)),
        digests={
            "tokenizer": digest_disk_arrays(tokens, lengths, len(tokenizer)),
            "counted_tokens": digest_disk_arrays(loss_masks, lengths, 0),
            "data": documents_digest(rows.documents),
            **_validation_digest(validation_documents),
        },
        notes={
            "conversations": len(rows),
            "duplicates_removed": rows.duplicates,
            **bad_rows_note(rows, validation, refused=bad_rows.count),
            **_conversation_notes(*encoded_splits),
            "unknown_tokens_per_thousand": measure_unknown_tokens(tokenizer, sampled_texts),
            **_overlap_note(rows.documents, validation_documents),
            **_packed_notes(samples[0]),
        },
    )


def _no_answer_error(data: DataSpec, longest: int) -> DataError:
    """Return the error for data in which no conversation has a token with loss.

    `longest` is the number of tokens of the longest conversation.
    """
    if longest <= data.max_tokens:
        return DataError(
            f"expected conversations in {data.train!r} with an answer that has loss, found none: "
            "every answer has weight 0 or train false; remove these settings"
        )
    return DataError(
        f"expected conversations in {data.train!r} whose first data.max_tokens = "
        f"{data.max_tokens} tokens reach an answer, found none; raise that limit: "
        f"--set data.max_tokens={longest}"
    )


def _refuse_answers_without_end(
    tokenizer: Any, samples: ConversationSamples, ends: frozenset[int]
) -> None:
    """Check that the model learns to end its answers, as generation stops only at end tokens.

    Raises:
        DataError: No token that ends an answer has loss anywhere.
    """
    if samples.ended_answers or samples.truncated == len(samples):
        return
    names = ", ".join(repr(tokenizer.decode([token])) for token in sorted(ends)) or "no token"
    raise DataError(
        f"expected answers that end with a stop token, got {len(samples)} conversations without "
        f"one: generation stops at {names}, and no answer trains that token; write it after each "
        "answer in the chat template, inside {% generation %} where that is used: --set "
        "data.chat_template=JINJA"
    )


def _conversation_notes(
    train: ConversationSamples, held_out: ConversationSamples
) -> dict[str, int]:
    return {
        "conversations_truncated": train.truncated + held_out.truncated,
        "left_out_as_no_answer_fits": train.left_out + held_out.left_out,
        "train_tokens": train.tokens.elements,
        "train_tokens_with_loss": sum(int(chunk.sum()) for chunk in train.loss_masks.chunks()),
    }


@dataclass(frozen=True, slots=True)
class Windows:
    """Samples cut from a stream of tokens: inputs and labels, each (samples, length), int64.

    A label is the token after its input: every token except the first and the begin tokens is
    predicted once. The last sample is padded with zeros and `IGNORED_LABEL`.
    """

    stream: TextStream
    length: int

    def __len__(self) -> int:
        return (max(self.stream.tokens.elements - 1, 0) + self.length - 1) // self.length

    def batch(self, rows: NDArray[np.int64] | slice) -> Batch:
        """Build a batch of input_ids and labels; its weight is the number of labels."""
        numbers = np.arange(len(self))[rows].tolist()
        inputs = np.zeros((len(numbers), self.length), np.int64)
        labels = np.full((len(numbers), self.length), IGNORED_LABEL, np.int64)
        for row, number in enumerate(numbers):
            tokens, loss_mask = self.sample(number)
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            labels[row, : len(tokens) - 1] = np.where(loss_mask[1:], tokens[1:], IGNORED_LABEL)
        weight = float(np.count_nonzero(labels != IGNORED_LABEL))
        return Batch({"input_ids": inputs, "labels": labels}, weight)

    def sample(self, number: int) -> tuple[Tokens, LossMask]:
        """See `Samples`."""
        lo = number * self.length
        return self.stream.read(lo, min(lo + self.length + 1, self.stream.tokens.elements))


@dataclass(frozen=True, slots=True)
class CutDocuments:
    """Documents as pieces to pack; a long document becomes several pieces.

    Each token of a document except the first is predicted once.

    Attributes:
        stream: The documents.
        starts: Offset of each piece in the stream, in tokens.
        lengths: Number of input tokens of each piece.
    """

    stream: TextStream
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @staticmethod
    def of(stream: TextStream, length: int) -> CutDocuments:
        """Cut the documents of a stream into pieces."""
        predicted_counts = np.maximum(stream.tokens.lengths - 1, 0)
        counts = -(-predicted_counts // length)
        first_pieces = np.repeat(np.cumsum(counts) - counts, counts)
        offsets = (np.arange(int(counts.sum())) - first_pieces) * length
        starts = np.repeat(stream.tokens.starts, counts) + offsets
        return CutDocuments(
            stream, starts, np.minimum(length, np.repeat(predicted_counts, counts) - offsets)
        )

    def piece(self, number: int) -> tuple[Tokens, Tokens]:
        """See `Pieces`."""
        tokens, loss_mask = self.sample(number)
        return tokens[:-1], np.where(loss_mask[1:], tokens[1:], IGNORED_LABEL)

    def sample(self, number: int) -> tuple[Tokens, LossMask]:
        """See `Pieces`."""
        start = int(self.starts[number])
        return self.stream.read(start, start + int(self.lengths[number]) + 1)


@dataclass(frozen=True, slots=True)
class ConversationSamples:
    """Conversations as tokens; a batch is padded on the right with zeros and `IGNORED_LABEL`.

    Padding comes last, so no token with loss attends to it.

    Attributes:
        tokens: Tokens of each conversation, at most `length`.
        loss_masks: Which tokens have loss: at least one in each conversation, never the first.
        order: The conversation of each sample; sorted by length to group similar lengths.
        length: `data.max_tokens`.
        pad_to: The width of a batch is a multiple of this, at most `length`.
        truncated: Number of truncated conversations.
        left_out: Number of conversations that were dropped, because none of their first `length`
            tokens has loss.
        longest: Tokens of the longest conversation, before truncation.
        ended_answers: Number of conversations in which a token that ends an answer has loss.
    """

    tokens: DiskArrays
    loss_masks: DiskArrays
    order: NDArray[np.int64]
    length: int
    pad_to: int
    truncated: int
    left_out: int
    longest: int
    ended_answers: int = 0

    @staticmethod
    def encode(
        template: ChatTemplate,
        conversations: Iterable[Conversation],
        length: int,
        pad_to: int,
        *,
        bad_rows: BadRows,
        should_sort: bool = False,
        ends: Collection[int] = (),
    ) -> ConversationSamples:
        """Render, tokenize and truncate conversations.

        Those that the template refuses are added to `bad_rows`.
        """
        tokens, loss_masks = DiskArrays("<u4", np.int64), DiskArrays(np.uint8, np.bool_)
        truncated = longest = count = ended_answers = 0
        end_tokens = np.array(sorted(ends), np.int64)
        rendered = (text for _, text in bad_rows.apply(conversations, template.render))
        for batch in _batches(rendered):
            count += len(batch)
            for ids, loss_mask in template.encode(batch):
                longest = max(longest, len(ids))
                loss_mask[:1] = False  # the first token has no token before it
                if not loss_mask[:length].any():
                    continue
                truncated += len(ids) > length
                loss_tokens = ids[:length][loss_mask[:length]]
                ended_answers += bool(np.isin(loss_tokens, end_tokens).any())
                tokens.append(ids[:length])
                loss_masks.append(loss_mask[:length])
        order = np.arange(len(tokens))
        if should_sort:
            order = np.argsort(tokens.lengths, kind="stable")
        left_out = count - len(tokens)
        return ConversationSamples(
            tokens, loss_masks, order, length, pad_to, truncated, left_out, longest, ended_answers
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """See `Pieces`; the last token is only a label."""
        return self.tokens.lengths[self.order] - 1

    def batch(self, rows: NDArray[np.int64] | slice) -> Batch:
        """See `Samples`."""
        pieces = [self.piece(number) for number in np.arange(len(self))[rows].tolist()]
        longest = max((len(piece_inputs) for piece_inputs, _ in pieces), default=1)
        width = min(-(-longest // self.pad_to) * self.pad_to, self.length)
        inputs = np.zeros((len(pieces), width), np.int64)
        labels = np.full((len(pieces), width), IGNORED_LABEL, np.int64)
        for row, (piece_inputs, piece_labels) in enumerate(pieces):
            inputs[row, : len(piece_inputs)] = piece_inputs
            labels[row, : len(piece_inputs)] = piece_labels
        weight = float(np.count_nonzero(labels != IGNORED_LABEL))
        return Batch({"input_ids": inputs, "labels": labels}, weight)

    def piece(self, number: int) -> tuple[Tokens, Tokens]:
        """See `Pieces`."""
        ids, loss_mask = self.sample(number)
        return ids[:-1], np.where(loss_mask[1:], ids[1:], IGNORED_LABEL)

    def sample(self, number: int) -> tuple[Tokens, LossMask]:
        """See `Samples`."""
        row = int(self.order[number])
        return self.tokens[row], self.loss_masks[row]


def _batches(rendered: Iterable[RenderedConversation]) -> Iterator[list[RenderedConversation]]:
    texts = iter(rendered)
    while batch := [*islice(texts, _CONVERSATIONS_PER_CALL)]:
        yield batch


def load_or_train_tokenizer(spec: ModelRun, texts: Iterable[str]) -> Any:
    """Load the run spec's or the model's tokenizer, or train one on the training documents."""
    tokenizer_spec = spec.tokenizer or TokenizerSpec()
    source = tokenizer_spec.source or (spec.model.source if spec.tokenizer is None else None)
    if source:
        return load_tokenizer(source, spec.model.added_tokens)
    tokenizer = train_tokenizer(texts, tokenizer_spec.vocab_size)
    add_to_tokenizer(tokenizer, spec.model.added_tokens)
    return tokenizer


def documents_digest(documents: Sequence[str]) -> str:
    """Return the digest of texts and their lengths."""
    stored_texts = documents if isinstance(documents, DiskTexts) else DiskTexts.of(documents)
    text = (np.frombuffer(piece, np.uint8) for piece in stored_texts.file.pieces())
    stream = StreamedArray(np.dtype(np.uint8), (len(stored_texts.file),), text)
    return digest_arrays({"lengths": np.array(stored_texts.characters, np.int64), "text": stream})


def digest_disk_arrays(arrays: Sequence[DiskArrays], lengths: Sequence[int], padding: int) -> str:
    """Return the digest of arrays; for tokens, the tokenizer's file format does not affect it."""
    return digest_arrays({
        "lengths": np.array(lengths, np.int64),
        "ids": concatenate(arrays),
        "padding": np.array([padding]),
    })  # fmt: skip
