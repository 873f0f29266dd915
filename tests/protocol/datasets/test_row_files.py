"""Data files of every kind, compressed or not, in folders and by pattern; reports of bad rows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from protocol.base.errors import DataError
from protocol.datasets.labeled_text import read_labeled_text
from protocol.datasets.preferences import read_preferences
from protocol.datasets.rows import BadRows, Location, read_rows
from protocol.datasets.sequences import read_tagged_words
from protocol.datasets.text_corpus import read_text_corpus
from protocol.spec.sections.data import DataSpec

pa = pytest.importorskip("pyarrow")
ROWS = [{"text": f"text {n}, é", "label": "ab"[n % 2]} for n in range(5)]


def content(kind: str, rows: list[dict[str, Any]]) -> bytes:
    """Return the content of a file with these rows."""
    if kind in ("jsonl", "ndjson"):
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    if kind == "json":
        return json.dumps(rows, indent=1).encode()
    if kind in ("csv", "tsv"):
        separator = "," if kind == "csv" else "\t"
        lines = [separator.join(f'"{cell}"' for cell in row.values()) for row in rows]
        return "\n".join([separator.join(rows[0]), *lines, ""]).encode()
    sink, table = pa.BufferOutputStream(), pa.Table.from_pylist(rows)
    if kind == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(table, sink)
    else:
        open_writer = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        with open_writer(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return bytes(sink.getvalue())


def compress(data: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data)
    return pa.compress(data, codec="zstd", asbytes=True) if suffix else data


def read_labels(path: Path | str, **spec: Any) -> Any:
    return read_labeled_text(DataSpec(train=str(path), **spec))


@pytest.mark.parametrize(("suffix", "kind"), [(".gz", "gzip"), (".zst", "zstandard")])
@pytest.mark.parametrize("data", [content("jsonl", ROWS), b"<html>404 Not Found</html>"])
def test_uncompressed_content_with_a_compression_suffix_is_refused(tmp_path, suffix, kind, data):
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(data)
    message = rf"expected {kind} in '.*{suffix}', as its name says.*download or compress it again"
    with pytest.raises(DataError, match=message):
        read_labels(file)


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "stream", "file"])
def test_a_truncated_file_is_refused_in_one_line(tmp_path, kind, compression):
    if not compression and kind in ("jsonl", "csv"):
        pytest.skip("plain text has no end mark")
    rows = [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(500)]
    whole = compress(content(kind, rows), compression)
    suffix = "arrow" if kind in ("stream", "file") else kind
    file = tmp_path / f"a.{suffix}{compression}"
    file.write_bytes(whole)
    assert len(read_labels(file).texts) == len(rows)
    for remaining_bytes in (9, len(whole) // 2, len(whole) - 9):
        file.write_bytes(whole[:remaining_bytes])
        with pytest.raises(DataError, match=rf"'.*{file.name}'.*copy or download it") as error_info:
            read_labels(file)
        assert "\n" not in str(error_info.value)


def test_a_truncated_second_frame_of_zstandard_is_refused(tmp_path):
    file = tmp_path / "a.jsonl.zst"
    rest = [{"text": f"rest {n}", "label": "a"} for n in range(500)]
    frames = [compress(content("jsonl", rows), ".zst") for rows in (ROWS, rest)]
    file.write_bytes(frames[0] + frames[1])
    assert len(read_labels(file).texts) == len(ROWS) + len(rest)
    file.write_bytes(frames[0] + frames[1][:-9])
    with pytest.raises(DataError, match=r"is damaged.*copy or download it again"):
        read_labels(file)


KINDS = ["jsonl", "ndjson", "json", "csv", "tsv", "parquet", "stream", "file"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_every_file_kind_gives_the_same_data(tmp_path, kind, compression):
    suffix = "arrow" if kind in ("stream", "file") else kind
    path = tmp_path / f"a.{suffix}{compression}"
    path.write_bytes(compress(content(kind, ROWS), compression))
    corpus = read_labels(path)
    assert [*corpus.texts] == [row["text"] for row in ROWS]
    assert [corpus.names[label] for label in corpus.labels] == [row["label"] for row in ROWS]
    assert [*read_text_corpus(DataSpec(train=str(path))).documents] == [*corpus.texts]


def test_json_may_be_one_object_with_a_list_or_lines(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    (tmp_path / "b.json").write_bytes(content("jsonl", ROWS))
    assert (
        len(read_labels(tmp_path / "a.json").texts)
        == len(read_labels(tmp_path / "b.json").texts)
        == 5
    )


def test_a_json_list_is_read_piece_by_piece(tmp_path):
    rows = [{"text": f"{n} " + 'x[{]},\\"' * 9_000, "label": "ab"[n % 2]} for n in range(40)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))  # 4 MiB, in pieces of 1 MiB
    assert [*read_labels(path).texts] == [row["text"] for row in rows]


@pytest.mark.parametrize(
    ("text", "expected_text"),
    [
        ('[{"text": "x"}, {"te', "row 2 is not JSON"),
        ('[{"text": "x"} {"text": "y"}]', "expected ',' after row 1, got '{'"),
        ('{"a": 1}', "an object with 0 lists"),
        ('{\n"a": [], "b": []}', "an object with 2 lists"),
        ("[1]", "row 1: expected a JSON object"),
    ],
)
def test_invalid_json_list_gives_a_one_line_error(tmp_path, text, expected_text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=expected_text) as error:
        read_labels(tmp_path / "a.json")
    assert "\n" not in str(error.value)


def test_folders_and_patterns_are_read_in_order(tmp_path):
    for number, name in enumerate(["b/2.jsonl.gz", "a/1.jsonl.gz", ".cache/x.jsonl.gz"]):
        path = tmp_path / "d" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content("jsonl", ROWS[2 * number : 2 * number + 2])))
    expected = [ROWS[n]["text"] for n in (2, 3, 0, 1)]
    for train in (tmp_path / "d", f"{tmp_path}/d/*/*.jsonl.gz", f"{tmp_path}/d/**/*.gz"):
        assert [*read_labels(train).texts] == expected
        assert [*read_text_corpus(DataSpec(train=str(train))).documents] == expected
    (tmp_path / "d" / "c.csv").write_bytes(content("csv", ROWS))
    with pytest.raises(DataError, match=r"files of one format .* csv and jsonl; .*\*\.jsonl'"):
        read_labels(tmp_path / "d")
    with pytest.raises(DataError, match=r"expected files like .*none"):
        read_labels(f"{tmp_path}/e/*.jsonl")


def test_saved_data_set_is_read_by_its_file_list(tmp_path):
    """The layout that `datasets.Dataset.save_to_disk` writes."""
    files = []
    for part, rows in enumerate((ROWS[:3], ROWS[3:])):
        name = f"data-0000{part}-of-00002.arrow"
        (tmp_path / name).write_bytes(content("stream", rows))
        files.append({"filename": name})
    (tmp_path / "cache-1.arrow").write_bytes(b"ignored")
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": files}))
    assert [*read_labels(tmp_path).texts] == [row["text"] for row in ROWS]
    splits = tmp_path / "splits"
    (splits / "train").mkdir(parents=True)
    (splits / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (splits / "train" / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"one data set, got the splits train .*/splits/train"):
        read_labels(splits)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_class_labels_of_datasets_keep_their_names(tmp_path, kind):
    """`datasets` writes a ClassLabel as a number, and its names into the file's metadata."""
    import pyarrow.parquet as pq

    classes = {"names": ["neg", "pos"], "_type": "ClassLabel"}
    features = {
        "text": {"dtype": "string", "_type": "Value"}, "label": classes,
        "tokens": {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"},
        "ner_tags": {"feature": {"names": ["O", "B-X"], "_type": "ClassLabel"}, "_type": "List"},
    }  # fmt: skip
    table = pa.table({
        "text": ["Good.", "Bad.", "So."], "label": [1, 0, -1],
        "tokens": [["Go", "Ann"], ["No"], ["So"]], "ner_tags": [[0, 1], [0], [0]],
    })  # fmt: skip
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = table.replace_schema_metadata(metadata)
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    corpus = read_labeled_text(DataSpec(train=str(path), skip_bad_rows=True))
    assert (corpus.names, [*corpus.labels], corpus.bad_rows) == (("neg", "pos"), [1, 0], 1)
    spec = DataSpec(train=str(path), text="tokens", label="ner_tags")
    assert [row.tags for row in read_tagged_words(spec)] == [("O", "B-X"), ("O",), ("O",)]


def test_class_folders_name_the_labels(tmp_path):
    for label, name, text in (
        ("pos", "1.txt", "Good."),
        ("neg", "2.txt", "Bad."),
        ("pos", "3.txt", "Fine."),
    ):
        (tmp_path / label).mkdir(exist_ok=True)
        (tmp_path / label / name).write_text(text)
    corpus = read_labels(tmp_path)
    pairs = [
        (text, corpus.names[label]) for text, label in zip(corpus.texts, corpus.labels, strict=True)
    ]
    assert pairs == [("Bad.", "neg"), ("Good.", "pos"), ("Fine.", "pos")]


def test_all_bad_rows_are_in_one_report_or_are_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(row) for row in ROWS]
    bad_rows = ["{", '{"text": 3, "label": "a"}', '{"text": "x"}']
    path.write_text("\n".join([*lines, *bad_rows]))
    with pytest.raises(DataError) as error:
        read_labels(path)
    report_lines = str(error.value).splitlines()
    assert report_lines[0] == "3 bad rows:"
    assert [f"line {n}" in line for n, line in zip((6, 7, 8), report_lines[1:], strict=False)] == [
        True
    ] * 3
    assert (
        report_lines[-1].strip()
        == "correct these rows, or leave them out: --set data.skip_bad_rows=true"
    )
    corpus = read_labels(path, skip_bad_rows=True)
    assert (len(corpus.texts), corpus.bad_rows) == (5, 3)
    path.write_text("\n".join(bad_rows[1:2] * 300))
    with pytest.raises(DataError, match="line 1: expected text, got 3"):
        read_labels(path, skip_bad_rows=True)
    path = tmp_path / "a.csv"
    path.write_text("text,label\nx,a\ny\nz,b\n")
    assert [*read_labels(path, skip_bad_rows=True).texts] == ["x", "z"]


def test_nulls_added_by_arrow_are_ignored(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"c": [{"a": 1}, {"b": {"c": 2, "d": None}}], "n": None}]
    path.write_bytes(content("parquet", rows))
    parsed_rows = [*read_rows([path], {}, ["c", "n"], BadRows(skip=False))]
    assert parsed_rows == [(Location(path, 1), {"c": [{"a": 1}, {"b": {"c": 2}}], "n": None})]


def test_single_bad_row_also_names_the_option(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(row) for row in ROWS]
    for bad_row, expected in (
        ('{"text": 3, "label": "a"}', "got 3; correct it, or leave the row out: --set data.skip_b"),
        ('{"text": "x", "label": [1]}', "multi-label"),
        ('{"text": "x"}', "found 'text'; correct the row, or leave it out: --set data.skip_bad"),
    ):
        path.write_text("\n".join([*lines, bad_row]))
        with pytest.raises(DataError, match="line 6") as error:
            read_labels(path)
        assert expected in str(error.value)
    path.write_text('{"text": "x", "labels": "a"}\n' * 2)  # a missing column, not a bad row
    with pytest.raises(DataError, match=r"--set data.label=labels"):
        read_labels(path)


def test_used_column_is_not_suggested_for_a_missing_one(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "q", "chosen": "x"}\n')
    with pytest.raises(DataError, match=r"--set data.columns.rejected=COLUMN"):
        read_preferences(DataSpec(train=str(path)))


def test_an_empty_text_of_a_pair_is_a_bad_row(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": f"t{n}", "b": "" if n == 1 else "u", "label": n % 2} for n in range(4)]
    path.write_bytes(content("jsonl", rows))
    with pytest.raises(DataError, match=r"line 2: expected two texts.*skip_bad_rows"):
        read_labels(path, text_pair="b")
    assert read_labels(path, text_pair="b", skip_bad_rows=True).bad_rows == 1
