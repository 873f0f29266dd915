"""Accepts connections, as long as there are not too many strangers.

It accepts itself, instead of `loop.create_server`, so that a connection counts from its first
packet: one that never gets through the TLS handshake takes a stranger's place too, and the address
that it came from is known before anything is read from it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from coordinator.members.listening import bind_failure, descriptors
from protocol.base import limits
from protocol.base.errors import ExitCode, FrameError, Mismatch, UsageError
from protocol.host import local_socket
from protocol.host.lent_memory import Lender
from protocol.wire import dial, frames, tls_transport
from protocol.wire.connection import encode
from protocol.wire.messages import Goodbye
from protocol.wire.transport import Channel, reason_of

_BACKLOG: Final = 1024
"""In the kernel, until the loop comes to them: a flood must not drown a newcomer's first packet,
which would come again only a second later."""
_AT_ONCE: Final = 64
"""Accepted in one turn of the loop, which then sees to members again."""
_LEAST_S: Final = 0.001
_REQUEST_BYTES: Final = 16 * limits.KIB
_HELLO_BYTES: Final = 2 * limits.UNAUTHENTICATED_HEADER_BYTES
_TLS_HANDSHAKE: Final = b"\x16"
"""What the first record of TLS begins with."""
CONTROL_PORT: Final = (
    "status, metrics and the page are at the control port (--control, 127.0.0.1:9001 by default)"
)
NOTHING_SAID: Final = "it has said nothing and closed"
_ANSWER: Final = json.dumps(
    {"error": f"this is the workers' port: {CONTROL_PORT}", "exit_code": ExitCode.UNREACHABLE}
)
_NO_TLS: Final = "the coordinator speaks TLS: start this worker without --plaintext"
_MISDIRECTED: Final = (
    f"HTTP/1.1 421 Misdirected Request\r\nContent-Type: application/json\r\nContent-Length: "
    f"{len(_ANSWER)}\r\nConnection: close\r\n\r\n{_ANSWER}"
).encode()
HERE: Final = ("this machine", 0)
"""The address of who comes in by the Unix socket."""
_NAME_PATIENCE_S: Final = 10.0
"""For the name servers, where --bind has a name."""
_PAUSE_S: Final = 0.2
"""After the system has no file descriptor or memory for another connection."""

Greet = Callable[[tuple[str, int]], asyncio.BaseProtocol | None]
"""Gives the protocol of a connection from that address; None to refuse it."""


class Doorway:
    """Listening sockets of one address.

    Attributes:
        address: Where it listens, once it is open.
    """

    def __init__(self, greet: Greet, context: ssl.SSLContext | None) -> None:
        self.address = ("", 0)
        self._greet = greet
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._entering: set[asyncio.Task[None]] = set()

    async def open(self, option: str, host: str, port: int) -> None:
        """Listen.

        Raises:
            UsageError: The address is taken or not this machine's.
        """
        try:
            for found in await dial.resolve(host, port, _NAME_PATIENCE_S, socket.AI_PASSIVE):
                listener = socket.socket(found.family, socket.SOCK_STREAM)
                self._listen(listener, found.socket_address)
        except OSError as error:
            self.close()
            raise UsageError(bind_failure(option, host, port, error)) from None
        own = self._listeners[0].getsockname()
        self.address = dial.host_of(own), own[1]
        for listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    def open_here(self, fingerprint: bytes, lender: Lender | None) -> None:
        """Listen to this user's own processes on this machine, too: they do without TLS.

        Args:
            fingerprint: Of the certificate.
            lender: Has memory to share with them; None: this system has none.
        """
        for at in {listener.getsockname() for listener in self._listeners}:
            listener = local_socket.listen(dial.host_of(at), at[1])
            if listener is not None:
                self._listeners.append(listener)
                self._loop.add_reader(listener, self._accept_here, listener, fingerprint, lender)

    def _accept_here(
        self, listener: socket.socket, fingerprint: bytes, lender: Lender | None
    ) -> None:
        for _ in range(_AT_ONCE):
            try:
                endpoint, _ = listener.accept()
            except OSError:
                return
            endpoint.setblocking(False)
            spare = endpoint.fileno() < descriptors() - limits.RESERVED_FILES
            channel = self._welcomed(endpoint, fingerprint, lender) if spare else None
            if channel is None:
                endpoint.close()
                continue
            self._enters(self._loop.create_task(self._enter_here(endpoint, channel)))

    def _welcomed(
        self, endpoint: socket.socket, fingerprint: bytes, lender: Lender | None
    ) -> asyncio.BaseProtocol | None:
        """The channel of one that is of the same user; it has memory in common with this process,
        unless there are no descriptors left for that."""
        memory, descriptors = None, list[int]()
        if lender is not None:
            with suppress(OSError):
                memory, descriptors = lender.to_one()
        known = local_socket.welcome(endpoint, fingerprint, descriptors)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        channel = self._greet(HERE) if known else None
        if isinstance(channel, Channel):
            channel.connection.memory = memory
        return channel

    async def _enter_here(self, endpoint: socket.socket, channel: asyncio.BaseProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: channel, endpoint)
        except OSError as error:
            endpoint.close()
            channel.connection_lost(error)

    def _enters(self, task: asyncio.Task[None]) -> None:
        self._entering.add(task)
        task.add_done_callback(self._entering.discard)

    def close(self) -> None:
        """No more connections; those in the handshake end."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        for task in self._entering:
            task.cancel()

    def _listen(self, listener: socket.socket, address: tuple[object, ...]) -> None:
        self._listeners.append(listener)
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                endpoint, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._loop.remove_reader(listener)
                self._loop.call_later(_PAUSE_S, self._accept_again, listener)
                return
            # Descriptors are given out from below: what is left is for the log and the epoch.
            spare = endpoint.fileno() < descriptors() - limits.RESERVED_FILES
            channel = self._greet(address[:2]) if spare else None
            if channel is None:
                endpoint.close()
                continue
            endpoint.setblocking(False)
            self._enters(self._loop.create_task(self._enter(endpoint, channel)))

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    async def _enter(self, endpoint: socket.socket, channel: asyncio.BaseProtocol) -> None:
        """The TLS handshake; who does not get through it is told to the channel's owner here."""
        until_s = self._loop.time() + limits.HANDSHAKE_TIMEOUT_MS / 1000
        try:
            if self._context is not None and await self._speaks_plainly(endpoint):
                channel.connection_lost(Mismatch(_NO_TLS))
                return
            if self._context is None:
                await self._loop.connect_accepted_socket(lambda: channel, endpoint)
                return
            assert isinstance(channel, Channel), "nobody else is spoken to over TLS"
            left_s = max(until_s - self._loop.time(), _LEAST_S)
            await tls_transport.secure(
                endpoint, self._context, channel, server_side=True, timeout_s=left_s
            )
        except (ssl.SSLError, FrameError) as error:
            # No worker ends so: it speaks TLS or frames, and trusts any certificate in TLS itself.
            endpoint.close()
            if isinstance(channel, Channel):
                channel.abort(reason_of(error), FrameError(reason_of(error)))
            channel.connection_lost(error)
        except OSError as error:  # also timeouts
            endpoint.close()
            channel.connection_lost(error)
        except asyncio.CancelledError:
            endpoint.close()
            channel.connection_lost(None)
            raise

    async def _speaks_plainly(self, endpoint: socket.socket) -> bool:
        """Wait for the first byte: nothing is spent on TLS for who says nothing.

        One that begins a frame is a worker's without TLS: it is told so, in frames, since it would
        not understand TLS' own words. Then it is done with.
        """
        try:
            async with asyncio.timeout(limits.HANDSHAKE_TIMEOUT_MS / 1000):
                await self._readable(endpoint)
        except TimeoutError:
            raise TimeoutError("it has said nothing") from None
        first = endpoint.recv(1, socket.MSG_PEEK)
        if not first:
            raise FrameError(NOTHING_SAID)
        if first == _TLS_HANDSHAKE:
            return False
        if first != frames.MAGIC[:1]:
            with suppress(OSError):
                endpoint.recv(_REQUEST_BYTES)  # else the answer is reset
                endpoint.send(_MISDIRECTED)
            raise FrameError("it speaks neither TLS nor frames (plain HTTP?)")
        endpoint.recv(_HELLO_BYTES)  # what is left unread would make the goodbye a reset
        goodbye = Goodbye(reason=_NO_TLS, retry=False, exit_code=Mismatch.exit_code)
        with endpoint:
            endpoint.send(b"".join(encode(goodbye).buffers))
        return True

    async def _readable(self, endpoint: socket.socket) -> None:
        readable = asyncio.Event()
        self._loop.add_reader(endpoint, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(endpoint)
