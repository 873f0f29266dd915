"""The texts of a file that is to be classified: a table's column, a key of JSON lines, or lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol.base.errors import DataError
from protocol.data.delimited import column_names, read_table
from protocol.data.text_file import check_columns, json_records, read_lines, shown


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
    if path.suffix == ".jsonl":
        for number, record in json_records(path):
            check_columns(path, number, list(record), {"text": column})
            yield number, record[column]
    elif path.suffix in (".csv", ".tsv"):
        rows = read_table(path, {column})
        if rows:
            header = column_names(rows[0][1])
            check_columns(path, rows[0][0], header, {"text": column})
            yield from ((number, cells[header.index(column)]) for number, cells in rows[1:])
    else:
        yield from ((n, text) for n, text in enumerate(read_lines(path), 1) if text.strip())
