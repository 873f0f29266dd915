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
from protocol.wire.certificate import self_signed
from protocol.wire.connection import Body, Connection, Encoded, Phase, Received, encode
from protocol.wire.messages import Cancel, Goodbye, Halt, Heartbeat, Message
from protocol.wire.transport import Channel, reason_of
from tests.cluster import PATIENCE_S
from tests.event_loop import on_uvloop
from tests.message_samples import BLOCKS, EXAMPLES, PAYLOAD, flat, frame

MIB = limits.MIB
LARGE = messages.BlockGradientPayload(**PAYLOAD, block=2)
VALUES = np.arange(limits.CHUNK_ELEMENTS, dtype="<f4")


class Recorder:
    """An owner that writes down what it hears."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.bodies: list[Body | None] = []
        self.lost: list[tuple[str, ProtocolError | None]] = []
        self.refuse = ""
        self._changed = asyncio.Condition()

    def on_message(self, channel: Channel, received: Received) -> None:
        del channel
        if self.refuse:
            raise OutOfOrder(self.refuse)
        self.messages.append(received.message)
        self.bodies.append(received.body)
        self._wake()

    def on_lost(self, channel: Channel, reason: str, error: ProtocolError | None) -> None:
        del channel
        self.lost.append((reason, error))
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
        await self.until(lambda: self.lost)
        (lost,) = self.lost
        return lost


class Served:
    """A listening coordinator side; every connection is open for members' messages."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.owner = Recorder()
        self.channels: list[Channel] = []


_opened: list[Channel] = []


def open_channel(role: str, owner: Recorder) -> Channel:
    connection = Connection(role)  # type: ignore[arg-type]
    connection.phase, connection.blocks = Phase.OPEN, BLOCKS
    _opened.append(Channel(connection, owner, time.monotonic))
    return _opened[-1]


@pytest.fixture(autouse=True)
def closes_sockets():
    """Those of connections that a test has left when its event loop is over."""
    yield
    for channel in _opened:
        if isinstance(channel._transport, tls_transport.TlsTransport):
            with contextlib.suppress(OSError):
                channel._transport._endpoint.shutdown(socket.SHUT_RDWR)
            channel._transport._endpoint.close()
    _opened.clear()


@dataclass(frozen=True)
class Ends:
    """The contexts of both; None: there is no TLS."""

    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None


_ends = Ends()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    directory = tmp_path_factory.mktemp("certificate")
    files = directory / "certificate.pem", directory / "key.pem"
    for file, text in zip(files, self_signed(), strict=True):
        file.write_text(text)
    return files


@pytest.fixture(autouse=True, params=["asyncio's transport", "TLS"])
def _transport(request, certificate, monkeypatch):
    """Every test is about both."""
    if request.param == "TLS":
        ends = Ends(tls.server_context(*certificate), tls.client_context())
        monkeypatch.setattr(sys.modules[__name__], "_ends", ends)


@contextlib.asynccontextmanager
async def accepting(accept: Callable[[], Channel]) -> AsyncIterator[int]:
    """The port of a server."""
    loop = asyncio.get_running_loop()
    if _ends.server is None:
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
    assert _ends.server is not None
    while True:
        endpoint, _ = await asyncio.get_running_loop().sock_accept(listener)
        endpoint.setblocking(False)
        await tls_transport.secure(
            endpoint, _ends.server, accept(), server_side=True, timeout_s=PATIENCE_S
        )


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Served]:
    served = Served(0)

    def accept() -> Channel:
        served.channels.append(open_channel("coordinator", served.owner))
        return served.channels[-1]

    async with accepting(accept) as served.port:
        try:
            yield served
        finally:
            for channel in served.channels:
                channel.abort("the test is over")


async def connected(port: int) -> tuple[Channel, Recorder]:
    owner = Recorder()
    channel = open_channel("worker", owner)
    if _ends.client is None:
        await asyncio.get_running_loop().create_connection(lambda: channel, "127.0.0.1", port)
    else:
        await tls_transport.connect(
            "127.0.0.1", port, _ends.client, channel, timeout_s=PATIENCE_S
        )  # fmt: skip
    return channel, owner


async def raw(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, ssl=_ends.client)


async def said(reader: asyncio.StreamReader) -> list[Message]:
    """Everything the coordinator's side said until it closed."""
    async with asyncio.timeout(PATIENCE_S):
        data = await reader.read()
    peer = Connection("worker")
    peer.phase, peer.blocks = Phase.OPEN, BLOCKS
    return [received.message for received in peer.receive_data(data)]


def paused(channel: Channel) -> asyncio.Transport:
    """The peer stops reading."""
    assert channel._transport is not None
    channel._transport.pause_reading()
    return channel._transport


@on_uvloop
async def test_what_came_with_a_message_that_ended_the_connection_is_not_heard():
    async with serving() as served:
        handled: list[Message] = []

        def end_at_the_first(channel: Channel, received: Received) -> None:
            handled.append(received.message)
            channel.abort("enough")

        served.owner.on_message = end_at_the_first  # type: ignore[method-assign]
        _, writer = await raw(served.port)
        writer.write(flat(encode(Heartbeat())) * 2)
        await served.owner.until_lost()
        assert handled == [Heartbeat()]
        writer.close()


@on_uvloop
async def test_urgent_messages_overtake_gradients_and_order_within_a_queue_holds():
    async with serving() as served:
        channel, _ = await connected(served.port)
        channel.send(Heartbeat())
        await served.owner.until_messages(1)
        reading = paused(served.channels[0])
        for step in range(24):
            channel.send(encode(LARGE.model_copy(update={"step": step}), VALUES))
        channel.send(Heartbeat())
        channel.send(Heartbeat())
        channel.send(EXAMPLES[messages.SubtreeLoss])
        reading.resume_reading()
        await served.owner.until_messages(28)
        arrivals = served.owner.messages[1:]
        assert [m.step for m in arrivals if isinstance(m, type(LARGE))] == list(range(24))
        urgent = [at for at, message in enumerate(arrivals) if isinstance(message, Heartbeat)]
        assert urgent[1] == urgent[0] + 1
        assert urgent[1] < 23
        assert isinstance(arrivals[-1], messages.SubtreeLoss)
        channel.abort("done")
        await served.owner.until_lost()


@pytest.mark.parametrize("kind", [Halt, Cancel, Heartbeat], ids=lambda kind: kind.__name__)
@on_uvloop
async def test_what_is_urgent_from_a_coordinator(kind):
    async with serving() as served:
        channel, owner = await connected(served.port)
        channel.send(Heartbeat())
        await served.owner.until_messages(1)
        reading = paused(channel)
        average = messages.AveragedBlockGradient(term=1, step=2, attempt=0, block=2, chunk=0)
        for _ in range(16):
            served.channels[0].send(encode(average, VALUES))
        served.channels[0].send(EXAMPLES[kind])
        reading.resume_reading()
        await owner.until_messages(17)
        assert [type(message) for message in owner.messages].index(kind) < 16
        channel.abort("done")
        await served.owner.until_lost()


@on_uvloop
async def test_a_broadcast_is_one_buffer_for_all_and_stays_as_it_is():
    async with serving() as served:
        peers = [await connected(served.port) for _ in range(3)]
        for channel, _ in peers:
            channel.send(Heartbeat())
        await served.owner.until_messages(3)
        values = VALUES.copy()
        average = messages.AveragedBlockGradient(term=1, step=2, attempt=0, block=2, chunk=0)
        encoded = encode(average, values)
        assert np.shares_memory(np.frombuffer(encoded.buffers[1], np.uint8), values)
        before = flat(encoded)
        for channel in served.channels:
            channel.send(encoded)
            channel.send(encoded)
        for _, owner in peers:
            await owner.until_messages(2)
            for body in owner.bodies:
                assert body is not None
                assert body.tobytes() == values.tobytes()
        assert flat(encoded) == before
        assert np.array_equal(values, VALUES)
        for channel, _ in peers:
            channel.abort("done")
        await served.owner.until(lambda: len(served.owner.lost) == 3)


@on_uvloop
async def test_bytes_are_counted_on_both_sides():
    async with serving() as served:
        channel, _ = await connected(served.port)
        channel.send(encode(LARGE, VALUES))
        channel.send(Heartbeat())
        await served.owner.until_messages(2)
        expected = len(flat(encode(LARGE, VALUES))) + len(frame(Heartbeat()))
        assert channel.bytes_sent == served.channels[0].bytes_received == expected
        channel.abort("done")
        await served.owner.until_lost()


def average(step: int) -> Encoded:
    """A broadcast."""
    place = {"term": 1, "step": step, "attempt": 0, "block": 2, "chunk": 0}
    return encode(messages.AveragedBlockGradient(**place), VALUES)


@on_uvloop
async def test_a_reader_that_is_too_slow_is_dropped(monkeypatch):
    monkeypatch.setattr(limits, "SEND_QUEUE_BYTES", 8 * MIB)
    monkeypatch.setattr(limits, "WRITE_HIGH_WATER_BYTES", MIB)
    async with serving() as served:
        channel, owner = await connected(served.port)
        channel.send(Heartbeat())
        await served.owner.until_messages(1)
        paused(channel)
        chunk = messages.BlobChunk(run_id="r", digest="0" * 64, offset=0)
        encoded, slow = encode(chunk, bytes(4 * MIB)), served.channels[0]
        for _ in range(64):
            slow.send(encoded)
        assert slow.closed
        reason, error = await served.owner.until_lost()
        assert reason.startswith("too slow")
        assert error is None
        assert not owner.messages
        channel.abort("done")


@on_uvloop
async def test_gradients_that_wait_for_a_slow_reader_drop_nobody_and_can_be_withdrawn(monkeypatch):
    monkeypatch.setattr(limits, "SEND_QUEUE_BYTES", MIB)
    monkeypatch.setattr(limits, "WRITE_HIGH_WATER_BYTES", MIB)
    async with serving() as served:
        channel, owner = await connected(served.port)
        channel.send(Heartbeat())
        await served.owner.until_messages(1)
        reading, slow = paused(channel), served.channels[0]
        for step in range(32):
            slow.send(average(step))
        waits = list(slow.waiting)
        assert waits[-1] == average(31).message
        assert slow.waiting_bytes == len(waits) * average(0).nbytes
        awaiting = asyncio.create_task(slow.room())
        await asyncio.sleep(0)
        assert not awaiting.done()
        slow.withdraw((messages.AveragedBlockGradient,))
        await awaiting
        assert (slow.waiting_bytes, list(slow.waiting)) == (0, [])
        slow.send(Heartbeat())
        reading.resume_reading()
        await owner.until_messages(32 - len(waits) + 1)
        channel.abort("done")
        await served.owner.until_lost()


@on_uvloop
async def test_a_state_in_pieces_that_is_sent_at_once_drops_nobody(monkeypatch):
    monkeypatch.setattr(limits, "SEND_QUEUE_BYTES", MIB)
    monkeypatch.setattr(limits, "WRITE_HIGH_WATER_BYTES", MIB)
    place = {"term": 1, "step": 0, "attempt": 0}
    pieces = (
        messages.InnerCheckpointChunk(**place, replica=0, inner=1, chunk=0, last=False),
        messages.CapturedRows(**place, lo=0, hi=1, microbatch=0, chunk=0),
    )
    async with serving() as served:
        channel, _ = await connected(served.port)
        channel.send(Heartbeat())
        await served.owner.until_messages(1)
        paused(served.channels[0])
        for piece in pieces:
            for _ in range(8):
                channel.send(encode(piece, bytes(MIB)))
        assert not channel.closed
        assert channel.waiting_bytes > channel.queued_bytes == 0
        served.channels[0].abort("done")
        channel.abort("done")
        await served.owner.until_lost()


@on_uvloop
async def test_nobody_waits_for_room_in_a_connection_that_is_over(monkeypatch):
    monkeypatch.setattr(limits, "WRITE_HIGH_WATER_BYTES", MIB)
    async with serving() as served:
        channel, _ = await connected(served.port)
        channel.send(Heartbeat())
        await served.owner.until_messages(1)
        paused(channel)
        slow = served.channels[0]
        for step in range(32):
            slow.send(average(step))
        awaiting = asyncio.create_task(slow.room())
        await asyncio.sleep(0)
        channel.abort("done")
        await awaiting
        await served.owner.until_lost()


@on_uvloop
async def test_goodbye_reaches_the_peer_and_says_why():
    async with serving() as served:
        channel, owner = await connected(served.port)
        channel.send(Heartbeat())
        await served.owner.until_messages(1)
        served.channels[0].goodbye("the house is closing", retry=True, exit_code=3)
        served.channels[0].send(Heartbeat())
        served.channels[0].goodbye("again", retry=False)
        await owner.until_lost()
        assert owner.messages == [Goodbye(reason="the house is closing", retry=True, exit_code=3)]
        await served.owner.until_lost()


@on_uvloop
async def test_goodbye_drops_the_gradients_that_wait_and_still_arrives(monkeypatch):
    monkeypatch.setattr(limits, "WRITE_HIGH_WATER_BYTES", MIB)
    async with serving() as served:
        channel, owner = await connected(served.port)
        channel.send(Heartbeat())
        await served.owner.until_messages(1)
        reading = paused(channel)
        average = messages.AveragedBlockGradient(term=1, step=2, attempt=0, block=2, chunk=0)
        for _ in range(32):
            served.channels[0].send(encode(average, VALUES))
        served.channels[0].goodbye("enough", retry=False)
        reading.resume_reading()
        await owner.until_lost()
        assert isinstance(owner.messages[-1], Goodbye)
        assert len(owner.messages) < 33
        await served.owner.until_lost()


@on_uvloop
async def test_a_long_reason_is_cut_and_still_arrives():
    """Counted in bytes it is longer than in characters."""
    for reason in ("x" * 5000, "\N{SNOWMAN}" * 5000, "\N{GRINNING FACE}" * 5000):
        async with serving() as served:
            channel, owner = await connected(served.port)
            channel.send(Heartbeat())
            await served.owner.until_messages(1)
            served.channels[0].goodbye(reason, retry=False)
            await owner.until_lost()
            (goodbye,) = owner.messages
            assert isinstance(goodbye, Goodbye)
            assert reason.startswith(goodbye.reason)
            assert 390 < len(goodbye.reason.encode()) <= 400


# How connections end.


def reset(writer: asyncio.StreamWriter) -> None:
    """Close as a killed process's kernel may: with RST."""
    endpoint = writer.get_extra_info("socket")
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize(
    ("sent", "close", "reason"),
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
async def test_a_peer_that_vanishes_is_reported_once(sent, close, reason):
    async with serving() as served:
        reader, writer = await raw(served.port)
        writer.write(frame(Heartbeat()) + sent)
        await writer.drain()
        await served.owner.until_messages(1)
        close(writer)
        reason_text, error = await served.owner.until_lost()
        assert any(each in reason_text for each in reason.split("|"))
        assert isinstance(error, FrameError) == ("frame" in reason)
        assert served.channels[0].closed
        served.channels[0].send(Heartbeat())
        served.channels[0].abort("late")
        del reader
        # Nothing more is to come: the loop has gone round with all that was in it.
        await asyncio.sleep(0)
        assert len(served.owner.lost) == 1


@pytest.mark.parametrize(
    ("broken", "kind", "text"),
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
async def test_who_breaks_the_protocol_is_told_why(broken, kind, text):
    async with serving() as served:
        reader, writer = await raw(served.port)
        writer.write(frame(Heartbeat()) + broken + frame(Heartbeat()))
        (goodbye,) = await said(reader)
        assert isinstance(goodbye, Goodbye)
        assert not goodbye.retry
        reason_text, error = await served.owner.until_lost()
        assert isinstance(error, kind)
        assert goodbye.reason == reason_text == str(error)
        assert goodbye.exit_code == error.exit_code
        assert text in reason_text
        writer.close()


@on_uvloop
async def test_a_protocol_error_of_the_owner_ends_the_connection():
    async with serving() as served:
        served.owner.refuse = "expected step 3, got 5"
        reader, writer = await raw(served.port)
        writer.write(frame(Heartbeat()) * 2)
        (goodbye,) = await said(reader)
        assert isinstance(goodbye, Goodbye)
        assert goodbye.reason == "expected step 3, got 5"
        _, error = await served.owner.until_lost()
        assert isinstance(error, OutOfOrder)
        writer.close()


@on_uvloop
async def test_a_refusal_that_quotes_the_peer_is_cut_to_what_may_be_sent():
    """The name of an unknown field is the peer's own text, in characters of three bytes."""
    header = b"\x81\xda\x03\xf9" + ("\N{SNOWMAN}" * 339).encode() + b"\x00"
    assert len(header) <= limits.HEADER_BYTES
    async with serving() as served:
        reader, writer = await raw(served.port)
        writer.write(frames.encode_head(Heartbeat.tag, header, None))
        (goodbye,) = await said(reader)
        assert isinstance(goodbye, Goodbye)
        assert "Heartbeat" in goodbye.reason
        await served.owner.until_lost()
        writer.close()


@on_uvloop
async def test_our_own_mistake_is_raised_where_it_is_made():
    async with serving() as served:
        channel, _ = await connected(served.port)
        with pytest.raises(LocalProtocolError):
            channel.send(EXAMPLES[messages.Welcome])
        with pytest.raises(LocalProtocolError):
            channel.send(LARGE)
        assert not channel.closed
        channel.send(Heartbeat())
        await served.owner.until_messages(1)
        channel.abort("done")
        await served.owner.until_lost()


@on_uvloop
async def test_a_channel_that_is_aborted_before_it_is_connected_closes_at_once():
    owner = Recorder()

    def refused() -> Channel:
        channel = open_channel("coordinator", owner)
        channel.abort("too many")
        return channel

    async with asyncio.timeout(PATIENCE_S), accepting(refused) as port:
        reader, writer = await raw(port)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        assert (await owner.until_lost())[0] == "too many"
        writer.close()


@on_uvloop
async def test_an_answer_to_what_came_with_a_goodbye_is_dropped():
    """Both came in one read; the owner answers the first before it hears of the second."""
    async with serving() as served:
        reader, writer = await raw(served.port)

        def answer(channel: Channel, received: Received) -> None:
            served.owner.messages.append(received.message)
            channel.send(Heartbeat())

        served.owner.on_message = answer  # type: ignore[method-assign]
        writer.write(frame(EXAMPLES[messages.SubtreeLoss]) + frame(EXAMPLES[Goodbye]))
        if writer.can_write_eof():
            writer.write_eof()
            assert await said(reader) == []
        else:  # TLS ends in both directions at once
            writer.close()
        assert await served.owner.until_lost() == ("the peer closed the connection", None)
        assert [type(m) for m in served.owner.messages] == [messages.SubtreeLoss, Goodbye]
        writer.close()


@on_uvloop
async def test_small_messages_do_not_wait_and_dead_links_are_noticed():
    async with serving() as served:
        channel, _ = await connected(served.port)
        channel.send(Heartbeat())
        await served.owner.until_messages(1)
        for end in (channel, served.channels[0]):
            assert end._transport is not None
            endpoint = end._transport.get_extra_info("socket")
            assert endpoint.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.peer.startswith("127.0.0.1:")
        channel.abort("done")
        await served.owner.until_lost()


@pytest.mark.parametrize(
    ("error", "expected_text"),
    [
        (None, "the peer closed the connection"),
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer"),
        (ConnectionResetError(), "the connection was reset"),
    ],
)
def test_why_a_connection_ended_is_reported_in_words(error, expected_text):
    assert reason_of(error) == expected_text
