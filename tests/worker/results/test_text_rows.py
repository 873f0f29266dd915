"""Texts to classify, from files."""

from __future__ import annotations

import pytest

from protocol.base.errors import DataError
from worker.results.text_rows import check_texts, is_file, read_texts


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'id,text\n1,one\n2,"two, and"\n'),
        ("a.tsv", "id\ttext\n1\tone\n2\ttwo, and\n"),
        ("a.jsonl", '{"text": "one"}\n\n{"text": "two, and", "id": 3}\n'),
        ("a.txt", "one\n\n two, and \n"),
    ],
)
def test_every_kind_of_file_gives_its_texts(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert read_texts(tmp_path / name, ["text"]) == ["one", "two, and"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "id,body\n1,one\n", "--column"),
        ("a.jsonl", '{"body": "one"}\n', "--column"),
        ("a.jsonl", '{"text": 3}\n', "line 1: expected text"),
        ("a.csv", "id,text\n1,one\n2,\n", "line 3: expected text"),
        ("a.txt", "\n", "found none"),
    ],
)
def test_errors_name_their_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_texts(tmp_path / name, ["text"])


def test_a_file_is_distinguished_from_a_text(tmp_path):
    (tmp_path / "a.txt").touch()
    assert is_file([str(tmp_path / "a.txt")])
    assert not is_file([str(tmp_path / "a.txt"), "and"])
    assert not is_file(["see a.txt"])
    for name in ("b.csv", "b.cvs", "b.jsnl"):
        with pytest.raises(DataError, match="found none"):
            is_file([str(tmp_path / name)])


def test_texts_as_arguments_are_not_empty_and_have_no_columns():
    assert check_texts(["one", "two"], has_columns=False) == ["one", "two"]
    with pytest.raises(DataError, match="expected a text, got an empty one"):
        check_texts(["one", " "], has_columns=False)
    with pytest.raises(DataError, match="--column: expected a file of rows, got a text"):
        check_texts(["one"], has_columns=True)
