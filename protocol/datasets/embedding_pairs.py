"""Texts that belong together, and others that do not: pairs and triplets out of data files.

A row is as sentence-transformers has it: `anchor` (a query), `positive` (a passage that answers it)
and, if there is one, `negative`: a passage that does not, or a list of such.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from protocol.base.errors import DataError
from protocol.datasets.conversations import DistinctRows, read_documents
from protocol.datasets.messages import read_words
from protocol.datasets.rows import BadRows, Record
from protocol.spec.sections.data import EMBEDDING_COLUMNS, DataSpec


@dataclass(frozen=True, slots=True)
class TextGroup:
    """An anchor, its passage, and hard negatives."""

    anchor: str
    passages: tuple[str, ...]
    """The positive, then the negatives."""
    location: str


def read_text_groups(spec: DataSpec) -> DistinctRows[TextGroup]:
    """Read what the run spec names.

    Raises:
        DataError: A file is missing, not UTF-8 or damaged, lacks a column, or rows lack a text.
    """
    bad_rows = BadRows(skip=spec.skip_bad_rows)
    rows = read_documents(spec, EMBEDDING_COLUMNS, ("negative",), _document, bad_rows)
    return DistinctRows(rows, _group_of, f"pairs of texts in {spec.train!r}", bad_rows)


def _group_of(document: str, location: str) -> TextGroup:
    anchor, *passages = json.loads(document)
    return TextGroup(anchor, tuple(passages), location)


def _document(where: str, record: Record) -> str:
    anchor = read_words(where, record["anchor"], "anchor")
    positive = read_words(where, record["positive"], "positive")
    negative = record["negative"]
    listed = [] if negative is None else negative if isinstance(negative, list) else [negative]
    negatives = [read_words(where, each, "negative") for each in listed]
    if positive in negatives:
        raise DataError(
            f"{where}: expected negatives that differ from the positive, got the same text as "
            "both; leave the row out"
        )
    return json.dumps([anchor, positive, *negatives], ensure_ascii=False)
