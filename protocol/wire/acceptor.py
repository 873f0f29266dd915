"""Accept connections on TCP ports, with TLS if there is a context.

`Acceptor` calls accept(2) itself, instead of `loop.create_server`, so that a connection counts from
its first packet: a connection that never finishes the TLS handshake counts as pending too, and its
address is known before anything is read from it. The coordinator and the workers of a sharded run
both use this class.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from protocol.base import limits
from protocol.base.errors import FrameError, Mismatch
from protocol.wire import dial, frames, tls_transport
from protocol.wire.connection import encode
from protocol.wire.messages import Goodbye
from protocol.wire.transport import Channel, reason_of

BACKLOG: Final = 1024
"""Connections that may wait in the kernel's queue. In a full queue, a client's first packet is
dropped, and TCP repeats it only after a second."""
MAX_ACCEPTS_PER_TURN: Final = 64
"""Maximum number of connections accepted per turn of the event loop, which must also serve admitted
connections."""
_MIN_TIMEOUT_S: Final = 0.001
_REQUEST_BYTES: Final = 16 * limits.KIB
_HELLO_BYTES: Final = 2 * limits.UNAUTHENTICATED_HEADER_BYTES
_TLS_HANDSHAKE: Final = b"\x16"
"""Type of the first TLS record."""
NOTHING_RECEIVED: Final = "the peer closed the connection without sending anything"
_RESOLVE_TIMEOUT_S: Final = 10.0
"""Time limit for name servers, if the address to bind is a name."""
_RETRY_ACCEPT_S: Final = 0.2
"""Pause before accepting again, after the system had no descriptor or memory for a connection."""

ProtocolFactory = Callable[[tuple[str, int]], asyncio.BaseProtocol | None]
"""Returns the protocol for a connection from this host and port; None to refuse it."""


class Acceptor:
    """Listening sockets on one port.

    Attributes:
        address: Host and port, once the acceptor listens.

    Args:
        make_protocol: Returns the protocol for each new connection.
        context: A TLS server context; None for plain TCP.
        plain_refusal: Reason sent to a samestep peer that does not speak TLS.
        plain_answer: Bytes sent to any other peer without TLS, such as an HTTP response.
    """

    def __init__(
        self,
        make_protocol: ProtocolFactory,
        context: ssl.SSLContext | None,
        *,
        plain_refusal: str = "expected TLS, got a plain connection",
        plain_answer: bytes = b"",
    ) -> None:
        self.address = ("", 0)
        self._make_protocol = make_protocol
        self._context = context
        self._plain_refusal = plain_refusal
        self._plain_answer = plain_answer
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._handshakes: set[asyncio.Task[None]] = set()
        self._paused = False

    async def listen(self, host: str, port: int) -> None:
        """Listen on each address of a host.

        Raises:
            OSError: An address is taken, or is not this machine's.
        """
        try:
            for address in await dial.resolve(host, port, _RESOLVE_TIMEOUT_S, socket.AI_PASSIVE):
                listener = socket.socket(address.family, socket.SOCK_STREAM)
                self._listeners.append(listener)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if listener.family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address.socket_address)
                listener.listen(BACKLOG)
        except OSError:
            self.close()
            raise
        self._start()

    def listen_on_free_port(self) -> None:
        """Listen on a free port of all addresses, IPv6 and IPv4 where both exist.

        Raises:
            OSError: No socket is available.
        """
        with suppress(OSError):  # dual stack may be compiled in and turned off
            if socket.has_dualstack_ipv6():
                self._listeners.append(
                    socket.create_server(
                        ("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
                    )
                )
        if not self._listeners:
            self._listeners.append(socket.create_server(("", 0), backlog=BACKLOG))
        self._start()

    def _start(self) -> None:
        bound = self._listeners[0].getsockname()
        self.address = dial.host_of(bound), bound[1]
        for listener in self._listeners:
            listener.setblocking(False)
            self._loop.add_reader(listener, self._accept, listener)

    def pause(self) -> None:
        """Leave new connections in the kernel's queue."""
        self._paused = True
        for listener in self._listeners:
            self._loop.remove_reader(listener)

    def resume(self) -> None:
        """Accept again."""
        if self._paused:
            self._paused = False
            for listener in self._listeners:
                self._loop.add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Stop listening and end all unfinished handshakes."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        for task in self._handshakes:
            task.cancel()

    def start_handshake(self, task: asyncio.Task[None]) -> None:
        """Keep a reference to a handshake, and cancel it in `close`."""
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MAX_ACCEPTS_PER_TURN):
            if self._paused:
                return
            try:
                endpoint, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._loop.remove_reader(listener)
                self._loop.call_later(_RETRY_ACCEPT_S, self._accept_again, listener)
                return
            channel = self._make_protocol(address[:2]) if has_spare_descriptors(endpoint) else None
            if channel is None:
                endpoint.close()
                continue
            endpoint.setblocking(False)
            self.start_handshake(self._loop.create_task(self._connect(endpoint, channel)))

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners and not self._paused:
            self._loop.add_reader(listener, self._accept, listener)

    async def _connect(self, endpoint: socket.socket, channel: asyncio.BaseProtocol) -> None:
        """Do the TLS handshake, if there is TLS; report a failure to the channel's owner."""
        deadline_s = self._loop.time() + limits.HANDSHAKE_TIMEOUT_MS / 1000
        try:
            if self._context is not None and await self._is_plain(endpoint):
                channel.connection_lost(Mismatch(self._plain_refusal))
                return
            if self._context is None:
                await self._loop.connect_accepted_socket(lambda: channel, endpoint)
                return
            assert isinstance(channel, Channel), "only channels speak over TLS"
            remaining_s = max(deadline_s - self._loop.time(), _MIN_TIMEOUT_S)
            await tls_transport.secure(
                endpoint, self._context, channel, server_side=True, timeout_s=remaining_s
            )
        except (ssl.SSLError, FrameError) as error:
            # Not a worker: a worker speaks TLS or frames, and accepts any certificate in TLS.
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

    async def _is_plain(self, endpoint: socket.socket) -> bool:
        """Wait for the first byte, and return whether it starts a frame without TLS.

        No TLS state is allocated for a peer that sends nothing. A worker that speaks plain frames
        gets a Goodbye in a plain frame, because it cannot read a TLS alert.
        """
        try:
            async with asyncio.timeout(limits.HANDSHAKE_TIMEOUT_MS / 1000):
                await self._wait_readable(endpoint)
        except TimeoutError:
            raise TimeoutError("the peer has sent nothing") from None
        first_byte = endpoint.recv(1, socket.MSG_PEEK)
        if not first_byte:
            raise FrameError(NOTHING_RECEIVED)
        if first_byte == _TLS_HANDSHAKE:
            return False
        if first_byte != frames.MAGIC[:1]:
            with suppress(OSError):
                endpoint.recv(_REQUEST_BYTES)  # unread bytes would turn the answer into a reset
                endpoint.send(self._plain_answer)
            raise FrameError("the peer speaks neither TLS nor frames (plain HTTP?)")
        endpoint.recv(_HELLO_BYTES)  # unread bytes would turn the Goodbye into a reset
        goodbye = Goodbye(reason=self._plain_refusal, retry=False, exit_code=Mismatch.exit_code)
        with endpoint:
            endpoint.send(b"".join(encode(goodbye).buffers))
        return True

    async def _wait_readable(self, endpoint: socket.socket) -> None:
        readable = asyncio.Event()
        self._loop.add_reader(endpoint, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(endpoint)


def file_limit() -> float:
    """Return the maximum number of open files and connections of this process; infinite without
    one."""
    try:
        import resource  # noqa: PLC0415 -- Windows lacks this module
    except ImportError:
        return math.inf
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit


def has_spare_descriptors(endpoint: socket.socket) -> bool:
    """Return whether enough file descriptors are left beside this connection.

    The kernel assigns the lowest free number, so a high number means that few are left. Those are
    reserved for files such as the log and the lock.
    """
    return endpoint.fileno() < file_limit() - limits.RESERVED_FILES
