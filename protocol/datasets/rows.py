"""Read rows of data files as mappings from column to value, and report bad rows.

Files are JSON lines, JSON lists, CSV, TSV, Parquet or Arrow, each plain, gzip or zstandard, as
their suffix says. Files may be larger than memory, except compressed Parquet and Arrow, and a JSON
object that contains a list of rows. A single row must fit in memory.
"""

from __future__ import annotations

import csv
import json
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from protocol.base.errors import DataError
from protocol.datasets.logits_file import pyarrow_modules
from protocol.datasets.text_file import (
    SKIP_BAD_ROWS,
    check_columns,
    check_object,
    is_compressed,
    json_lines,
    json_values,
    open_decompressed,
    read_text,
    stream_lines,
    text_pieces,
)
from protocol.spec.files import sources

_BATCH_ROWS: Final = 64
_BUFFER_BYTES: Final = 1 << 18
_MAX_REPORTED_ROWS: Final = 20
"""Maximum number of bad rows that a report quotes."""
_MAX_BAD_ROWS_AT_START: Final = 100
"""Number of bad rows after which reading ends, if no row has been good."""

Record = Mapping[str, Any]
Row = TypeVar("Row")
ParsedRow = TypeVar("ParsedRow")


class Location(NamedTuple):
    """A row of a file; rows are numbered from 1."""

    path: Path
    number: int

    def __str__(self) -> str:
        is_line = sources.file_format(self.path) in ("jsonl", "csv", "tsv")
        return f"{str(self.path)!r} {'line' if is_line else 'row'} {self.number}"


class Locations:
    """The locations of many rows, in little memory."""

    def __init__(self) -> None:
        self._paths: list[Path] = []
        self._files, self._numbers = array("l"), array("q")

    def append(self, location: Location) -> None:
        """Append a location."""
        if not self._paths or self._paths[-1] != location.path:
            self._paths.append(location.path)
        self._files.append(len(self._paths) - 1)
        self._numbers.append(location.number)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> str:
        return str(Location(self._paths[self._files[number]], self._numbers[number]))


class BadRows:
    """Collects the errors of rows that cannot be used: they are reported together, or skipped.

    Args:
        skip: Whether bad rows are skipped (`data.skip_bad_rows`).

    Attributes:
        count: Number of bad rows so far.
    """

    def __init__(self, *, skip: bool) -> None:
        self.count = 0
        self._skip = skip
        self._good = 0
        self._errors: list[DataError] = []

    def add(self, error: DataError) -> None:
        """Add the error of a bad row.

        Raises:
            DataError: There are many bad rows, and no good one.
        """
        self.count += 1
        if len(self._errors) < _MAX_REPORTED_ROWS:
            self._errors.append(error)
        if not self._good and self.count >= _MAX_BAD_ROWS_AT_START:
            raise self._errors[0]

    def parse(
        self,
        rows: Iterable[tuple[Location, Record]],
        parse_row: Callable[[Location, Record], ParsedRow],
    ) -> Iterator[tuple[Location, ParsedRow]]:
        """Yield each row's location and parsed row; a row that raises `DataError` is bad.

        Raises:
            DataError: After the last row, if there are bad rows that may not be skipped.
        """
        for (location, _), parsed in self.apply(rows, lambda row: parse_row(*row)):
            yield location, parsed
        self.report()

    def apply(
        self, rows: Iterable[Row], function: Callable[[Row], ParsedRow]
    ) -> Iterator[tuple[Row, ParsedRow]]:
        """Yield each row with the function's result; a row that raises `DataError` is bad.

        Raises:
            DataError: There are many bad rows, and no good one. `report` raises the others.
        """
        for row in rows:
            try:
                result = function(row)
            except DataError as error:
                self.add(error)
                continue
            self._good += 1
            yield row, result

    def report(self) -> None:
        """Report the bad rows, unless they are skipped.

        Raises:
            DataError: There are bad rows that may not be skipped, or all rows are bad.
        """
        if not self.count or (self._skip and self._good):
            return
        if not self._good:
            raise self._errors[0]
        if self.count == 1:
            raise DataError(_with_remedy(str(self._errors[0]))) from self._errors[0]
        lines = [f"{self.count} bad rows:", *map(str, self._errors)]
        if self.count > len(self._errors):
            lines.append(f"and {self.count - len(self._errors)} more")
        lines.append(f"correct these rows, or leave them out: {SKIP_BAD_ROWS}")
        raise DataError("\n  ".join(lines))


def _with_remedy(error: str) -> str:
    """Return the error of the only bad row, with a remedy unless the error names an option."""
    if "--set" in error:
        return error
    if error.endswith("leave the row out"):
        return f"{error}: {SKIP_BAD_ROWS}"
    start = ", or leave the row out" if "; " in error else "; correct it, or leave the row out"
    return f"{error}{start}: {SKIP_BAD_ROWS}"


class _ColumnCheck:
    """Checks that rows have the required columns.

    Args:
        required_columns: Columns, by the key of the section `data` that names them.
        optional: Columns that are read where they exist.
        inspect_columns: Called with a row's location and columns before they are checked.
    """

    def __init__(
        self,
        required_columns: Mapping[str, str],
        optional: Collection[str],
        inspect_columns: Callable[[Location, Sequence[str]], None],
    ) -> None:
        self._required, self._optional = required_columns, optional
        self._inspect_columns = inspect_columns
        self._has_complete_rows = False

    def check(self, path: Path, number: int, columns: Sequence[str]) -> None:
        """Check the columns of one row, or of a table's header.

        Raises:
            DataError: A required column is missing or occurs twice.
        """
        location = Location(path, number)
        self._inspect_columns(location, columns)
        check_columns(
            str(location), columns, self._required, optional=self._optional,
            is_lone_row=self._has_complete_rows and sources.file_format(path) in ("jsonl", "json"),
        )  # fmt: skip
        self._has_complete_rows = True


def read_rows(
    files: Sequence[Path],
    required_columns: Mapping[str, str],
    names: Sequence[str],
    bad_rows: BadRows,
    inspect_columns: Callable[[Location, Sequence[str]], None] = lambda _location, _columns: None,
) -> Iterator[tuple[Location, Record]]:
    """Read every row of these files, one at a time.

    Args:
        files: The files, in order.
        required_columns: Columns that every row must have, by the key of the section `data` that
            names them.
        names: All columns to read.
        bad_rows: Receives rows that are damaged or lack a column.
        inspect_columns: Called with a row's location and columns before they are checked.

    Raises:
        DataError: A file has an unsupported format or is damaged, or a table's header lacks a
            column.
    """
    optional = {*names} - {*required_columns.values()}
    column_check = _ColumnCheck(required_columns, optional, inspect_columns)
    for path in files:
        check = partial(column_check.check, path)
        format_name = sources.file_format(path)
        if format_name in ("jsonl", "json"):
            lines = (
                json_lines(path)
                if format_name == "jsonl"
                else _read_json_rows(path, {*required_columns.values()})
            )
            for number, record in lines:
                try:
                    if isinstance(record, DataError):
                        raise record
                    check(number, list(record))
                except DataError as error:
                    bad_rows.add(error)
                    continue
                yield Location(path, number), record
        elif format_name in ("csv", "tsv"):
            yield from _read_table_rows(path, {*required_columns.values()}, check, bad_rows)
        elif format_name in ("parquet", "arrow"):
            rows = _read_parquet_rows if format_name == "parquet" else _read_arrow_rows
            for number, record in enumerate(rows(path, check, names), start=1):
                yield Location(path, number), record
        else:
            raise DataError(
                f"expected a file that ends with one of {sources.ROW_FORMATS_TEXT}, got "
                f"{str(path)!r}, which is not supported"
            )


def _read_json_rows(
    path: Path, required_columns: Collection[str]
) -> Iterator[tuple[int, Record | DataError]]:
    """Read a JSON list of objects, the only list inside an object, or JSON lines named `.json`."""
    lines = (line for line in stream_lines(path) if line.strip())
    first_line, second_line = next(lines, "").lstrip(), next(lines, "")
    if first_line.startswith("["):
        for number, value in enumerate(json_values(path, text_pieces(path)), start=1):
            yield number, check_object(f"{str(path)!r} row {number}", value)
        return
    try:
        first_value = json.loads(first_line)
    except (ValueError, RecursionError):
        first_value = None
    if first_value is not None and (
        second_line
        or not isinstance(first_value, dict)
        or {*required_columns} <= first_value.keys()
    ):
        yield from json_lines(path)
        return
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is not JSON: {error}") from None
    lists = [value for value in document.values() if isinstance(value, list)]
    if len(lists) != 1:
        raise DataError(
            f"expected a list of rows in {str(path)!r}, or an object with one list, got an object "
            f"with {len(lists)} lists"
        )
    for number, value in enumerate(lists[0], start=1):
        yield number, check_object(f"{str(path)!r} row {number}", value)


def _read_table_rows(
    path: Path,
    required_columns: Collection[str],
    check: Callable[[int, Sequence[str]], None],
    bad_rows: BadRows,
) -> Iterator[tuple[Location, Record]]:
    rows = read_table(path, required_columns)
    line, first = next(rows, (0, []))
    if not first:
        return
    assert not isinstance(first, DataError)
    header = column_names(first)
    check(line, header)
    for number, cells in rows:
        if isinstance(cells, DataError):
            bad_rows.add(cells)
        else:
            yield Location(path, number), dict(zip(header, cells, strict=True))


@contextmanager
def _pyarrow_errors(path: Path, format_name: str) -> Iterator[tuple[Any, Any]]:
    """Yield pyarrow and pyarrow.parquet; their errors become a `DataError` of one line."""
    pa, pq = pyarrow_modules(f"{format_name} files are read by pyarrow")
    try:
        yield pa, pq
    except (pa.ArrowException, OSError, EOFError, zlib.error, ValueError) as error:
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"expected {format_name} in {str(path)!r}, got: {words.rstrip('.')}; if the file "
            "is damaged, copy or download it again"
        ) from None


def _read_parquet_rows(
    path: Path, check: Callable[[int, Sequence[str]], None], names: Sequence[str]
) -> Iterator[Record]:
    with _pyarrow_errors(path, "Parquet") as (pa, pq):
        source = pa.BufferReader(open_decompressed(path).read()) if is_compressed(path) else path
        # Page by page: otherwise whole columns of a row group are read at once, and the whole file
        # may be one group.
        with pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            columns = list(file.schema_arrow.names)
            check(1, columns)
            present = [name for name in names if name in columns]
            classes = _class_names(file.schema_arrow.metadata)
            for batch in file.iter_batches(_BATCH_ROWS, columns=present):
                yield from (_clean_record(record, classes) for record in batch.to_pylist())


def _read_arrow_rows(
    path: Path, check: Callable[[int, Sequence[str]], None], names: Sequence[str]
) -> Iterator[Record]:
    """Read Arrow's streaming format, which `datasets` saves, or its file format."""
    with _pyarrow_errors(path, "Arrow") as (pa, _):
        source = (
            pa.BufferReader(open_decompressed(path).read())
            if is_compressed(path)
            else pa.memory_map(str(path))
        )
        with source:
            try:
                reader: Any = pa.ipc.open_stream(source)
                batches: Iterable[Any] = reader
            except pa.ArrowInvalid:
                source.seek(0)
                reader = pa.ipc.open_file(source)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            columns = list(reader.schema.names)
            check(1, columns)
            present = [name for name in dict.fromkeys(names) if name in columns]
            classes = _class_names(reader.schema.metadata)
            for batch in batches:
                batch.validate(full=True)  # damaged offsets would be read beyond the batch
                for lo in range(0, batch.num_rows, _BATCH_ROWS):
                    rows = batch.slice(lo, _BATCH_ROWS).select(present)
                    yield from (_clean_record(record, classes) for record in rows.to_pylist())


def _class_names(metadata: Mapping[bytes, bytes] | None) -> Mapping[str, Sequence[str]]:
    """Return the class names of each column of classes, or of lists of classes.

    `datasets` writes them into a file: https://huggingface.co/docs/datasets/about_dataset_features
    """
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        columns = dict(features.items())
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}
    names_by_column = {}
    for column, feature in columns.items():
        definition = feature[0] if isinstance(feature, list) and feature else feature
        definition = definition.get("feature", definition) if isinstance(definition, dict) else {}
        names = definition.get("names") if isinstance(definition, dict) else None
        if isinstance(names, list) and definition.get("_type") == "ClassLabel":
            names_by_column[str(column)] = [*map(str, names)]
    return names_by_column


def _clean_record(record: Record, classes: Mapping[str, Sequence[str]]) -> Record:
    """Replace classes by their names, and remove nulls inside cells.

    Arrow gives every object of a column the keys of all objects. The class -1 stands for none, and
    becomes null.
    """
    return {
        name: _class_name(value, classes[name]) if name in classes else _without_nulls(value)
        for name, value in record.items()
    }


def _class_name(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_class_name(item, names) for item in value]
    if not isinstance(value, int) or value >= len(names):
        return value
    return names[value] if value >= 0 else None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


_CELL_CHARACTERS: Final = 1 << 28
csv.field_size_limit(_CELL_CHARACTERS)  # applies to the process; the default is 131,072
_TAB: Final = "\t"
_DELIMITERS: Final = (",", _TAB, ";", "|")

TableRow = tuple[int, list[str] | DataError]
"""The number of a row's last line, and the row's cells or its error."""


def read_table(path: Path, required_columns: Collection[str]) -> Iterator[TableRow]:
    """Read every nonempty row of a table, the header first.

    Args:
        path: The file.
        required_columns: Columns that the header must have; they determine the delimiter.

    Raises:
        DataError: The table is not UTF-8, or a quote is missing or not doubled.
    """
    delimiter = _find_delimiter(path, required_columns)
    quoting = csv.QUOTE_MINIMAL
    if delimiter == _TAB and _quotes_are_text(path):
        quoting = csv.QUOTE_NONE
    yield from _read_cells(path, delimiter, quoting)


def _find_delimiter(path: Path, required_columns: Collection[str]) -> str:
    """Return the delimiter that splits the header into the required columns.

    If there is none, return a tab if every line has one, else the delimiter with the most columns.
    """
    usual_delimiter = _TAB if sources.file_format(path) == "tsv" else ","
    header = next((line for line in stream_lines(path) if line.strip()), "")
    columns = {
        delimiter: column_names(next(csv.reader([header], delimiter=delimiter)))
        for delimiter in _DELIMITERS
    }
    for delimiter in _DELIMITERS:
        if {*required_columns} <= {*columns[delimiter]}:
            return delimiter
    if all(_TAB in line for line in stream_lines(path) if line.strip()):
        return _TAB
    return max((usual_delimiter, *_DELIMITERS), key=lambda delimiter: len(columns[delimiter]))


def _quotes_are_text(path: Path) -> bool:
    """Return whether quotes in a TSV file are part of the text, and do not enclose cells.

    They are part of the text if the file then has more rows, and no column has only quoted cells.
    """
    if not any(line[0] == '"' or '\t"' in line for line in stream_lines(path) if line):
        return False
    rows, is_column_quoted = 0, list[bool]()
    for _, cells in _read_cells(path, _TAB, csv.QUOTE_NONE):
        if isinstance(cells, DataError):
            return False
        is_cell_quoted = [*map(_is_quoted, cells)]
        is_column_quoted = [
            a and b for a, b in zip(is_column_quoted or is_cell_quoted, is_cell_quoted, strict=True)
        ]
        rows += 1
    if any(is_column_quoted):
        return False
    rows_with_quoting = 0
    try:
        for _, cells in _read_cells(path, _TAB, csv.QUOTE_MINIMAL):
            if isinstance(cells, DataError):
                return True
            rows_with_quoting += 1
    except DataError:
        return True
    return rows_with_quoting < rows


def _is_quoted(cell: str) -> bool:
    return len(cell) > 1 and cell[0] == cell[-1] == '"'


def _read_cells(path: Path, delimiter: str, quoting: Any) -> Iterator[TableRow]:
    table = csv.reader(stream_lines(path), delimiter=delimiter, quoting=quoting, strict=True)
    columns = 0
    try:
        for row in table:
            if not row:
                continue
            columns = columns or len(row)
            if len(row) == columns:
                yield table.line_num, row
                continue
            yield (
                table.line_num,
                DataError(
                    f"{str(path)!r} line {table.line_num}: expected {columns} columns, got "
                    f"{len(row)}; quote cells that contain {delimiter!r}, or write the data as "
                    "JSONL"
                ),
            )
    except csv.Error as error:
        if "field limit" in str(error):
            raise DataError(
                f"{str(path)!r} line {table.line_num}: expected cells of at most "
                f"{_CELL_CHARACTERS} characters, got a longer one; is a quote left open?"
            ) from None
        raise DataError(
            f"{str(path)!r} line {table.line_num} is not a table: {error}; is a quote left open, "
            "or not doubled inside a cell? JSONL needs no quotes"
        ) from None


def column_names(cells: Sequence[str]) -> list[str]:
    """Return the names of a header's columns, without the spaces around them."""
    return [cell.strip() for cell in cells]
