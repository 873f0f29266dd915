"""Members that read slowly, or late: they hold nobody back, and nothing is kept for them."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pytest

from backends.scripted import ScriptedBackend, ScriptedProgram
from coordinator.run.outputs.events import Committed, Event
from protocol.base import limits
from protocol.spec.manifest import Block, TensorSpec
from protocol.wire.messages import (
    BlockGradientPayload,
    Commit,
    Heartbeat,
    StepApplied,
    StepPlan,
    SubtreeLoss,
)
from tests.event_loop import on_uvloop
from tests.hostile_worker import PATIENCE_S, HostileWorker
from tests.live_service import LiveService, Scripted, live_service, scripted_spec, undisturbed
from tests.resident_memory import MIB

BLOCK_BYTES: Final = MIB // 4
BLOCKS: Final = 3
STEP_BYTES: Final = BLOCKS * BLOCK_BYTES
JOB: Final = {
    "scripted": {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "samples": 64},
    "batch": {"samples": 2, "microbatch": 1},
}


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch):
    """A step is longer than anything that may wait; what is missed is soon more than a state."""
    monkeypatch.setattr(limits, "SEND_QUEUE_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(limits, "SEND_AHEAD_BYTES", BLOCK_BYTES // 4)
    monkeypatch.setattr(limits, "WRITE_HIGH_WATER_BYTES", BLOCK_BYTES // 4)
    monkeypatch.setattr(limits, "REPLAY_BYTES", STEP_BYTES)


def deliver(hostile: HostileWorker, plan: StepPlan) -> None:
    """What it was given to compute."""
    tensor = TensorSpec(name="w", shape=(BLOCK_BYTES // 4,))
    block = Block(name="b", kind="block", tensors=(tensor,))
    values = np.zeros(block.elements, np.float32)
    place = {"term": plan.term, "step": plan.step, "attempt": plan.attempt}
    for lo, hi in plan.subtrees:
        subtree = {**place, "lo": lo, "hi": hi, "weight": float(hi - lo)}
        for number, chunk in itertools.product(reversed(range(BLOCKS)), range(block.chunks)):
            payload = BlockGradientPayload(**subtree, block=number, chunk=chunk)
            hostile.send(payload, values[block.chunk_slice(chunk)])
        hostile.send(SubtreeLoss(**subtree, loss_sum=1.0, sums=b"", elapsed_ms=1.0))


async def answer_rightly(live: LiveService, hostile: HostileWorker) -> None:
    """Say that the first step is taken, with the digest that is right."""
    current = live.service.current
    assert current is not None
    async with asyncio.timeout(PATIENCE_S):
        while current.applied is None or current.applied.step < 1:  # noqa: ASYNC110 -- untold
            await asyncio.sleep(0.001)
    digest = current.applied.state_digest
    hostile.send(StepApplied(term=hostile.term, step=1, state_digest=digest))


async def beat(hostile: HostileWorker) -> None:
    """Its side of the connection is alive, as far as anyone can tell."""
    while True:
        hostile.send(Heartbeat())
        await asyncio.sleep(limits.HEARTBEAT_INTERVAL_MS / 1000)


class Queue:
    """What waits for one worker, looked at with every commit."""

    def __init__(self, live: LiveService, worker: str) -> None:
        self._live, self._worker = live, worker
        self.most_bytes = 0
        live.service.event_sinks.append(self)

    def emit(self, event: Event, run_id: str = "") -> None:
        del run_id
        session = self._live.service.sessions.get(self._worker)
        if isinstance(event, Committed) and session is not None:
            self.most_bytes = max(self.most_bytes, session.channel.waiting_bytes)


@on_uvloop
async def test_a_member_that_reads_no_more_holds_nobody_back_and_nothing_is_kept_for_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(limits, "LIVENESS_TIMEOUT_MS", 60_000)  # however slow this machine is
    async with live_service(tmp_path, 2) as live:
        run_id = live.service.submit(scripted_spec(steps=40, **JOB))
        live.worker("w0")
        await live.wait_for("worker_ready", worker="w0")
        async with HostileWorker(live.port) as hostile:
            deliver(hostile, await hostile.plan())
            await hostile.until(Commit)
            await answer_rightly(live, hostile)
            beating = asyncio.create_task(beat(hostile))
            queue = Queue(live, "hostile")
            await live.result(run_id)
            beating.cancel()
            assert live.first("straggler", worker="hostile") is not None
            # A step is in progress, the one before is on its way: whoever is further behind gets
            # it from the log.
            assert 0 < queue.most_bytes < 3 * STEP_BYTES
            assert live.first("worker_disconnected") is None


class Slow(ScriptedBackend):
    """Takes its time, until it need not any more."""

    def compile(self, *arguments: Any) -> ScriptedProgram:
        self.program = cast("ScriptedProgram", super().compile(*arguments))
        return self.program

    def hurry(self) -> None:
        self.program._microbatch_s = 0.0


async def joined_late(directory: Path, **changes: Any) -> tuple[dict[str, Any], LiveService]:
    """The result of a run that a second worker joins while it goes on."""
    slow, first = Slow(microbatch_ms=40), Scripted()
    first._backend = slow
    async with live_service(directory, 1) as live:
        run_id = live.service.submit(scripted_spec(**JOB, **changes))
        live.worker("w0", toolbox=first)
        await live.wait_for("committed", step=6)
        live.worker("w1")
        await live.wait_for("worker_joined", worker="w1")
        slow.hurry()
        return await live.result(run_id), live


@pytest.mark.parametrize("log", ["full", pytest.param("checkpoint", marks=pytest.mark.slow)])
@on_uvloop
async def test_a_late_joiner_whose_every_step_is_longer_than_all_limits(tmp_path, log):
    """By the state of a checkpoint, then the log, then what is broadcast."""
    job = {"steps": 60, "log": log, "optimizer": {"name": "adamw"}, "checkpoint": {"every": 0}}
    result, live = await joined_late(tmp_path / "joined", **job)
    calm = await undisturbed(tmp_path / "calm", scripted_spec(**JOB, **job))
    assert result["weights_digest"] == calm["weights_digest"]
    assert result["workers"]["w1"] > 0
    assert live.every("worker_disconnected") == []
    # No other checkpoint was due than the first and the last: one was made for whoever joins.
    assert len(live.every("checkpoint")) > 2
