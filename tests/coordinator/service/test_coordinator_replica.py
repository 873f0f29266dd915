"""The coordinator's replica: filled once, changed in the order of the calls."""

import asyncio

import numpy as np
import pytest

from coordinator.service.coordinator_replica import CoordinatorReplica
from protocol.base import limits
from protocol.exact.replica import Replica
from protocol.exact.update import step_scalars
from protocol.spec.manifest import Block, Manifest, TensorSpec
from protocol.spec.run_spec import ScriptedRun
from protocol.spec.sections.optimizer import Momentum
from protocol.wire.messages import StateChunk

BLOCK = Block(name="b", kind="block", tensors=(TensorSpec(name="w", shape=(6,)),))
MANIFEST = Manifest(blocks=(BLOCK,), train_samples=1)
SPEC = ScriptedRun(task="scripted", steps=9, optimizer=Momentum(name="momentum", lr=0.1))
SCALARS = step_scalars(SPEC.optimizer, 1, 0, 9, 1.0)


@pytest.fixture
def coordinator_replica(monkeypatch):
    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 4)
    replica = CoordinatorReplica(MANIFEST, SPEC)
    yield replica
    replica.close()


def chunk(number, **change):
    step_id = {"kind": "parameters", "step": 0, "optimizer_step": 0, **change}
    return StateChunk(run_id="r", block=0, chunk=number, last=number == 1, **step_id)


def expected_replica(steps):
    replica = Replica(MANIFEST.blocks, SPEC.optimizer)
    replica.load_parameters([np.arange(6, dtype=np.float32)])
    for is_applied in steps:
        replica.apply([np.ones(6, np.float32)], SCALARS) if is_applied else replica.skip()
    return replica


def fill(coordinator_replica):
    coordinator_replica.fill(chunk(0), np.arange(4, dtype=np.float32))
    coordinator_replica.fill(chunk(1), np.arange(4, 6, dtype=np.float32))


async def test_chunks_fill_state_0(coordinator_replica):
    fill(coordinator_replica)
    initial_digest, state = await coordinator_replica.digest_state_0()
    assert initial_digest == expected_replica([]).initial_digest()
    assert (state.step, state.state_digest) == (0, expected_replica([]).state_digest())


async def test_steps_and_locks_keep_the_order_of_the_calls(coordinator_replica):
    async def locked_digest() -> str:
        with await coordinator_replica.lock() as locked:
            return locked.replica.state_digest()

    fill(coordinator_replica)
    ones = [np.ones(6, np.float32)]
    first, digest_between, skipped, last = await asyncio.gather(
        coordinator_replica.apply(ones, SCALARS), locked_digest(),
        coordinator_replica.apply(ones, None),
        coordinator_replica.apply(ones, SCALARS),
    )  # fmt: skip
    assert first.state_digest == digest_between == expected_replica([True]).state_digest()
    assert (skipped.step, last.step) == (2, 3)
    assert last.state_digest == expected_replica([True, False, True]).state_digest()
    assert ones[0].tolist() == [1.0] * 6


async def test_step_waits_until_the_replica_is_released(coordinator_replica):
    fill(coordinator_replica)
    with await coordinator_replica.lock() as locked:
        step = asyncio.create_task(coordinator_replica.apply([np.ones(6, np.float32)], SCALARS))
        waiter = asyncio.create_task(asyncio.wait_for(asyncio.shield(step), 0.01))
        with pytest.raises(TimeoutError):
            await waiter
        assert locked.replica.state_digest() == expected_replica([]).state_digest()
        locked.release()
        assert (await step).state_digest == expected_replica([True]).state_digest()
    # The end of the first context must not release a lock that another caller has taken.
    assert (await coordinator_replica.digest_state_0())[1].step == 1
