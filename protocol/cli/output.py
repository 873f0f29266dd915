"""Standard streams whose failures never end a process.

If a reader has gone (`| head -1`), a disk is full or a terminal has closed, output is lost, and the
process continues and ends with the exit code of its work. Everything that writes to `sys.stdout` or
`sys.stderr` (print, typer, rich, structlog) goes through here.

A command waits for a reader that has stopped (`| less`, Ctrl-S). A daemon calls
`never_wait_for_readers` and loses lines until they are read again.
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
"""How long a daemon waits for a reader that has stopped."""
_PIPE_BYTES: Final = select.PIPE_BUF
_TERMINAL_BYTES: Final = 256
"""Maximum size of one write: a pipe or a terminal that is writable accepts this without
blocking."""
_STREAMS: Final = {1: "stdout", 2: "stderr"}


class _DroppingFile(io.FileIO):
    """A file that drops output that cannot be written, instead of raising an error."""

    def __init__(self, descriptor: int, failed: Callable[[OSError], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._failed = failed
        self._piece_bytes = _TERMINAL_BYTES if self.isatty() else _PIPE_BYTES
        self._lost_bytes = 0

    def write(self, content: Any) -> int:
        """Write as much as possible, and report everything as written."""
        length = memoryview(content).nbytes
        try:
            if self._lost_bytes and self._is_writable():
                note = f"({self._lost_bytes} bytes of output are lost: nobody read them)\n".encode()
                self._lost_bytes = self._write(memoryview(note))
            self._lost_bytes += self._write(memoryview(content).cast("B"))
        except OSError as error:
            self._failed(error)
        return length

    def _write(self, remaining: memoryview) -> int:
        """Write `remaining`; return the number of bytes that could not be written."""
        while remaining and self._is_writable():
            remaining = remaining[super().write(remaining[: self._piece_bytes]) or 0 :]
        return remaining.nbytes

    def _is_writable(self) -> bool:
        if not _DAEMON.is_set():
            return bool(select.select([], [self], [])[1])
        # Once output was lost, do not wait for the reader again.
        patience_s = 0.0 if self._lost_bytes else _PATIENCE_S
        return bool(select.select([], [self], [], patience_s)[1])


_DAEMON: Final = threading.Event()


def never_wait_for_readers() -> None:
    """From now on, drop output whose reader has stopped, instead of waiting for the reader."""
    _DAEMON.set()


def tolerate_stream_failures(command: str) -> None:
    """Keep failures of the standard streams from ending this process; call this before any output.

    Args:
        command: The prefix of the reported lines.
    """
    open_standard_streams()
    reported: set[int] = set()

    def failed(descriptor: int, error: OSError) -> None:
        # EPIPE is a reader that has seen enough; a failure of standard error cannot be reported.
        if descriptor == 1 and error.errno != errno.EPIPE and not reported:
            reported.add(descriptor)
            line = f"{command}: standard output cannot be written: {error.strerror}; lines are lost"
            with contextlib.suppress(OSError):
                os.write(2, f"{line}; the work continues\n".encode())

    for descriptor, name in _STREAMS.items():
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and _descriptor_of(stream) == descriptor:
            setattr(sys, name, _drop_failures(stream, partial(failed, descriptor)))


def open_standard_streams() -> None:
    """Open the null device for each standard stream that is closed.

    Otherwise a socket would get the stream's number, and libraries would write into it or abort.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            fd = os.open(os.devnull, os.O_RDWR)
            if fd != descriptor:
                os.dup2(fd, descriptor)
                os.close(fd)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def say(text: str, stream: TextIO) -> None:
    """Print and flush a line on a stream that may be a script's; ignore failures."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


def _descriptor_of(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _drop_failures(stream: io.TextIOWrapper, failed: Callable[[OSError], None]) -> io.TextIOWrapper:
    """Return a stream for the same descriptor that ignores failures."""
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
    encoding_errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    return io.TextIOWrapper(
        io.BufferedWriter(_DroppingFile(stream.fileno(), failed)),
        encoding=stream.encoding,
        errors=encoding_errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
