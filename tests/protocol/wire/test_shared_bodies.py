"""Bodies in memory that both ends of a connection map."""

import asyncio
import os
import socket
import time
from functools import partial

import numpy as np
import pytest

from protocol.base.errors import FrameError, OutOfOrder, RemoteProtocolError, SharedMemoryFull
from protocol.machine.shared_segment import SegmentOwner, SharedSegment, open_segment
from protocol.wire import frames
from protocol.wire.connection import Connection, Phase, encode
from protocol.wire.messages import AveragedBlockGradient, BlockGradientPayload, MemoryReturned
from protocol.wire.transport import Channel
from tests.message_samples import BLOCKS, PAYLOAD, STEP_ID
from tests.protocol.wire.test_transport import Recorder

VALUES = np.arange(BLOCKS[1].chunk_slice(0).stop, dtype=np.float32)
MESSAGE = BlockGradientPayload(**PAYLOAD, block=1)


def shared_connections() -> tuple[Connection, Connection]:
    """Return open connections of a coordinator and a worker that share all bodies."""
    lender = SegmentOwner()
    listener_memory, descriptors = lender.new_worker_segment()
    client_memory = open_segment([os.dup(fd) for fd in descriptors])
    os.close(descriptors[1])
    assert client_memory is not None
    return open_connection("coordinator", listener_memory), open_connection("worker", client_memory)


def open_connection(role: str, memory: SharedSegment) -> Connection:
    connection = Connection(role)  # type: ignore[arg-type]
    connection.phase, connection.blocks, connection.memory = Phase.OPEN, BLOCKS, memory
    memory.min_shared_bytes = 0
    return connection


def send_shared(connection: Connection, message, values=VALUES) -> bytes:
    assert connection.memory is not None
    frame = encode(message, values).encode_shared(connection.memory)
    assert frame is not None
    return frame


def test_shared_body_is_outside_the_frame_and_unchanged():
    coordinator, worker = shared_connections()
    frame = send_shared(worker, MESSAGE)
    assert len(frame) < 200
    ((message, body),) = coordinator.receive_data(frame)
    assert message == MESSAGE
    assert body is not None
    assert body.view(np.float32).tobytes() == VALUES.tobytes()
    assert coordinator.shared_bytes_received == VALUES.nbytes


def test_broadcast_is_stored_once():
    coordinator, worker = shared_connections()
    assert coordinator.memory is not None
    encoded = encode(AveragedBlockGradient(**STEP_ID, block=1, chunk=0), VALUES)
    assert encoded.encode_shared(coordinator.memory) == encoded.encode_shared(coordinator.memory)
    del worker


def test_flipped_bit_of_header_or_offset_is_detected():
    coordinator, worker = shared_connections()
    frame = send_shared(worker, MESSAGE)
    for offset in (len(frame) - 1, len(frame) - 9):
        flipped = bytearray(frame)
        flipped[offset] ^= 1
        with pytest.raises(RemoteProtocolError):
            open_connection("coordinator", coordinator.memory).receive_data(flipped)  # type: ignore[arg-type]


def test_peer_without_shared_memory_gets_the_body():
    _, worker = shared_connections()
    frame = send_shared(worker, MESSAGE)
    coordinator = Connection("coordinator")
    coordinator.phase, coordinator.blocks = Phase.OPEN, BLOCKS
    with pytest.raises(FrameError, match="expected the body in the frame"):
        coordinator.receive_data(frame)


def test_only_bodies_of_one_step_may_be_shared():
    coordinator, worker = shared_connections()
    message = MemoryReturned(places=())
    frame = frames.encode_shared(message.tag, message.to_header(), 4, 0)
    with pytest.raises((FrameError, OutOfOrder)):
        coordinator.receive_data(frame)
    coordinator = open_connection("coordinator", coordinator.memory)  # type: ignore[arg-type]
    short_body = encode(MESSAGE, VALUES[:-1])
    assert worker.memory is not None
    with pytest.raises(OutOfOrder, match="expected a body of"):
        coordinator.receive_data(short_body.encode_shared(worker.memory))  # type: ignore[arg-type]


async def channels() -> tuple[Channel, Channel, Recorder, Recorder]:
    """Return channels of a coordinator and a worker over a Unix socket, and their recorders."""
    loop, recorders = asyncio.get_running_loop(), (Recorder(), Recorder())
    channel_ends = []
    for connection, end, recorder in zip(
        shared_connections(), socket.socketpair(), recorders, strict=True
    ):
        channel = Channel(connection, recorder, time.monotonic)
        await loop.connect_accepted_socket(partial(_return_channel, channel), end)
        channel_ends.append(channel)
    coordinator, worker = channel_ends
    return coordinator, worker, *recorders


def _return_channel(channel: Channel) -> Channel:
    return channel


async def test_memory_is_returned_with_the_next_message():
    coordinator, worker, owner, receiver = await channels()
    memory = worker.connection.memory
    assert isinstance(memory, SharedSegment)
    worker.send(encode(MESSAGE, VALUES))
    await owner.until_messages(1)
    assert coordinator.bytes_received > VALUES.nbytes
    owner.bodies.clear()
    assert len(memory._lent) == 1
    coordinator.send(encode(AveragedBlockGradient(**STEP_ID, block=1, chunk=0), VALUES))
    await receiver.until_messages(1)
    assert not memory._lent
    coordinator.abort("the test is over")
    worker.abort("the test is over")


async def test_without_space_the_connection_ends_with_a_remedy(monkeypatch):
    coordinator, worker, _, recorder = await channels()

    def full(raw):
        raise SharedMemoryFull(len(raw), 0)

    monkeypatch.setattr(worker.connection.memory, "copy", full)
    worker.send(encode(MESSAGE, VALUES))
    reason, _ = await recorder.until_lost()
    assert "close other programs" in reason
    coordinator.abort("the test is over")
