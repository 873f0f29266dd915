"""Conversation rows: every value is used, or the row is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from protocol.base.errors import DataError
from protocol.datasets.conversations import read_conversations
from protocol.datasets.preferences import read_preferences
from protocol.spec.sections.data import DataSpec

ALPACA = {"instruction": "And 2?", "output": "Four."}
HISTORY = [["What is 1?", "One."], ["Why?", "It is."]]
PROMPT = {"prompt": "Hi", "completion": "Hello."}
MESSAGES = {
    "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
}
PAIR = {"prompt": "Hi", "chosen": "Hello.", "rejected": "No."}


def write_row(directory: Path, row: dict[str, Any], form: str) -> str:
    path = directory / f"rows.{form}"
    if form == "jsonl":
        path.write_text(json.dumps(row) + "\n")
    elif form == "csv":
        with path.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(row)
            table.writerow(v if isinstance(v, str) else json.dumps(v) for v in row.values())
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({key: [value] for key, value in row.items()}), path)
    return str(path)


def turns(
    directory: Path, row: dict[str, Any], form: str = "jsonl", **spec: Any
) -> list[list[str]]:
    [conversation] = read_conversations(DataSpec(train=write_row(directory, row, form), **spec))
    return [[message.role, message.content] for message in conversation.messages]


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_alpaca_system_and_history_precede_the_instruction(tmp_path, form):
    row = {**ALPACA, "system": "Be brief.", "history": HISTORY}
    assert turns(tmp_path, row, form, format="alpaca") == [
        ["system", "Be brief."], ["user", "What is 1?"], ["assistant", "One."], ["user", "Why?"],
        ["assistant", "It is."], ["user", "And 2?"], ["assistant", "Four."],
    ]  # fmt: skip
    empty = {**ALPACA, "system": "", "history": []}
    assert len(turns(tmp_path, empty, "jsonl", format="alpaca")) == 2


def test_a_system_column_is_the_first_message(tmp_path):
    for form, row in (("prompt-completion", PROMPT), ("messages", MESSAGES)):
        row_with_system = {**row, "rules": "Be brief."}
        messages = turns(tmp_path, row_with_system, format=form, columns={"system": "rules"})
        assert messages == [["system", "Be brief."], ["user", "Hi"], ["assistant", "Hello."]]
    path = write_row(tmp_path, {**PAIR, "system": "Be brief."}, "jsonl")
    [pair] = read_preferences(DataSpec(train=path))
    for conversation in (pair.chosen, pair.rejected):
        assert [message.role for message in conversation.messages] == [
            "system",
            "user",
            "assistant",
        ]


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        ("messages", {**MESSAGES, "tools": [{"f": 1}]}, " 1 tool 1: expected a function"),
        ("messages", {**MESSAGES, "functions": [{"name": "f"}]}, "'functions'.*would ignore"),
        ("prompt-completion", {**PROMPT, "images": ["a.png"]}, "'images'"),
        ("prompt-completion", {**PROMPT, "label": False}, "'label'"),
        ("prompt-completion", {**PROMPT, "history": HISTORY}, "'history'"),
        ("messages", {**MESSAGES, "weight": 0}, "'weight'"),
        ("alpaca", {**ALPACA, "history": ["What is 1?"]}, "history 1: expected an instruction"),
        ("alpaca", {**ALPACA, "history": "Hi"}, "history 1: expected an instruction"),
        (
            "messages",
            {"messages": [*MESSAGES["messages"][:1], {**MESSAGES["messages"][1], "audio": "x"}]},
            "message 2: .*'audio' too, which training would ignore",
        ),
        (
            "messages",
            {
                "messages": [{"role": "system", "content": "a"}, *MESSAGES["messages"]],
                "system": "b",
            },
            "expected one system message",
        ),
    ],
)
@pytest.mark.parametrize("file", ["jsonl", "parquet"])
def test_values_that_training_would_ignore_are_refused(tmp_path, form, row, message, file):
    if file == "parquet" and form != "messages":
        return
    with pytest.raises(DataError, match=message) as error:
        turns(tmp_path, row, file, format=form)
    assert "\n" not in str(error.value)


def test_empty_values_are_skipped(tmp_path):
    row: dict[str, Any] = {
        **PROMPT,
        "tools": [],
        "system": None,
        "id": 7,
        "source": "web",
        "label": "greeting",
    }
    assert len(turns(tmp_path, row, format="prompt-completion")) == 2


def test_preference_pairs_keep_their_tools(tmp_path):
    path = write_row(tmp_path, {**PAIR, "tools": '[{"name": "f"}]'}, "jsonl")
    [pair] = read_preferences(DataSpec(train=path))
    assert pair.chosen.tools == pair.rejected.tools
    assert pair.chosen.tools[0]["function"] == {"name": "f"}
