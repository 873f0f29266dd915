"""Read regular files and JSON.

Other types of files are refused: reading a pipe may block, and reading a device may never end.
"""

from __future__ import annotations

import errno
import json
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final

_LEVELS: Final = 128
"""Maximum nesting of brackets, so that code that walks a document does not overflow the stack."""
_TOO_DEEP: Final = f"expected JSON nested at most {_LEVELS} levels deep, got more"
_FILE_TYPES: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def check_regular(mode: int, path: Path) -> None:
    """Check that a mode is that of a regular file.

    Raises:
        OSError: The file is of another type; `strerror` names the type.
    """
    if not stat.S_ISREG(mode):
        file_type = stat.S_IFMT(mode)
        number = errno.EISDIR if file_type == stat.S_IFDIR else errno.EINVAL
        type_name = _FILE_TYPES.get(file_type, "another type of file")
        raise OSError(number, f"expected a file, got {type_name}", path)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Raises:
        OSError: The file cannot be opened, or is not regular.
    """
    check_regular(path.stat().st_mode, path)
    return path.open("rb")


def read_regular(path: Path, max_bytes: int | None = None) -> bytes:
    """Read a whole regular file.

    Args:
        path: The file, or a link to one.
        max_bytes: Largest size in bytes; None for no limit.

    Raises:
        OSError: The file cannot be read, is not regular, or is larger than `max_bytes`.
    """
    with open_regular(path) as file:
        content = file.read(-1 if max_bytes is None else max_bytes + 1)
    if max_bytes is not None and len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"expected at most {max_bytes} bytes, got more", path)
    return content


def parse_json(content: bytes | str) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: The document is not JSON, or is nested too deeply.
    """
    try:
        document = json.loads(content)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [document]
    for _ in range(_LEVELS + 1):
        containers = [container for container in level if isinstance(container, dict | list)]
        if not containers:
            return document
        level = [
            value
            for container in containers
            for value in (container.values() if isinstance(container, dict) else container)
        ]
    raise ValueError(_TOO_DEEP)


def read_json(path: Path) -> Any:
    """Read and parse a JSON file.

    Raises:
        OSError: See `read_regular`.
        ValueError: See `parse_json`.
    """
    return parse_json(read_regular(path))
