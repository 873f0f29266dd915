"""Write a Chrome trace of a process's events (open it in Perfetto or chrome://tracing).

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (JSON
array format, complete "X" and instant "i" events, microseconds).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Self

from protocol.base.errors import UsageError


def _open_file(path: str, flags: int) -> int:
    """Open a file, or a pipe with a reader; without a reader, opening would block."""
    fd = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    if hasattr(os, "set_blocking"):
        os.set_blocking(fd, True)
    return fd


class Tracer:
    """Writes events to a file as they happen; thread-safe."""

    def __init__(self, path: Path, process: str) -> None:
        self._file = open(path, "w", encoding="utf-8", opener=_open_file)  # noqa: SIM115
        self._lock = threading.Lock()
        self._file.write("[\n")
        self._write({"name": "process_name", "ph": "M", "args": {"name": process}})

    @classmethod
    def to_file(cls, path: Path, process: str) -> Tracer:
        """Start a trace in the file that the user named.

        Raises:
            UsageError: The file cannot be written.
        """
        try:
            return cls(path, process)
        except OSError as error:
            raise UsageError(
                f"--trace {str(path)!r} cannot be written: {error.strerror}; name another file"
            ) from None

    def instant(self, name: str, track: str, **details: object) -> None:
        """Record an event that happens now."""
        self._write(
            {"name": name, "ph": "i", "s": "t", "ts": now_us(), "tid": track, "args": details}
        )

    def span(self, name: str, track: str, start_us: float, **details: object) -> None:
        """Record an event that lasted from `start_us` (see `now_us`) until now."""
        self._write(
            {
                "name": name,
                "ph": "X",
                "ts": start_us,
                "dur": now_us() - start_us,
                "tid": track,
                "args": details,
            }
        )

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if not self._file.closed:
                self._file.write("{}]\n")
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, event: dict[str, object]) -> None:
        line = json.dumps({"pid": 0, **event})
        with self._lock, contextlib.suppress(OSError):
            # A full disk ends the trace, not the run.
            if not self._file.closed:
                self._file.write(line + ",\n")


def now_us() -> float:
    """Return microseconds on the monotonic clock, which all processes of the machine share."""
    return time.monotonic_ns() / 1e3
