"""Who is connected to the control port: how many at a time, and for how long without a token.

Any process of the machine can connect. One that has not shown the token within the time of a
handshake goes, and so does the oldest such one when a place is needed; whoever has shown it stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from aiohttp.web_protocol import RequestHandler

from protocol.base import limits

Handler = RequestHandler


class Visitors:
    """The connections of one control port.

    Args:
        serve: Gives the protocol of a new connection.
    """

    def __init__(self, serve: Callable[[], Handler]) -> None:
        self._serve = serve
        self._inside: dict[Handler, _Visit] = {}

    def __len__(self) -> int:
        return len(self._inside)

    def greet(self, address: tuple[str, int]) -> asyncio.Protocol | None:
        """The protocol of a new connection; None if there is no place. See `doorway.Greet`."""
        del address
        if len(self._inside) >= limits.CONTROL_CONNECTIONS:
            oldest = next((visit for visit in self._inside.values() if visit.leaves), None)
            if oldest is None:
                return None
            oldest.end()
        visit = _Visit(self._serve(), self._left)
        self._inside[visit.handler] = visit
        return visit

    def trust(self, handler: object) -> None:
        """Its request bears the token."""
        for visit in (self._inside.get(handler),) if isinstance(handler, RequestHandler) else ():
            if visit is not None:
                visit.stay()

    def _left(self, visit: _Visit) -> None:
        self._inside.pop(visit.handler, None)


class _Visit(asyncio.Protocol):
    """One connection; passes everything on to the handler of its requests."""

    def __init__(self, handler: Handler, left: Callable[[_Visit], None]) -> None:
        self.handler = handler
        self._left = left
        self._transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        self.leaves: asyncio.TimerHandle | None = loop.call_later(
            limits.HANDSHAKE_TIMEOUT_MS / 1000, self.end
        )

    def stay(self) -> None:
        """Without a limit in time from here on."""
        if self.leaves is not None:
            self.leaves.cancel()
            self.leaves = None

    def end(self) -> None:
        """Close it now; its place is free at once."""
        self.stay()
        self._left(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.handler.connection_made(transport)
        if self.leaves is None:
            self._transport.abort()  # its time was over before it began

    def connection_lost(self, exc: BaseException | None) -> None:
        self.stay()
        self._left(self)
        if self._transport is not None:
            self.handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.handler.data_received(data)

    def eof_received(self) -> None:
        self.handler.eof_received()

    def pause_writing(self) -> None:
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        self.handler.resume_writing()
