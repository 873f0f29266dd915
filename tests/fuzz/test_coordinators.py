"""A coordinator that has proved itself breaks what it says: the connection may end, and no more.

A worker trusts its coordinator with what it computes; its process is its own all the same.
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
ALWAYS = [frame(EXAMPLES[kind]) for kind in (Heartbeat, Goodbye, Halt)]
LONGEST = 32
"""More than a coordinator says to its one worker in this run."""

pytestmark = pytest.mark.timeout(1800)


def frames_of(data: bytes) -> Iterator[bytes]:
    while data:
        prefix = frames.decode_prefix(data, 2**16, 2**32)
        size = prefix.head_bytes + prefix.body_bytes
        yield data[:size]
        data = data[size:]


def play(built: Built, seed: int) -> tuple[bool, list[tuple[str, str]]]:
    """A whole run with one broken frame in it; whether the worker's connection outlived it."""
    rng = random.Random(seed)
    turn = rng.randrange(LONGEST)
    coordinator, worker = PureCoordinator(SPEC), PureWorker(built, SPEC, INITIAL)
    frames: list[bytes] = []
    waiting = [*frames_of(coordinator.connect())]
    while waiting and worker.open and coordinator.open:
        frames.append(waiting.pop(0))
        if len(frames) - 1 == turn:
            frames[-1] = rng.choice(MUTATIONS)(rng, [*frames[-3:], *ALWAYS])
        waiting += frames_of(coordinator.feed(worker.feed(frames[-1])))
    return worker.open, coordinator.ended


@pytest.mark.parametrize(
    "runs",
    [
        150,
        pytest.param(3_000, marks=pytest.mark.slow, id="3,000"),
        pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.release], id="20,000"),
    ],
)
def test_a_worker_s_logic_outlives_a_coordinator_that_breaks_what_it_says(runs):
    built = asyncio.run(build())
    outlived = finished = 0
    for seed in range(50):
        play(built, seed)
    with measured_growth() as growth:
        for seed in range(SEED, SEED + runs):
            try:
                was_open, ended = play(built, seed)
            except Exception as error:
                raise AssertionError(f"seed {seed}") from error
            outlived += was_open
            finished += [outcome for outcome, _ in ended] == ["finished"]
    assert growth.peak_bytes <= MEMORY_GROWTH_BYTES
    assert finished > runs // 50
    assert outlived < runs
