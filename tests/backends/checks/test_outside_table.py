"""Index errors of torch's functions name the input that has the wrong index."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from backends.checks.outside_table import find_failing_index

LABELS = torch.tensor([0, 2, 7, -100])
LOGITS, TABLE = torch.zeros(4, 3), torch.zeros(5, 2)
ARRAYS = {"x": torch.tensor([[0, 1], [4, 5]]), "y": LABELS, "z": torch.tensor([9])}


def error_of(function: Callable[[], object]) -> str | None:
    """Return the text of the index error and the row at fault; None for any other error."""
    try:
        function()
    except (IndexError, RuntimeError, ValueError) as error:
        index_error = find_failing_index(error, ARRAYS)
        return None if index_error is None else f"{index_error.text} ({index_error.row})"
    raise AssertionError("expected torch to raise an error")


LOOKUP_OF_Y = "which the model, or its loss, looks up in 3 rows: expected 0 to 2"


CASES: list[tuple[Callable[[], object], str | None]] = [
    (
        lambda: functional.cross_entropy(LOGITS, LABELS),
        f"input 'y' has 7 at [2], {LOOKUP_OF_Y} (2)",
    ),
    (lambda: torch.nn.NLLLoss()(LOGITS, LABELS), f"input 'y' has 7 at [2], {LOOKUP_OF_Y} (2)"),
    (
        lambda: functional.cross_entropy(LOGITS[0], LABELS[2]),
        f"input 'y' has 7, {LOOKUP_OF_Y} (None)",
    ),
    (lambda: functional.cross_entropy(LOGITS, LABELS + 1), f"an index is 3, {LOOKUP_OF_Y} (None)"),
    (
        lambda: functional.cross_entropy(LOGITS, LABELS, ignore_index=7),
        f"input 'y' has -100 at [3], {LOOKUP_OF_Y} (3)",
    ),
    (
        lambda: functional.embedding(ARRAYS["x"], TABLE),
        f"input 'x' has 5 at [1, 1], {LOOKUP_OF_Y.replace('3', '5').replace('2', '4')} (1)",
    ),
    (lambda: functional.cross_entropy(LOGITS, LABELS[:2]), None),
    (lambda: functional.linear(LOGITS, TABLE), None),
    (lambda: LOGITS[9], None),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_out_of_range_index_names_its_input(number):
    function, expected_text = CASES[number]
    assert error_of(function) == expected_text
