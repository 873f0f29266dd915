"""Report to systemd through two sockets: the service manager's and the system journal's.

Sources: sd_notify(3), sd_watchdog_enabled(3); https://systemd.io/JOURNAL_NATIVE_PROTOCOL/ and
`$JOURNAL_STREAM` in systemd.exec(5). The journal of a run is unrelated: it is a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping
from enum import IntEnum
from typing import Final

from protocol.base.errors import SamestepError

_JOURNAL_SOCKET: Final = "/run/systemd/journal/socket"
_STATUS_INTERVAL_S: Final = 1.0
"""Interval at which the status is read and the watchdog is pinged, unless the watchdog needs a
shorter one."""


class Supervisor:
    """The link to systemd, the supervisor of this process: reports readiness, status and pings.

    Does nothing without `$NOTIFY_SOCKET`. Removes systemd's variables from the environment: child
    processes must not report in this process's place.

    Args:
        environment: Environment variables, with systemd's if systemd started this process.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        watchdog_us = environment.pop("WATCHDOG_USEC", "")
        is_watched = environment.pop("WATCHDOG_PID", "") in {"", str(os.getpid())}
        self._watchdog_s = int(watchdog_us) / 1e6 if watchdog_us.isdecimal() and is_watched else 0.0
        self._socket: socket.socket | None = None
        self._sender: asyncio.Task[None] | None = None
        if address:
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def report_ready(
        self, status: Callable[[], str], *, is_alive: Callable[[], bool] = lambda: True
    ) -> None:
        """Report that this daemon has started; from now on send its status and the pings.

        Args:
            status: Returns the status of the service, in one line.
            is_alive: Returns whether to ping the watchdog.
        """
        if self._socket is not None:
            self._send("READY=1")
            self._sender = asyncio.get_running_loop().create_task(
                self._send_status(status, is_alive)
            )

    def report_stopping(self) -> None:
        """Report that this daemon was asked to stop and finishes its work."""
        self._send("STOPPING=1")

    def close(self) -> None:
        """Stop reporting."""
        if self._sender is not None:
            self._sender.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _send_status(self, status: Callable[[], str], is_alive: Callable[[], bool]) -> None:
        is_watched = self._watchdog_s > 0
        pause_s = _STATUS_INTERVAL_S
        if is_watched:
            pause_s = min(pause_s, self._watchdog_s / 3)
        last_line = ""
        while True:
            pings = ["WATCHDOG=1"] if is_watched and is_alive() else []
            line = " ".join(status().split())
            updates = [] if line == last_line else [f"STATUS={line}"]
            last_line = line
            if pings or updates:
                self._send(*pings, *updates)
            await asyncio.sleep(pause_s)

    def _send(self, *assignments: str) -> None:
        if self._socket is None:
            return
        # If the service manager is busy or away, it gets the next report.
        with contextlib.suppress(OSError):
            self._socket.sendto("\n".join(assignments).encode(), self._address)


class Priority(IntEnum):
    """Priorities of syslog(3); `journalctl -p warning` shows those up to 4."""

    CRITICAL = 2
    ERROR = 3
    WARNING = 4
    NOTICE = 5
    INFO = 6


class SystemJournal:
    """Writes entries with fields to the system journal, under a command's name.

    `journalctl SAMESTEP_WORKER=cuda0` then finds the entries about one worker.
    """

    def __init__(self, command: str, stream: int, address: str) -> None:
        self._command = command
        self._stream = stream
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    @classmethod
    def for_stream(
        cls, command: str, stream: int = 2, environment: Mapping[str, str] = os.environ
    ) -> SystemJournal | None:
        """Return the journal that a stream leads to; None if it leads elsewhere.

        Args:
            command: coordinator or worker.
            stream: File descriptor, by default that of standard error.
            environment: Environment variables, with `$JOURNAL_STREAM` of systemd.
        """
        try:
            status = os.fstat(stream)
        except OSError:
            return None
        device_and_inode = environment.get("JOURNAL_STREAM", "")
        return (
            cls(command, stream, _JOURNAL_SOCKET)
            if device_and_inode == f"{status.st_dev}:{status.st_ino}"
            else None
        )

    def write(
        self,
        message: str,
        fields: Mapping[str, object] | None = None,
        priority: Priority = Priority.INFO,
    ) -> None:
        """Write one entry; each field's name gets the prefix SAMESTEP_."""
        samestep_fields = {
            f"SAMESTEP_{name.upper()}": str(value) for name, value in (fields or {}).items()
        }
        entry = {
            "MESSAGE": message,
            "PRIORITY": str(int(priority)),
            "SYSLOG_IDENTIFIER": self._command,
            **samestep_fields,
        }
        content = b"".join(_assignment(name, value.encode()) for name, value in entry.items())
        try:
            self._socket.sendto(content, self._address)
        except OSError:
            # The stream also leads to the journal, but without fields.
            with contextlib.suppress(OSError):
                os.write(self._stream, f"<{int(priority)}>{message}\n".encode())

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def write_error(command: str, error: SamestepError) -> None:
    """Write the last line of a command that fails, to standard error or the journal behind it."""
    journal = SystemJournal.for_stream(command)
    if journal is None:
        sys.stderr.write(f"{command}: {error}\n")
        return
    journal.write(str(error), {"exit_code": int(error.exit_code)}, Priority.ERROR)
    journal.close()


def _assignment(name: str, value: bytes) -> bytes:
    if b"\n" not in value:
        return b"%s=%s\n" % (name.encode(), value)
    return b"%s\n%s%s\n" % (name.encode(), len(value).to_bytes(8, "little"), value)
