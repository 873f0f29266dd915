"""Preference pairs: every form of TRL, and errors with the line of the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.base.errors import DataError
from protocol.datasets.preferences import read_preferences
from protocol.spec.sections.data import DataSpec

ASK = {"role": "user", "content": "2 + 2?"}
SYSTEM = {"role": "system", "content": "Add."}
YES = {"role": "assistant", "content": "4"}
NO = {"role": "assistant", "content": "5"}


def spec_of(directory: Path, *rows: object, **overrides: Any) -> DataSpec:
    path = directory / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSpec(train=str(path), **overrides)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"prompt": [ASK], "chosen": [YES], "rejected": [NO]},
        {"chosen": [ASK, YES], "rejected": [ASK, NO]},
        {"prompt": "2 + 2?", "chosen": [ASK, YES], "rejected": [ASK, NO]},
        {"prompt": "2 + 2?", "chosen": [YES], "rejected": "5"},
        {"chosen": json.dumps([ASK, YES]), "rejected": json.dumps([ASK, NO])},
    ],
)
def test_every_form_gives_the_same_pair(tmp_path, row):
    [pair] = read_preferences(spec_of(tmp_path, row))
    assert [(m.role, m.content) for m in pair.chosen.messages] == [
        ("user", "2 + 2?"),
        ("assistant", "4"),
    ]
    assert pair.rejected.messages[-1].content == "5"
    assert pair.rejected.messages[:-1] == pair.chosen.messages[:-1]


def test_columns_may_have_other_names_and_duplicate_pairs_are_dropped(tmp_path):
    row = {"q": "2 + 2?", "good": "4", "bad": "5"}
    names = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    pairs = read_preferences(spec_of(tmp_path, row, row, columns=names))
    assert (len(pairs), pairs.duplicates) == (1, 1)


@pytest.mark.parametrize(
    ("row", "expected_text"),
    [
        ({"prompt": "a", "chosen": "b"}, "rejected"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            "line 1: expected chosen and rejected to differ",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "line 1 rejected: expected text"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "line 1: expected rejected"),
        ({"chosen": "b", "rejected": "c"}, "line 1 chosen: expected a prompt"),
        ({"chosen": [ASK, YES], "rejected": [SYSTEM, ASK, NO]}, "differ earlier"),
        ({"prompt": "other", "chosen": [ASK, YES], "rejected": [ASK, NO]}, "begins differently"),
        (
            {"prompt": [ASK, YES], "chosen": [YES], "rejected": [NO]},
            "a message of the user",
        ),
        (
            {"prompt": [ASK], "chosen": [YES, ASK], "rejected": [NO]},
            "last message to be",
        ),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "line 1 prompt: expected text"),
    ],
)
def test_errors_name_their_line(tmp_path, row, expected_text):
    with pytest.raises(DataError, match=expected_text):
        read_preferences(spec_of(tmp_path, row))
