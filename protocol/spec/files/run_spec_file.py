"""Read a run spec from a file, or from a pipe such as a shell's `<(...)`."""

from __future__ import annotations

import errno
import logging
import os
import select
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from protocol.base import limits
from protocol.base.errors import RunSpecError
from protocol.spec.run_spec import RunSpec, parse_run_spec_text

_LOG: Final = logging.getLogger(__name__)
_WRITER_PATIENCE_S: Final = 5.0
"""Maximum wait for a pipe's writer: a shell starts both ends at about the same time."""


def load_run_spec(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Read and validate a run spec file.

    Args:
        path: A YAML file, or a pipe.
        overrides: `key=value` pairs, dots between nested keys, values in YAML.

    Raises:
        RunSpecError: Names each key at fault and what to do.
    """
    try:
        text = _read(path).decode("utf-8")
    except FileNotFoundError:
        raise RunSpecError(f"expected a run spec at {str(path)!r}, found no such file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunSpecError(f"cannot read the run spec {str(path)!r}: {reason}") from None
    return parse_run_spec_text(text, overrides, str(path), _LOG.warning)


def _read(path: Path) -> bytes:
    """Read a file of limited size; a device file could be endless.

    Raises:
        OSError: The file cannot be read, or is larger than a run spec may be.
    """
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(fd, "rb") as file:
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            _await_writer(fd)
        if hasattr(os, "set_blocking"):
            os.set_blocking(fd, True)
        content = file.read(limits.RUN_SPEC_BYTES + 1)
    if len(content) > limits.RUN_SPEC_BYTES:
        raise OSError(errno.EFBIG, f"expected at most {limits.RUN_SPEC_BYTES} bytes, got more")
    return content


def _await_writer(fd: int) -> None:
    """Wait for a pipe's writer: without one, a read returns end of file."""
    if not hasattr(select, "poll"):
        return  # on Windows an open pipe has a writer
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if not poll.poll(_WRITER_PATIENCE_S * 1000):
        raise OSError(errno.EPIPE, "expected a file, got a pipe that nobody writes to")
