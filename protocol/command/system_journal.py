"""Entries with fields in systemd's journal, for a daemon whose standard error leads there.

`journalctl SAMESTEP_WORKER=cuda0` then finds what concerns one worker. Not the journal of a run,
which is a file and proves something.

Source: https://systemd.io/JOURNAL_NATIVE_PROTOCOL/; `$JOURNAL_STREAM` in systemd.exec(5).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from protocol.base.errors import SamestepError

_SOCKET: Final = "/run/systemd/journal/socket"


class Priority(IntEnum):
    """Of syslog(3); `journalctl -p warning` shows those up to 4."""

    CRITICAL = 2
    ERROR = 3
    WARNING = 4
    NOTICE = 5
    INFO = 6


class SystemJournal:
    """Writes entries under a command's name; have one by `behind`."""

    def __init__(self, command: str, stream: int, address: str) -> None:
        self._command = command
        self._stream = stream
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    @classmethod
    def behind(
        cls, command: str, stream: int = 2, environment: Mapping[str, str] = os.environ
    ) -> SystemJournal | None:
        """The journal that a stream leads to; None if it leads elsewhere.

        Args:
            command: coordinator or worker.
            stream: File descriptor; standard error.
            environment: With systemd's variable.
        """
        try:
            status = os.fstat(stream)
        except OSError:
            return None
        named = environment.get("JOURNAL_STREAM", "")
        return (
            cls(command, stream, _SOCKET) if named == f"{status.st_dev}:{status.st_ino}" else None
        )

    def write(
        self,
        message: str,
        fields: Mapping[str, object] | None = None,
        priority: Priority = Priority.INFO,
    ) -> None:
        """One entry; each field's name gets the prefix SAMESTEP_."""
        own = {f"SAMESTEP_{name.upper()}": str(value) for name, value in (fields or {}).items()}
        entry = {
            "MESSAGE": message,
            "PRIORITY": str(int(priority)),
            "SYSLOG_IDENTIFIER": self._command,
            **own,
        }
        content = b"".join(_assignment(name, value.encode()) for name, value in entry.items())
        try:
            self._socket.sendto(content, self._address)
        except OSError:
            # The stream is the journal too, without the fields.
            with contextlib.suppress(OSError):
                os.write(self._stream, f"<{int(priority)}>{message}\n".encode())

    def close(self) -> None:
        """Write nothing more."""
        self._socket.close()


def write_error(command: str, error: SamestepError) -> None:
    """The last line of a command that fails, on standard error or in the journal behind it."""
    journal = SystemJournal.behind(command)
    if journal is None:
        sys.stderr.write(f"{command}: {error}\n")
        return
    journal.write(str(error), {"exit_code": int(error.exit_code)}, Priority.ERROR)
    journal.close()


def _assignment(name: str, value: bytes) -> bytes:
    if b"\n" not in value:
        return b"%s=%s\n" % (name.encode(), value)
    return b"%s\n%s%s\n" % (name.encode(), len(value).to_bytes(8, "little"), value)
