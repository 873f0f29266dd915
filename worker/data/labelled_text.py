"""Labelled text out of a JSONL, CSV or TSV file: read, checked, duplicates removed, split.

A `.csv` file with a tab in every line is read as TSV. A TSV file may come without a header if it
has two columns, label first, as the SMS Spam Collection has; the columns asked for are then
`text` and `label`.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from protocol.base.errors import DataError
from protocol.spec import sources
from protocol.spec.run_spec import DataSpec
from worker.data import holdout
from worker.data.text_file import column, json_records, no_column, read_lines

LABELS: Final = 1_000
LABEL_CHARACTERS: Final = 90

_HEADERLESS: Final = ("label", "text")


@dataclass(frozen=True, slots=True)
class LabelledText:
    """Texts with their labels as numbers into `names`; no text comes twice."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]
    names: tuple[str, ...]
    duplicates: int = field(default=0, compare=False)

    def split(self, seed: int, fraction: float) -> tuple[list[int], list[int]]:
        """Numbers of the training and of the held-out samples, by keyed hash of the text."""
        return holdout.split(self.texts, seed, fraction)


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    text: str
    label: str


def read_labelled_text(spec: DataSpec) -> LabelledText:
    """Read what the run spec names.

    Of rows with the same text (spaces at both ends apart) the first counts. Labels are numbered
    by name; if all of them are whole numbers, by value.

    Raises:
        DataError: The file is not there, not UTF-8, empty, or lacks a column, a label or a class.
    """
    path = sources.text_source(spec.train)
    seen: dict[str, str] = {}
    rows = 0
    for row in _rows(path, spec):
        seen.setdefault(row.text, row.label)
        rows += 1
    if not seen:
        raise DataError(f"expected samples in {str(path)!r}, found none")
    names = _label_names(set(seen.values()), spec, path)
    number = {name: index for index, name in enumerate(names)}
    labels = tuple(number[label] for label in seen.values())
    return LabelledText(tuple(seen), labels, names, rows - len(seen))


def _label_names(found: set[str], spec: DataSpec, path: Path) -> tuple[str, ...]:
    if len(found) < 2:
        raise DataError(f"expected at least 2 labels in {str(path)!r}, found only {min(found)!r}")
    if len(found) > LABELS or max(map(len, found)) > LABEL_CHARACTERS:
        raise DataError(
            f"expected at most {LABELS} labels of {LABEL_CHARACTERS} characters in {str(path)!r}, "
            f"found {len(found)}; is {spec.label!r} the label's column?"
        )
    if spec.num_classes is not None and spec.num_classes != len(found):
        raise DataError(
            f"expected {spec.num_classes} labels (data.num_classes) in {str(path)!r}, "
            f"found {len(found)}: {', '.join(sorted(found)[:10])}"
        )
    if all(name.isascii() and name.removeprefix("-").isdigit() for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


def _rows(path: Path, spec: DataSpec) -> Iterator[_Row]:
    if path.suffix == ".jsonl":
        return _json_rows(path, spec)
    lines = read_lines(path)
    if path.suffix == ".tsv" or (
        path.suffix == ".csv" and lines and all("\t" in line for line in lines if line.strip())
    ):
        return _table_rows(path, csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE), spec)
    if path.suffix == ".csv":
        return _table_rows(path, csv.reader(lines, strict=True), spec)
    known = ", ".join(sources.TEXT_SUFFIXES)
    raise DataError(f"expected a file that ends with one of {known}, got {str(path)!r}")


def _json_rows(path: Path, spec: DataSpec) -> Iterator[_Row]:
    for number, record in json_records(path):
        text, label = (column(path, number, record, key) for key in (spec.text, spec.label))
        yield _row(path, number, text, label)


def _table_rows(path: Path, table: Any, spec: DataSpec) -> Iterator[_Row]:
    try:
        rows = [(table.line_num, row) for row in table if row]
    except csv.Error as error:
        raise DataError(f"{str(path)!r} line {table.line_num} is not a table: {error}") from None
    if not rows:
        return
    header, body = _header(path, rows, spec)
    text, label = header.index(spec.text), header.index(spec.label)
    for number, row in body:
        if len(row) != len(header):
            raise DataError(
                f"{str(path)!r} line {number}: expected {len(header)} columns, got {len(row)}"
            )
        yield _row(path, number, row[text], row[label])


def _header(
    path: Path, rows: list[tuple[int, list[str]]], spec: DataSpec
) -> tuple[Sequence[str], list[tuple[int, list[str]]]]:
    """Column names, and the rows below them."""
    first = rows[0][1]
    if spec.text in first and spec.label in first:
        return first, rows[1:]
    if {spec.text, spec.label} == set(_HEADERLESS) and len(first) == 2:
        # A header of other names would be a label that comes once.
        labels = Counter(row[0] for _, row in rows)
        if labels[first[0]] > 1 and len(labels) <= LABELS:
            return _HEADERLESS, rows
    missing = spec.label if spec.text in first else spec.text
    raise no_column(path, missing, first)


def _row(path: Path, number: int, text: Any, label: Any) -> _Row:
    if not isinstance(text, str):
        raise DataError(f"{str(path)!r} line {number}: expected text, got {type(text).__name__}")
    if not isinstance(label, str | int):
        raise DataError(
            f"{str(path)!r} line {number}: expected a label, got {type(label).__name__}"
        )
    name = str(label).strip()
    if not name:
        raise DataError(f"{str(path)!r} line {number}: expected a label, found none")
    return _Row(number, text.strip(), name)
