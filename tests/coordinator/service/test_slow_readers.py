"""Workers that stop reading or join late block nobody; few steps wait in memory for them."""

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
from tests.live_service import (
    LiveService,
    ScriptedFactory,
    live_service,
    run_undisturbed,
    scripted_spec,
)
from tests.resident_memory import MIB

BLOCK_BYTES: Final = MIB // 4
BLOCKS: Final = 3
STEP_BYTES: Final = BLOCKS * BLOCK_BYTES
LARGE_STEPS: Final = {
    "scripted": {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "samples": 64},
    "batch": {"samples": 2, "microbatch": 1},
}


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch):
    """A step exceeds each send limit; soon a state is sent in place of the missed steps."""
    monkeypatch.setattr(limits, "SEND_QUEUE_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(limits, "SEND_AHEAD_BYTES", BLOCK_BYTES // 4)
    monkeypatch.setattr(limits, "WRITE_HIGH_WATER_BYTES", BLOCK_BYTES // 4)
    monkeypatch.setattr(limits, "REPLAY_BYTES", STEP_BYTES)


def deliver(attacker: HostileWorker, plan: StepPlan) -> None:
    """Send the results of the plan."""
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


async def report_step_applied(live: LiveService, attacker: HostileWorker) -> None:
    """Report the first step as applied, with the correct digest."""
    current = live.service.current
    assert current is not None
    async with asyncio.timeout(PATIENCE_S):
        while current.replica_state is None or current.replica_state.step < 1:  # noqa: ASYNC110 -- nothing signals it
            await asyncio.sleep(0.001)
    digest = current.replica_state.state_digest
    attacker.send(StepApplied(term=attacker.term, step=1, state_digest=digest))


async def send_heartbeats(attacker: HostileWorker) -> None:
    """Keep the attacker's side of the connection alive."""
    while True:
        attacker.send(Heartbeat())
        await asyncio.sleep(limits.HEARTBEAT_INTERVAL_MS / 1000)


class QueueMeter:
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
    monkeypatch.setattr(limits, "LIVENESS_TIMEOUT_MS", 60_000)  # allows for a slow machine
    async with live_service(tmp_path, 2) as live:
        run_id = live.service.submit(scripted_spec(steps=40, **LARGE_STEPS))
        live.start_worker("w0")
        await live.wait_for("worker_ready", worker="w0")
        async with HostileWorker(live.port) as attacker:
            deliver(attacker, await attacker.plan())
            await attacker.wait_for_message(Commit)
            await report_step_applied(live, attacker)
            heartbeats = asyncio.create_task(send_heartbeats(attacker))
            queue = QueueMeter(live, "hostile")
            await live.result(run_id)
            heartbeats.cancel()
            assert live.find_event("straggler", worker="hostile") is not None
            # One step is in progress and the previous step in transit: a worker that is further
            # behind reads from the log.
            assert 0 < queue.most_bytes < 3 * STEP_BYTES
            assert live.find_event("worker_disconnected") is None


class SlowBackend(ScriptedBackend):
    """A backend that computes slowly until `hurry` is called."""

    def compile(self, *arguments: Any) -> ScriptedProgram:
        self.program = cast("ScriptedProgram", super().compile(*arguments))
        return self.program

    def hurry(self) -> None:
        self.program._microbatch_s = 0.0


async def train_with_late_joiner(
    directory: Path, **changes: Any
) -> tuple[dict[str, Any], LiveService]:
    """Return the result and the service of a run that a second worker joins in progress."""
    slow_backend, backend_factory = SlowBackend(microbatch_ms=40), ScriptedFactory()
    backend_factory._backend = slow_backend
    async with live_service(directory, 1) as live:
        run_id = live.service.submit(scripted_spec(**LARGE_STEPS, **changes))
        live.start_worker("w0", backend_factory=backend_factory)
        await live.wait_for("committed", step=6)
        live.start_worker("w1")
        await live.wait_for("worker_joined", worker="w1")
        slow_backend.hurry()
        return await live.result(run_id), live


@pytest.mark.parametrize("log", ["full", pytest.param("checkpoint", marks=pytest.mark.slow)])
@on_uvloop
async def test_late_joiner_catches_up_with_steps_larger_than_all_limits(tmp_path, log):
    """The joiner receives the state of a checkpoint, then the log, then broadcasts."""
    options = {"steps": 60, "log": log, "optimizer": {"name": "adamw"}, "checkpoint": {"every": 0}}
    result, live = await train_with_late_joiner(tmp_path / "joined", **options)
    reference = await run_undisturbed(tmp_path / "calm", scripted_spec(**LARGE_STEPS, **options))
    assert result["weights_digest"] == reference["weights_digest"]
    assert result["workers"]["w1"] > 0
    assert live.events_named("worker_disconnected") == []
    # Only the first and the last checkpoint were due; another was written for the joiner.
    assert len(live.events_named("checkpoint")) > 2
