"""One connection between two members, in blocking calls: the protocol is that of all others."""

from __future__ import annotations

import contextlib
import os
import select
import socket

from protocol.wire.connection import Connection, Encoded, Received, Role


class Wire:
    """One connection, in blocking calls.

    Args:
        endpoint: Connected, with TLS if there is to be any.
        role: Who dialled.
    """

    def __init__(self, endpoint: socket.socket, role: Role) -> None:
        self.endpoint = endpoint
        self.connection = Connection(role)
        self._come: list[Received] = []
        self.bytes_received = 0
        self.bytes_counted = 0

    def send(self, encoded: Encoded) -> None:
        """Write a message whole.

        Raises:
            OSError: The connection is over.
        """
        for buffer in self.connection.send(encoded).buffers:
            self.endpoint.sendall(buffer)

    def receive(self) -> Received:
        """The next message.

        Raises:
            OSError: The connection is over.
            ProtocolError: What came is none.
        """
        while not self._come:
            # The array is a body's own: what is read is not copied again.
            count = self._read_into(self.connection.get_buffer(), self.connection.rest_of_body)
            self.bytes_received += count
            self._come = self.connection.buffer_updated(count)
        return self._come.pop(0)

    def _read_into(self, buffer: memoryview, at_least: int) -> int:
        """How many bytes were read; TLS gives 16 KiB at a time, and the rest is surely on its way.

        Raises:
            OSError: The connection is over.
        """
        read, filled = self.endpoint.recv_into, 0
        while not filled or filled < at_least:
            count = read(buffer[filled:])
            if not count:
                raise ConnectionResetError("the peer closed the connection")
            filled += count
        return filled

    def watched(self) -> int | None:
        """A descriptor for `wait_closed`; None where the system tells nobody of an end unread.

        Raises:
            OSError: This end is closed.
        """
        return os.dup(self.endpoint.fileno()) if hasattr(select, "POLLRDHUP") else None

    def close(self) -> None:
        """At once; whoever reads or writes in another thread gets an OSError."""
        with contextlib.suppress(OSError):
            self.endpoint.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self.endpoint.close()


def wait_closed(watched: int) -> None:
    """Until a connection is closed at either end, although nobody reads it."""
    poll = select.poll()
    poll.register(watched, select.POLLRDHUP)
    try:
        poll.poll()
    finally:
        os.close(watched)
