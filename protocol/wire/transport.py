"""A connection over an asyncio transport: `tls_transport` over a network, or asyncio's own.

Bodies are read from the socket directly into the connection's arrays (BufferedProtocol). Outgoing
messages wait in two queues, so that a halt or a heartbeat does not wait behind a gigabyte of
gradients; each queue keeps its order. The transport gets further messages only after it has written
most of its buffer. A buffer that was passed to `send` must not be changed afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

from protocol.base import limits
from protocol.base.address import format_address
from protocol.base.errors import OutOfOrder, ProtocolError, SharedMemoryFull
from protocol.base.fields import cut_text
from protocol.wire import frames
from protocol.wire.connection import Connection, EncodedMessage, Phase, ReceivedMessage, encode
from protocol.wire.messages import (
    Cancel,
    CapturedRows,
    Goodbye,
    Halt,
    Heartbeat,
    InnerCheckpointChunk,
    MemoryReturned,
    Message,
    StepEmbeddings,
)

_LAST_ACK: Final = struct.Struct("56xI")
"""`struct tcp_info` up to tcpi_last_ack_recv, which is in milliseconds."""
URGENT: Final[tuple[type[Message], ...]] = (Halt, Cancel, Heartbeat, Goodbye)
_MANY_OFFSETS: Final = 16
"""Number of unneeded borrowed offsets that are worth a separate message."""
_ARRAY_CHUNKS = (InnerCheckpointChunk, CapturedRows, StepEmbeddings)
"""Messages that are chunks of a large array, which is in memory in any case, like gradients."""


@dataclass(frozen=True, slots=True)
class ParseResult:
    """The result of parsing received bytes.

    Attributes:
        received: Complete messages, in order.
        error: The peer's violation of the protocol; None if there is none.
    """

    received: list[ReceivedMessage]
    error: ProtocolError | None = None

    @property
    def is_empty(self) -> bool:
        return not self.received and self.error is None


class ChannelOwner(Protocol):
    """Receives the messages of a channel, and its end."""

    def on_message(self, channel: Channel, received: ReceivedMessage) -> None:
        """Handle a message. A ProtocolError raised here ends the connection."""

    def on_lost(self, channel: Channel, reason: str, error: ProtocolError | None) -> None:
        """Handle the end of the connection; called once."""


class Channel(asyncio.BufferedProtocol):
    """One connection to one peer.

    Attributes:
        connection: The protocol without I/O.
        peer: The peer's address; `?` before the connection is made.
        last_received_s: Time of the last received bytes, on `clock`.
        bytes_sent: Size of the frames that were passed to the transport.
        is_paused: Whether reading is paused.

    Args:
        connection: The protocol without I/O.
        owner: Receives messages and the end of the connection, in the event loop.
        clock: Returns the time in seconds.
        priority: Types of messages that are sent before all others.
        take_values: Called in the reading thread with each message whose body is values (gradients
            or state), instead of the owner; None: the owner receives these too.
    """

    def __init__(
        self,
        connection: Connection,
        owner: ChannelOwner,
        clock: Callable[[], float],
        priority: tuple[type[Message], ...] = URGENT,
        take_values: Callable[[ReceivedMessage], None] | None = None,
    ) -> None:
        self._take_values = take_values
        self._priority = priority
        self.connection = connection
        self.peer = "?"
        self.last_received_s = clock()
        self._bytes_received = 0
        self.bytes_sent = 0
        self._clock = clock
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._urgent: deque[EncodedMessage] = deque()
        self._queue: deque[EncodedMessage] = deque()
        self._queued_bytes = 0
        self._waiting_bytes = 0
        self._room_futures: list[asyncio.Future[None]] = []
        self._is_writable = True
        self.is_paused = False
        self._error: ProtocolError | None = None
        self._reason = ""
        self._closing = False
        self._lost = False

    @property
    def closed(self) -> bool:
        return self._closing

    @property
    def certificate(self) -> bytes | None:
        """The peer's certificate from the TLS handshake, in DER; None without TLS."""
        if self._transport is None:
            return None
        secured = self._transport.get_extra_info("ssl_object")
        return secured.getpeercert(binary_form=True) if secured is not None else None

    @property
    def is_local(self) -> bool:
        """Whether the peer is on this machine: both ends have the same address."""
        if self._transport is None:
            return False
        endpoint = self._transport.get_extra_info("socket")
        if endpoint is not None and _is_unix(endpoint):
            return True
        local, remote = (self._transport.get_extra_info(n) for n in ("sockname", "peername"))
        return bool(local and remote and local[0] == remote[0])

    @property
    def unacknowledged_s(self) -> float | None:
        """Time since the peer's kernel last acknowledged data; None if the system does not report
        it.

        The kernel acknowledges data for a process that is blocked, as long as it exists.
        """
        endpoint = self._transport.get_extra_info("socket") if self._transport else None
        return None if endpoint is None else _unacknowledged_s(endpoint)

    @property
    def bytes_received(self) -> int:
        """Bytes received, including those through shared memory."""
        return self._bytes_received + self.connection.shared_bytes_received

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent, without those already passed to the transport.

        Gradients, state and other large arrays do not count: they are in memory in any case, and
        their senders limit them.
        """
        return self._queued_bytes

    @property
    def waiting_bytes(self) -> int:
        """All bytes that wait to be sent."""
        return self._waiting_bytes

    @property
    def waiting_messages(self) -> Iterator[Message]:
        """The messages that wait to be sent, in order, without urgent ones."""
        return (frame.message for frame in self._queue)

    def withdraw(self, message_types: tuple[type[Message], ...]) -> None:
        """Drop waiting messages of these types."""
        for frame in self._queue:
            if isinstance(frame.message, message_types):
                self._count(frame, -1)
        self._queue = deque(e for e in self._queue if not isinstance(e.message, message_types))
        self._wake()

    async def wait_for_room(self) -> None:
        """Wait until few bytes are queued, or the connection is over."""
        while self._waiting_bytes > limits.SEND_AHEAD_BYTES and not self._closing:
            has_room = asyncio.get_running_loop().create_future()
            self._room_futures.append(has_room)
            await has_room

    def _wake(self) -> None:
        if self._closing or self._waiting_bytes <= limits.SEND_AHEAD_BYTES:
            futures, self._room_futures = self._room_futures, []
            for future in futures:
                if not future.done():
                    future.set_result(None)

    def _count(self, frame: EncodedMessage, sign: int) -> None:
        self._waiting_bytes += sign * frame.nbytes
        if frame.message.body != "values" and not isinstance(frame.message, _ARRAY_CHUNKS):
            self._queued_bytes += sign * frame.nbytes

    def send(self, message: Message | EncodedMessage) -> None:
        """Queue a message; does nothing once the channel is closing.

        The channel also counts as closing once the peer's Goodbye has been read: messages before
        the Goodbye are handled first, and may cause messages to everyone.
        """
        if self._closing or self.connection.phase is Phase.CLOSED:
            return
        frame = self.connection.send(encode(message) if isinstance(message, Message) else message)
        is_urgent = isinstance(frame.message, self._priority)
        (self._urgent if is_urgent else self._queue).append(frame)
        self._count(frame, 1)
        if self._queued_bytes > limits.SEND_QUEUE_BYTES:
            self.abort(f"too slow: {self._queued_bytes} bytes wait to be read")
        else:
            self._pump()

    def pause(self) -> None:
        """Stop reading until `resume`; the peer's messages wait at the peer."""
        if not self.is_paused and self._transport is not None and not self._closing:
            self.is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Continue reading."""
        if self.is_paused and self._transport is not None and not self._closing:
            self.is_paused = False
            self.last_received_s = self._clock()
            self._transport.resume_reading()

    def goodbye(self, reason: str, *, retry: bool, exit_code: int = 0) -> None:
        """Send the reason, and close the connection once it is written."""
        if self._closing:
            return
        message = Goodbye(reason=self._shorten_reason(reason), retry=retry, exit_code=exit_code)
        with contextlib.suppress(ProtocolError):
            self.send(message)
        # The peer closes after it has read the Goodbye, but the end has this side's reason.
        self._reason = self._reason or reason
        self.finish()

    def finish(self) -> None:
        """Close once urgent messages are written; drop the others."""
        if self._closing:
            return
        self._queue.clear()
        self._pump(force=True)
        self._closing = True
        self._wake()
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str, error: ProtocolError | None = None) -> None:
        """Close at once, or as soon as the connection is made."""
        self._closing = True
        self._wake()
        self._error = error or self._error
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods but not the base class.
        transport = cast("asyncio.Transport", transport)
        self._transport = transport
        high_bytes = limits.WRITE_HIGH_WATER_BYTES
        if self.connection.memory is not None:
            high_bytes -= min(limits.SEGMENT_COPIES_BYTES, high_bytes // 2)
        transport.set_write_buffer_limits(high=high_bytes)
        address = transport.get_extra_info("peername")
        self.peer = format_address(*address[:2]) if isinstance(address, tuple) else "this machine"
        endpoint = transport.get_extra_info("socket")
        if endpoint is not None:
            set_socket_options(endpoint)
        if self._closing:
            transport.abort()
            return
        self._pump()

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self.connection.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.note_received(nbytes)
        if not self._closing:
            self.handle(self.parse(nbytes))

    def note_received(self, nbytes: int) -> None:
        """Note that `nbytes` bytes have arrived; called in the thread that reads."""
        self.last_received_s = self._clock()
        self._bytes_received += nbytes

    def parse(self, nbytes: int) -> ParseResult:
        """Return the messages that these bytes complete; called in the thread that reads."""
        try:
            received = self.connection.buffer_updated(nbytes)
            if self._take_values is None:
                return ParseResult(received)
            for frame in received:
                if frame.message.body == "values" and not self._closing:
                    self._take_values(frame)
            return ParseResult([frame for frame in received if frame.message.body != "values"])
        except ProtocolError as error:
            return ParseResult([], error)

    def handle(self, parsed: ParseResult) -> None:
        """Handle parsed messages, in the event loop."""
        try:
            for received in parsed.received:
                if self._closing:  # an earlier message has closed the channel
                    return
                self._handle_message(received)
            if parsed.error is not None and not self._closing:
                raise parsed.error
        except ProtocolError as error:
            self._refuse(error)

    def _handle_message(self, received: ReceivedMessage) -> None:
        memory = self.connection.memory
        if isinstance(received.message, MemoryReturned):
            if memory is None:
                raise OutOfOrder("MemoryReturned on a connection without shared memory")
            memory.release(received.message.places)
            return
        self._owner.on_message(self, received)
        del received  # releases a borrowed body that the owner has not kept
        if memory is not None and (offsets := memory.collect_unneeded(_MANY_OFFSETS)):
            self._return_memory(offsets)

    def _has_peer_left(self) -> bool:
        """Return whether the peer has closed its end.

        Writing then resets the connection before the peer's last messages and its reason are read.
        """
        if self.connection.memory is None or self._transport is None:
            return False  # over a network this is unknown
        endpoint = self._transport.get_extra_info("socket")
        if endpoint is None or endpoint.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(endpoint.fileno(), select.POLLHUP | select.POLLRDHUP)
        return bool(poll.poll(0))

    def _return_memory(self, offsets: tuple[int, ...]) -> None:
        """Tell the peer that it may reuse this memory."""
        if self._transport is not None and not self._closing and not self._has_peer_left():
            frame = self.connection.send(MemoryReturned(places=offsets))
            self._transport.writelines(frame.buffers)

    def eof_received(self) -> bool:
        try:
            self.connection.receive_eof()
        except ProtocolError as error:
            self._error = error
        return False

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection; `Acceptor` calls it after a failed TLS handshake."""
        if self._lost:
            return
        self._lost = self._closing = True
        self._wake()
        self._urgent.clear()
        self._queue.clear()
        reason = str(self._error or self._reason or reason_of(exc))
        self._owner.on_lost(self, reason, self._error)

    def _refuse(self, error: ProtocolError) -> None:
        """Send the error to the peer, and close the connection."""
        self._error = error
        transport = self._transport
        self._closing = True
        if transport is not None:
            reason = self._shorten_reason(str(error))
            goodbye = encode(Goodbye(reason=reason, retry=False, exit_code=error.exit_code))
            transport.writelines(goodbye.buffers)
            transport.close()

    def _shorten_reason(self, reason: str) -> str:
        """Cut a reason to fit a Goodbye; during the handshake a peer accepts only small headers."""
        return cut_text(reason, 400 if self.connection.phase is Phase.OPEN else 200)

    def _pump(self, *, force: bool = False) -> None:
        """Pass messages to the transport, up to its limit."""
        transport = self._transport
        if transport is None or self._has_peer_left():
            return
        while self._is_writable or force:
            queue = self._urgent or self._queue
            if not queue:
                return
            frame = queue.popleft()
            self._count(frame, -1)
            self._wake()
            self.bytes_sent += frame.nbytes
            try:
                buffers = self._buffers(frame)
            except SharedMemoryFull as error:
                self.abort(str(error))
                return
            transport.writelines(buffers)

    def _buffers(self, frame: EncodedMessage) -> Sequence[frames.Buffer]:
        """Return the buffers of a message; with shared memory, the body's offset instead of the
        body.

        Raises:
            SharedMemoryFull: There is not enough memory.
        """
        memory = self.connection.memory
        if memory is None:
            return frame.buffers
        shared = frame.encode_shared(memory)
        buffers = frame.buffers if shared is None else (shared,)
        if offsets := memory.collect_unneeded():
            return (*encode(MemoryReturned(places=offsets)).buffers, *buffers)
        return buffers


def reason_of(error: BaseException | None) -> str:
    """Describe why a connection ended or could not be made, without the system's error number."""
    if error is None:
        return "the peer closed the connection"
    return getattr(error, "strerror", None) or str(error) or "the connection was reset"


def _unacknowledged_s(endpoint: socket.socket) -> float | None:
    """Return the seconds since the peer's kernel last acknowledged data, as Linux reports it."""
    if _is_unix(endpoint):
        return 0.0  # both ends have one kernel, which closes the socket of a process that exits
    tcp_info = getattr(socket, "TCP_INFO", None)
    if tcp_info is None:
        return None
    try:
        info = endpoint.getsockopt(socket.IPPROTO_TCP, tcp_info, _LAST_ACK.size)
    except OSError:
        return None
    return float(_LAST_ACK.unpack(info)[0] / 1000) if len(info) == _LAST_ACK.size else None


def _is_unix(endpoint: socket.socket) -> bool:
    return hasattr(socket, "AF_UNIX") and endpoint.family == socket.AF_UNIX


def set_socket_options(endpoint: socket.socket) -> None:
    """Turn off Nagle's delay, and let the kernel detect dead links too."""
    if _is_unix(endpoint):
        return
    endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    user_timeout = getattr(socket, "TCP_USER_TIMEOUT", None)
    if user_timeout is not None:
        endpoint.setsockopt(socket.IPPROTO_TCP, user_timeout, limits.LIVENESS_TIMEOUT_MS)
