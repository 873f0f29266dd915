"""An authenticated coordinator sends broken frames: only the connection may end.

A worker trusts its coordinator with the computation, but its process must survive.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator

import pytest

from protocol.wire import frames
from protocol.wire.messages import Goodbye, Halt, Heartbeat
from tests.fuzz.mutations import MUTATIONS
from tests.fuzz.pure_coordinator import PureCoordinator
from tests.fuzz.pure_worker import PureWorker
from tests.fuzz.test_members import INITIAL, SPEC, build
from tests.message_samples import EXAMPLES, frame
from tests.resident_memory import MIB, measured_growth
from worker.logic.events import Built

SEED = int(os.environ.get("SAMESTEP_FUZZ_SEED", "0"))
MEMORY_GROWTH_BYTES = 32 * MIB
COMMON_FRAMES = [frame(EXAMPLES[each]) for each in (Heartbeat, Goodbye, Halt)]
MAX_FRAMES = 32
"""More frames than a coordinator sends to its one worker in this run."""

pytestmark = pytest.mark.timeout(1800)


def split_frames(data: bytes) -> Iterator[bytes]:
    """Yield the frames of a byte stream that ends with a frame."""
    while data:
        prefix = frames.decode_prefix(data, 2**16, 2**32)
        size = prefix.head_bytes + prefix.body_bytes
        yield data[:size]
        data = data[size:]


def play_run(built: Built, seed: int) -> tuple[bool, list[tuple[str, str]]]:
    """Play a run with one broken frame; return whether the worker's connection is still open, and
    the outcomes of runs."""
    rng = random.Random(seed)
    broken_index = rng.randrange(MAX_FRAMES)
    coordinator, worker = PureCoordinator(SPEC), PureWorker(built, SPEC, INITIAL)
    sent_frames: list[bytes] = []
    pending = [*split_frames(coordinator.connect())]
    while pending and worker.is_open and coordinator.is_open:
        sent_frames.append(pending.pop(0))
        if len(sent_frames) - 1 == broken_index:
            sent_frames[-1] = rng.choice(MUTATIONS)(rng, [*sent_frames[-3:], *COMMON_FRAMES])
        pending += split_frames(coordinator.feed(worker.feed(sent_frames[-1])))
    return worker.is_open, coordinator.outcomes


@pytest.mark.parametrize(
    "runs",
    [
        150,
        pytest.param(3_000, marks=pytest.mark.slow, id="3,000"),
        pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.release], id="20,000"),
    ],
)
def test_worker_logic_survives_broken_coordinator_frames(runs):
    built = asyncio.run(build())
    survivals = finished_runs = 0
    for seed in range(50):
        play_run(built, seed)
    with measured_growth() as growth:
        for seed in range(SEED, SEED + runs):
            try:
                has_survived, outcomes = play_run(built, seed)
            except Exception as error:
                raise AssertionError(f"seed {seed}") from error
            survivals += has_survived
            finished_runs += [outcome for outcome, _ in outcomes] == ["finished"]
    assert growth.peak_bytes <= MEMORY_GROWTH_BYTES
    assert finished_runs > runs // 50
    assert survivals < runs
