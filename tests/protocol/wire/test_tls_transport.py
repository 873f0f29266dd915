"""TLS with our own transport over real sockets: work in threads, and the end of connections.

`test_transport.py`, whose tests run on both transports, checks that it behaves like asyncio's.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
import threading

import numpy as np
import pytest

from protocol.base import limits
from protocol.wire import frames, messages, tls, tls_transport
from protocol.wire.connection import encode
from protocol.wire.messages import Goodbye, Heartbeat
from protocol.wire.transport import Channel
from tests.cluster import PATIENCE_S
from tests.event_loop import on_uvloop
from tests.message_samples import STEP_ID
from tests.protocol.wire.test_transport import (
    Recorder,
    certificate,
    closes_sockets,
    open_channel,
)

_FIXTURES = certificate, closes_sockets

LARGE, SMALL = limits.BODY_BYTES, 3 * limits.KIB


@pytest.fixture(scope="module")
def contexts(certificate):
    return tls.server_context(*certificate), tls.client_context()


async def connect(contexts, endpoints=None):
    """Connect both ends; return them and the recorders of their messages."""
    coordinator_end, worker_end = endpoints or socket.socketpair()
    owners = Recorder(), Recorder()
    channels = open_channel("coordinator", owners[0]), open_channel("worker", owners[1])
    parameters = zip((coordinator_end, worker_end), contexts, channels, (True, False), strict=True)
    for endpoint in (coordinator_end, worker_end):
        endpoint.setblocking(False)
    await asyncio.gather(*(
        tls_transport.secure(
            endpoint, context, channel, server_side=server_side, timeout_s=PATIENCE_S
        )
        for endpoint, context, channel, server_side in parameters
    ))  # fmt: skip
    return channels, owners


def _then(work, event):
    def both(*arguments):
        work(*arguments)
        event.set()

    return both


def blob(content, offset=0):
    """A message from the coordinator."""
    return encode(messages.BlobChunk(digest="0" * 64, offset=offset, run_id="r"), content)


def rows(content, offset=0):
    """A message from a worker."""
    return encode(messages.CapturedRows(**STEP_ID, lo=0, hi=4, microbatch=0, chunk=offset), content)


def of_bytes(count, seed=1):
    return np.random.default_rng(seed).integers(0, 255, count, np.uint8)


def parse_threads(monkeypatch):
    """Record in which threads messages are parsed, by the number of bytes read."""
    records = []
    parse = Channel.parse

    def recording(channel, nbytes):
        records.append((nbytes, threading.current_thread().name))
        return parse(channel, nbytes)

    monkeypatch.setattr(Channel, "parse", recording)
    return records


@on_uvloop
async def test_large_bodies_are_read_in_a_thread_small_ones_in_the_event_loop(
    contexts, monkeypatch
):
    (coordinator_end, worker_end), (_, receiver) = await connect(contexts)
    parsed = parse_threads(monkeypatch)
    for count in (SMALL, LARGE, SMALL):
        coordinator_end.send(blob(of_bytes(count)))
    await receiver.until_messages(3)
    assert [body.nbytes for body in receiver.bodies] == [SMALL, LARGE, SMALL]
    assert all(np.array_equal(body, of_bytes(body.nbytes)) for body in receiver.bodies)
    in_threads = sum(nbytes for nbytes, thread in parsed if thread == "bulk in")
    assert LARGE - limits.BULK_BYTES < in_threads <= LARGE
    assert worker_end.bytes_received == coordinator_end.bytes_sent
    coordinator_end.abort("done")
    worker_end.abort("done")


@pytest.mark.parametrize("seed", range(4))
@on_uvloop
async def test_simultaneous_messages_both_ways_arrive_in_order(contexts, seed):
    chance = random.Random(seed)
    channels, owners = await connect(contexts)
    sizes = [0, 1, limits.BULK_BYTES, limits.BULK_BYTES + 1, SMALL, 300_000, LARGE]
    body_sizes = [[chance.choice(sizes) for _ in range(24)] for _ in channels]

    async def send_counts(channel, counts):
        of = blob if channel is channels[0] else rows
        for number, count in enumerate(counts):
            channel.send(of(of_bytes(count, seed=number), offset=number))
            if chance.random() < 0.5:
                await channel.room()

    await asyncio.gather(*map(send_counts, channels, body_sizes))
    for owner, counts in zip(owners, reversed(body_sizes), strict=True):
        await owner.until_messages(len(counts))
        numbers = [getattr(m, "offset", None) or getattr(m, "chunk", 0) for m in owner.messages]
        assert numbers == list(range(len(counts)))
        for number, (count, body) in enumerate(zip(counts, owner.bodies, strict=True)):
            assert np.array_equal(body, of_bytes(count, seed=number))
    for channel in channels:
        channel.abort("done")


@on_uvloop
async def test_data_received_while_paused_is_delivered_later(contexts):
    (coordinator_end, worker_end), (_, receiver) = await connect(contexts)
    for number in range(4):
        coordinator_end.send(blob(of_bytes(LARGE), offset=number))
    await receiver.until_messages(1)
    worker_end.pause()
    before = len(receiver.messages)
    coordinator_end.send(Heartbeat())
    await asyncio.to_thread(lambda: None)
    assert len(receiver.messages) == before
    worker_end.resume()
    await receiver.until_messages(5)
    assert [type(message) for message in receiver.messages][-1] in (messages.BlobChunk, Heartbeat)
    coordinator_end.abort("done")
    worker_end.abort("done")


@on_uvloop
async def test_goodbye_of_a_vanished_peer_is_read(contexts):
    """Unread data must be delivered before an error of the writer."""
    listener = socket.create_server(("127.0.0.1", 0))
    dialled = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    listener.close()
    (coordinator_end, worker_end), (_, receiver) = await connect(contexts, (accepted, dialled))
    transport = coordinator_end._transport
    worker_end.send(rows(of_bytes(LARGE)))
    worker_end.send(rows(of_bytes(LARGE)))
    # The peer reads nothing of that, says goodbye, and disappears with a reset.
    coordinator_end.pause()
    coordinator_end.goodbye("the disk is full", retry=False)
    transport._endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
    transport.abort()
    for number in range(4):
        worker_end.send(rows(of_bytes(LARGE), offset=number))
    await receiver.until_lost()
    assert [message.reason for message in receiver.messages] == ["the disk is full"]
    assert isinstance(receiver.messages[0], Goodbye)


@on_uvloop
async def test_the_end_in_the_middle_of_a_large_body_is_reported(contexts):
    (coordinator_end, worker_end), (_, receiver) = await connect(contexts)
    frame_bytes = b"".join(bytes(buffer) for buffer in blob(of_bytes(LARGE)).buffers)
    assert coordinator_end._transport is not None
    coordinator_end._transport.write(frame_bytes[: LARGE // 2])
    coordinator_end._transport.close()
    reason, error = await receiver.until_lost()
    assert "rest of a frame" in reason
    assert error is not None
    worker_end.abort("done")


@on_uvloop
async def test_a_large_body_that_does_not_fit_its_checksum_ends_the_connection(contexts):
    (coordinator_end, worker_end), (sender, receiver) = await connect(contexts)
    frame_bytes = bytearray(b"".join(bytes(buffer) for buffer in blob(of_bytes(LARGE)).buffers))
    frame_bytes[-1] ^= 1
    assert coordinator_end._transport is not None
    coordinator_end._transport.write(bytes(frame_bytes))
    reason, _ = await receiver.until_lost()
    assert "checksum" in reason
    await sender.until_messages(1)
    assert "checksum" in sender.messages[0].reason
    del worker_end


@on_uvloop
async def test_bytes_that_are_no_tls_end_the_connection(contexts):
    (coordinator_end, worker_end), (sender, receiver) = await connect(contexts)
    socket.socket.send(
        coordinator_end._transport._endpoint, b"\x17\x03\x03\x00\x20" + bytes(32)
    )  # an unencrypted record
    await receiver.until_lost()
    await sender.until_lost()
    assert coordinator_end.closed
    assert worker_end.closed


@on_uvloop
async def test_complete_messages_before_invalid_tls_are_delivered(contexts):
    (coordinator_end, worker_end), (_, receiver) = await connect(contexts)
    worker_end.pause()
    for number in range(3):
        coordinator_end.send(blob(of_bytes(100), offset=number))
    socket.socket.send(coordinator_end._transport._endpoint, b"\x17\x03\x03\x00\x20" + bytes(32))
    worker_end.resume()
    await receiver.until_lost()
    assert [message.offset for message in receiver.messages] == [0, 1, 2]
    coordinator_end.abort("done")


@on_uvloop
async def test_simultaneous_goodbyes_do_not_deadlock(contexts):
    """Both have much to write, and process nothing that they read."""
    channels, owners = await connect(contexts)
    for number in range(4):
        channels[0].send(blob(of_bytes(LARGE), offset=number))
        channels[1].send(rows(of_bytes(LARGE), offset=number))
    transports = [channel._transport for channel in channels]
    for channel in channels:
        channel.goodbye("the end", retry=False)
    for owner in owners:
        await owner.until_lost()
    for transport in transports:
        assert transport.get_write_buffer_size() == 0


@on_uvloop
async def test_briefly_resumed_reader_receives_nothing(contexts):
    (coordinator_end, worker_end), (_, receiver) = await connect(contexts)
    reader_event, read = asyncio.Event(), asyncio.Event()
    transport = worker_end._transport
    transport._reader.do = _then(transport._reader.do, reader_event)
    transport._on_bulk_read = _then(transport._on_bulk_read, read)
    coordinator_end.send(blob(of_bytes(LARGE)))
    await reader_event.wait()
    worker_end.pause()
    await read.wait()
    worker_end.resume()
    worker_end.pause()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not receiver.messages
    worker_end.resume()
    await receiver.until_messages(1)
    coordinator_end.abort("done")
    worker_end.abort("done")


@on_uvloop
async def test_handshake_timeout_states_the_time(contexts):
    coordinator_end, worker_end = socket.socketpair()
    with coordinator_end, worker_end:
        coordinator_end.setblocking(False)
        channel = open_channel("coordinator", Recorder())
        with pytest.raises(TimeoutError, match="no answer to the TLS handshake for 1 s"):
            await tls_transport.secure(
                coordinator_end, contexts[0], channel, server_side=True, timeout_s=0.9
            )  # fmt: skip


@on_uvloop
async def test_non_tls_data_is_identified(contexts):
    coordinator_end, worker_end = socket.socketpair()
    with coordinator_end, worker_end:
        coordinator_end.setblocking(False)
        worker_end.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(ssl.SSLError) as error:
            await tls_transport.secure(
                coordinator_end, contexts[1], open_channel("worker", Recorder()), server_side=False,
                timeout_s=PATIENCE_S,
            )  # fmt: skip
        assert error.value.reason in tls.ERROR_MEANS_NO_TLS


@on_uvloop
async def test_threads_end_with_their_connection(contexts):
    before = set(threading.enumerate())
    (coordinator_end, worker_end), (receiver, _) = await connect(contexts)
    worker_end.send(rows(of_bytes(LARGE)))
    await receiver.until_messages(1)
    threads = [thread for thread in threading.enumerate() if thread not in before]
    assert {thread.name for thread in threads} >= {"bulk in", "bulk out"}
    coordinator_end.goodbye("the end", retry=False)
    worker_end.abort("done")
    await receiver.until_lost()
    for thread in threads:
        if thread.name.startswith("bulk"):
            await asyncio.to_thread(thread.join, PATIENCE_S)
            assert not thread.is_alive()


def test_frames_are_byte_buffers():
    """The transport counts lengths in bytes."""
    for buffer in blob(of_bytes(SMALL)).buffers:
        view = memoryview(buffer)
        assert len(buffer) == view.nbytes
    assert frames.PREFIX_BYTES
