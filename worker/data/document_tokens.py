"""Tokenize whole documents of running text, in bounded memory.

A token may depend on the text around it: tokenizers mark the beginning of a text, and group line
ends or digits. So a document is not encoded in independent parts. A document that is longer than a
window is encoded in overlapping windows, and two windows are joined only where they agree:

- Over the middle half of the overlap they have the same tokens at the same offsets, so that the
  effects of a window's beginning and end are outside this range.
- They are joined where a word begins: models encode each word of the pre-tokenizer separately, and
  the pre-tokenizer finds the next word from the end of the last one.
- With BPE they may be joined between any two tokens: a sequence of tokens is the encoding of its
  text if each pair of neighboring tokens is the encoding of the pair's text.

If two windows differ, the size of the first one is doubled, up to the whole document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import models

from protocol.base.errors import DataError
from protocol.datasets.disk_texts import DiskTexts, SelectedTexts
from protocol.datasets.text_corpus import TextCorpus
from worker.models.tokens import Tokens, encode_each

WINDOW_CHARACTERS: Final = 1 << 20
"""A document of at most this size is encoded in one call, which takes a few hundred MiB."""
_OVERLAP_DIVISOR: Final = 16
"""A window overlaps the next one by its number of characters divided by this. A quarter of the
overlap, 16,384 characters, is farther than tokenizers look ahead except in repetitive text (BERT: a
word of 100 characters)."""


class _Window(NamedTuple):
    """The tokens of a part of a document.

    Attributes:
        ids: Token ids.
        starts: The first character of each token in the document, in ascending order.
        ends: The character after each token.
        begins_word: Whether each token begins a word of the pre-tokenizer.
    """

    ids: Tokens
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    begins_word: NDArray[np.bool_]

    def part(self, lo: int, hi: int | None = None) -> _Window:
        """Return the tokens [lo, hi)."""
        rows = slice(lo, hi)
        return _Window(self.ids[rows], self.starts[rows], self.ends[rows], self.begins_word[rows])

    def equals(self, window: _Window) -> bool:
        """Return whether both windows have the same tokens at the same offsets."""
        return all(np.array_equal(a, b) for a, b in zip(self, window, strict=True))


def encode_documents(
    tokenizer: Any, corpus: TextCorpus, selected: NDArray[np.bool_]
) -> Iterator[tuple[int, Tokens]]:
    """Yield the index of each document or part, and its tokens without special tokens.

    The tokens of a part are those of the whole document that begin in it, so that the tokens of
    all parts together are those of the document.

    Args:
        tokenizer: The model's tokenizer.
        corpus: Documents, or parts of them.
        selected: Mask of the documents or parts to yield, (documents,) bool; a document without a
            selected part is not encoded.

    Raises:
        DataError: A token depends on text that is thousands of characters away.
    """
    characters = corpus.documents.characters

    def is_short(document: tuple[int, int]) -> bool:
        lo, hi = document
        return hi - lo == 1 and characters[lo] <= WINDOW_CHARACTERS

    ends = (np.flatnonzero(corpus.ends) + 1).tolist()
    for are_short, documents in groupby(pairwise([0, *ends]), is_short):
        if are_short:
            indices = [lo for lo, _ in documents if selected[lo]]
            texts = SelectedTexts(corpus.documents, indices)
            yield from zip(indices, encode_each(tokenizer, texts), strict=True)
            continue
        for lo, hi in documents:
            if selected[lo:hi].any():
                parts = _encode_parts(tokenizer, _Document(corpus.documents, lo, hi))
                yield from (
                    (lo + part, ids) for part, ids in enumerate(parts) if selected[lo + part]
                )


class _Document:
    """The text of a document, read on demand."""

    def __init__(self, texts: DiskTexts, lo: int, hi: int) -> None:
        self.bounds = np.cumsum([0, *texts.characters[lo:hi]])
        self._texts, self._lo = texts, lo
        self._cached_part = -1, ""

    def read(self, lo: int, hi: int) -> str:
        """Return the characters [lo, hi)."""
        first_part = int(np.searchsorted(self.bounds, lo, "right")) - 1
        parts = range(first_part, int(np.searchsorted(self.bounds, hi)))
        return "".join(
            self._read_part(part)[max(lo - int(self.bounds[part]), 0) : hi - int(self.bounds[part])]
            for part in parts
        )

    def _read_part(self, part: int) -> str:
        if self._cached_part[0] != part:
            self._cached_part = part, self._texts[self._lo + part]
        return self._cached_part[1]


def _encode_parts(tokenizer: Any, document: _Document) -> Iterator[Tokens]:
    """Yield the tokens that begin in each part of a document."""
    bounds = document.bounds[1:-1].tolist()
    part_tokens: list[Tokens] = []
    index = 0
    for ids, starts in encode_text(tokenizer, int(document.bounds[-1]), document.read):
        offset = 0
        while index < len(bounds) and len(starts) and bounds[index] <= starts[-1]:
            split = int(np.searchsorted(starts, bounds[index]))
            yield np.concatenate([*part_tokens, ids[offset:split]])
            part_tokens, offset, index = [], split, index + 1
        part_tokens.append(ids[offset:])
    for _ in range(len(bounds) + 1 - index):
        yield np.concatenate([*part_tokens, np.zeros(0, np.int64)])
        part_tokens = []


def encode_text(
    tokenizer: Any,
    characters: int,
    read: Callable[[int, int], str],
    window: int = WINDOW_CHARACTERS,
) -> Iterator[tuple[Tokens, NDArray[np.int64]]]:
    """Yield the tokens of a text window by window, with the character at which each token begins.

    The tokens are those of one call without special tokens.

    Args:
        tokenizer: The model's tokenizer. Without offsets, the text is encoded in one call, and its
            tokens are assumed to be evenly spread.
        characters: Length of the text.
        read: Returns the characters [lo, hi).
        window: Number of characters that are encoded at once.

    Raises:
        DataError: A token depends on text that is thousands of characters away.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not getattr(tokenizer, "is_fast", False):
        (ids,) = encode_each(tokenizer, [read(0, characters)])
        yield ids, np.arange(len(ids)) * characters // max(len(ids), 1)
        return

    def encode(lo: int, hi: int) -> _Window:
        return _encode_window(tokenizer, read(lo, hi), lo)

    is_bpe = isinstance(getattr(backend, "model", None), models.BPE)
    lo, hi, first_token = 0, min(window, characters), 0
    first_window = encode(lo, hi)
    while hi < characters:
        overlap = (hi - lo) // _OVERLAP_DIVISOR
        next_start = hi - overlap
        end = min(next_start + max(window, 2 * overlap), characters)
        second_window = encode(next_start, end)
        zone = next_start + overlap // 4, hi - overlap // 4
        join = _find_join(first_window, second_window, *zone, inside_words=is_bpe)
        if join is None:
            checked_tokens, hi = first_window.part(0, first_token + 1), min(2 * hi - lo, characters)
            first_window = encode(lo, hi)
            if first_token and not first_window.part(0, first_token + 1).equals(checked_tokens):
                raise DataError(
                    "expected tokens that depend only on nearby text, got tokens at character "
                    f"{checked_tokens.starts[-1]} of a document that change with text thousands of "
                    f"characters later; split the document into several of at most {window} "
                    "characters"
                )
            continue
        yield first_window.ids[first_token : join[0]], first_window.starts[first_token : join[0]]
        lo, hi, first_window, first_token = next_start, end, second_window, join[1]
    yield first_window.ids[first_token:], first_window.starts[first_token:]


def _encode_window(tokenizer: Any, text: str, offset: int) -> _Window:
    """Encode a text that begins at character `offset` of the document."""
    encoding = tokenizer([text], add_special_tokens=False, verbose=False).encodings[0]
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) + offset
    word_numbers = np.array(
        [-1 if number is None else number for number in encoding.word_ids], np.int64
    )
    return _Window(
        np.array(encoding.ids, np.int64),
        np.maximum.accumulate(offsets[:, 0]),
        offsets[:, 1],
        np.diff(word_numbers, prepend=-2) != 0,
    )


def _find_join(
    first: _Window, second: _Window, lo: int, hi: int, *, inside_words: bool
) -> tuple[int, int] | None:
    """Find a token at which the second of two overlapping windows can continue the first.

    Args:
        first: The first window.
        second: The second window, which begins in the first.
        lo: First character of the range that neither window's ends affect.
        hi: Character after this range.
        inside_words: Whether the token may be inside a word.

    Returns:
        The token's index in each window; None if the windows differ between `lo` and `hi`.
    """
    (first_lo, first_hi), (second_lo, second_hi) = (
        np.searchsorted(window.starts, (lo, hi)).tolist() for window in (first, second)
    )
    common = first.part(first_lo, first_hi)
    if not common.equals(second.part(second_lo, second_hi)):
        return None
    is_separate = (common.starts[1:] > common.starts[:-1]) & (common.starts[1:] >= common.ends[:-1])
    candidates = np.flatnonzero(is_separate & (common.begins_word[1:] | inside_words)) + 1
    if not len(candidates):
        return None
    middle = int(candidates[len(candidates) // 2])
    return first_lo + middle, second_lo + middle
