"""Tokenize whole documents of running text, in bounded memory.

A token may depend on what is around it: tokenizers mark the beginning of a text, and group line
ends or digits. So a document is not encoded in independent parts. One that is longer than a window
is encoded in overlapping windows, and two windows are joined only where they agree:

- over the middle half of the overlap they have the same tokens at the same places, so what a
  window's own beginning and end change lies outside;
- there, where a word begins: models encode each word of the pre-tokenizer by itself, and it finds
  the next word from where the last one ended;
- with BPE between any two tokens: tokens are the encoding of their text if each two neighbors are
  that of theirs (a first merge over a boundary would be made in the text of two neighbors, too).

Where two windows differ, the first one is doubled, in the end up to the whole document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import models

from protocol.base.errors import DataError
from protocol.datasets.disk_texts import Chosen, DiskTexts
from protocol.datasets.text_corpus import TextCorpus
from worker.models.tokens import Tokens, encode_each

WINDOW_CHARACTERS: Final = 1 << 20
"""A document of at most so many is encoded in one call, which takes a few hundred MiB."""
_OVERLAP_SHARE: Final = 16
"""Of a window one in so many characters is in the next one, too. A quarter of those, 16,384, is
farther than tokenizers look for anything that does not repeat itself (BERT: a word of 100)."""


class _Window(NamedTuple):
    """The tokens of a part of a document.

    Attributes:
        ids: Token ids.
        starts: The first character of each token in the document, rising.
        ends: The character after each token.
        begins_word: Whether a word of the pre-tokenizer begins with it.
    """

    ids: Tokens
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    begins_word: NDArray[np.bool_]

    def cut(self, lo: int, hi: int | None = None) -> _Window:
        """Return the tokens [lo, hi)."""
        at = slice(lo, hi)
        return _Window(self.ids[at], self.starts[at], self.ends[at], self.begins_word[at])

    def equals(self, other: _Window) -> bool:
        """Return whether both have the same tokens at the same offsets."""
        return all(np.array_equal(own, others) for own, others in zip(self, other, strict=True))


def encode_documents(
    tokenizer: Any, corpus: TextCorpus, selected: NDArray[np.bool_]
) -> Iterator[tuple[int, Tokens]]:
    """Yield the number of each document, or part of one, and its tokens without special tokens.

    A part has the tokens of the whole document that begin in it: concatenated, the tokens of all
    parts are those of the document.

    Args:
        tokenizer: Of the model.
        corpus: Documents, or parts of them.
        selected: Which of them to yield; a document without any is not encoded.

    Raises:
        DataError: Tokens depend on text that is thousands of characters away.
    """
    characters = corpus.documents.characters

    def is_short(document: tuple[int, int]) -> bool:
        lo, hi = document
        return hi - lo == 1 and characters[lo] <= WINDOW_CHARACTERS

    ends = (np.flatnonzero(corpus.ends) + 1).tolist()
    for short, documents in groupby(pairwise([0, *ends]), is_short):
        if short:
            numbers = [lo for lo, _ in documents if selected[lo]]
            texts = Chosen(corpus.documents, numbers)
            yield from zip(numbers, encode_each(tokenizer, texts), strict=True)
            continue
        for lo, hi in documents:
            if selected[lo:hi].any():
                parts = _parts(tokenizer, _Document(corpus.documents, lo, hi))
                yield from (
                    (lo + part, ids) for part, ids in enumerate(parts) if selected[lo + part]
                )


class _Document:
    """The text of a document, read on demand."""

    def __init__(self, texts: DiskTexts, lo: int, hi: int) -> None:
        self.bounds = np.cumsum([0, *texts.characters[lo:hi]])
        self._texts, self._lo = texts, lo
        self._last = -1, ""

    def read(self, lo: int, hi: int) -> str:
        """Return the characters [lo, hi)."""
        first = int(np.searchsorted(self.bounds, lo, "right")) - 1
        parts = range(first, int(np.searchsorted(self.bounds, hi)))
        return "".join(
            self._part(part)[max(lo - int(self.bounds[part]), 0) : hi - int(self.bounds[part])]
            for part in parts
        )

    def _part(self, part: int) -> str:
        if self._last[0] != part:
            self._last = part, self._texts[self._lo + part]
        return self._last[1]


def _parts(tokenizer: Any, document: _Document) -> Iterator[Tokens]:
    """Yield the tokens that begin in each part of a document."""
    bounds = document.bounds[1:-1].tolist()
    pending: list[Tokens] = []
    boundary = 0
    for ids, starts in encode_text(tokenizer, int(document.bounds[-1]), document.read):
        at = 0
        while boundary < len(bounds) and len(starts) and bounds[boundary] <= starts[-1]:
            split = int(np.searchsorted(starts, bounds[boundary]))
            yield np.concatenate([*pending, ids[at:split]])
            pending, at, boundary = [], split, boundary + 1
        pending.append(ids[at:])
    for _ in range(len(bounds) + 1 - boundary):
        yield np.concatenate([*pending, np.zeros(0, np.int64)])
        pending = []


def encode_text(
    tokenizer: Any,
    characters: int,
    read: Callable[[int, int], str],
    window: int = WINDOW_CHARACTERS,
) -> Iterator[tuple[Tokens, NDArray[np.int64]]]:
    """Yield the tokens of a text in pieces, as one call would give them without special tokens, and
    the character at which each begins.

    Args:
        tokenizer: The model's. Without offsets, the text is encoded in one call, and its tokens
            count as evenly spread.
        characters: The length of the text.
        read: Returns its characters [lo, hi).
        window: How many characters are encoded at once.

    Raises:
        DataError: Tokens depend on text that is thousands of characters away.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not getattr(tokenizer, "is_fast", False):
        (ids,) = encode_each(tokenizer, [read(0, characters)])
        yield ids, np.arange(len(ids)) * characters // max(len(ids), 1)
        return

    def encoded(lo: int, hi: int) -> _Window:
        return _encode(tokenizer, read(lo, hi), lo)

    anywhere = isinstance(getattr(backend, "model", None), models.BPE)
    lo, hi, first = 0, min(window, characters), 0
    current = encoded(lo, hi)
    while hi < characters:
        overlap = (hi - lo) // _OVERLAP_SHARE
        next_start = hi - overlap
        end = min(next_start + max(window, 2 * overlap), characters)
        following = encoded(next_start, end)
        zone = next_start + overlap // 4, hi - overlap // 4
        joint = _joint(current, following, *zone, anywhere=anywhere)
        if joint is None:
            verified, hi = current.cut(0, first + 1), min(2 * hi - lo, characters)
            current = encoded(lo, hi)
            if first and not current.cut(0, first + 1).equals(verified):
                raise DataError(
                    "expected tokens that depend only on nearby text, got tokens at character "
                    f"{verified.starts[-1]} of a document that change with text thousands of "
                    f"characters later; divide the document into several of at most {window} "
                    "characters"
                )
            continue
        yield current.ids[first : joint[0]], current.starts[first : joint[0]]
        lo, hi, current, first = next_start, end, following, joint[1]
    yield current.ids[first:], current.starts[first:]


def _encode(tokenizer: Any, text: str, at: int) -> _Window:
    """Encode a text that begins at a character of the document."""
    encoding = tokenizer([text], add_special_tokens=False, verbose=False).encodings[0]
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) + at
    word_numbers = np.array(
        [-1 if number is None else number for number in encoding.word_ids], np.int64
    )
    return _Window(
        np.array(encoding.ids, np.int64),
        np.maximum.accumulate(offsets[:, 0]),
        offsets[:, 1],
        np.diff(word_numbers, prepend=-2) != 0,
    )


def _joint(
    first: _Window, second: _Window, lo: int, hi: int, *, anywhere: bool
) -> tuple[int, int] | None:
    """Find the token at which the second of two windows can continue the first.

    Args:
        first: The first window.
        second: The second, which begins in it.
        lo: The first character that the ends of neither window affect.
        hi: The character after the last such.
        anywhere: Whether the token may be inside a word.

    Returns:
        Its number in each window; None if the windows differ between `lo` and `hi`.
    """
    (at, our_end), (second_start, their_end) = (
        np.searchsorted(each.starts, (lo, hi)).tolist() for each in (first, second)
    )
    common = first.cut(at, our_end)
    if not common.equals(second.cut(second_start, their_end)):
        return None
    is_boundary = (common.starts[1:] > common.starts[:-1]) & (common.starts[1:] >= common.ends[:-1])
    candidates = np.flatnonzero(is_boundary & (common.begins_word[1:] | anywhere)) + 1
    if not len(candidates):
        return None
    middle = int(candidates[len(candidates) // 2])
    return at + middle, second_start + middle
