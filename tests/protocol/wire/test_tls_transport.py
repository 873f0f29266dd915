"""TLS with our transport over real sockets: work in threads, and the end of connections.

The tests of `test_transport.py` run on both transports and check that ours behaves like asyncio's.
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


def _set_after(function, event):
    def call_and_set(*arguments):
        function(*arguments)
        event.set()

    return call_and_set


def blob(content, offset=0):
    """Return a message that a coordinator sends."""
    return encode(messages.BlobChunk(digest="0" * 64, offset=offset, run_id="r"), content)


def rows(content, offset=0):
    """Return a message that a worker sends."""
    return encode(messages.CapturedRows(**STEP_ID, lo=0, hi=4, microbatch=0, chunk=offset), content)


def random_bytes(count, seed=1):
    return np.random.default_rng(seed).integers(0, 255, count, np.uint8)


def parse_threads(monkeypatch):
    """Record the bytes and the thread of each parse."""
    records = []
    parse = Channel.parse

    def recorded_parse(channel, nbytes):
        records.append((nbytes, threading.current_thread().name))
        return parse(channel, nbytes)

    monkeypatch.setattr(Channel, "parse", recorded_parse)
    return records


@on_uvloop
async def test_large_bodies_are_read_in_a_thread_small_ones_in_the_event_loop(
    contexts, monkeypatch
):
    (coordinator_end, worker_end), (_, receiver) = await connect(contexts)
    parses = parse_threads(monkeypatch)
    for count in (SMALL, LARGE, SMALL):
        coordinator_end.send(blob(random_bytes(count)))
    await receiver.until_messages(3)
    assert [body.nbytes for body in receiver.bodies] == [SMALL, LARGE, SMALL]
    assert all(np.array_equal(body, random_bytes(body.nbytes)) for body in receiver.bodies)
    in_threads = sum(nbytes for nbytes, thread in parses if thread == "bulk in")
    assert LARGE - limits.BULK_BYTES < in_threads <= LARGE
    assert worker_end.bytes_received == coordinator_end.bytes_sent
    coordinator_end.abort("done")
    worker_end.abort("done")


@pytest.mark.parametrize("seed", range(4))
@on_uvloop
async def test_simultaneous_messages_both_ways_arrive_in_order(contexts, seed):
    source = random.Random(seed)
    channels, owners = await connect(contexts)
    sizes = [0, 1, limits.BULK_BYTES, limits.BULK_BYTES + 1, SMALL, 300_000, LARGE]
    body_sizes = [[source.choice(sizes) for _ in range(24)] for _ in channels]

    async def send_counts(channel, counts):
        make_message = blob if channel is channels[0] else rows
        for number, count in enumerate(counts):
            channel.send(make_message(random_bytes(count, seed=number), offset=number))
            if source.random() < 0.5:
                await channel.wait_for_room()

    await asyncio.gather(*map(send_counts, channels, body_sizes))
    for owner, counts in zip(owners, reversed(body_sizes), strict=True):
        await owner.until_messages(len(counts))
        numbers = [getattr(m, "offset", None) or getattr(m, "chunk", 0) for m in owner.messages]
        assert numbers == list(range(len(counts)))
        for number, (count, body) in enumerate(zip(counts, owner.bodies, strict=True)):
            assert np.array_equal(body, random_bytes(count, seed=number))
    for channel in channels:
        channel.abort("done")


@on_uvloop
async def test_data_received_while_paused_is_delivered_later(contexts):
    (coordinator_end, worker_end), (_, receiver) = await connect(contexts)
    for number in range(4):
        coordinator_end.send(blob(random_bytes(LARGE), offset=number))
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
    dialed_socket = socket.create_connection(listener.getsockname())
    accepted_socket, _ = listener.accept()
    listener.close()
    (coordinator_end, worker_end), (_, receiver) = await connect(
        contexts, (accepted_socket, dialed_socket)
    )
    transport = coordinator_end._transport
    worker_end.send(rows(random_bytes(LARGE)))
    worker_end.send(rows(random_bytes(LARGE)))
    # The peer reads none of these messages, sends a goodbye, and resets the connection.
    coordinator_end.pause()
    coordinator_end.goodbye("the disk is full", retry=False)
    transport._endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
    transport.abort()
    for number in range(4):
        worker_end.send(rows(random_bytes(LARGE), offset=number))
    await receiver.until_lost()
    assert [message.reason for message in receiver.messages] == ["the disk is full"]
    assert isinstance(receiver.messages[0], Goodbye)


@on_uvloop
async def test_the_end_in_the_middle_of_a_large_body_is_reported(contexts):
    (coordinator_end, worker_end), (_, receiver) = await connect(contexts)
    frame_bytes = b"".join(bytes(buffer) for buffer in blob(random_bytes(LARGE)).buffers)
    assert coordinator_end._transport is not None
    coordinator_end._transport.write(frame_bytes[: LARGE // 2])
    coordinator_end._transport.close()
    reason, error = await receiver.until_lost()
    assert "rest of a frame" in reason
    assert error is not None
    worker_end.abort("done")


@on_uvloop
async def test_large_body_with_a_wrong_checksum_ends_the_connection(contexts):
    (coordinator_end, worker_end), (sender, receiver) = await connect(contexts)
    frame_bytes = bytearray(b"".join(bytes(buffer) for buffer in blob(random_bytes(LARGE)).buffers))
    frame_bytes[-1] ^= 1
    assert coordinator_end._transport is not None
    coordinator_end._transport.write(bytes(frame_bytes))
    reason, _ = await receiver.until_lost()
    assert "checksum" in reason
    await sender.until_messages(1)
    assert "checksum" in sender.messages[0].reason
    del worker_end


@on_uvloop
async def test_bytes_that_are_not_tls_end_the_connection(contexts):
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
        coordinator_end.send(blob(random_bytes(100), offset=number))
    socket.socket.send(coordinator_end._transport._endpoint, b"\x17\x03\x03\x00\x20" + bytes(32))
    worker_end.resume()
    await receiver.until_lost()
    assert [message.offset for message in receiver.messages] == [0, 1, 2]
    coordinator_end.abort("done")


@on_uvloop
async def test_simultaneous_goodbyes_do_not_deadlock(contexts):
    """Both sides have much to write and process nothing that they read."""
    channels, owners = await connect(contexts)
    for number in range(4):
        channels[0].send(blob(random_bytes(LARGE), offset=number))
        channels[1].send(rows(random_bytes(LARGE), offset=number))
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
    read_started, read_finished = asyncio.Event(), asyncio.Event()
    transport = worker_end._transport
    transport._reader.do = _set_after(transport._reader.do, read_started)
    transport._on_bulk_read = _set_after(transport._on_bulk_read, read_finished)
    coordinator_end.send(blob(random_bytes(LARGE)))
    await read_started.wait()
    worker_end.pause()
    await read_finished.wait()
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
    worker_end.send(rows(random_bytes(LARGE)))
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
    for buffer in blob(random_bytes(SMALL)).buffers:
        view = memoryview(buffer)
        assert len(buffer) == view.nbytes
    assert frames.PREFIX_BYTES
