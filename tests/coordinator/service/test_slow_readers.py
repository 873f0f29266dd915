"""A member that reads no more: others go on without it, and it is dropped before it takes much."""

from __future__ import annotations

import asyncio
import itertools
from typing import Final

import numpy as np

from protocol.base import limits
from protocol.spec.manifest import Block, TensorSpec
from protocol.wire.messages import (
    BlockGradientPayload,
    Commit,
    Heartbeat,
    NodeLoss,
    StepApplied,
    StepPlan,
)
from tests.event_loop import on_uvloop
from tests.hostile_worker import PATIENCE_S, HostileWorker
from tests.live_service import LiveService, live_service, scripted_spec
from tests.resident_memory import MIB

BLOCK_BYTES: Final = 1 * MIB
BLOCKS: Final = 3
SPEC: Final = scripted_spec(
    steps=30, scripted={"blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "samples": 64}
)
QUEUE_BYTES: Final = 8 * MIB
"""More than a step's averages, less than what comes beyond the buffers of the kernel."""


def deliver(hostile: HostileWorker, plan: StepPlan) -> None:
    """What it was given to compute."""
    tensor = TensorSpec(name="w", shape=(BLOCK_BYTES // 4,))
    block = Block(name="b", kind="block", tensors=(tensor,))
    values = np.zeros(block.elements, np.float32)
    place = {"epoch": plan.epoch, "step": plan.step, "attempt": plan.attempt}
    for lo, hi in plan.nodes:
        node = {**place, "lo": lo, "hi": hi, "weight": float(hi - lo)}
        for number, chunk in itertools.product(reversed(range(BLOCKS)), range(block.chunks)):
            payload = BlockGradientPayload(**node, block=number, chunk=chunk)
            hostile.send(payload, values[block.chunk_slice(chunk)])
        hostile.send(NodeLoss(**node, loss_sum=1.0, elapsed_ms=1.0))


async def answer_rightly(live: LiveService, hostile: HostileWorker) -> None:
    """Say that the first step is taken, with the digest that is right."""
    current = live.service.current
    assert current is not None
    async with asyncio.timeout(PATIENCE_S):
        while current.applied is None or current.applied.step < 1:  # noqa: ASYNC110 -- untold
            await asyncio.sleep(0.001)
    digest = current.applied.state_digest
    hostile.send(StepApplied(epoch=hostile.epoch, step=1, state_digest=digest))


async def beat(hostile: HostileWorker) -> None:
    """Its side of the connection is alive, as far as anyone can tell."""
    while True:
        hostile.send(Heartbeat())
        await asyncio.sleep(limits.HEARTBEAT_INTERVAL_MS / 1000)


@on_uvloop
async def test_a_member_that_reads_no_more_holds_nobody_back(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "SEND_QUEUE_BYTES", QUEUE_BYTES)
    monkeypatch.setattr(limits, "WRITE_HIGH_WATER_BYTES", MIB)
    # It is the queue that is to be full first, however slow this machine is.
    monkeypatch.setattr(limits, "LIVENESS_TIMEOUT_MS", 60_000)
    async with live_service(tmp_path, 2) as live:
        run_id = live.service.submit(SPEC)
        live.worker("w0")
        await live.wait_for("worker_ready", worker="w0")
        async with HostileWorker(live.port) as hostile:
            deliver(hostile, await hostile.plan())
            await hostile.until(Commit)
            await answer_rightly(live, hostile)
            beating = asyncio.create_task(beat(hostile))
            dropped = await live.wait_for("worker_disconnected", worker="hostile")
            beating.cancel()
            assert dropped["reason"].startswith("too slow")
            late = live.first("straggler", worker="hostile")
            assert late is not None
            committed = [event["step"] for event in live.every("committed")]
            # Steps went on after it was late and before it was dropped.
            assert committed[-1] > late["step"]
        await live.result(run_id)
    assert not live.first("worker_lost", worker="w0")
