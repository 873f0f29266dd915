"""Work that blocks an event loop is found, and mere delays are not blamed."""

from __future__ import annotations

import asyncio
import time

import pytest

from protocol.base import limits
from protocol.machine.event_loop import LoopWatch
from tests.event_loop import on_uvloop

HELD_S = 2 * limits.LOOP_HOLD_MS / 1000


def work() -> None:
    """Keeps the processor busy."""
    until_s = time.thread_time() + HELD_S
    while time.thread_time() < until_s:
        pass


@pytest.mark.parametrize(("block", "busy_ms"), [(work, True), (lambda: time.sleep(HELD_S), False)])
def test_processor_time_of_a_callback_counts_and_a_wait_does_not(block, busy_ms):
    reports: list[float] = []
    watch = LoopWatch(reports.append)

    @on_uvloop
    async def story() -> None:
        watching = asyncio.create_task(watch.run())
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(block)
        while watch.longest_delay_ms < HELD_S * 1000 / 2:  # noqa: ASYNC110 -- nothing else tells
            await asyncio.sleep(0.001)
        watching.cancel()

    story()
    assert (watch.longest_hold_ms > limits.LOOP_HOLD_MS) == busy_ms
    assert bool(reports) == busy_ms
