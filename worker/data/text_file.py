"""Reads text files whole: UTF-8 or a clear refusal, and JSON lines."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol.base.errors import DataError


def read_text(path: Path) -> str:
    """The file's text with its line ends as they are; a byte-order mark is left out.

    Raises:
        DataError: It cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{str(path)!r} is not UTF-8 at byte {error.start}; convert it to UTF-8"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror}") from None


def read_lines(path: Path) -> list[str]:
    """The lines with their ends; only real line ends count, not U+2028 and its like."""
    return list(io.StringIO(read_text(path), newline=""))


def json_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every object of a JSONL file with its line number, from 1; empty lines are passed over.

    Raises:
        DataError: A line is not JSON, or no object.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(f"{str(path)!r} line {number} is not JSON") from None
        if not isinstance(record, dict):
            raise DataError(f"{str(path)!r} line {number}: expected a JSON object")
        yield number, record


def column(path: Path, line: int, record: dict[str, Any], key: str) -> Any:
    """What a record holds under that key.

    Raises:
        DataError: Nothing; the keys that are there are named.
    """
    if key not in record:
        raise no_column(path, key, list(record), line)
    return record[key]


def no_column(path: Path, key: str, there: list[str], line: int = 1) -> DataError:
    """The error that a column is not there, with those that are."""
    known = ", ".join(repr(str(name)[:40]) for name in there[:10])
    return DataError(f"expected a column {key!r} in {str(path)!r} line {line}, found {known}")
