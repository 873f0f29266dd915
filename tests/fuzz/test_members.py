"""A member sends broken frames at any stage of a run: only its connection may end.

The coordinator is its logic alone, with many connections, or a whole service with a disk.
`SAMESTEP_FUZZ_SEED` selects other faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Callable

import pytest
import structlog

from coordinator.run.inputs import ContinueRun
from coordinator.run.run import RunPhase
from protocol.base.errors import MessageError
from protocol.spec.manifest import Manifest
from protocol.wire import frames
from protocol.wire.authentication import answer_challenge, new_nonce
from protocol.wire.connection import Connection, Phase
from protocol.wire.messages import Challenge, Drain, Goodbye, Heartbeat, Hello, Ready
from tests.event_loop import on_uvloop_for
from tests.fuzz.member import WAIT, Member
from tests.fuzz.memory_transport import MemoryTransport
from tests.fuzz.mutations import MUTATIONS, split_frame
from tests.fuzz.pure_coordinator import PureCoordinator
from tests.live_service import LiveService, ScriptedFactory, live_service, scripted_spec
from tests.message_samples import EXAMPLES, frame, join_buffers
from tests.resident_memory import MIB, measured_growth
from worker.logic import actions as act
from worker.logic.events import Built, Event
from worker.shell.engine import Engine

SEED = int(os.environ.get("SAMESTEP_FUZZ_SEED", "0"))
MEMORY_GROWTH_BYTES = 32 * MIB
LARGE_ELEMENTS = 1_000_000
"""Limit on a broken manifest, whose replica must fit in this machine's memory."""
SPEC = scripted_spec(steps=2, evaluate_every=1)
INITIAL = ScriptedFactory().task(SPEC).initial_parameters()
COMMON_FRAMES = [frame(EXAMPLES[each]) for each in (Heartbeat, Drain, Goodbye)]
MAX_FRAMES = 24
"""More frames than an honest member sends in this run."""
PATIENCE_S = 120.0

pytestmark = pytest.mark.timeout(1800)


async def build() -> Built:
    """Return the engine's result of building the run."""
    loop = asyncio.get_running_loop()
    built_event: asyncio.Future[Event] = loop.create_future()

    def emit(event: Event) -> None:
        loop.call_soon_threadsafe(built_event.set_result, event)

    engine = Engine(ScriptedFactory(), emit)
    engine.do(act.Build("r", SPEC, keep_state=False))
    built = await built_event
    await loop.run_in_executor(None, engine.close)
    assert isinstance(built, Built)
    return built


def has_large_manifest(data: bytes) -> bool:
    """Whether the frame has a manifest of more than `LARGE_ELEMENTS` elements."""
    if len(data) < 20 or data[3] != Ready.tag:
        return False
    try:
        return Manifest.from_bytes(split_frame(data)[2]).elements > LARGE_ELEMENTS
    except MessageError:
        return False


def break_frame(rng: random.Random, legal_frames: list[bytes]) -> bytes:
    while has_large_manifest(data := rng.choice(MUTATIONS)(rng, legal_frames)):
        pass
    return data


def frame_breaker(rng: random.Random) -> Callable[[int, list[bytes]], bytes]:
    """Return a function that returns the last sent frame, or a broken frame at one random turn."""
    broken_index = rng.randrange(MAX_FRAMES)
    return lambda number, sent_frames: (
        break_frame(rng, [*sent_frames[-3:], *COMMON_FRAMES])
        if number == broken_index
        else sent_frames[-1]
    )


# The logic alone.


def play(coordinator: PureCoordinator, built: Built, seed: int) -> None:
    """Play one connection: honest frames with one broken frame among them."""
    mutate = frame_breaker(random.Random(seed))
    member = Member(built, INITIAL, coordinator.digest_after)
    member.receive(coordinator.connect())
    frames: list[bytes] = []
    for number, outgoing in enumerate(member.frames()):
        if outgoing == WAIT or not coordinator.is_open:
            break
        frames.append(outgoing)
        member.receive(coordinator.feed(mutate(number, frames)))
    coordinator.hang_up()


@pytest.mark.parametrize(
    "connections",
    [
        200,
        pytest.param(3_000, marks=pytest.mark.slow, id="3,000"),
        pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.release], id="20,000"),
    ],
)
def test_run_logic_survives_broken_member_frames(connections):
    built = asyncio.run(build())
    coordinator = PureCoordinator(SPEC)
    for seed in range(100):
        play(coordinator, built, seed)
    with measured_growth() as growth:
        for seed in range(SEED, SEED + connections):
            try:
                play(coordinator, built, seed)
            except Exception as error:
                raise AssertionError(f"seed {seed}") from error
    assert growth.peak_bytes <= MEMORY_GROWTH_BYTES
    outcomes = [outcome for outcome, _ in coordinator.outcomes]
    assert outcomes.count("finished") > connections // 50
    # Before the start, a first worker that cannot build the task ends the run; nothing else does.
    assert set(outcomes) <= {"finished", "failed"}


# The whole coordinator.


@pytest.fixture
def _without_fsync_and_logs(monkeypatch):
    """Skip fsync and logs: there are many connections, and durability does not matter here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


class LiveMember:
    """A member of a whole service, in memory."""

    def __init__(self, live: LiveService, built: Built) -> None:
        self.live = live
        self.member = Member(built, INITIAL, self._digest_after)
        channel = live.service._connection(("127.0.0.1", 1))
        assert channel is not None
        self.transport = MemoryTransport(channel)
        self._shake_hands()

    def _shake_hands(self) -> None:
        connection = Connection("worker")
        hello = EXAMPLES[Hello].model_copy(update={"nonce": new_nonce(), "name": "m"})
        assert isinstance(hello, Hello)
        self.transport.feed(join_buffers(connection.send(hello)))
        ((challenge, _),) = connection.receive_data(self.transport.take())
        token = self.live.service.credentials.join_token()
        assert isinstance(challenge, Challenge)
        proof = answer_challenge(hello, challenge, token.fingerprint, token.secret)
        self.transport.feed(join_buffers(connection.send(proof)))
        content = self.transport.take()
        length = welcome_bytes(content)
        connection.receive_data(content[:length])
        assert connection.phase is Phase.OPEN
        self.member.receive(content[length:])

    def _digest_after(self, step: int) -> str | None:
        current = self.live.service.current
        applied_state = current.replica_state if current is not None else None
        return (
            applied_state.state_digest
            if applied_state is not None and applied_state.step == step
            else None
        )

    @property
    def is_over(self) -> bool:
        """Whether the coordinator will send nothing more."""
        current = self.live.service.current
        is_idle = current is None or current.run.phase in (RunPhase.HALTED, RunPhase.OVER)
        return is_idle or self.transport.is_closing()

    async def listen(self) -> None:
        """Process received frames, or wait briefly; progress of the run without messages is
        polled."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.transport.activity.wait(), 0.005)
        self.transport.activity.clear()
        self.member.receive(self.transport.take())


def welcome_bytes(data: bytes) -> int:
    """Return the length of the first frame, which has no body."""
    return frames.PREFIX_BYTES + int.from_bytes(data[4:6], "big")


async def play_live(live: LiveService, built: Built, seed: int) -> None:
    """Play one connection like `play`, with a whole service."""
    await ensure_run(live)
    mutate = frame_breaker(random.Random(seed))
    live_member = LiveMember(live, built)
    frames: list[bytes] = []
    async with asyncio.timeout(PATIENCE_S):
        for outgoing in live_member.member.frames():
            if outgoing == WAIT:
                if live_member.is_over:
                    break
                await live_member.listen()
                continue
            frames.append(outgoing)
            live_member.transport.feed(mutate(len(frames) - 1, frames))
    live_member.transport.hang_up()
    await asyncio.sleep(0)
    assert not live.events_named("internal_error")


async def ensure_run(live: LiveService) -> None:
    """Make sure that there is a run, and that it is not halted."""
    service = live.service
    current = service.current
    if current is not None and current.run.phase is RunPhase.OVER:
        await live.wait_for("run_ended", run_id=current.run.run_id)
    if service.current is None:
        service.submit(SPEC)
    elif service.current.run.phase is RunPhase.HALTED:
        service.current.execute_command(ContinueRun())


@pytest.mark.usefixtures("_without_fsync_and_logs")
@pytest.mark.parametrize(
    "connections",
    [
        12,
        pytest.param(100, marks=pytest.mark.slow, id="100"),
        pytest.param(500, marks=[pytest.mark.slow, pytest.mark.release], id="500"),
    ],
)
@on_uvloop_for(1_800.0)
async def test_service_survives_broken_member_frames(tmp_path, connections):
    async with live_service(tmp_path, 1) as live:
        built = await build()
        with measured_growth() as growth:
            for seed in range(SEED, SEED + connections):
                try:
                    await play_live(live, built, seed)
                except Exception as error:
                    raise AssertionError(f"seed {seed}") from error
        assert growth.peak_bytes <= MEMORY_GROWTH_BYTES
        assert len(live.events_named("run_ended")) > 1
        assert not live.service._pending
