"""Labelled text out of a JSONL, CSV, TSV or Parquet file: read, checked, duplicates removed.

What parts the cells of a table is seen from its header, whatever the file's name ends with. A TSV
file may come without a header if it has two columns, label first, as the SMS Spam Collection has;
the columns asked for are then `text` and `label`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from protocol.base.errors import DataError
from protocol.data.delimited import column_names, read_table
from protocol.data.disk_texts import DIGEST_BYTES, DiskTexts
from protocol.data.rows import read_rows
from protocol.data.text_file import check_columns, json_records, shown
from protocol.spec import sources
from protocol.spec.run_spec import DataSpec

LABELS: Final = 1_000
LABEL_CHARACTERS: Final = 90
_CONFLICTS_SHOWN: Final = 100
_MANY: Final = 20
"""More labels than these, and more than half as many as samples, are ids or texts."""
_HEADERLESS: Final = ("label", "text")


@dataclass(frozen=True, slots=True)
class LabelledText:
    """Texts with their labels as numbers into `names`; no text comes twice.

    Those that are read from a file are on disk: they may be larger than memory.

    Attributes:
        texts: Without the spaces at both ends.
        labels: Of each text.
        names: Of the labels.
        duplicates: How many came again.
        lines: Of the file, where each text stands.
        conflicts: How many came again with another label and were left out.
    """

    texts: Sequence[str]
    labels: Sequence[int]
    names: tuple[str, ...]
    duplicates: int = field(default=0, compare=False)
    lines: Sequence[int] = field(default=(), compare=False)
    conflicts: int = field(default=0, compare=False)

    @property
    def alike(self) -> list[tuple[str, ...]]:
        """Labels that differ in case, spaces or how a number is written: mostly one class."""
        groups: dict[object, list[str]] = {}
        for name in self.names:
            groups.setdefault(_plain(name), []).append(name)
        return [tuple(group) for group in groups.values() if len(group) > 1]


def _plain(name: str) -> object:
    try:
        return float(name)
    except ValueError:
        return " ".join(name.casefold().split())


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    text: str
    label: str


def read_labelled_text(spec: DataSpec, known: Sequence[str] | None = None) -> LabelledText:
    """Read what the run spec names.

    Rows with the same text (spaces at both ends apart) and label count once. Labels are numbered
    by name; if all of them are whole numbers, by value.

    Args:
        spec: The section data.
        known: The names of the labels in the order of their numbers, where others have given
            them: of a file that is measured on.

    Raises:
        DataError: The file is not there, not UTF-8, empty, lacks a column, a label or a class, or
            gives one text two labels, unless `data.conflicts` keeps the first.
    """
    path = sources.text_source(spec.train)
    texts, lines, labels = DiskTexts(), array("q"), array("q")
    seen: dict[bytes, int] = {}
    there: dict[str, int] = {}
    conflicts = _Conflicts(path, spec)
    rows = 0
    for row in _rows(path, spec):
        if known is not None and row.label not in known:
            raise DataError(
                f"{str(path)!r} line {row.line}: expected a label of the training data, got "
                f"{row.label!r}; there are {', '.join(known[:10])}"
            )
        rows += 1
        label = there.setdefault(row.label, len(there))
        first = seen.setdefault(blake3(row.text.encode()).digest(DIGEST_BYTES), len(texts))
        if first == len(texts):
            texts.append(row.text)
            lines.append(row.line)
            labels.append(label)
        elif labels[first] != label:
            conflicts.add(row, lines[first], [*there][labels[first]])
    conflicts.refuse()
    if not rows:
        raise DataError(f"expected samples in {str(path)!r}, found none")
    names = known or _label_names({*there}, len(texts), spec, path)
    number = [{name: index for index, name in enumerate(names)}[name] for name in there]
    labels = array("q", (number[label] for label in labels))
    duplicates = rows - len(texts) - conflicts.count
    return LabelledText(texts, labels, tuple(names), duplicates, lines, conflicts.count)


class _Conflicts:
    """Texts that came again with another label.

    Attributes:
        count: How many.
    """

    def __init__(self, path: Path, spec: DataSpec) -> None:
        self._path = path
        self._keeps_first = spec.conflicts == "keep_first"
        self._shown: list[str] = []
        self.count = 0

    def add(self, row: _Row, first_line: int, first_label: str) -> None:
        """One more: the row, and what an earlier line says of the same text."""
        self.count += 1
        if len(self._shown) < _CONFLICTS_SHOWN:
            self._shown.append(f"line {row.line} {row.label!r} (line {first_line} {first_label!r})")

    def refuse(self) -> None:
        """See that there are none, or that the first label counts.

        Raises:
            DataError: There are.
        """
        if not self.count or self._keeps_first:
            return
        more = self.count - len(self._shown)
        others = f" and {more} more" if more else ""
        raise DataError(
            f"{str(self._path)!r}: expected one label for each text, got another for the same text "
            f"in {', '.join(self._shown)}{others}; mend them, or keep the first label of each: "
            "--set data.conflicts=keep_first"
        )


def _label_names(found: set[str], samples: int, spec: DataSpec, path: Path) -> tuple[str, ...]:
    if len(found) < 2:
        raise DataError(
            f"expected at least 2 labels in {str(path)!r}, found only {min(found)!r}; add samples "
            "of another class, or name the label's column: --set data.label=COLUMN"
        )
    if len(found) > LABELS or max(map(len, found)) > LABEL_CHARACTERS:
        raise DataError(
            f"expected at most {LABELS} labels of {LABEL_CHARACTERS} characters in {str(path)!r}, "
            f"found {len(found)}; is {spec.label!r} the label's column? --set data.label=COLUMN"
        )
    if spec.num_classes is None and len(found) > max(_MANY, samples // 2):
        raise DataError(
            f"expected labels that come again and again in {str(path)!r}, found {len(found)} for "
            f"{samples} samples; is {spec.label!r} the label's column? --set data.label=COLUMN, or "
            f"if it is: --set data.num_classes={len(found)}"
        )
    if spec.num_classes is not None and spec.num_classes != len(found):
        raise DataError(
            f"expected {spec.num_classes} labels (data.num_classes) in {str(path)!r}, "
            f"found {len(found)}: {', '.join(sorted(found)[:10])}"
        )
    if isinstance(spec.class_weights, dict) and (unknown := {*spec.class_weights} - found):
        raise DataError(
            f"expected labels in data.class_weights, got {min(unknown)!r}; "
            f"there are {', '.join(sorted(found)[:10])}"
        )
    if all(name.isascii() and name.removeprefix("-").isdigit() for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


def _rows(path: Path, spec: DataSpec) -> Iterator[_Row]:
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return _json_rows(path, spec)
    if suffix in (".csv", ".tsv"):
        return _table_rows(path, spec)
    return _other_rows(path, spec)  # Parquet, or it says which kinds are read


def _other_rows(path: Path, spec: DataSpec) -> Iterator[_Row]:
    wanted = {"text": spec.text, "label": spec.label}
    for number, record in read_rows(path, wanted, [*wanted.values()]):
        yield _row(path, number, record[spec.text], record[spec.label])


def _json_rows(path: Path, spec: DataSpec) -> Iterator[_Row]:
    wanted = {"text": spec.text, "label": spec.label}
    for number, record in json_records(path):
        check_columns(path, number, list(record), wanted)
        yield _row(path, number, record[spec.text], record[spec.label])


def _table_rows(path: Path, spec: DataSpec) -> Iterator[_Row]:
    asked = {spec.text, spec.label}
    rows = read_table(path, asked)
    line, first = next(rows, (0, []))
    if not first:
        return
    header: Sequence[str] = column_names(first)
    if asked == {*_HEADERLESS} and len(header) == 2 and not asked & {*header}:
        every = (row[0].strip() for _, row in read_table(path, asked))
        if _is_a_label(header[0], every):
            header, rows = _HEADERLESS, read_table(path, asked)
    check_columns(path, line, header, {"text": spec.text, "label": spec.label})
    text, label = header.index(spec.text), header.index(spec.label)
    for number, row in rows:
        yield _row(path, number, row[text], row[label])


def _is_a_label(first: str, every: Iterable[str]) -> bool:
    """Of the first cells of all rows: a header of other names would be a label that comes once."""
    labels = Counter[str]()
    for each in every:
        labels[each] += 1
        if len(labels) > LABELS:
            return False
    return labels[first] > 1


def _row(path: Path, number: int, text: Any, label: Any) -> _Row:
    if not isinstance(text, str):
        raise DataError(f"{str(path)!r} line {number}: expected text, got {shown(text)}")
    if not isinstance(label, str | int):
        raise DataError(
            f"{str(path)!r} line {number}: expected a text or whole number as label, got "
            f"{shown(label)}"
        )
    name = str(label).strip()
    if not name:
        raise DataError(f"{str(path)!r} line {number}: expected a label, found none")
    return _Row(number, text.strip(), name)
