"""The texts of a file that is to be classified: a table's column, a key of JSON lines, or lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from protocol.base.errors import DataError
from protocol.data.delimited import column_names, read_table
from protocol.data.rows import JSON_REMEDY, JSON_SUFFIXES
from protocol.data.text_file import json_records, read_lines, shown

SUFFIXES = (".csv", ".tsv", ".jsonl", ".txt")


def is_file(texts: Sequence[str]) -> bool:
    """Whether what was given is not a text but the name of a file.

    Raises:
        DataError: It looks like one, and there is none.
    """
    if len(texts) != 1:
        return False
    if "\n" not in texts[0] and len(texts[0]) < 4_096 and Path(texts[0]).is_file():
        return True
    if texts[0].endswith(SUFFIXES) and not any(map(str.isspace, texts[0])):
        raise DataError(f"expected a file of texts at {texts[0]!r}, found none")
    return False


def read_texts(path: Path, column: str) -> list[str]:
    """All texts, in order; empty lines of JSON lines and plain text are passed over.

    Args:
        path: Ends with .csv, .tsv or .jsonl; any other file is a text a line.
        column: Or key, of the text.

    Raises:
        DataError: The file cannot be read, has no such column, or a row without text.
    """
    texts = []
    for line, text in _rows(path, column):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{str(path)!r} line {line}: expected text, got {shown(text)}")
        texts.append(text.strip())
    if not texts:
        raise DataError(f"expected texts in {str(path)!r}, found none")
    return texts


def _rows(path: Path, column: str) -> Iterator[tuple[int, Any]]:
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        for number, record in json_records(path):
            _check(path, number, list(record), column)
            yield number, record[column]
    elif suffix in JSON_SUFFIXES:
        raise DataError(f"expected .csv, .tsv, .jsonl or text, got {str(path)!r}: {JSON_REMEDY}")
    elif suffix in (".csv", ".tsv"):
        rows = read_table(path, {column})
        line, first = next(rows, (0, []))
        if first:
            header = column_names(first)
            _check(path, line, header, column)
            yield from ((number, cells[header.index(column)]) for number, cells in rows)
    else:
        yield from ((n, text) for n, text in enumerate(read_lines(path), 1) if text.strip())


def _check(path: Path, line: int, there: Sequence[str], column: str) -> None:
    if there.count(column) != 1:
        found = ", ".join(repr(str(name)[:40]) for name in there[:10]) or "nothing"
        raise DataError(
            f"{str(path)!r} line {line}: expected one column {column!r}, found {found}; name the "
            "text's: --column NAME"
        )
