"""Accept workers and operators: on TCP ports, and from this machine on a Unix socket.

Processes of the same user on this machine connect without TLS and share memory with the
coordinator (`protocol/machine/local_socket.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from contextlib import suppress
from typing import Final

from coordinator.members.listening import bind_failure
from protocol.base.errors import ExitCode, UsageError
from protocol.machine import local_socket
from protocol.machine.shared_segment import SegmentOwner
from protocol.wire import dial
from protocol.wire.acceptor import (
    MAX_ACCEPTS_PER_TURN,
    Acceptor,
    ProtocolFactory,
    has_spare_descriptors,
)
from protocol.wire.transport import Channel

CONTROL_PORT: Final = (
    "status, metrics and the page are at the control port (--control, 127.0.0.1:9001 by default)"
)
_ANSWER: Final = json.dumps(
    {"error": f"this is the workers' port: {CONTROL_PORT}", "exit_code": ExitCode.UNREACHABLE}
)
_NO_TLS: Final = "the coordinator speaks TLS: start this worker without --plaintext"
_MISDIRECTED: Final = (
    f"HTTP/1.1 421 Misdirected Request\r\nContent-Type: application/json\r\nContent-Length: "
    f"{len(_ANSWER)}\r\nConnection: close\r\n\r\n{_ANSWER}"
).encode()
LOCAL: Final = ("this machine", 0)
"""Address of a peer on the Unix socket."""


class CoordinatorAcceptor(Acceptor):
    """One of the coordinator's ports.

    Args:
        make_protocol: Returns the protocol for each new connection.
        context: For workers, the TLS context; None for plain TCP.
    """

    def __init__(self, make_protocol: ProtocolFactory, context: ssl.SSLContext | None) -> None:
        super().__init__(make_protocol, context, plain_refusal=_NO_TLS, plain_answer=_MISDIRECTED)

    async def open(self, option: str, host: str, port: int) -> None:
        """Listen at the address of a command-line option.

        Raises:
            UsageError: The address is in use, or is not this machine's.
        """
        try:
            await self.listen(host, port)
        except OSError as error:
            raise UsageError(bind_failure(option, host, port, error)) from None

    def open_local(self, fingerprint: bytes, segment_owner: SegmentOwner | None) -> None:
        """Listen on Unix sockets for processes of this user.

        Args:
            fingerprint: SHA-256 of the TLS certificate.
            segment_owner: Allocates the memory shared with these processes; None where the system
                has no shared memory.
        """
        for address in {listener.getsockname() for listener in self._listeners}:
            listener = local_socket.listen(dial.host_of(address), address[1])
            if listener is not None:
                self._listeners.append(listener)
                self._loop.add_reader(
                    listener, self._accept_local, listener, fingerprint, segment_owner
                )

    def _accept_local(
        self, listener: socket.socket, fingerprint: bytes, segment_owner: SegmentOwner | None
    ) -> None:
        for _ in range(MAX_ACCEPTS_PER_TURN):
            try:
                endpoint, _ = listener.accept()
            except OSError:
                return
            endpoint.setblocking(False)
            can_accept = has_spare_descriptors(endpoint)
            channel = self._welcome(endpoint, fingerprint, segment_owner) if can_accept else None
            if channel is None:
                endpoint.close()
                continue
            self.start_handshake(self._loop.create_task(self._connect_local(endpoint, channel)))

    def _welcome(
        self, endpoint: socket.socket, fingerprint: bytes, segment_owner: SegmentOwner | None
    ) -> asyncio.BaseProtocol | None:
        """Return the channel of a process of the same user; None for another user.

        The process shares memory with this one, unless no file descriptors are left for that.
        """
        memory, descriptors = None, list[int]()
        if segment_owner is not None:
            with suppress(OSError):
                memory, descriptors = segment_owner.new_worker_segment()
        is_same_user = local_socket.welcome(endpoint, fingerprint, descriptors)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        channel = self._make_protocol(LOCAL) if is_same_user else None
        if isinstance(channel, Channel):
            channel.connection.memory = memory
        return channel

    async def _connect_local(self, endpoint: socket.socket, channel: asyncio.BaseProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: channel, endpoint)
        except OSError as error:
            endpoint.close()
            channel.connection_lost(error)
