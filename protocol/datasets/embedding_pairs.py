"""Read pairs and triplets of texts for the task `embed` from data files.

A row has the columns of sentence-transformers: `anchor` (a query), `positive` (a passage that
answers it) and optionally `negative`, a passage that does not, or a list of these.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from protocol.base.errors import DataError
from protocol.datasets.conversations import DistinctRows, read_documents
from protocol.datasets.messages import require_text
from protocol.datasets.rows import BadRows, Record
from protocol.spec.sections.data import EMBEDDING_COLUMNS, DataSpec


@dataclass(frozen=True, slots=True)
class TextGroup:
    """An anchor with its passages.

    Attributes:
        anchor: The query.
        passages: The positive, then the hard negatives.
        location: File and row, for errors.
    """

    anchor: str
    passages: tuple[str, ...]
    location: str


def read_text_groups(spec: DataSpec, first_row: TextGroup | None = None) -> DistinctRows[TextGroup]:
    """Read the rows of the files that the run spec names.

    Args:
        spec: Names files and columns.
        first_row: For validation data: the first row of the training data. Every row must have the
            same number of negatives.

    Raises:
        DataError: A file is missing, not UTF-8 or damaged, or lacks a column; or a row lacks a
            text, or its number of negatives differs from the first row's.
    """
    bad_rows = BadRows(skip=spec.skip_bad_rows)
    parser = _RowParser(first_row)
    rows = read_documents(spec, EMBEDDING_COLUMNS, ("negative",), parser.document, bad_rows)
    return DistinctRows(rows, _group_of, f"pairs of texts in {spec.train!r}", bad_rows)


def _group_of(document: str, location: str) -> TextGroup:
    anchor, *passages = json.loads(document)
    return TextGroup(anchor, tuple(passages), location)


class _RowParser:
    """Parses rows, and compares their number of negatives with that of the first row."""

    def __init__(self, first_row: TextGroup | None) -> None:
        self._first_location = "" if first_row is None else first_row.location
        self._negatives = 0 if first_row is None else len(first_row.passages) - 1

    def document(self, location: str, record: Record) -> str:
        """Return the row's texts as JSON: anchor, positive, negatives.

        Raises:
            DataError: A text is missing, the positive is also a negative, or the number of
                negatives differs from the first row's.
        """
        anchor = require_text(location, record["anchor"], "anchor")
        positive = require_text(location, record["positive"], "positive")
        cell = record["negative"]
        texts = [] if cell is None else cell if isinstance(cell, list) else [cell]
        negatives = [require_text(location, text, "negative") for text in texts]
        if positive in negatives:
            raise DataError(
                f"{location}: expected negatives that differ from the positive, got the same text "
                "as both; leave the row out"
            )
        if not self._first_location:
            self._first_location, self._negatives = location, len(negatives)
        elif len(negatives) != self._negatives:
            raise DataError(
                f"{location}: expected as many negatives as in the first row, "
                f"{self._first_location}, which has {self._negatives or 'none'}, got "
                f"{len(negatives) or 'none'}; give every row the same number, or ignore all "
                "negatives: --set data.columns.negative=none"
            )
        return json.dumps([anchor, positive, *negatives], ensure_ascii=False)
