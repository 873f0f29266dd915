"""ROUGE of written texts, as the package `rouge-score` computes it without a stemmer.

Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries". Words are the runs of a-z and
0-9 in the lowercased text: what is written in another alphabet has none.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

_WORD: Final = re.compile(r"[a-z0-9]+")
NAMES: Final = ("rouge1", "rouge2", "rougeL")


def rouge(reference: str, written: str) -> dict[str, float]:
    """Return the F1 of words, of pairs of words and of the longest common subsequence, in [0, 1].

    Args:
        reference: The text that was to be written.
        written: The model's text.
    """
    a, b = words_of(reference), words_of(written)
    return {
        "rouge1": _f1(_shared(a, b), len(a), len(b)),
        "rouge2": _f1(_shared(_pairs(a), _pairs(b)), max(len(a) - 1, 0), max(len(b) - 1, 0)),
        "rougeL": _f1(_common_subsequence(a, b), len(a), len(b)),
    }


def words_of(text: str) -> list[str]:
    """Return the words that ROUGE counts."""
    return _WORD.findall(text.lower())


def _pairs(words: Sequence[str]) -> list[str]:
    return [f"{one} {other}" for one, other in itertools.pairwise(words)]


def _shared(reference: Sequence[str], written: Sequence[str]) -> int:
    """Return how many units of both are equal, each used once."""
    return (Counter(reference) & Counter(written)).total()


def _f1(shared: int, reference: int, written: int) -> float:
    if not shared:
        return 0.0
    precision, recall = shared / written, shared / reference
    return 2 * precision * recall / (precision + recall)


def _common_subsequence(reference: Sequence[str], written: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, by bits of one integer.

    Source: Hyyrö 2004, "Bit-parallel LCS-length computation revisited". A zero bit at i says that
    the subsequence within the first i + 1 words of the reference is longer than within i.
    """
    positions: dict[str, int] = {}
    for at, word in enumerate(reference):
        positions[word] = positions.get(word, 0) | 1 << at
    everything = (1 << len(reference)) - 1
    bits = everything
    for word in written:
        found = bits & positions.get(word, 0)
        bits = ((bits + found) | (bits - found)) & everything
    return len(reference) - bits.bit_count()
