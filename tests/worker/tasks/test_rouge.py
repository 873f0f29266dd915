"""ROUGE has the values of the package `rouge-score`."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.tasks.language.rouge import NAMES, rouge

REFERENCE_SCORES = [
    ("the cat sat on the mat", "the cat lay on a mat", (2 / 3, 0.2, 2 / 3)),
    ("The quick, brown fox.", "quick BROWN foxes jump over", (4 / 9, 2 / 7, 4 / 9)),
    ("a b c d e", "e d c b a", (1.0, 0.0, 0.2)),
    ("police killed the gunman", "the gunman kill police", (0.75, 1 / 3, 0.5)),
    ("one", "one", (1.0, 0.0, 1.0)),
    ("", "words", (0.0, 0.0, 0.0)),
    ("naïve Ä 3.14", "na ve 3 14", (1.0, 1.0, 1.0)),
    ("東京", "東京", (0.0, 0.0, 0.0)),
]
"""Reference, text, and the F1 of rouge-score 0.1.2."""
texts = st.lists(st.sampled_from(["the", "Cat", "sat,", "on", "3.14", "ÄÖ", ""]), max_size=12).map(
    " ".join
)


@given(texts, texts)
def test_values_equal_rouge_score(reference, candidate):
    for one, other, expected in REFERENCE_SCORES:
        assert [*rouge(one, other).values()] == pytest.approx(expected), (one, other)
    scores = rouge(reference, candidate)
    assert scores["rougeL"] == pytest.approx(_plain_rouge_l(reference, candidate))
    if (package := _package()) is not None:
        package_scores = package.RougeScorer([*NAMES]).score(reference, candidate)
        assert scores == {name: package_scores[name].fmeasure for name in NAMES}


def _package() -> Any:
    try:
        return importlib.import_module("rouge_score.rouge_scorer")
    except ImportError:
        return None


def _plain_rouge_l(reference: str, candidate: str) -> float:
    a, b = (
        "".join(c if c.isascii() and c.isalnum() else " " for c in text.lower()).split()
        for text in (reference, candidate)
    )
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, one in enumerate(a, 1):
        for j, other in enumerate(b, 1):
            longer = max(table[i - 1][j], table[i][j - 1])
            table[i][j] = table[i - 1][j - 1] + 1 if one == other else longer
    shared = table[-1][-1]
    return 2 * shared / (len(a) + len(b)) if shared else 0.0
