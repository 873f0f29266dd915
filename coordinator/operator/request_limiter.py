"""Limit the connections to the control port: all in number, those without a token also in time.

Any process on this machine can connect. A connection without the token is closed after the
handshake timeout; the oldest such connection is closed earlier if a new connection needs its slot.
A connection with the token stays open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from aiohttp.web_protocol import RequestHandler

from protocol.base import limits

Handler = RequestHandler


class RequestLimiter:
    """The connections of one control port.

    Args:
        serve: Returns the protocol of a new connection.
    """

    def __init__(self, serve: Callable[[], Handler]) -> None:
        self._serve = serve
        self._connections: dict[Handler, _LimitedConnection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def make_protocol(self, address: tuple[str, int]) -> asyncio.Protocol | None:
        """Return the protocol of a new connection; None if too many are open."""
        del address
        if len(self._connections) >= limits.CONTROL_CONNECTIONS:
            oldest = next(
                (connection for connection in self._connections.values() if connection.deadline),
                None,
            )
            if oldest is None:
                return None
            oldest.end()
        connection = _LimitedConnection(self._serve(), self._on_closed)
        self._connections[connection.handler] = connection
        return connection

    def trust(self, handler: object) -> None:
        """Remove the time limit of a connection whose request has the token."""
        for connection in (
            (self._connections.get(handler),) if isinstance(handler, RequestHandler) else ()
        ):
            if connection is not None:
                connection.trust()

    def _on_closed(self, connection: _LimitedConnection) -> None:
        self._connections.pop(connection.handler, None)


class _LimitedConnection(asyncio.Protocol):
    """One connection, with a deadline until it has the token; the handler gets all its data."""

    def __init__(self, handler: Handler, on_closed: Callable[[_LimitedConnection], None]) -> None:
        self.handler = handler
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        loop = asyncio.get_running_loop()
        self.deadline: asyncio.TimerHandle | None = loop.call_later(
            limits.HANDSHAKE_TIMEOUT_MS / 1000, self.end
        )

    def trust(self) -> None:
        """Remove the time limit."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def end(self) -> None:
        """Close the connection now; its slot is free at once."""
        self.trust()
        self._on_closed(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.handler.connection_made(transport)
        if self.deadline is None:
            self._transport.abort()  # the limit expired before it began

    def connection_lost(self, exc: BaseException | None) -> None:
        self.trust()
        self._on_closed(self)
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
