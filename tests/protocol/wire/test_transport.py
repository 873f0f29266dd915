"""Channels over real loopback sockets: order, urgency, slow readers, and how connections end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import numpy as np
import pytest

from protocol.base import limits
from protocol.base.errors import (
    FrameError,
    LocalProtocolError,
    OutOfOrder,
    ProtocolError,
    VersionMismatch,
)
from protocol.wire import frames, messages, tls, tls_transport
from protocol.wire.certificate import new_certificate
from protocol.wire.connection import (
    Body,
    Connection,
    EncodedMessage,
    Phase,
    ReceivedMessage,
    encode,
)
from protocol.wire.messages import Cancel, Goodbye, Halt, Heartbeat, Message
from protocol.wire.transport import Channel, reason_of
from tests.cluster import PATIENCE_S
from tests.event_loop import on_uvloop
from tests.message_samples import BLOCKS, EXAMPLES, PAYLOAD, frame, join_buffers

MIB = limits.MIB
LARGE = messages.BlockGradientPayload(**PAYLOAD, block=2)
VALUES = np.arange(limits.CHUNK_ELEMENTS, dtype="<f4")


class Recorder:
    """An owner that records its messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.bodies: list[Body | None] = []
        self.losses: list[tuple[str, ProtocolError | None]] = []
        self.refuse = ""
        self._changed = asyncio.Condition()

    def on_message(self, channel: Channel, received: ReceivedMessage) -> None:
        del channel
        if self.refuse:
            raise OutOfOrder(self.refuse)
        self.messages.append(received.message)
        self.bodies.append(received.body)
        self._wake()

    def on_lost(self, channel: Channel, reason: str, error: ProtocolError | None) -> None:
        del channel
        self.losses.append((reason, error))
        self._wake()

    def _wake(self) -> None:
        async def wake() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._task = asyncio.get_running_loop().create_task(wake())

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(condition)

    async def until_messages(self, count: int) -> None:
        await self.until(lambda: len(self.messages) >= count)

    async def until_lost(self) -> tuple[str, ProtocolError | None]:
        await self.until(lambda: self.losses)
        (loss,) = self.losses
        return loss


class Server:
    """A listening coordinator side; its connections start in the open phase."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.owner = Recorder()
        self.channels: list[Channel] = []


_open_channels: list[Channel] = []


def open_channel(role: str, owner: Recorder) -> Channel:
    connection = Connection(role)  # type: ignore[arg-type]
    connection.phase, connection.blocks = Phase.OPEN, BLOCKS
    _open_channels.append(Channel(connection, owner, time.monotonic))
    return _open_channels[-1]


@pytest.fixture(autouse=True)
def closes_sockets():
    """Close sockets that a test leaves open when its event loop ends."""
    yield
    for channel in _open_channels:
        if isinstance(channel._transport, tls_transport.TlsTransport):
            with contextlib.suppress(OSError):
                channel._transport._endpoint.shutdown(socket.SHUT_RDWR)
            channel._transport._endpoint.close()
    _open_channels.clear()


@dataclass(frozen=True)
class TlsContexts:
    """TLS contexts of both ends; None without TLS."""

    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None


_contexts = TlsContexts()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    directory = tmp_path_factory.mktemp("certificate")
    files = directory / "certificate.pem", directory / "key.pem"
    for file, text in zip(files, new_certificate(), strict=True):
        file.write_text(text)
    return files


@pytest.fixture(autouse=True, params=["asyncio's transport", "TLS"])
def _transport(request, certificate, monkeypatch):
    """Run every test with and without TLS."""
    if request.param == "TLS":
        tls_contexts = TlsContexts(tls.server_context(*certificate), tls.client_context())
        monkeypatch.setattr(sys.modules[__name__], "_contexts", tls_contexts)


@contextlib.asynccontextmanager
async def listening(accept: Callable[[], Channel]) -> AsyncIterator[int]:
    """Listen on a free port; yield the port."""
    loop = asyncio.get_running_loop()
    if _contexts.server is None:
        server = await loop.create_server(accept, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            # Not `async with`: it would wait for connections that a failed test leaves open.
            server.close()
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        server_task = loop.create_task(_accept_all(listener, accept))
        yield listener.getsockname()[1]
        server_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await server_task


async def _accept_all(listener: socket.socket, accept: Callable[[], Channel]) -> None:
    assert _contexts.server is not None
    while True:
        endpoint, _ = await asyncio.get_running_loop().sock_accept(listener)
        endpoint.setblocking(False)
        await tls_transport.secure(
            endpoint, _contexts.server, accept(), server_side=True, timeout_s=PATIENCE_S
        )


@contextlib.asynccontextmanager
async def running_server() -> AsyncIterator[Server]:
    server = Server(0)

    def accept() -> Channel:
        server.channels.append(open_channel("coordinator", server.owner))
        return server.channels[-1]

    async with listening(accept) as server.port:
        try:
            yield server
        finally:
            for channel in server.channels:
                channel.abort("the test is over")


async def connect_worker(port: int) -> tuple[Channel, Recorder]:
    owner = Recorder()
    channel = open_channel("worker", owner)
    if _contexts.client is None:
        await asyncio.get_running_loop().create_connection(lambda: channel, "127.0.0.1", port)
    else:
        await tls_transport.connect(
            "127.0.0.1", port, _contexts.client, channel, timeout_s=PATIENCE_S
        )  # fmt: skip
    return channel, owner


async def open_raw_connection(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, ssl=_contexts.client)


async def read_messages(reader: asyncio.StreamReader) -> list[Message]:
    """Return all messages that the coordinator's side sends until it closes."""
    async with asyncio.timeout(PATIENCE_S):
        data = await reader.read()
    peer = Connection("worker")
    peer.phase, peer.blocks = Phase.OPEN, BLOCKS
    return [received.message for received in peer.receive_data(data)]


def pause_reading(channel: Channel) -> asyncio.Transport:
    """Stop reading at this end; return the transport."""
    assert channel._transport is not None
    channel._transport.pause_reading()
    return channel._transport


@on_uvloop
async def test_messages_after_the_end_are_not_delivered():
    async with running_server() as server:
        handled_messages: list[Message] = []

        def end_at_the_first(channel: Channel, received: ReceivedMessage) -> None:
            handled_messages.append(received.message)
            channel.abort("enough")

        server.owner.on_message = end_at_the_first  # type: ignore[method-assign]
        _, writer = await open_raw_connection(server.port)
        writer.write(join_buffers(encode(Heartbeat())) * 2)
        await server.owner.until_lost()
        assert handled_messages == [Heartbeat()]
        writer.close()


@on_uvloop
async def test_urgent_messages_overtake_gradients_in_order():
    async with running_server() as server:
        channel, _ = await connect_worker(server.port)
        channel.send(Heartbeat())
        await server.owner.until_messages(1)
        paused_transport = pause_reading(server.channels[0])
        for step in range(24):
            channel.send(encode(LARGE.model_copy(update={"step": step}), VALUES))
        channel.send(Heartbeat())
        channel.send(Heartbeat())
        channel.send(EXAMPLES[messages.SubtreeLoss])
        paused_transport.resume_reading()
        await server.owner.until_messages(28)
        arrivals = server.owner.messages[1:]
        assert [m.step for m in arrivals if isinstance(m, type(LARGE))] == list(range(24))
        heartbeat_offsets = [
            offset for offset, message in enumerate(arrivals) if isinstance(message, Heartbeat)
        ]
        assert heartbeat_offsets[1] == heartbeat_offsets[0] + 1
        assert heartbeat_offsets[1] < 23
        assert isinstance(arrivals[-1], messages.SubtreeLoss)
        channel.abort("done")
        await server.owner.until_lost()


@pytest.mark.parametrize("kind", [Halt, Cancel, Heartbeat], ids=lambda kind: kind.__name__)
@on_uvloop
async def test_urgent_messages_of_a_coordinator_overtake_averages(kind):
    async with running_server() as server:
        channel, owner = await connect_worker(server.port)
        channel.send(Heartbeat())
        await server.owner.until_messages(1)
        paused_transport = pause_reading(channel)
        average = messages.AveragedBlockGradient(term=1, step=2, attempt=0, block=2, chunk=0)
        for _ in range(16):
            server.channels[0].send(encode(average, VALUES))
        server.channels[0].send(EXAMPLES[kind])
        paused_transport.resume_reading()
        await owner.until_messages(17)
        assert [type(message) for message in owner.messages].index(kind) < 16
        channel.abort("done")
        await server.owner.until_lost()


@on_uvloop
async def test_broadcast_shares_one_unchanged_buffer():
    async with running_server() as server:
        peers = [await connect_worker(server.port) for _ in range(3)]
        for channel, _ in peers:
            channel.send(Heartbeat())
        await server.owner.until_messages(3)
        values = VALUES.copy()
        average = messages.AveragedBlockGradient(term=1, step=2, attempt=0, block=2, chunk=0)
        encoded = encode(average, values)
        assert np.shares_memory(np.frombuffer(encoded.buffers[1], np.uint8), values)
        before = join_buffers(encoded)
        for channel in server.channels:
            channel.send(encoded)
            channel.send(encoded)
        for _, owner in peers:
            await owner.until_messages(2)
            for body in owner.bodies:
                assert body is not None
                assert body.tobytes() == values.tobytes()
        assert join_buffers(encoded) == before
        assert np.array_equal(values, VALUES)
        for channel, _ in peers:
            channel.abort("done")
        await server.owner.until(lambda: len(server.owner.losses) == 3)


@on_uvloop
async def test_bytes_are_counted_on_both_sides():
    async with running_server() as server:
        channel, _ = await connect_worker(server.port)
        channel.send(encode(LARGE, VALUES))
        channel.send(Heartbeat())
        await server.owner.until_messages(2)
        expected = len(join_buffers(encode(LARGE, VALUES))) + len(frame(Heartbeat()))
        assert channel.bytes_sent == server.channels[0].bytes_received == expected
        channel.abort("done")
        await server.owner.until_lost()


def average(step: int) -> EncodedMessage:
    """Return a broadcast message."""
    step_id = {"term": 1, "step": step, "attempt": 0, "block": 2, "chunk": 0}
    return encode(messages.AveragedBlockGradient(**step_id), VALUES)


@on_uvloop
async def test_slow_reader_is_dropped(monkeypatch):
    monkeypatch.setattr(limits, "SEND_QUEUE_BYTES", 8 * MIB)
    monkeypatch.setattr(limits, "WRITE_HIGH_WATER_BYTES", MIB)
    async with running_server() as server:
        channel, owner = await connect_worker(server.port)
        channel.send(Heartbeat())
        await server.owner.until_messages(1)
        pause_reading(channel)
        chunk = messages.BlobChunk(run_id="r", digest="0" * 64, offset=0)
        encoded, slow_channel = encode(chunk, bytes(4 * MIB)), server.channels[0]
        for _ in range(64):
            slow_channel.send(encoded)
        assert slow_channel.closed
        reason, error = await server.owner.until_lost()
        assert reason.startswith("too slow")
        assert error is None
        assert not owner.messages
        channel.abort("done")


@on_uvloop
async def test_queued_gradients_do_not_drop_a_reader_and_can_be_withdrawn(monkeypatch):
    monkeypatch.setattr(limits, "SEND_QUEUE_BYTES", MIB)
    monkeypatch.setattr(limits, "WRITE_HIGH_WATER_BYTES", MIB)
    async with running_server() as server:
        channel, owner = await connect_worker(server.port)
        channel.send(Heartbeat())
        await server.owner.until_messages(1)
        paused_transport, slow_channel = pause_reading(channel), server.channels[0]
        for step in range(32):
            slow_channel.send(average(step))
        queue_before = list(slow_channel.waiting_messages)
        assert queue_before[-1] == average(31).message
        assert slow_channel.waiting_bytes == len(queue_before) * average(0).nbytes
        room_task = asyncio.create_task(slow_channel.wait_for_room())
        await asyncio.sleep(0)
        assert not room_task.done()
        slow_channel.withdraw((messages.AveragedBlockGradient,))
        await room_task
        assert (slow_channel.waiting_bytes, list(slow_channel.waiting_messages)) == (0, [])
        slow_channel.send(Heartbeat())
        paused_transport.resume_reading()
        await owner.until_messages(32 - len(queue_before) + 1)
        channel.abort("done")
        await server.owner.until_lost()


@on_uvloop
async def test_state_chunks_do_not_drop_a_reader(monkeypatch):
    monkeypatch.setattr(limits, "SEND_QUEUE_BYTES", MIB)
    monkeypatch.setattr(limits, "WRITE_HIGH_WATER_BYTES", MIB)
    step_id = {"term": 1, "step": 0, "attempt": 0}
    state_chunks = (
        messages.InnerCheckpointChunk(**step_id, replica=0, inner=1, chunk=0, last=False),
        messages.CapturedRows(**step_id, lo=0, hi=1, microbatch=0, chunk=0),
    )
    async with running_server() as server:
        channel, _ = await connect_worker(server.port)
        channel.send(Heartbeat())
        await server.owner.until_messages(1)
        pause_reading(server.channels[0])
        for chunk_message in state_chunks:
            for _ in range(8):
                channel.send(encode(chunk_message, bytes(MIB)))
        assert not channel.closed
        assert channel.waiting_bytes > channel.queued_bytes == 0
        server.channels[0].abort("done")
        channel.abort("done")
        await server.owner.until_lost()


@on_uvloop
async def test_closed_connection_releases_waiting_senders(monkeypatch):
    monkeypatch.setattr(limits, "WRITE_HIGH_WATER_BYTES", MIB)
    async with running_server() as server:
        channel, _ = await connect_worker(server.port)
        channel.send(Heartbeat())
        await server.owner.until_messages(1)
        pause_reading(channel)
        slow_channel = server.channels[0]
        for step in range(32):
            slow_channel.send(average(step))
        room_task = asyncio.create_task(slow_channel.wait_for_room())
        await asyncio.sleep(0)
        channel.abort("done")
        await room_task
        await server.owner.until_lost()


@on_uvloop
async def test_goodbye_reaches_the_peer_with_its_reason():
    async with running_server() as server:
        channel, owner = await connect_worker(server.port)
        channel.send(Heartbeat())
        await server.owner.until_messages(1)
        server.channels[0].goodbye("the coordinator is closing", retry=True, exit_code=3)
        server.channels[0].send(Heartbeat())
        server.channels[0].goodbye("again", retry=False)
        await owner.until_lost()
        assert owner.messages == [
            Goodbye(reason="the coordinator is closing", retry=True, exit_code=3)
        ]
        await server.owner.until_lost()


@on_uvloop
async def test_goodbye_overtakes_queued_gradients(monkeypatch):
    monkeypatch.setattr(limits, "WRITE_HIGH_WATER_BYTES", MIB)
    async with running_server() as server:
        channel, owner = await connect_worker(server.port)
        channel.send(Heartbeat())
        await server.owner.until_messages(1)
        paused_transport = pause_reading(channel)
        average = messages.AveragedBlockGradient(term=1, step=2, attempt=0, block=2, chunk=0)
        for _ in range(32):
            server.channels[0].send(encode(average, VALUES))
        server.channels[0].goodbye("enough", retry=False)
        paused_transport.resume_reading()
        await owner.until_lost()
        assert isinstance(owner.messages[-1], Goodbye)
        assert len(owner.messages) < 33
        await server.owner.until_lost()


@on_uvloop
async def test_long_reason_is_truncated_and_arrives():
    """The limit counts bytes, not characters."""
    for reason in ("x" * 5000, "\N{SNOWMAN}" * 5000, "\N{GRINNING FACE}" * 5000):
        async with running_server() as server:
            channel, owner = await connect_worker(server.port)
            channel.send(Heartbeat())
            await server.owner.until_messages(1)
            server.channels[0].goodbye(reason, retry=False)
            await owner.until_lost()
            (goodbye,) = owner.messages
            assert isinstance(goodbye, Goodbye)
            assert reason.startswith(goodbye.reason)
            assert 390 < len(goodbye.reason.encode()) <= 400


# The end of connections.


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as the kernel may for a killed process."""
    endpoint = writer.get_extra_info("socket")
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize(
    ("partial_frame", "close_peer", "reason"),
    [
        (b"", asyncio.StreamWriter.close, "closed"),
        (frame(Heartbeat()), asyncio.StreamWriter.close, "closed"),
        (frame(Heartbeat())[:7], asyncio.StreamWriter.close, "rest of a frame"),
        (frame(EXAMPLES[LARGE.__class__])[:-1], asyncio.StreamWriter.close, "rest of a frame"),
        (b"", reset, "reset|closed"),
    ],
    ids=["at once", "after a frame", "in a prefix", "in a body", "with a reset"],
)
@on_uvloop
async def test_a_peer_that_vanishes_is_reported_once(partial_frame, close_peer, reason):
    async with running_server() as server:
        reader, writer = await open_raw_connection(server.port)
        writer.write(frame(Heartbeat()) + partial_frame)
        await writer.drain()
        await server.owner.until_messages(1)
        close_peer(writer)
        reason_text, error = await server.owner.until_lost()
        assert any(text in reason_text for text in reason.split("|"))
        assert isinstance(error, FrameError) == ("frame" in reason)
        assert server.channels[0].closed
        server.channels[0].send(Heartbeat())
        server.channels[0].abort("late")
        del reader
        # Nothing more can arrive: the loop has processed all pending events.
        await asyncio.sleep(0)
        assert len(server.owner.losses) == 1


@pytest.mark.parametrize(
    ("bad_frame", "kind", "text"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", FrameError, "start with b'GE'"),
        (b"ss\x63" + bytes(15), VersionMismatch, "upgrade the coordinator"),
        (frame(Heartbeat())[:-1] + b"\x90", ProtocolError, "Heartbeat"),
        (frame(EXAMPLES[messages.StepPlan]), OutOfOrder, "not expected"),
        (frame(EXAMPLES[messages.StepApplied])[:-1] + b"x", ProtocolError, "StepApplied"),
    ],
    ids=["http", "version", "no map", "role", "digest"],
)
@on_uvloop
async def test_protocol_violation_gets_a_reason(bad_frame, kind, text):
    async with running_server() as server:
        reader, writer = await open_raw_connection(server.port)
        writer.write(frame(Heartbeat()) + bad_frame + frame(Heartbeat()))
        (goodbye,) = await read_messages(reader)
        assert isinstance(goodbye, Goodbye)
        assert not goodbye.retry
        reason_text, error = await server.owner.until_lost()
        assert isinstance(error, kind)
        assert goodbye.reason == reason_text == str(error)
        assert goodbye.exit_code == error.exit_code
        assert text in reason_text
        writer.close()


@on_uvloop
async def test_a_protocol_error_of_the_owner_ends_the_connection():
    async with running_server() as server:
        server.owner.refuse = "expected step 3, got 5"
        reader, writer = await open_raw_connection(server.port)
        writer.write(frame(Heartbeat()) * 2)
        (goodbye,) = await read_messages(reader)
        assert isinstance(goodbye, Goodbye)
        assert goodbye.reason == "expected step 3, got 5"
        _, error = await server.owner.until_lost()
        assert isinstance(error, OutOfOrder)
        writer.close()


@on_uvloop
async def test_refusal_that_quotes_the_peer_is_truncated():
    """The name of an unknown field is the peer's own text, in characters of three bytes."""
    header = b"\x81\xda\x03\xf9" + ("\N{SNOWMAN}" * 339).encode() + b"\x00"
    assert len(header) <= limits.HEADER_BYTES
    async with running_server() as server:
        reader, writer = await open_raw_connection(server.port)
        writer.write(frames.encode_head(Heartbeat.tag, header, None))
        (goodbye,) = await read_messages(reader)
        assert isinstance(goodbye, Goodbye)
        assert "Heartbeat" in goodbye.reason
        await server.owner.until_lost()
        writer.close()


@on_uvloop
async def test_invalid_send_is_raised_at_the_caller():
    async with running_server() as server:
        channel, _ = await connect_worker(server.port)
        with pytest.raises(LocalProtocolError):
            channel.send(EXAMPLES[messages.Welcome])
        with pytest.raises(LocalProtocolError):
            channel.send(LARGE)
        assert not channel.closed
        channel.send(Heartbeat())
        await server.owner.until_messages(1)
        channel.abort("done")
        await server.owner.until_lost()


@on_uvloop
async def test_channel_aborted_before_connecting_closes_at_once():
    owner = Recorder()

    def open_aborted_channel() -> Channel:
        channel = open_channel("coordinator", owner)
        channel.abort("too many")
        return channel

    async with asyncio.timeout(PATIENCE_S), listening(open_aborted_channel) as port:
        reader, writer = await open_raw_connection(port)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        assert (await owner.until_lost())[0] == "too many"
        writer.close()


@on_uvloop
async def test_answer_to_a_message_before_goodbye_is_dropped():
    """Both arrived in one read; the owner answers the first before it receives the second."""
    async with running_server() as server:
        reader, writer = await open_raw_connection(server.port)

        def answer(channel: Channel, received: ReceivedMessage) -> None:
            server.owner.messages.append(received.message)
            channel.send(Heartbeat())

        server.owner.on_message = answer  # type: ignore[method-assign]
        writer.write(frame(EXAMPLES[messages.SubtreeLoss]) + frame(EXAMPLES[Goodbye]))
        if writer.can_write_eof():
            writer.write_eof()
            assert await read_messages(reader) == []
        else:  # TLS ends in both directions at once
            writer.close()
        assert await server.owner.until_lost() == ("the peer closed the connection", None)
        assert [type(m) for m in server.owner.messages] == [messages.SubtreeLoss, Goodbye]
        writer.close()


@on_uvloop
async def test_small_messages_do_not_wait_and_dead_links_are_noticed():
    async with running_server() as server:
        channel, _ = await connect_worker(server.port)
        channel.send(Heartbeat())
        await server.owner.until_messages(1)
        for end in (channel, server.channels[0]):
            assert end._transport is not None
            endpoint = end._transport.get_extra_info("socket")
            assert endpoint.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.peer.startswith("127.0.0.1:")
        channel.abort("done")
        await server.owner.until_lost()


@pytest.mark.parametrize(
    ("error", "expected_text"),
    [
        (None, "the peer closed the connection"),
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer"),
        (ConnectionResetError(), "the connection was reset"),
    ],
)
def test_end_of_a_connection_is_described(error, expected_text):
    assert reason_of(error) == expected_text
