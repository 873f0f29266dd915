"""What a process writes for people, on its standard streams: reporting never ends work.

A reader that is gone (`| head -1`), a full disk behind a log, a terminal that has vanished: what
cannot be written is lost, and the process goes on to the exit code of its work. Everything that
writes to `sys.stdout` or `sys.stderr` (print, typer, rich, structlog) goes through here.

A reader that stands still (`| less`, Ctrl-S) is waited for by a command that shows something, and
not by a daemon, which calls `never_wait_for_readers`: it loses lines until they are read again.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TextIO

_PATIENCE_S: Final = 1.0
"""Of a daemon, for a reader that stands still."""
_PIPE_BYTES: Final = select.PIPE_BUF
_TERMINAL_BYTES: Final = 256
"""What a pipe or a terminal takes without waiting, once it is writable."""
_STREAMS: Final = {1: "stdout", 2: "stderr"}


class _Lasting(io.FileIO):
    """A descriptor to write to, whose failures cost what was to be written and nothing else."""

    def __init__(self, descriptor: int, failed: Callable[[OSError], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._failed = failed
        self._piece_bytes = _TERMINAL_BYTES if self.isatty() else _PIPE_BYTES
        self._lost_bytes = 0

    def write(self, content: Any) -> int:
        """Write what is not refused; all of it counts as written."""
        length = memoryview(content).nbytes
        try:
            if self._lost_bytes and self._is_writable():
                note = f"({self._lost_bytes} bytes of output are lost: nobody read them)\n".encode()
                self._lost_bytes = self._write(memoryview(note))
            self._lost_bytes += self._write(memoryview(content).cast("B"))
        except OSError as error:
            self._failed(error)
        return length

    def _write(self, rest: memoryview) -> int:
        """How many bytes could not be written, because nobody reads."""
        while rest and self._is_writable():
            rest = rest[super().write(rest[: self._piece_bytes]) or 0 :]
        return rest.nbytes

    def _is_writable(self) -> bool:
        if not _DAEMON.is_set():
            return bool(select.select([], [self], [])[1])
        # One that has stood still for so long is waited for no more.
        patience_s = 0.0 if self._lost_bytes else _PATIENCE_S
        return bool(select.select([], [self], [], patience_s)[1])


_DAEMON: Final = threading.Event()


def never_wait_for_readers() -> None:
    """From here on what this process reports is lost where its reader stands still."""
    _DAEMON.set()


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
