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
from protocol.base.regular_file import open_regular

_PIECE_CHARACTERS: Final = 1 << 20
_UNPACK, _AS_TEXT = "unpack it first", "save what it says as text (UTF-8)"
_OTHER_KINDS: Final = {
    b"\x1f\x8b": ("gzip", _UNPACK),
    b"BZh": ("bzip2", _UNPACK),
    b"\xfd7zXZ\0": ("xz", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("zstandard", _UNPACK),
    b"7z\xbc\xaf\x27\x1c": ("7-Zip", _UNPACK),
    b"Rar!\x1a\x07": ("RAR", _UNPACK),
    b"PK\x03\x04": (
        "a ZIP archive, as .zip, .docx, .xlsx and .odt are",
        f"{_UNPACK}, or {_AS_TEXT}",
    ),
    b"%PDF-": ("PDF", _AS_TEXT),
    b"{\\rtf": ("RTF", _AS_TEXT),
    b"\xd0\xcf\x11\xe0": ("an old Office document", _AS_TEXT),
    b"PAR1": (
        "Parquet",
        "let its name end with .parquet where Parquet is read, or write it as .jsonl",
    ),
    b"ARROW1": ("Arrow", "write it as .jsonl"),
    b"SQLite format 3\0": ("SQLite", "write the table as .csv or .jsonl"),
    b"\xff\xfe": ("UTF-16", "convert it to UTF-8"),
    b"\xfe\xff": ("UTF-16", "convert it to UTF-8"),
}
"""How files begin that are no text: what they are, and what to do."""
_MAGIC_BYTES: Final = max(map(len, _OTHER_KINDS))


def read_text(path: Path) -> str:
    """The file's text with its line ends as they are; a byte-order mark is left out.

    Raises:
        DataError: It cannot be read, or is not UTF-8.
    """
    _refuse_other_kinds(path)
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
    _refuse_other_kinds(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from pieces(file)
    except UnicodeDecodeError:
        raise DataError(
            f"{str(path)!r} is not UTF-8 at byte {_bad_byte(path)}; convert it to UTF-8"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror}") from None


def _refuse_other_kinds(path: Path) -> None:
    """See that a file is not what people take for text by its name.

    Raises:
        DataError: It begins as another kind of file does.
    """
    try:
        with open_regular(path) as file:
            beginning = file.read(_MAGIC_BYTES)
    except OSError:
        return  # who reads it says what is wrong with it
    for magic, (kind, remedy) in _OTHER_KINDS.items():
        if beginning.startswith(magic):
            raise DataError(
                f"expected text in {str(path)!r}, got {kind}: this kind of file is not read here; "
                f"{remedy}"
            )


def _bad_byte(path: Path) -> int:
    """Where a file stops to be UTF-8."""
    decoder, begun = codecs.getincrementaldecoder("utf-8")(), 0
    with open_regular(path) as file:
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
