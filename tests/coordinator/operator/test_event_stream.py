"""Readers get each event once and in order; a reader that lags too far is disconnected."""

from __future__ import annotations

import asyncio

from coordinator.operator.event_stream import KEPT_EVENTS, EventStream


class Reader:
    """Takes one event per line; pauses while `open` is not set."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.open = asyncio.Event()
        self.open.set()

    async def write(self, text: bytes) -> None:
        self.events += text.decode().split("\n\n")[:-1]
        await self.open.wait()


async def test_reader_gets_events_until_the_end():
    stream, reader = EventStream(1), Reader()
    stream.publish("before", {})
    following = asyncio.create_task(stream.follow(stream.start_after(None), reader.write))
    stream.publish("one", {"n": 1})
    await asyncio.sleep(0)
    stream.publish("two", {"n": float("inf")})
    stream.end()
    await following
    assert reader.events == [
        'id: 2\ndata: {"event": "one", "n": 1}',
        'id: 3\ndata: {"event": "two", "n": null}',
    ]


async def test_reader_that_lags_too_far_is_disconnected():
    stream, reader = EventStream(1), Reader()
    reader.open.clear()
    following = asyncio.create_task(stream.follow(stream.start_after(None), reader.write))
    await asyncio.sleep(0)
    stream.publish("first", {})
    await asyncio.sleep(0)
    for _ in range(KEPT_EVENTS + 1):
        stream.publish("tick", {})
    reader.open.set()
    await following
    assert len(reader.events) == 1


async def test_returning_reader_starts_after_its_last_event():
    stream = EventStream(1000)
    for _ in range(3):
        stream.publish("tick", {})
    assert stream.start_after("1001") == 1002
    assert stream.start_after("5") == 1000, "an earlier process's: all of this one"
    assert stream.start_after("99999") == 1003
    assert stream.start_after(None) == 1003
