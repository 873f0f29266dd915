"""Bodies that lie in memory which both ends of a connection map."""

import asyncio
import os
import socket
import time
from functools import partial

import numpy as np
import pytest

from protocol.base.errors import FrameError, OutOfOrder, RemoteProtocolError, SharedMemoryFull
from protocol.machine.shared_segment import SegmentOwner, SharedSegment, borrowed
from protocol.wire import frames
from protocol.wire.connection import Connection, Phase, encode
from protocol.wire.messages import AveragedBlockGradient, BlockGradientPayload, MemoryReturned
from protocol.wire.transport import Channel
from tests.message_samples import BLOCKS, PAYLOAD, PLACE
from tests.protocol.wire.test_transport import Recorder

VALUES = np.arange(BLOCKS[1].chunk_slice(0).stop, dtype=np.float32)
SENT = BlockGradientPayload(**PAYLOAD, block=1)


def sharing() -> tuple[Connection, Connection]:
    """A coordinator's connection and a worker's, open, of which all bodies are shared."""
    lender = SegmentOwner()
    listens, descriptors = lender.to_one()
    dials = borrowed([os.dup(each) for each in descriptors])
    os.close(descriptors[1])
    assert dials is not None
    return opened("coordinator", listens), opened("worker", dials)


def opened(role: str, memory: SharedSegment) -> Connection:
    connection = Connection(role)  # type: ignore[arg-type]
    connection.phase, connection.blocks, connection.memory = Phase.OPEN, BLOCKS, memory
    memory.least_bytes = 0
    return connection


def shared(connection: Connection, message, values=VALUES) -> bytes:
    assert connection.memory is not None
    frame = encode(message, values).shared(connection.memory)
    assert frame is not None
    return frame


def test_a_body_is_not_in_the_frame_and_comes_unchanged():
    coordinator, worker = sharing()
    frame = shared(worker, SENT)
    assert len(frame) < 200
    ((message, body),) = coordinator.receive_data(frame)
    assert message == SENT
    assert body is not None
    assert body.view(np.float32).tobytes() == VALUES.tobytes()
    assert coordinator.shared_bytes == VALUES.nbytes


def test_what_all_are_sent_is_put_there_once():
    coordinator, worker = sharing()
    assert coordinator.memory is not None
    encoded = encode(AveragedBlockGradient(**PLACE, block=1, chunk=0), VALUES)
    assert encoded.shared(coordinator.memory) == encoded.shared(coordinator.memory)
    del worker


def test_a_flipped_bit_of_header_or_place_is_seen():
    coordinator, worker = sharing()
    frame = shared(worker, SENT)
    for at in (len(frame) - 1, len(frame) - 9):
        flipped = bytearray(frame)
        flipped[at] ^= 1
        with pytest.raises(RemoteProtocolError):
            opened("coordinator", coordinator.memory).receive_data(flipped)  # type: ignore[arg-type]


def test_who_shares_no_memory_is_told_of_none():
    _, worker = sharing()
    frame = shared(worker, SENT)
    coordinator = Connection("coordinator")
    coordinator.phase, coordinator.blocks = Phase.OPEN, BLOCKS
    with pytest.raises(FrameError, match="memory that is not shared"):
        coordinator.receive_data(frame)


def test_only_what_a_step_needs_no_longer_than_itself_may_lie_there():
    coordinator, worker = sharing()
    returned = MemoryReturned(places=())
    frame = frames.encode_shared(returned.tag, returned.to_header(), 4, 0)
    with pytest.raises((FrameError, OutOfOrder)):
        coordinator.receive_data(frame)
    coordinator = opened("coordinator", coordinator.memory)  # type: ignore[arg-type]
    wrong = encode(SENT, VALUES[:-1])
    assert worker.memory is not None
    with pytest.raises(OutOfOrder, match="expected a body of"):
        coordinator.receive_data(wrong.shared(worker.memory))  # type: ignore[arg-type]


async def channels() -> tuple[Channel, Channel, Recorder, Recorder]:
    """A coordinator's and a worker's over a Unix socket, and what both hear."""
    loop, recorders = asyncio.get_running_loop(), (Recorder(), Recorder())
    ends = []
    for connection, end, hears in zip(sharing(), socket.socketpair(), recorders, strict=True):
        channel = Channel(connection, hears, time.monotonic)
        await loop.connect_accepted_socket(partial(_same, channel), end)
        ends.append(channel)
    coordinator, worker = ends
    return coordinator, worker, *recorders


def _same(channel: Channel) -> Channel:
    return channel


async def test_memory_comes_back_with_what_is_sent_next():
    coordinator, worker, owner, receiver = await channels()
    memory = worker.connection.memory
    assert isinstance(memory, SharedSegment)
    worker.send(encode(SENT, VALUES))
    await owner.until_messages(1)
    assert coordinator.bytes_received > VALUES.nbytes
    owner.bodies.clear()
    assert len(memory._lent) == 1
    coordinator.send(encode(AveragedBlockGradient(**PLACE, block=1, chunk=0), VALUES))
    await receiver.until_messages(1)
    assert not memory._lent
    coordinator.abort("the test is over")
    worker.abort("the test is over")


async def test_without_room_the_connection_ends_with_what_to_do(monkeypatch):
    coordinator, worker, _, hears = await channels()

    def full(raw):
        raise SharedMemoryFull(len(raw), 0)

    monkeypatch.setattr(worker.connection.memory, "copy", full)
    worker.send(encode(SENT, VALUES))
    reason, _ = await hears.until_lost()
    assert "close other programs" in reason
    coordinator.abort("the test is over")
