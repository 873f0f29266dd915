"""Rows of a JSONL, CSV, TSV or Parquet file, each a value by the name of its column."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from protocol.base.errors import DataError
from protocol.data.delimited import column_names, read_table
from protocol.data.logits_file import pyarrow_modules
from protocol.data.text_file import check_columns, json_records
from protocol.spec import sources

_PARQUET: Final = ".parquet"
_TABLES: Final = (".csv", ".tsv")
_ROWS_AT_ONCE: Final = 64
_BUFFER_BYTES: Final = 1 << 18
ROW_SUFFIXES: Final = (*sources.TEXT_SUFFIXES, _PARQUET)
JSON_SUFFIXES: Final = (".json", ".ndjson", ".jsonlines")
JSON_REMEDY: Final = "write one object on each line, and let its name end with .jsonl"

Record = Mapping[str, Any]
_Check = Callable[[int, Sequence[str]], None]


def place_of(path: Path, number: int) -> str:
    """File and row in words."""
    return f"{str(path)!r} {'row' if path.suffix.lower() == _PARQUET else 'line'} {number}"


def read_rows(
    path: Path,
    wanted: Mapping[str, str],
    names: Sequence[str],
    look: Callable[[int, Sequence[str]], None] = lambda _line, _columns: None,
) -> Iterator[tuple[int, Record]]:
    """Every row with its number, one after another, for files larger than memory.

    Args:
        path: The file; what it is its name's end says.
        wanted: Columns that have to be there, by the key of the section `data` that names each.
        names: All columns that are read.
        look: Is called with a line and its columns before any is missed.

    Raises:
        DataError: It is none of `ROW_SUFFIXES`, is damaged, or lacks a column.
    """
    suffix = path.suffix.lower()

    def check(line: int, there: Sequence[str]) -> None:
        look(line, there)
        check_columns(path, line, there, wanted)

    if suffix == ".jsonl":
        for number, record in json_records(path):
            check(number, list(record))
            yield number, record
    elif suffix in _TABLES:
        yield from _table_rows(path, {*wanted.values()}, check)
    elif suffix == _PARQUET:
        yield from _parquet_rows(path, check, names)
    else:
        hint = f"; {JSON_REMEDY}" if suffix in JSON_SUFFIXES else ""
        known = ", ".join(ROW_SUFFIXES)
        raise DataError(
            f"expected a file that ends with one of {known}, got {str(path)!r}: this kind of file "
            f"is not read{hint}"
        )


def _table_rows(path: Path, wanted: Collection[str], check: _Check) -> Iterator[tuple[int, Record]]:
    rows = read_table(path, wanted)
    line, first = next(rows, (0, []))
    if not first:
        return
    header = column_names(first)
    check(line, header)
    for number, cells in rows:
        yield number, dict(zip(header, cells, strict=True))


def _parquet_rows(path: Path, check: _Check, names: Sequence[str]) -> Iterator[tuple[int, Record]]:
    pa, pq = pyarrow_modules()
    number = 0
    try:
        # Page by page: else whole columns of a group are read at once, and all may be one group.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            there = list(file.schema_arrow.names)
            check(1, there)
            used = [name for name in names if name in there]
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=used):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
    except (pa.ArrowException, OSError, ValueError) as error:
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"expected Parquet in {str(path)!r}, got: {words}") from None
