"""Read labeled text from data files, check it and remove duplicates.

The header of a CSV or TSV table determines its delimiter, whatever the file's suffix. A table may
lack a header if it has two columns, label first, like the SMS Spam Collection; the run spec's
columns must then be `text` and `label`. A directory may have a folder of text files for each class
instead, like the IMDb reviews.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from protocol.base.errors import DataError
from protocol.datasets.disk_texts import DIGEST_BYTES, DiskTexts
from protocol.datasets.rows import (
    BadRows,
    Location,
    Locations,
    Record,
    column_names,
    read_rows,
    read_table,
)
from protocol.datasets.text_file import check_columns, format_value, read_text
from protocol.spec.files import sources
from protocol.spec.sections.data import DataSpec

Label = str | float | tuple[str, ...]
"""A row's label: a name, a number to predict, or sorted names."""
MAX_LABELS: Final = 1_000
MAX_LABEL_CHARACTERS: Final = 90
_MAX_CONFLICTS_SHOWN: Final = 100
_MANY_LABELS: Final = 20
"""If there are more labels than this, and more than half as many as samples, the column probably
contains ids or texts."""
_COLUMNS_WITHOUT_HEADER: Final = ("label", "text")


@dataclass(frozen=True, slots=True)
class LabeledText:
    """Distinct texts with their labels.

    Texts that are read from a file are stored on disk: they may be larger than memory.

    Attributes:
        texts: The texts, without the spaces at both ends; for pairs the result of `join_pair`.
        labels: For each text an index into `names`, a tuple of indices (multi-label), or the value
            to predict (regression).
        names: Names of the labels; empty for regression.
        duplicates: Number of rows left out because they repeat an earlier text and its label.
        locations: File and row of each text.
        conflicts: Number of rows left out because their text occurred earlier with another label.
        bad_rows: Number of skipped rows.
    """

    texts: Sequence[str]
    labels: Sequence[Any]
    names: tuple[str, ...]
    duplicates: int = field(default=0, compare=False)
    locations: Locations = field(default_factory=Locations, compare=False)
    conflicts: int = field(default=0, compare=False)
    bad_rows: int = field(default=0, compare=False)

    @property
    def similar_labels(self) -> list[tuple[str, ...]]:
        """Groups of labels that differ only in case, spaces or number format."""
        groups: dict[object, list[str]] = {}
        for name in self.names:
            groups.setdefault(_normalize(name), []).append(name)
        return [tuple(group) for group in groups.values() if len(group) > 1]


def _normalize(name: str) -> object:
    try:
        return float(name)
    except ValueError:
        return " ".join(name.casefold().split())


@dataclass(frozen=True, slots=True)
class _Row:
    location: Location
    text: str
    label: Label


def join_pair(first: str, second: str) -> str:
    """Return two texts as one document; see `split_pair`."""
    return json.dumps([first, second], ensure_ascii=False)


def split_pair(document: str) -> tuple[str, str]:
    """Return the two texts of a document."""
    first, second = json.loads(document)
    return first, second


def read_labeled_text(spec: DataSpec, known_labels: Sequence[str] | None = None) -> LabeledText:
    """Read the labeled texts of the files that the run spec names.

    Rows with the same label and the same text, without the spaces at both ends, count once. Labels
    are numbered by name, or by value if all of them are whole numbers.

    Args:
        spec: The run spec's section `data`.
        known_labels: For evaluation data: `names` of the training data.

    Raises:
        DataError: A file is missing, not UTF-8 or empty, lacks a column, a label or a class, or
            gives one text two labels, unless `data.conflicts` keeps the first.
    """
    texts, locations, labels = DiskTexts(), Locations(), list[Label]()
    first_by_digest: dict[bytes, int] = {}
    distinct: dict[Label, Label] = {}
    conflicts, bad_rows = _Conflicts(spec), BadRows(skip=spec.skip_bad_rows)
    rows, parse_row = 0, partial(_parse_row, spec, known_labels)
    for location, row in bad_rows.parse(_read_records(spec, bad_rows), parse_row):
        rows += 1
        label = distinct.setdefault(row.label, row.label)  # equal labels are stored once
        first = first_by_digest.setdefault(
            blake3(row.text.encode()).digest(DIGEST_BYTES), len(texts)
        )
        if first == len(texts):
            texts.append(row.text)
            locations.append(location)
            labels.append(label)
        elif labels[first] != label:
            conflicts.add(row, locations[first], labels[first])
    conflicts.refuse()
    if not rows:
        raise DataError(
            f"expected samples in {spec.train!r}, found none; name other data: --set "
            "data.train=FILE"
        )
    duplicates = rows - len(texts) - conflicts.count
    counts = (duplicates, locations, conflicts.count, bad_rows.count)
    if spec.problem == "regression":
        return LabeledText(texts, array("d", labels), (), *counts)
    label_names = {name for label in distinct for name in _names_in(label)}
    names = tuple(known_labels or _order_labels(label_names, len(texts), spec))
    index_of = {name: index for index, name in enumerate(names)}
    indices = {label: tuple(index_of[name] for name in _names_in(label)) for label in distinct}
    if spec.problem == "multi-label":
        return LabeledText(texts, [indices[label] for label in labels], names, *counts)
    single_indices = array("q", (indices[label][0] for label in labels))
    return LabeledText(texts, single_indices, names, *counts)


def _names_in(label: Label) -> tuple[str, ...]:
    return label if isinstance(label, tuple) else (str(label),)


class _Conflicts:
    """Texts that occur with two labels.

    Attributes:
        count: Number of rows whose label differs from the first label of the same text.
    """

    def __init__(self, spec: DataSpec) -> None:
        self._train = spec.train
        self._keeps_first = spec.conflicts == "keep_first"
        self._descriptions: list[str] = []
        self.count = 0

    def add(self, row: _Row, first_location: str, first_label: Label) -> None:
        """Add a row, with the location and label of the first row with the same text."""
        self.count += 1
        if len(self._descriptions) < _MAX_CONFLICTS_SHOWN:
            path = f"{str(row.location.path)!r} "
            location, first_location = (
                text.removeprefix(path) for text in (str(row.location), first_location)
            )
            self._descriptions.append(
                f"{location} {row.label!r} ({first_location} {first_label!r})"
            )

    def refuse(self) -> None:
        """Refuse conflicts, unless the run spec keeps the first label.

        Raises:
            DataError: There are conflicts.
        """
        if not self.count or self._keeps_first:
            return
        hidden_count = self.count - len(self._descriptions)
        others = f" and {hidden_count} more" if hidden_count else ""
        raise DataError(
            f"{self._train!r}: expected one label for each text, got another for the same text in "
            f"{', '.join(self._descriptions)}{others}; correct them, or keep the first label of "
            "each text: --set data.conflicts=keep_first"
        )


def _order_labels(names: set[str], samples: int, spec: DataSpec) -> tuple[str, ...]:
    """Check the names of the labels, and return them in the order of their indices.

    Raises:
        DataError: There are too few or too many labels, or the run spec names others.
    """
    if len(names) < 2:
        raise DataError(
            f"expected at least 2 labels in {spec.train!r}, found only {min(names)!r}; add samples "
            "of another class, or name the label's column: --set data.label=COLUMN"
        )
    if len(names) > MAX_LABELS or max(map(len, names)) > MAX_LABEL_CHARACTERS:
        raise DataError(
            f"expected at most {MAX_LABELS} labels of {MAX_LABEL_CHARACTERS} characters in "
            f"{spec.train!r}, found {len(names)}; is {spec.label!r} the label's column? --set "
            "data.label=COLUMN"
        )
    if (
        spec.num_classes is None
        and spec.problem == "single-label"
        and len(names) > max(_MANY_LABELS, samples // 2)
    ):
        raise DataError(
            f"expected labels that repeat in {spec.train!r}, found {len(names)} for {samples} "
            f"samples; is {spec.label!r} the label's column? --set data.label=COLUMN; if it is: "
            f"--set data.num_classes={len(names)}, or to predict numbers: --set "
            "data.problem=regression"
        )
    if spec.num_classes is not None and spec.num_classes != len(names):
        raise DataError(
            f"expected {spec.num_classes} labels (data.num_classes) in {spec.train!r}, "
            f"found {len(names)}: {', '.join(sorted(names)[:10])}"
        )
    for key in ("class_weights", "sampling"):
        weights = getattr(spec, key)
        if isinstance(weights, dict) and (unknown := {*weights} - names):
            raise DataError(
                f"expected labels in data.{key}, got {min(unknown)!r}; "
                f"there are {', '.join(sorted(names)[:10])}"
            )
    if all(name.isascii() and name.removeprefix("-").isdigit() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _read_records(spec: DataSpec, bad_rows: BadRows) -> Iterator[tuple[Location, Record]]:
    """Read every row as a mapping with `text`, `label` and, for pairs, `text_pair`."""
    required_columns = _required_columns(spec)
    for path in sources.row_files(spec.train, class_folders=True):
        format_name = sources.file_format(path)
        if format_name in ("csv", "tsv"):
            yield from _read_table_rows(path, spec, bad_rows)
        elif format_name in sources.ROW_FORMATS or not sources.is_directory(spec.train):
            for location, record in read_rows(
                [path], required_columns, [*required_columns.values()], bad_rows
            ):
                yield location, {key: record[name] for key, name in required_columns.items()}
        else:
            folder = path.relative_to(sources.expand_home(spec.train)).parts[0]
            yield Location(path, 1), {"text": read_text(path), "label": folder}


def _required_columns(spec: DataSpec) -> dict[str, str]:
    pair = {} if spec.text_pair is None else {"text_pair": spec.text_pair}
    return {"text": spec.text, **pair, "label": spec.label}


def _read_table_rows(
    path: Path, spec: DataSpec, bad_rows: BadRows
) -> Iterator[tuple[Location, Record]]:
    required_columns = _required_columns(spec)
    columns = {*required_columns.values()}
    rows = read_table(path, columns)
    line, first_row = next(rows, (0, []))
    if not first_row:
        return
    assert not isinstance(first_row, DataError)
    header: Sequence[str] = column_names(first_row)
    if columns == {*_COLUMNS_WITHOUT_HEADER} and len(header) == 2 and not columns & {*header}:
        cells = (row for _, row in read_table(path, columns) if not isinstance(row, DataError))
        if _is_label(header[0], (row[0].strip() for row in cells)):
            header, rows = _COLUMNS_WITHOUT_HEADER, read_table(path, columns)
    check_columns(str(Location(path, line)), header, required_columns)
    column_of = {key: header.index(name) for key, name in required_columns.items()}
    for number, row in rows:
        if isinstance(row, DataError):
            bad_rows.add(row)
        else:
            yield Location(path, number), {key: row[column] for key, column in column_of.items()}


def _is_label(first_cell: str, cells: Iterable[str]) -> bool:
    """Return whether the first cell of a column is a label: unlike a label, a header occurs
    once."""
    labels = Counter[str]()
    for label in cells:
        labels[label] += 1
        if len(labels) > MAX_LABELS:
            return False
    return labels[first_cell] > 1


def _parse_row(
    spec: DataSpec, known_labels: Sequence[str] | None, location: Location, record: Record
) -> _Row:
    texts = [record[key] for key in ("text", "text_pair") if key in record]
    for text in texts:
        if not isinstance(text, str):
            raise DataError(f"{location}: expected text, got {format_value(text)}")
    stripped = [text.strip() for text in texts]
    if len(stripped) > 1 and not all(stripped):
        raise DataError(f"{location}: expected two texts, got an empty one")
    document = join_pair(*stripped) if len(stripped) > 1 else stripped[0]
    label: Label = _LABEL_PARSERS[spec.problem](location, record["label"])
    if (
        known_labels
        and spec.problem != "regression"
        and (unknown := {*_names_in(label)} - {*known_labels})
    ):
        raise DataError(
            f"{location}: expected a label of the training data, got {min(unknown)!r}; there are "
            f"{', '.join(known_labels[:10])}"
        )
    return _Row(location, document, label)


_OTHER_PROBLEM: Final[Mapping[type, str]] = {
    list: "; for several labels per text: --set data.problem=multi-label",
    float: "; to predict numbers: --set data.problem=regression",
}


def _parse_label(location: Location, label: object) -> str:
    if not isinstance(label, str | int):
        hint = _OTHER_PROBLEM.get(type(label), "")
        raise DataError(
            f"{location}: expected a text or whole number as label, got {format_value(label)}{hint}"
        )
    name = str(label).strip()
    if not name:
        raise DataError(f"{location}: expected a label, found none")
    return name


def _parse_labels(location: Location, value: object) -> tuple[str, ...]:
    """Parse a list of labels, its JSON text, or labels separated by commas; it may be empty."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise DataError(
                f"{location}: expected a list of labels as JSON, got {format_value(value)}"
            ) from None
    if value is None or value == "":
        return ()
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise DataError(f"{location}: expected a list of labels, got {format_value(value)}")
    return tuple(sorted({_parse_label(location, part) for part in parts}))


def _parse_number(location: Location, label: object) -> float:
    try:
        value = math.nan if isinstance(label, bool) else float(label)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{location}: expected a finite number as label, got {format_value(label)}")
    return value


_LABEL_PARSERS: Final[Mapping[str, Callable[[Location, object], Label]]] = {
    "single-label": _parse_label,
    "multi-label": _parse_labels,
    "regression": _parse_number,
}
