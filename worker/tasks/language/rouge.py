"""ROUGE of generated texts, as the package `rouge-score` computes it without a stemmer.

Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries". Words are the runs of a-z and
0-9 in the lowercased text, so texts in other alphabets have none.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

_WORD: Final = re.compile(r"[a-z0-9]+")
NAMES: Final = ("rouge1", "rouge2", "rougeL")


def rouge(reference: str, generated: str) -> dict[str, float]:
    """Return the F1, in [0, 1], of words, word pairs and the longest common subsequence.

    Args:
        reference: The expected text.
        generated: The model's text.
    """
    reference_words, generated_words = words_of(reference), words_of(generated)
    return {
        "rouge1": _f1(
            _shared_count(reference_words, generated_words),
            len(reference_words),
            len(generated_words),
        ),
        "rouge2": _f1(
            _shared_count(_pairs(reference_words), _pairs(generated_words)),
            max(len(reference_words) - 1, 0),
            max(len(generated_words) - 1, 0),
        ),
        "rougeL": _f1(
            _common_subsequence(reference_words, generated_words),
            len(reference_words),
            len(generated_words),
        ),
    }


def words_of(text: str) -> list[str]:
    """Return the words that ROUGE counts."""
    return _WORD.findall(text.lower())


def _pairs(words: Sequence[str]) -> list[str]:
    return [f"{word} {next_word}" for word, next_word in itertools.pairwise(words)]


def _shared_count(reference: Sequence[str], generated: Sequence[str]) -> int:
    """Return how many units the texts have in common, counting repetitions."""
    return (Counter(reference) & Counter(generated)).total()


def _f1(shared_count: int, reference: int, generated: int) -> float:
    if not shared_count:
        return 0.0
    precision, recall = shared_count / generated, shared_count / reference
    return 2 * precision * recall / (precision + recall)


def _common_subsequence(reference: Sequence[str], generated: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, computed in the bits of one integer.

    Source: Hyyrö 2004, "Bit-parallel LCS-length computation revisited". A zero bit at i says that
    the subsequence within the first i + 1 words of the reference is longer than within i.
    """
    positions: dict[str, int] = {}
    for index, word in enumerate(reference):
        positions[word] = positions.get(word, 0) | 1 << index
    all_bits = (1 << len(reference)) - 1
    bits = all_bits
    for word in generated:
        matches = bits & positions.get(word, 0)
        bits = ((bits + matches) | (bits - matches)) & all_bits
    return len(reference) - bits.bit_count()
