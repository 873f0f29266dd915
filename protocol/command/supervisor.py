"""What systemd is told: a daemon is ready, what it is doing, and that its event loop still turns.

Source: sd_notify(3) and sd_watchdog_enabled(3), whose whole protocol is a datagram of assignments
to the socket that `$NOTIFY_SOCKET` names. Where that is unset nothing is made, sent or scheduled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, MutableMapping
from typing import Final

_TURN_S: Final = 1.0
"""Between two looks at the status, and between two pings unless the watchdog wants more."""


class Supervisor:
    """Speaks for this process alone: its variables are taken out of the environment.

    Args:
        environment: With systemd's variables, if it started this process.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        watchdog_us = environment.pop("WATCHDOG_USEC", "")
        watched = environment.pop("WATCHDOG_PID", "") in {"", str(os.getpid())}
        self._watchdog_s = int(watchdog_us) / 1e6 if watchdog_us.isdecimal() and watched else 0.0
        self._socket: socket.socket | None = None
        self._turning: asyncio.Task[None] | None = None
        if address:
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def ready(self, status: Callable[[], str]) -> None:
        """It has started; from now on the running loop tells the status and keeps the watchdog."""
        if self._socket is not None:
            self._tell("READY=1")
            self._turning = asyncio.get_running_loop().create_task(self._turn(status))

    def stopping(self) -> None:
        """It was told to end, and finishes what it has begun."""
        self._tell("STOPPING=1")

    def close(self) -> None:
        """Say nothing more."""
        if self._turning is not None:
            self._turning.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _turn(self, status: Callable[[], str]) -> None:
        pings = ["WATCHDOG=1"] if self._watchdog_s else []
        pause_s = min(_TURN_S, self._watchdog_s / 3) if pings else _TURN_S
        told = ""
        while True:
            line = " ".join(status().split())
            news = [] if line == told else [f"STATUS={line}"]
            told = line
            if pings or news:
                self._tell(*pings, *news)
            await asyncio.sleep(pause_s)

    def _tell(self, *assignments: str) -> None:
        if self._socket is None:
            return
        # A supervisor that is busy or away hears the next one; a daemon does not end for that.
        with contextlib.suppress(OSError):
            self._socket.sendto("\n".join(assignments).encode(), self._address)
