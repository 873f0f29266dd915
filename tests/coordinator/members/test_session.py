"""The coordinator's side of a connection: handshake, timeout, names, and disconnection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.members.credentials import CoordinatorCredentials
from coordinator.members.session import JoinCheck, MemberSession
from protocol.base import limits
from protocol.base.errors import ExitCode, OutOfOrder
from protocol.wire import messages
from protocol.wire.authentication import answer_challenge
from protocol.wire.connection import ReceivedMessage
from protocol.wire.messages import Challenge, Message, Welcome
from tests.event_loop import on_uvloop
from tests.hostile_worker import HostileWorker
from tests.live_service import PATIENCE_S, live_service
from tests.message_samples import EXAMPLES

WELCOME = EXAMPLES[Welcome]


class FakeChannel:
    """Replaces the channel: records the calls of the session."""

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


class FakeService:
    """Replaces the service and its run."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def name_worker(self, session: MemberSession) -> Welcome:
        self.calls.append(("name_worker", session.hello.name))
        assert isinstance(WELCOME, Welcome)
        return WELCOME

    def add_member(self, session: MemberSession) -> None:
        self.calls.append(("add_member", session.name))

    def receive(self, session: MemberSession, received: ReceivedMessage) -> None:
        assert session.name
        self.calls.append(("receive", type(received.message).__name__))

    def remove_session(self, session: MemberSession, reason: str) -> None:
        assert session.channel is not None
        self.calls.append(("remove_session", reason))


def start_session() -> tuple[MemberSession, FakeService, Any]:
    service, channel = FakeService(), FakeChannel()
    session = MemberSession(service, JoinCheck(CoordinatorCredentials.open(), encrypted=True))
    session.start(channel)  # type: ignore[arg-type]
    return session, service, channel


def receive_message(session: MemberSession, kind: type[Message], **changes: Any) -> None:
    message = EXAMPLES[kind].model_copy(update=changes)
    session.on_message(session.channel, ReceivedMessage(message, None))


def prove(session: MemberSession, channel: FakeChannel) -> None:
    """Send the correct answer to the challenge."""
    token = CoordinatorCredentials.open().join_token()
    (challenge,) = channel.sent
    assert isinstance(challenge, Challenge)
    proof = answer_challenge(session.hello, challenge, token.fingerprint, token.secret)
    session.on_message(session.channel, ReceivedMessage(proof, None))


@on_uvloop
async def test_handshake_makes_a_member():
    session, service, channel = start_session()
    receive_message(session, messages.Hello)
    assert [type(message) for message in channel.sent] == [Challenge]
    assert service.calls == []
    prove(session, channel)
    assert channel.sent[1:] == [WELCOME]
    # The service may send as soon as it learns of the member: the welcome was sent before.
    assert service.calls == [("name_worker", "w"), ("add_member", "w")]
    receive_message(session, messages.SubtreeLoss)  # without a run, the message is dropped
    session.run = service
    receive_message(session, messages.Heartbeat)
    receive_message(session, messages.SubtreeLoss)
    assert service.calls[2:] == [("receive", "SubtreeLoss")]
    session.on_lost(session.channel, "gone", None)
    assert service.calls[3:] == [("remove_session", "gone")]


@on_uvloop
async def test_wrong_proof_is_not_admitted():
    session, service, channel = start_session()
    receive_message(session, messages.Hello)
    receive_message(session, messages.Proof, proof=b"guess")
    assert service.calls == []
    ((reason, code),) = channel.goodbyes
    assert "the proof is wrong" in reason
    assert code == ExitCode.NOT_AUTHORIZED
    assert session.name == ""
    session.on_lost(session.channel, "closed", None)


@on_uvloop
async def test_member_without_a_run_may_leave():
    session, service, channel = start_session()
    receive_message(session, messages.Hello)
    prove(session, channel)
    receive_message(session, messages.Drain)
    assert channel.goodbyes == [("drained", ExitCode.OK)]
    assert len(service.calls) == 2
    session.on_lost(session.channel, "closed", None)


@on_uvloop
async def test_work_before_the_welcome_is_out_of_order():
    session, service, _ = start_session()
    with pytest.raises(OutOfOrder, match="SubtreeLoss before the handshake"):
        receive_message(session, messages.SubtreeLoss)
    assert service.calls == []
    session.on_lost(session.channel, "closed", None)


@on_uvloop
async def test_slow_handshake_is_aborted(monkeypatch):
    monkeypatch.setattr(limits, "HANDSHAKE_TIMEOUT_MS", 30)
    slow_session, _, channel = start_session()
    receive_message(slow_session, messages.Hello)
    async with asyncio.timeout(PATIENCE_S):
        await channel.aborted.wait()
    assert channel.reason == "the handshake took longer than 0.03 s"
    slow_session.on_lost(slow_session.channel, channel.reason, None)


@on_uvloop
async def test_timeout_stops_for_members_and_lost_connections(monkeypatch):
    monkeypatch.setattr(limits, "HANDSHAKE_TIMEOUT_MS", 30)
    member, _, member_channel = start_session()
    receive_message(member, messages.Hello)
    prove(member, member_channel)
    lost_session, _, lost_channel = start_session()
    lost_session.on_lost(lost_session.channel, "closed", None)
    _, _, late_channel = start_session()
    async with asyncio.timeout(PATIENCE_S):
        await late_channel.aborted.wait()
    assert not member_channel.aborted.is_set()
    assert not lost_channel.aborted.is_set()
    member.on_lost(member.channel, "closed", None)


@pytest.mark.parametrize(
    ("last_message", "expected_reason"), [("the card is on fire", None), ("", "goodbye")]
)
@on_uvloop
async def test_last_message_of_a_worker_is_the_reason(last_message, expected_reason):
    session, service, channel = start_session()
    receive_message(session, messages.Goodbye, reason=last_message)
    assert channel.aborted.is_set()
    session.on_lost(session.channel, "the peer closed the connection", None)
    assert service.calls == [("remove_session", expected_reason or last_message)]


# Names of workers, through the service.


@on_uvloop
async def test_names_are_made_unique_and_stay_short(tmp_path):
    async with live_service(tmp_path, 1) as live:
        for expected in ("w", "x" * 64, ""):
            async with (
                HostileWorker(live.port) as first,
                HostileWorker(live.port) as second,
                HostileWorker(live.port) as third,
            ):
                names = [
                    (await each.join(name=expected, instance=str(number) * 32)).worker
                    for number, each in enumerate((first, second, third))
                ]
                assert names[0] == (expected or "worker")
                assert len(set(names)) == 3
                assert all(len(name) <= 64 for name in names)
                assert set(names) <= set(live.service.sessions)


@on_uvloop
async def test_returning_worker_replaces_its_old_connection(tmp_path):
    async with (
        live_service(tmp_path, 1) as live,
        HostileWorker(live.port) as before,
        HostileWorker(live.port) as after,
    ):
        assert (await before.join(name="w")).worker == "w"
        assert (await after.join(name="w")).worker == "w"
        assert await before.wait_for_goodbye() is None
        departure = await live.wait_for("worker_disconnected", worker="w")
        assert departure["reason"] == "the worker has connected again"
        assert list(live.service.sessions) == ["w"]


@on_uvloop
async def test_dismissed_worker_leaves_with_that_reason(tmp_path):
    """The reason is 'drained' although the worker closes the connection."""
    async with live_service(tmp_path, 1) as live, HostileWorker(live.port, "w") as worker:
        await worker.join()
        worker.send(messages.Drain())
        await worker.wait_for_message(messages.Goodbye)
        worker.abort()
        departure = await live.wait_for("worker_disconnected", worker="w")
        assert departure["reason"] == "drained"


@on_uvloop
async def test_welcome_has_term_and_heartbeat_interval(tmp_path):
    for term in (1, 2):
        async with live_service(tmp_path, 1) as live, HostileWorker(live.port) as worker:
            welcome = await worker.join()
            assert welcome.term == term
            assert welcome.heartbeat_interval_ms == limits.HEARTBEAT_INTERVAL_MS
            assert welcome.liveness_timeout_ms == limits.LIVENESS_TIMEOUT_MS


@on_uvloop
async def test_silent_member_is_lost_and_live_member_stays(tmp_path, monkeypatch):
    """A silent member is lost after the stall timeout although its kernel keeps the connection."""
    monkeypatch.setattr(limits, "HEARTBEAT_INTERVAL_MS", 20)
    monkeypatch.setattr(limits, "LIVENESS_TIMEOUT_MS", 100_000)
    monkeypatch.setattr(limits, "STALL_TIMEOUT_MS", 1500)
    async with live_service(tmp_path, 1) as live:
        live.start_worker("living")
        async with HostileWorker(live.port, "silent") as silent_worker:
            await silent_worker.join()
            event = await live.wait_for("worker_disconnected", worker="silent")
            assert event["reason"].startswith("silent for")
        assert list(live.service.sessions) == ["living"]


@on_uvloop
async def test_members_receive_a_goodbye_when_the_service_ends(tmp_path):
    async with live_service(tmp_path, 1) as live:
        worker = HostileWorker(live.port)
        async with worker:
            await worker.join()
            await live.service.stop()
            goodbye = await worker.wait_for_goodbye()
            assert goodbye is not None
            assert goodbye.exit_code == ExitCode.OK
            assert not goodbye.retry
