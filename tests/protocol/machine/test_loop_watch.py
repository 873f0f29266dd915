"""Work that blocks an event loop is reported, and mere delays are not."""

from __future__ import annotations

import asyncio
import time

import pytest

from protocol.base import limits
from protocol.machine.event_loop import LoopWatch
from tests.event_loop import on_uvloop

HOLD_S = 2 * limits.LOOP_HOLD_MS / 1000


def work() -> None:
    """Keep the processor busy."""
    until_s = time.thread_time() + HOLD_S
    while time.thread_time() < until_s:
        pass


@pytest.mark.parametrize(
    ("block", "is_reported"), [(work, True), (lambda: time.sleep(HOLD_S), False)]
)
def test_processor_time_of_a_callback_counts_and_a_wait_does_not(block, is_reported):
    reports: list[float] = []
    watch = LoopWatch(reports.append)

    @on_uvloop
    async def watch_loop() -> None:
        watch_task = asyncio.create_task(watch.run())
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(block)
        while watch.longest_delay_ms < HOLD_S * 1000 / 2:  # noqa: ASYNC110 -- no event to wait for
            await asyncio.sleep(0.001)
        watch_task.cancel()

    watch_loop()
    assert (watch.longest_hold_ms > limits.LOOP_HOLD_MS) == is_reported
    assert bool(reports) == is_reported
