"""Reads text files, whole or piece by piece: UTF-8 or a clear refusal, and JSON lines."""

from __future__ import annotations

import codecs
import difflib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

from protocol.base.errors import DataError

_PIECE_CHARACTERS: Final = 1 << 20


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


def text_pieces(path: Path) -> Iterator[str]:
    """The file's text as of `read_text`, piece by piece, for files larger than memory.

    Raises:
        DataError: As of `read_text`.
    """
    yield from _streamed(path, lambda file: iter(lambda: file.read(_PIECE_CHARACTERS), ""))


def stream_lines(path: Path) -> Iterator[str]:
    """The lines as of `read_lines`, one after the other, for files larger than memory.

    Raises:
        DataError: As of `read_text`.
    """
    yield from _streamed(path, iter)


def _streamed(path: Path, pieces: Callable[[TextIO], Iterator[str]]) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from pieces(file)
    except UnicodeDecodeError:
        raise DataError(
            f"{str(path)!r} is not UTF-8 at byte {_bad_byte(path)}; convert it to UTF-8"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror}") from None


def _bad_byte(path: Path) -> int:
    """Where a file stops to be UTF-8."""
    decoder, begun = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while True:
            kept = len(decoder.getstate()[0])
            content = file.read(_PIECE_CHARACTERS)
            try:
                decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                return begun - kept + error.start
            begun += len(content)


class _KeyTwice(ValueError):
    pass


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _KeyTwice(f"the key {twice!r} comes twice")
    return record


def _holds_surrogates(record: object) -> bool:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def json_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every object of a JSONL file with its line number, from 1; empty lines are passed over.

    Raises:
        DataError: A line is not JSON, no object, or holds half a character.
    """
    for number, line in enumerate(stream_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_pairs_hook=_distinct)
        except (ValueError, RecursionError) as error:
            reason = error if isinstance(error, _KeyTwice) else "expected one object on each line"
            raise DataError(f"{str(path)!r} line {number} is not JSON: {reason}") from None
        # Half a character, which JSON can escape and no other text can hold.
        if "\\ud" in line.lower() and _holds_surrogates(record):
            raise DataError(
                f"{str(path)!r} line {number}: expected Unicode text, got half a surrogate pair "
                "(\\ud800 to \\udfff); mend or remove that character"
            )
        if not isinstance(record, dict):
            raise DataError(f"{str(path)!r} line {number}: expected a JSON object")
        yield number, record


def shown(value: object) -> str:
    """A JSON value as it stands in a file, or its beginning."""
    return json.dumps(value, ensure_ascii=False)[:40]


def check_columns(path: Path, line: int, there: Sequence[str], wanted: Mapping[str, str]) -> None:
    """See that the columns asked for are there, each once.

    Args:
        path: The file.
        line: Where `there` was found.
        there: Columns or keys.
        wanted: By the key of the run spec's section `data` that names it.

    Raises:
        DataError: What is missing, and what to set.
    """
    for name in wanted.values():
        if there.count(name) > 1:
            raise DataError(
                f"{str(path)!r} line {line}: expected one column {name!r}, found "
                f"{there.count(name)} of that name; rename all but one"
            )
    missing = {key: name for key, name in wanted.items() if name not in there}
    if not missing:
        return
    others = [name for name in there if name not in wanted.values()]
    found = ", ".join(repr(str(name)[:40]) for name in there[:10]) or "nothing"
    settings = []
    for key, name in missing.items():
        near = difflib.get_close_matches(name, others, n=1) or others
        lone = len(near) == 1 and len(missing) <= len(others)
        settings.append(f"--set data.{key}={near[0] if lone else 'COLUMN'}")
    names = " and ".join(map(repr, missing.values()))
    raise DataError(
        f"expected a column {names} in {str(path)!r} line {line}, found {found}; "
        f"say which it is: {' '.join(settings)}"
    )
