"""A transport whose other end is the test itself, without sockets or waits.

To a channel it behaves like the transports of asyncio and uvloop: once closed, it stops reading,
writes its buffered data, and reports the lost connection in a later iteration of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from protocol.wire.transport import Channel


class _TlsInfo:
    """The TLS information of a connection."""

    def __init__(self, certificate: bytes) -> None:
        self._certificate = certificate

    def getpeercert(self, *, binary_form: bool) -> bytes:
        assert binary_form
        return self._certificate


class MemoryTransport(asyncio.Transport):
    """One end of a connection.

    Attributes:
        output: Bytes that the channel wrote and the test has not taken.
        activity: Set when bytes were written or the transport was closed.

    Args:
        channel: The channel of the connection.
        certificate: Certificate of the other end, in DER; None on the coordinator's side.
    """

    def __init__(self, channel: Channel, certificate: bytes | None = None) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.output = bytearray()
        self.activity = asyncio.Event()
        self._channel = channel
        self._closing = False
        if certificate is not None:
            self._extra["ssl_object"] = _TlsInfo(certificate)  # type: ignore[attr-defined]
        channel.connection_made(self)

    def feed(self, data: bytes) -> None:
        """Deliver bytes from the peer."""
        view = memoryview(data)
        while view and not self._closing:
            buffer = self._channel.get_buffer(-1)
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            self._channel.buffer_updated(count)
            view = view[count:]

    def take(self) -> bytes:
        """Return the bytes written since the last call."""
        content = bytes(self.output)
        self.output.clear()
        return content

    def hang_up(self) -> None:
        """Close the peer's end."""
        if not self._closing:
            self._channel.eof_received()
            self.close()

    def write(self, data: Any) -> None:
        self.output += data
        self.activity.set()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        for data in list_of_data:
            self.write(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        del high, low

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self.activity.set()
            asyncio.get_running_loop().call_soon(self._channel.connection_lost, None)

    abort = close
