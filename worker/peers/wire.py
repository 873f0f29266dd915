"""One connection between two members, in blocking calls: the protocol is that of all others."""

from __future__ import annotations

import contextlib
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
            count = self.endpoint.recv_into(self.connection.get_buffer())
            if not count:
                raise ConnectionResetError("the peer closed the connection")
            self.bytes_received += count
            self._come = self.connection.buffer_updated(count)
        return self._come.pop(0)

    def close(self) -> None:
        """At once; whoever reads or writes in another thread gets an OSError."""
        with contextlib.suppress(OSError):
            self.endpoint.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self.endpoint.close()
