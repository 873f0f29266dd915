"""TLS of our own over real sockets: what is in threads, what is not, and how connections end.

That it does what asyncio's transports do is in `test_transport.py`, whose tests are about both.
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
from tests.message_samples import PLACE
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


async def joined(contexts, endpoints=None):
    """Both ends of a connection, and who hears what is said there."""
    ours, theirs = endpoints or socket.socketpair()
    owners = Recorder(), Recorder()
    channels = open_channel("coordinator", owners[0]), open_channel("worker", owners[1])
    ends = zip((ours, theirs), contexts, channels, (True, False), strict=True)
    for endpoint in (ours, theirs):
        endpoint.setblocking(False)
    await asyncio.gather(*(
        tls_transport.secure(
            endpoint, context, channel, server_side=server_side, timeout_s=PATIENCE_S
        )
        for endpoint, context, channel, server_side in ends
    ))  # fmt: skip
    return channels, owners


def _then(work, event):
    def both(*arguments):
        work(*arguments)
        event.set()

    return both


def blob(content, offset=0):
    """From the coordinator."""
    return encode(messages.BlobChunk(digest="0" * 64, offset=offset, run_id="r"), content)


def rows(content, offset=0):
    """From a worker."""
    return encode(messages.CapturedRows(**PLACE, lo=0, hi=4, microbatch=0, chunk=offset), content)


def of_bytes(count, seed=1):
    return np.random.default_rng(seed).integers(0, 255, count, np.uint8)


def recorded(monkeypatch):
    """In which threads messages are parsed, by the bytes that were read."""
    records = []
    parse = Channel.parse

    def recording(channel, nbytes):
        records.append((nbytes, threading.current_thread().name))
        return parse(channel, nbytes)

    monkeypatch.setattr(Channel, "parse", recording)
    return records


@on_uvloop
async def test_large_bodies_are_read_in_a_thread_and_small_ones_in_the_event_loop(
    contexts, monkeypatch
):
    (ours, theirs), (_, receiver) = await joined(contexts)
    parsed = recorded(monkeypatch)
    for count in (SMALL, LARGE, SMALL):
        ours.send(blob(of_bytes(count)))
    await receiver.until_messages(3)
    assert [body.nbytes for body in receiver.bodies] == [SMALL, LARGE, SMALL]
    assert all(np.array_equal(body, of_bytes(body.nbytes)) for body in receiver.bodies)
    in_threads = sum(nbytes for nbytes, thread in parsed if thread == "bulk in")
    assert LARGE - limits.BULK_BYTES < in_threads <= LARGE
    assert theirs.bytes_received == ours.bytes_sent
    ours.abort("done")
    theirs.abort("done")


@pytest.mark.parametrize("seed", range(4))
@on_uvloop
async def test_whatever_is_sent_both_ways_at_once_arrives_in_order(contexts, seed):
    chance = random.Random(seed)
    channels, owners = await joined(contexts)
    sizes = [0, 1, limits.BULK_BYTES, limits.BULK_BYTES + 1, SMALL, 300_000, LARGE]
    sent = [[chance.choice(sizes) for _ in range(24)] for _ in channels]

    async def say(channel, counts):
        of = blob if channel is channels[0] else rows
        for number, count in enumerate(counts):
            channel.send(of(of_bytes(count, seed=number), offset=number))
            if chance.random() < 0.5:
                await channel.room()

    await asyncio.gather(*map(say, channels, sent))
    for owner, counts in zip(owners, reversed(sent), strict=True):
        await owner.until_messages(len(counts))
        numbers = [getattr(m, "offset", None) or getattr(m, "chunk", 0) for m in owner.messages]
        assert numbers == list(range(len(counts)))
        for number, (count, body) in enumerate(zip(counts, owner.bodies, strict=True)):
            assert np.array_equal(body, of_bytes(count, seed=number))
    for channel in channels:
        channel.abort("done")


@on_uvloop
async def test_what_comes_while_nothing_is_to_be_read_is_heard_later(contexts):
    (ours, theirs), (_, receiver) = await joined(contexts)
    for number in range(4):
        ours.send(blob(of_bytes(LARGE), offset=number))
    await receiver.until_messages(1)
    theirs.pause()
    before = len(receiver.messages)
    ours.send(Heartbeat())
    await asyncio.to_thread(lambda: None)
    assert len(receiver.messages) == before
    theirs.resume()
    await receiver.until_messages(5)
    assert [type(message) for message in receiver.messages][-1] in (messages.BlobChunk, Heartbeat)
    ours.abort("done")
    theirs.abort("done")


@on_uvloop
async def test_a_goodbye_is_read_although_the_peer_has_gone_while_it_was_sent_to(contexts):
    """What the reader has not read yet waits behind an error of the writer."""
    listener = socket.create_server(("127.0.0.1", 0))
    dialled = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    listener.close()
    (ours, theirs), (_, receiver) = await joined(contexts, (accepted, dialled))
    transport = ours._transport
    theirs.send(rows(of_bytes(LARGE)))
    theirs.send(rows(of_bytes(LARGE)))
    ours.pause()  # it reads nothing of that, says goodbye, and is gone with a reset
    ours.goodbye("the disk is full", retry=False)
    transport._endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
    transport.abort()
    for number in range(4):
        theirs.send(rows(of_bytes(LARGE), offset=number))
    await receiver.until_lost()
    assert [message.reason for message in receiver.messages] == ["the disk is full"]
    assert isinstance(receiver.messages[0], Goodbye)


@on_uvloop
async def test_the_end_in_the_middle_of_a_large_body_is_reported(contexts):
    (ours, theirs), (_, receiver) = await joined(contexts)
    whole = b"".join(bytes(each) for each in blob(of_bytes(LARGE)).buffers)
    assert ours._transport is not None
    ours._transport.write(whole[: LARGE // 2])
    ours._transport.close()
    reason, error = await receiver.until_lost()
    assert "rest of a frame" in reason
    assert error is not None
    theirs.abort("done")


@on_uvloop
async def test_a_large_body_that_does_not_fit_its_checksum_ends_the_connection(contexts):
    (ours, theirs), (sender, receiver) = await joined(contexts)
    whole = bytearray(b"".join(bytes(each) for each in blob(of_bytes(LARGE)).buffers))
    whole[-1] ^= 1
    assert ours._transport is not None
    ours._transport.write(bytes(whole))
    reason, _ = await receiver.until_lost()
    assert "checksum" in reason
    await sender.until_messages(1)
    assert "checksum" in sender.messages[0].reason
    del theirs


@on_uvloop
async def test_bytes_that_are_no_tls_end_the_connection(contexts):
    (ours, theirs), (sender, receiver) = await joined(contexts)
    socket.socket.send(
        ours._transport._endpoint, b"\x17\x03\x03\x00\x20" + bytes(32)
    )  # a record that nobody encrypted
    await receiver.until_lost()
    await sender.until_lost()
    assert ours.closed
    assert theirs.closed


@on_uvloop
async def test_whole_messages_before_bytes_that_are_no_tls_are_heard(contexts):
    (ours, theirs), (_, receiver) = await joined(contexts)
    theirs.pause()
    for number in range(3):
        ours.send(blob(of_bytes(100), offset=number))
    socket.socket.send(ours._transport._endpoint, b"\x17\x03\x03\x00\x20" + bytes(32))
    theirs.resume()
    await receiver.until_lost()
    assert [message.offset for message in receiver.messages] == [0, 1, 2]
    ours.abort("done")


@on_uvloop
async def test_two_that_say_goodbye_at_once_do_not_wait_for_each_other(contexts):
    """Both have much to write, and read nothing that they handle."""
    channels, owners = await joined(contexts)
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
async def test_who_reads_for_a_moment_only_receives_nothing(contexts):
    (ours, theirs), (_, receiver) = await joined(contexts)
    reader_event, read = asyncio.Event(), asyncio.Event()
    transport = theirs._transport
    transport._reader.do = _then(transport._reader.do, reader_event)
    transport._bulk_read = _then(transport._bulk_read, read)
    ours.send(blob(of_bytes(LARGE)))
    await reader_event.wait()
    theirs.pause()
    await read.wait()
    theirs.resume()
    theirs.pause()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not receiver.messages
    theirs.resume()
    await receiver.until_messages(1)
    ours.abort("done")
    theirs.abort("done")


@on_uvloop
async def test_who_does_not_shake_hands_is_told_how_long_was_waited(contexts):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        channel = open_channel("coordinator", Recorder())
        with pytest.raises(TimeoutError, match="no answer to the TLS handshake for 1 s"):
            await tls_transport.secure(
                ours, contexts[0], channel, server_side=True, timeout_s=0.9
            )  # fmt: skip


@on_uvloop
async def test_what_is_no_tls_is_named_so(contexts):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(ssl.SSLError) as refused:
            await tls_transport.secure(
                ours, contexts[1], open_channel("worker", Recorder()), server_side=False,
                timeout_s=PATIENCE_S,
            )  # fmt: skip
        assert refused.value.reason in tls.ERROR_MEANS_NO_TLS


@on_uvloop
async def test_threads_end_with_their_connection(contexts):
    before = set(threading.enumerate())
    (ours, theirs), (receiver, _) = await joined(contexts)
    theirs.send(rows(of_bytes(LARGE)))
    await receiver.until_messages(1)
    threads = [thread for thread in threading.enumerate() if thread not in before]
    assert {thread.name for thread in threads} >= {"bulk in", "bulk out"}
    ours.goodbye("the end", retry=False)
    theirs.abort("done")
    await receiver.until_lost()
    for thread in threads:
        if thread.name.startswith("bulk"):
            await asyncio.to_thread(thread.join, PATIENCE_S)
            assert not thread.is_alive()


def test_frames_are_of_what_the_transport_takes():
    """Its lengths are bytes."""
    for buffer in blob(of_bytes(SMALL)).buffers:
        view = memoryview(buffer)
        assert len(buffer) == view.nbytes
    assert frames.PREFIX_BYTES
