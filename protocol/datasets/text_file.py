"""Read text files, plain or compressed, whole or in pieces; JSON lines and JSON lists.

Text is UTF-8; the error for any other file names its format and what to do.
"""

from __future__ import annotations

import codecs
import difflib
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO, cast

from protocol.base.errors import DataError
from protocol.base.regular_file import open_regular
from protocol.datasets.logits_file import pyarrow_modules
from protocol.spec.sections.data import COLUMNS_OF_FORMAT, OPTIONAL_COLUMNS

_PIECE_CHARACTERS: Final = 1 << 20
_SIMILARITY: Final = 0.75
"""How similar a column must be to a required one to be suggested in its place, of 1."""
_UNPACK, _AS_TEXT = "unpack it first", "save its content as text (UTF-8)"
_OTHER_FORMATS: Final = {
    b"BZh": ("bzip2", _UNPACK),
    b"\xfd7zXZ\0": ("xz", _UNPACK),
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
        "if this task reads Parquet, rename it to .parquet; otherwise write it as .jsonl",
    ),
    b"ARROW1": (
        "Arrow",
        "if this task reads Arrow, rename it to .arrow; otherwise write it as .jsonl",
    ),
    b"SQLite format 3\0": ("SQLite", "write the table as .csv or .jsonl"),
    b"\xff\xfe": ("UTF-16", "convert it to UTF-8"),
    b"\xfe\xff": ("UTF-16", "convert it to UTF-8"),
}
"""The first bytes of files that are not text, each with the format and what to do."""
SKIP_BAD_ROWS: Final = "--set data.skip_bad_rows=true"
"""The option that leaves out rows that cannot be used."""

_GZIP: Final = b"\x1f\x8b"
_ZSTANDARD: Final = b"\x28\xb5\x2f\xfd"
_COMPRESSIONS: Final = {
    ".gz": ("gzip", _GZIP),
    ".zst": ("zstandard", _ZSTANDARD),
    ".zstd": ("zstandard", _ZSTANDARD),
}
"""By suffix, the compression and the first bytes of the file."""
_MAGIC_BYTES: Final = max(map(len, _OTHER_FORMATS))


def is_compressed(path: Path) -> bool:
    """Return whether a file has the first bytes of gzip or zstandard."""
    return _first_bytes(path).startswith((_GZIP, _ZSTANDARD))


def open_decompressed(path: Path) -> BinaryIO:
    """Open a regular file for reading, its content decompressed.

    Raises:
        DataError: The file is zstandard, and pyarrow is missing.
        OSError: The file cannot be opened.
    """
    file = open_regular(path)
    magic = file.read(_MAGIC_BYTES)
    file.seek(0)
    if not magic.startswith((_GZIP, _ZSTANDARD)):
        return file
    file.close()
    if magic.startswith(_GZIP):
        return cast("BinaryIO", gzip.open(path, "rb"))
    pa, _ = pyarrow_modules("zstandard files are read by pyarrow")
    return cast("BinaryIO", pa.input_stream(str(path), compression="zstd"))


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Replace errors of reading a file by a `DataError` of one line."""
    try:
        yield
    except UnicodeDecodeError:
        raise DataError(
            f"{str(path)!r} is not UTF-8 at byte {_find_bad_byte(path)}; convert it to UTF-8"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"the compressed file {str(path)!r} is damaged: {error}; copy or download it again"
        ) from None
    except OSError as error:
        if error.strerror:
            raise DataError(f"cannot read {str(path)!r}: {error.strerror}") from None
        raise DataError(
            f"the compressed file {str(path)!r} is damaged: {error}; copy or download it again"
        ) from None


def read_text(path: Path) -> str:
    """Return a file's text with its line ends as they are, without a byte-order mark.

    Raises:
        DataError: The file cannot be read, is damaged, or is not UTF-8.
    """
    with _file_errors(path), _open_text(path) as file:
        return file.read()


def read_lines(path: Path) -> list[str]:
    """Return the lines with their ends (LF, CR LF or CR); U+2028 and the like do not end a line."""
    return list(io.StringIO(read_text(path), newline=""))


def text_pieces(path: Path) -> Iterator[str]:
    """Read a text as `read_text` does, piece by piece, for files larger than memory."""
    with _file_errors(path), _open_text(path) as file:
        yield from iter(lambda: file.read(_PIECE_CHARACTERS), "")


def stream_lines(path: Path) -> Iterator[str]:
    """Read the lines as `read_lines` does, one at a time, for files larger than memory."""
    with _file_errors(path), _open_text(path) as file:
        yield from file


def _open_text(path: Path) -> TextIO:
    beginning = b""
    with suppress(OSError), open_decompressed(path) as file:  # the caller's read reports the error
        beginning = file.read(_MAGIC_BYTES)
    for magic, (type_name, remedy) in _OTHER_FORMATS.items():
        if beginning.startswith(magic):
            raise DataError(
                f"expected text in {str(path)!r}, got {type_name}, which is not "
                f"supported here; {remedy}"
            )
    compression, magic = _COMPRESSIONS.get(path.suffix.lower(), ("", b""))
    if beginning and not _first_bytes(path).startswith(magic):
        raise DataError(
            f"expected {compression} in {str(path)!r}, as its name says, got other content; "
            f"download or compress it again, or remove {path.suffix} from its name if it is plain "
            "text"
        )
    return io.TextIOWrapper(open_decompressed(path), encoding="utf-8-sig", newline="")


def _first_bytes(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(_MAGIC_BYTES)
    except OSError:
        return b""  # the caller's read reports the error


def _find_bad_byte(path: Path) -> int:
    """Return the first byte that is not UTF-8."""
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    with open_decompressed(path) as file:
        while True:
            pending_bytes = len(decoder.getstate()[0])
            content = file.read(_PIECE_CHARACTERS)
            try:
                decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                return position - pending_bytes + error.start
            position += len(content)


_SPACES: Final = re.compile(r"\s+")


class _DuplicateKey(ValueError):
    pass


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise _DuplicateKey(f"the key {duplicate!r} occurs twice")
    return record


def _contains_surrogates(record: object) -> bool:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
    """Yield the number of each nonempty line of a JSONL file, and its object or its error.

    Raises:
        DataError: The file cannot be read, or is not UTF-8.
    """
    for number, line in enumerate(stream_lines(path), start=1):
        if not line.strip():
            continue
        location = f"{str(path)!r} line {number}"
        try:
            record = json.loads(line, object_pairs_hook=_refuse_duplicate_keys)
        except (ValueError, RecursionError) as error:
            reason = (
                error if isinstance(error, _DuplicateKey) else "expected one object on each line"
            )
            yield number, DataError(f"{location} is not JSON: {reason}")
            continue
        yield number, check_object(location, record, may_contain_half_pair="\\ud" in line.lower())


def check_object(
    location: str, value: object, *, may_contain_half_pair: bool = True
) -> dict[str, Any] | DataError:
    """Return an object of a file, or the error if the value is not a valid object.

    Args:
        location: File and row.
        value: The parsed JSON value.
        may_contain_half_pair: Whether the value may contain half a surrogate pair, which only JSON
            can escape.
    """
    if may_contain_half_pair and _contains_surrogates(value):
        return DataError(
            f"{location}: expected Unicode text, got half a surrogate pair (\\ud800 to \\udfff); "
            "correct or remove that character"
        )
    return value if isinstance(value, dict) else DataError(f"{location}: expected a JSON object")


def json_values(path: Path, pieces: Iterator[str]) -> Iterator[Any]:
    """Read the values of a JSON list one at a time.

    Args:
        path: The file, for errors.
        pieces: The list's text.

    Raises:
        DataError: The text is not JSON.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_refuse_duplicate_keys)
    text, position, count, expected = "", 0, 0, "["
    for piece in itertools.chain(pieces, [""]):
        text, position = text[position:] + piece, 0
        while True:
            if spaces := _SPACES.match(text, position):
                position = spaces.end()
            next_character = text[position : position + 1]
            if next_character == "]" and (expected == "," or not (expected or count)):
                return
            if expected:
                if not next_character:
                    break
                if next_character != expected:
                    raise DataError(
                        f"{str(path)!r} is not JSON: expected {expected!r} after row {count}, got "
                        f"{next_character!r}"
                    )
                position, expected = position + 1, ""
                continue
            try:
                value, position = decoder.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                if piece and not isinstance(error, _DuplicateKey):
                    break  # the rest of the value may be in the next piece
                raise DataError(f"{str(path)!r} row {count + 1} is not JSON: {error}") from None
            count, expected = count + 1, ","
            yield value
    raise DataError(f"{str(path)!r} is not JSON: expected ']' after row {count}")


def format_value(value: object) -> str:
    """Format the beginning of a JSON value for an error."""
    return json.dumps(value, ensure_ascii=False)[:40]


def check_columns(
    location: str,
    actual_columns: Sequence[str],
    required_columns: Mapping[str, str],
    *,
    optional: Collection[str] = (),
    is_lone_row: bool = False,
) -> None:
    """Check that each required column exists once.

    Args:
        location: File and row of the columns.
        actual_columns: Columns of the table, or keys of the row.
        required_columns: Columns, by the key of the run spec's section `data` that names them.
        optional: Columns that are read where they exist.
        is_lone_row: Whether earlier rows have all columns, so that only this row is wrong.

    Raises:
        DataError: A required column is missing or occurs twice; the error says what to set.
    """
    for name in required_columns.values():
        if actual_columns.count(name) > 1:
            raise DataError(
                f"{location}: expected one column {name!r}, found "
                f"{actual_columns.count(name)} of that name; rename all but one"
            )
    missing = {key: name for key, name in required_columns.items() if name not in actual_columns}
    if not missing:
        return
    used = {*required_columns.values(), *optional}
    unused = [name for name in actual_columns if name not in used]
    column_names = ", ".join(repr(str(name)[:40]) for name in actual_columns[:10]) or "none"
    settings = []
    for key, name in missing.items():
        similar = difflib.get_close_matches(name, unused, n=1, cutoff=_SIMILARITY)
        candidates = similar or (unused if len(missing) == 1 else [])
        is_unique = len(candidates) == 1
        settings.append(f"--set data.{key}={candidates[0] if is_unique else 'COLUMN'}")
    names = " and ".join(map(repr, missing.values()))
    advice = f"name the column: {' '.join(settings)}"
    if (other_format := _format_with(actual_columns)) and {*missing} & _CONVERSATION_KEYS:
        advice = f"these are columns of another format: --set data.format={other_format}"
    if is_lone_row:
        advice = f"correct the row, or leave it out: {SKIP_BAD_ROWS}"
    raise DataError(f"expected a column {names} in {location}, found {column_names}; {advice}")


_CONVERSATION_KEYS: Final = frozenset(
    f"columns.{column}" for columns in COLUMNS_OF_FORMAT.values() for column in columns
)


def _format_with(columns: Sequence[str]) -> str | None:
    """Return the format of conversations that these columns fit; None if they fit none."""
    for name, required_columns in COLUMNS_OF_FORMAT.items():
        required = {*required_columns} - OPTIONAL_COLUMNS
        if required and required <= {*columns}:
            return name
    return None
