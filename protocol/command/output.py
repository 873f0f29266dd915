"""What a process writes for people, on its standard streams: reporting never ends work.

A reader that is gone (`| head -1`), a full disk behind a log, a terminal that has vanished: what
cannot be written is lost, and the process goes on to the exit code of its work. Everything that
writes to `sys.stdout` or `sys.stderr` (print, typer, rich, structlog) goes through here.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TextIO

_PATIENCE_S: Final = 5.0
"""For a reader that a stream does not wait for itself (O_NONBLOCK)."""
_STREAMS: Final = {1: "stdout", 2: "stderr"}


class _Lasting(io.FileIO):
    """A descriptor to write to, whose failures cost what was to be written and nothing else."""

    def __init__(self, descriptor: int, failed: Callable[[OSError], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._failed = failed

    def write(self, content: Any) -> int:
        """Write what is not refused; all of it counts as written."""
        rest = memoryview(content).cast("B")
        length = len(rest)
        try:
            while rest:
                written = super().write(rest)
                if written is None and not select.select([], [self], [], _PATIENCE_S)[1]:
                    break
                rest = rest[written or 0 :]
        except OSError as error:
            self._failed(error)
        return length


def keep_reporting(command: str) -> None:
    """From here on nothing that this process reports can end it. To be called first of all.

    Args:
        command: What its lines begin with.
    """
    open_standard_streams()
    told: set[int] = set()

    def failed(descriptor: int, error: OSError) -> None:
        # A reader that has seen enough is no trouble, and a full standard error can say nothing.
        if descriptor == 1 and error.errno != errno.EPIPE and not told:
            told.add(descriptor)
            line = f"{command}: standard output cannot be written: {error.strerror}; lines are lost"
            with contextlib.suppress(OSError):
                os.write(2, f"{line}, and the work goes on\n".encode())

    for descriptor, name in _STREAMS.items():
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and _descriptor(stream) == descriptor:
            setattr(sys, name, _lasting(stream, partial(failed, descriptor)))


def open_standard_streams() -> None:
    """Open the null device for each standard stream that is closed.

    Else a socket gets its number: libraries write to it, or abort the process over it.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def say(text: str, stream: TextIO) -> None:
    """Print a line at once on a stream that may be another's, a script's; never fail over it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _lasting(stream: io.TextIOWrapper, failed: Callable[[OSError], None]) -> io.TextIOWrapper:
    """The same stream over a descriptor that lasts."""
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
    lost_marks = "backslashreplace" if stream.errors == "strict" else stream.errors
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(stream.fileno(), failed)),
        encoding=stream.encoding,
        errors=lost_marks,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
