"""The coordinator's side of one connection: handshake, time-out, names, and how it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.members.credentials import CoordinatorCredentials
from coordinator.members.session import JoinCheck, MemberSession
from protocol.base import limits
from protocol.base.errors import ExitCode, OutOfOrder
from protocol.wire import messages
from protocol.wire.authentication import answer
from protocol.wire.connection import Received
from protocol.wire.messages import Challenge, Message, Welcome
from tests.event_loop import on_uvloop
from tests.hostile_worker import HostileWorker
from tests.live_service import PATIENCE_S, live_service
from tests.message_samples import EXAMPLES

WELCOME = EXAMPLES[Welcome]


class Wire:
    """Stands for the channel: writes down what the session does with it."""

    peer = "127.0.0.1:1"

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.goodbyes: list[tuple[str, int]] = []
        self.aborted = asyncio.Event()
        self.reason = ""

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def goodbye(self, reason: str, *, retry: bool, exit_code: int = 0) -> None:
        assert not retry
        self.goodbyes.append((reason, exit_code))

    def abort(self, reason: str) -> None:
        self.reason = reason
        self.aborted.set()


class House:
    """Stands for the service, and for its run."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def admit(self, session: MemberSession) -> Welcome:
        self.heard.append(("admit", session.hello.name))
        assert isinstance(WELCOME, Welcome)
        return WELCOME

    def joined(self, session: MemberSession) -> None:
        self.heard.append(("joined", session.name))

    def receive(self, session: MemberSession, received: Received) -> None:
        assert session.name
        self.heard.append(("receive", type(received.message).__name__))

    def left(self, session: MemberSession, reason: str) -> None:
        assert session.channel is not None
        self.heard.append(("left", reason))


def begun() -> tuple[MemberSession, House, Any]:
    house, wire = House(), Wire()
    session = MemberSession(house, JoinCheck(CoordinatorCredentials.open(), encrypted=True))
    session.start(wire)  # type: ignore[arg-type]
    return session, house, wire


def hear(session: MemberSession, kind: type[Message], **changes: Any) -> None:
    message = EXAMPLES[kind].model_copy(update=changes)
    session.on_message(session.channel, Received(message, None))


def prove(session: MemberSession, wire: Wire) -> None:
    """The right answer to the challenge."""
    token = CoordinatorCredentials.open().join_token()
    (challenge,) = wire.sent
    assert isinstance(challenge, Challenge)
    proof = answer(session.hello, challenge, token.fingerprint, token.secret)
    session.on_message(session.channel, Received(proof, None))


@on_uvloop
async def test_hello_challenge_proof_welcome_and_then_a_member():
    session, house, wire = begun()
    hear(session, messages.Hello)
    assert [type(message) for message in wire.sent] == [Challenge]
    assert house.heard == []
    prove(session, wire)
    assert wire.sent[1:] == [WELCOME]
    # The owner may send as soon as it hears of the member: the welcome has gone before.
    assert house.heard == [("admit", "w"), ("joined", "w")]
    hear(session, messages.SubtreeLoss)  # of a run that is over: nobody hears it
    session.run = house
    hear(session, messages.Heartbeat)
    hear(session, messages.SubtreeLoss)
    assert house.heard[2:] == [("receive", "SubtreeLoss")]
    session.on_lost(session.channel, "gone", None)
    assert house.heard[3:] == [("left", "gone")]


@on_uvloop
async def test_a_wrong_proof_is_not_admitted():
    session, house, wire = begun()
    hear(session, messages.Hello)
    hear(session, messages.Proof, proof=b"guess")
    assert house.heard == []
    ((reason, code),) = wire.goodbyes
    assert "the proof is wrong" in reason
    assert code == ExitCode.NOT_AUTHORIZED
    assert session.name == ""
    session.on_lost(session.channel, "closed", None)


@on_uvloop
async def test_a_member_without_a_run_may_leave():
    session, house, wire = begun()
    hear(session, messages.Hello)
    prove(session, wire)
    hear(session, messages.Drain)
    assert wire.goodbyes == [("drained", ExitCode.OK)]
    assert len(house.heard) == 2
    session.on_lost(session.channel, "closed", None)


@on_uvloop
async def test_work_before_the_welcome_is_out_of_order():
    session, house, _ = begun()
    with pytest.raises(OutOfOrder, match="SubtreeLoss before the handshake"):
        hear(session, messages.SubtreeLoss)
    assert house.heard == []
    session.on_lost(session.channel, "closed", None)


@on_uvloop
async def test_the_handshake_has_its_time(monkeypatch):
    monkeypatch.setattr(limits, "HANDSHAKE_TIMEOUT_MS", 30)
    slow, _, wire = begun()
    hear(slow, messages.Hello)
    async with asyncio.timeout(PATIENCE_S):
        await wire.aborted.wait()
    assert wire.reason == "the handshake took longer than 0.03 s"
    slow.on_lost(slow.channel, wire.reason, None)


@on_uvloop
async def test_the_clock_stops_for_members_and_for_the_lost(monkeypatch):
    monkeypatch.setattr(limits, "HANDSHAKE_TIMEOUT_MS", 30)
    member, _, member_wire = begun()
    hear(member, messages.Hello)
    prove(member, member_wire)
    lost, _, lost_wire = begun()
    lost.on_lost(lost.channel, "closed", None)
    _, _, late_wire = begun()
    async with asyncio.timeout(PATIENCE_S):
        await late_wire.aborted.wait()
    assert not member_wire.aborted.is_set()
    assert not lost_wire.aborted.is_set()
    member.on_lost(member.channel, "closed", None)


@pytest.mark.parametrize(
    ("last_message", "expected_reason"), [("the card is on fire", None), ("", "goodbye")]
)
@on_uvloop
async def test_what_a_worker_said_last_is_the_reason(last_message, expected_reason):
    session, house, wire = begun()
    hear(session, messages.Goodbye, reason=last_message)
    assert wire.aborted.is_set()
    session.on_lost(session.channel, "the peer closed the connection", None)
    assert house.heard == [("left", expected_reason or last_message)]


# Through the service: who is known by which name.


@on_uvloop
async def test_names_are_made_unique_and_stay_short(tmp_path):
    async with live_service(tmp_path, 1) as live:
        for wanted in ("w", "x" * 64, ""):
            async with (
                HostileWorker(live.port) as first,
                HostileWorker(live.port) as second,
                HostileWorker(live.port) as third,
            ):
                names = [
                    (await each.join(name=wanted, instance=str(number) * 32)).worker
                    for number, each in enumerate((first, second, third))
                ]
                assert names[0] == (wanted or "worker")
                assert len(set(names)) == 3
                assert all(len(name) <= 64 for name in names)
                assert set(names) <= set(live.service.sessions)


@on_uvloop
async def test_a_worker_that_came_back_takes_the_place_of_its_old_connection(tmp_path):
    async with (
        live_service(tmp_path, 1) as live,
        HostileWorker(live.port) as before,
        HostileWorker(live.port) as after,
    ):
        assert (await before.join(name="w")).worker == "w"
        assert (await after.join(name="w")).worker == "w"
        assert await before.farewell() is None
        left = await live.wait_for("worker_disconnected", worker="w")
        assert left["reason"] == "the worker has connected again"
        assert list(live.service.sessions) == ["w"]


@on_uvloop
async def test_who_was_let_go_left_for_that(tmp_path):
    """Though it is the worker that closes."""
    async with live_service(tmp_path, 1) as live, HostileWorker(live.port, "w") as worker:
        await worker.join()
        worker.send(messages.Drain())
        await worker.until(messages.Goodbye)
        worker.vanish()
        left = await live.wait_for("worker_disconnected", worker="w")
        assert left["reason"] == "drained"


@on_uvloop
async def test_a_welcome_says_the_term_and_the_rhythm(tmp_path):
    for term in (1, 2):
        async with live_service(tmp_path, 1) as live, HostileWorker(live.port) as worker:
            welcome = await worker.join()
            assert welcome.term == term
            assert welcome.heartbeat_interval_ms == limits.HEARTBEAT_INTERVAL_MS
            assert welcome.liveness_timeout_ms == limits.LIVENESS_TIMEOUT_MS


@on_uvloop
async def test_a_silent_member_is_lost_and_a_living_one_is_not(tmp_path, monkeypatch):
    """Though its kernel answers: it may build its task, but not for ever."""
    monkeypatch.setattr(limits, "HEARTBEAT_INTERVAL_MS", 20)
    monkeypatch.setattr(limits, "LIVENESS_TIMEOUT_MS", 100_000)
    monkeypatch.setattr(limits, "STALL_TIMEOUT_MS", 1500)
    async with live_service(tmp_path, 1) as live:
        live.worker("living")
        async with HostileWorker(live.port, "silent") as silent:
            await silent.join()
            lost = await live.wait_for("worker_disconnected", worker="silent")
            assert lost["reason"].startswith("silent for")
        assert list(live.service.sessions) == ["living"]


@on_uvloop
async def test_members_hear_goodbye_when_the_service_ends(tmp_path):
    async with live_service(tmp_path, 1) as live:
        worker = HostileWorker(live.port)
        async with worker:
            await worker.join()
            await live.service.stop()
            goodbye = await worker.farewell()
            assert goodbye is not None
            assert goodbye.exit_code == ExitCode.OK
            assert not goodbye.retry
