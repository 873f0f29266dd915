"""Members that read slowly or late: they block nobody, and the coordinator keeps nothing for
them."""

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
    """A step exceeds the send limits; missed data soon exceeds a state."""
    monkeypatch.setattr(limits, "SEND_QUEUE_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(limits, "SEND_AHEAD_BYTES", BLOCK_BYTES // 4)
    monkeypatch.setattr(limits, "WRITE_HIGH_WATER_BYTES", BLOCK_BYTES // 4)
    monkeypatch.setattr(limits, "REPLAY_BYTES", STEP_BYTES)


def deliver(attacker: HostileWorker, plan: StepPlan) -> None:
    """Send the results of its assignment."""
    tensor = TensorSpec(name="w", shape=(BLOCK_BYTES // 4,))
    block = Block(name="b", kind="block", tensors=(tensor,))
    values = np.zeros(block.elements, np.float32)
    step_id = {"term": plan.term, "step": plan.step, "attempt": plan.attempt}
    for lo, hi in plan.subtrees:
        subtree = {**step_id, "lo": lo, "hi": hi, "weight": float(hi - lo)}
        for number, chunk in itertools.product(reversed(range(BLOCKS)), range(block.chunks)):
            payload = BlockGradientPayload(**subtree, block=number, chunk=chunk)
            attacker.send(payload, values[block.chunk_slice(chunk)])
        attacker.send(SubtreeLoss(**subtree, loss_sum=1.0, sums=b"", elapsed_ms=1.0))


async def answer_rightly(live: LiveService, attacker: HostileWorker) -> None:
    """Report the first step as applied, with the right digest."""
    current = live.service.current
    assert current is not None
    async with asyncio.timeout(PATIENCE_S):
        while current.applied is None or current.applied.step < 1:  # noqa: ASYNC110 -- untold
            await asyncio.sleep(0.001)
    digest = current.applied.state_digest
    attacker.send(StepApplied(term=attacker.term, step=1, state_digest=digest))


async def beat(attacker: HostileWorker) -> None:
    """Keep its side of the connection alive."""
    while True:
        attacker.send(Heartbeat())
        await asyncio.sleep(limits.HEARTBEAT_INTERVAL_MS / 1000)


class Queue:
    """Measures the send queue of one worker at every commit."""

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
async def test_member_that_stops_reading_blocks_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "LIVENESS_TIMEOUT_MS", 60_000)  # however slow this machine is
    async with live_service(tmp_path, 2) as live:
        run_id = live.service.submit(scripted_spec(steps=40, **JOB))
        live.worker("w0")
        await live.wait_for("worker_ready", worker="w0")
        async with HostileWorker(live.port) as attacker:
            deliver(attacker, await attacker.plan())
            await attacker.until(Commit)
            await answer_rightly(live, attacker)
            beating = asyncio.create_task(beat(attacker))
            queue = Queue(live, "hostile")
            await live.result(run_id)
            beating.cancel()
            assert live.first("straggler", worker="hostile") is not None
            # One step is in progress, the previous one in transit: a worker further behind reads
            # from the log.
            assert 0 < queue.most_bytes < 3 * STEP_BYTES
            assert live.first("worker_disconnected") is None


class Slow(ScriptedBackend):
    """Computes slowly, until it is told to hurry."""

    def compile(self, *arguments: Any) -> ScriptedProgram:
        self.program = cast("ScriptedProgram", super().compile(*arguments))
        return self.program

    def hurry(self) -> None:
        self.program._microbatch_s = 0.0


async def joined_late(directory: Path, **changes: Any) -> tuple[dict[str, Any], LiveService]:
    """Return the result of a run that a second worker joins in progress."""
    slow_worker, first = Slow(microbatch_ms=40), Scripted()
    first._backend = slow_worker
    async with live_service(directory, 1) as live:
        run_id = live.service.submit(scripted_spec(**JOB, **changes))
        live.worker("w0", toolbox=first)
        await live.wait_for("committed", step=6)
        live.worker("w1")
        await live.wait_for("worker_joined", worker="w1")
        slow_worker.hurry()
        return await live.result(run_id), live


@pytest.mark.parametrize("log", ["full", pytest.param("checkpoint", marks=pytest.mark.slow)])
@on_uvloop
async def test_late_joiner_with_steps_beyond_all_limits(tmp_path, log):
    """It receives the state of a checkpoint, then the log, then broadcasts."""
    job = {"steps": 60, "log": log, "optimizer": {"name": "adamw"}, "checkpoint": {"every": 0}}
    result, live = await joined_late(tmp_path / "joined", **job)
    reference = await undisturbed(tmp_path / "calm", scripted_spec(**JOB, **job))
    assert result["weights_digest"] == reference["weights_digest"]
    assert result["workers"]["w1"] > 0
    assert live.every("worker_disconnected") == []
    # Only the first and the last checkpoint were due: the other one was made for the joiner.
    assert len(live.every("checkpoint")) > 2
