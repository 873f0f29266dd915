"""Strangers: how many there may be, from where, and what becomes of silent ones."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from coordinator.members.credentials import CoordinatorCredentials
from coordinator.members.listening import is_loopback
from protocol.base import limits
from protocol.base.errors import ExitCode, NotAuthorized
from protocol.wire.acceptor import Acceptor
from protocol.wire.authentication import Exchange, answer, on_this_machine
from protocol.wire.messages import Challenge, Proof
from tests.event_loop import on_uvloop
from tests.hostile_worker import HostileWorker
from tests.live_service import PATIENCE_S, LiveService, live_service, scripted_spec

HELLO_OF_TLS = bytes.fromhex("1603010200010001fc0303") + bytes(32)


class Stranger:
    """A plain connection that does no more than it is told."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.endpoint = socket.socket()
        self.endpoint.setblocking(False)
        self.endpoint.bind((host, 0))
        self._port = port

    async def connect(self, data: bytes = b"") -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.endpoint, ("127.0.0.1", self._port))
        await loop.sock_sendall(self.endpoint, data)

    async def closed(self) -> bool:
        """Wait for the end of the connection, whatever comes before."""
        loop = asyncio.get_running_loop()
        try:
            while await loop.sock_recv(self.endpoint, 4096):
                pass
        except ConnectionResetError:
            return True
        return True


async def crowd(live: LiveService, count: int, host: str, data: bytes = b"") -> list[Stranger]:
    strangers = [Stranger(live.port, host) for _ in range(count)]
    for each in strangers:
        await each.connect(data)
    return strangers


async def inside(live: LiveService, count: int) -> None:
    """Wait until so many are in the handshake."""
    async with asyncio.timeout(PATIENCE_S):
        while len(live.service._pending) != count:  # noqa: ASYNC110 -- nobody is told of strangers
            await asyncio.sleep(0)


def leave(strangers: list[Stranger]) -> None:
    for each in strangers:
        each.endpoint.close()


@pytest.mark.parametrize("data", [b"", HELLO_OF_TLS[:20]], ids=["silent", "half a TLS handshake"])
@on_uvloop
async def test_one_address_has_eight_places_and_others_have_theirs(tmp_path, data, monkeypatch):
    monkeypatch.setattr(limits, "UNAUTHENTICATED_SLOT_MS", 0)
    async with live_service(tmp_path, 1) as live:
        most = limits.UNAUTHENTICATED_CONNECTIONS_PER_ADDRESS
        here = await crowd(live, most, "127.0.0.1", data)
        await inside(live, most)
        async with asyncio.timeout(limits.HANDSHAKE_TIMEOUT_MS / 1000 - 1):
            (refused,) = await crowd(live, 1, "127.0.0.1")
            assert await refused.closed()
            async with HostileWorker(live.port, host="127.0.0.2") as elsewhere:
                await elsewhere.join()
        leave([*here, refused])
        await inside(live, 0)
        async with HostileWorker(live.port, "later") as later:
            await later.join()


@on_uvloop
async def test_all_addresses_together_have_64_places(tmp_path):
    async with live_service(tmp_path, 1) as live:
        most, each = (
            limits.UNAUTHENTICATED_CONNECTIONS,
            limits.UNAUTHENTICATED_CONNECTIONS_PER_ADDRESS,
        )
        strangers: list[Stranger] = []
        for number in range(most // each):
            strangers += await crowd(live, each, f"127.0.0.{10 + number}")
        await inside(live, most)
        async with asyncio.timeout(limits.HANDSHAKE_TIMEOUT_MS / 1000 - 1):
            (refused,) = await crowd(live, 1, "127.0.0.99")
            assert await refused.closed()
        assert len(live.service._pending) == most
        leave([*strangers, refused])
        await inside(live, 0)


@pytest.mark.parametrize(
    "data", [b"", HELLO_OF_TLS[:20], HELLO_OF_TLS], ids=["silent", "part", "hello"]
)
@on_uvloop
async def test_who_does_not_finish_the_tls_handshake_is_closed_in_time(tmp_path, data, monkeypatch):
    monkeypatch.setattr(limits, "HANDSHAKE_TIMEOUT_MS", 200)
    async with live_service(tmp_path, 1) as live:
        (stranger,) = await crowd(live, 1, "127.0.0.1", data)
        async with asyncio.timeout(3):
            assert await stranger.closed()
        await inside(live, 0)
        stranger.endpoint.close()


@on_uvloop
async def test_who_does_not_become_a_member_keeps_its_place_for_a_while(tmp_path, monkeypatch):
    most = limits.UNAUTHENTICATED_CONNECTIONS_PER_ADDRESS
    monkeypatch.setattr(limits, "UNAUTHENTICATED_SLOT_MS", 600_000)
    async with live_service(tmp_path, 1) as live:
        async with HostileWorker(live.port) as member:
            await member.join()
        for _ in range(most):
            (stranger,) = await crowd(live, 1, "127.0.0.1")
            await inside(live, 1)
            leave([stranger])
            await inside(live, 0)
        (refused,) = await crowd(live, 1, "127.0.0.1")
        assert await refused.closed()
        async with HostileWorker(live.port, host="127.0.0.2") as elsewhere:
            await elsewhere.join()
        leave([refused])


@on_uvloop
async def test_members_take_no_stranger_s_place(tmp_path):
    async with live_service(tmp_path, 1) as live:
        for number in range(limits.UNAUTHENTICATED_CONNECTIONS_PER_ADDRESS + 2):
            live.worker(f"w{number}")
        for number in range(limits.UNAUTHENTICATED_CONNECTIONS_PER_ADDRESS + 2):
            await live.wait_for("worker_connected", worker=f"w{number}")
        assert not live.service._pending


@on_uvloop
async def test_without_file_descriptors_it_waits_and_continues(monkeypatch):
    """`accept` fails with EMFILE once: the listener rests, and then takes the caller."""
    arrival = asyncio.Event()
    acceptor = Acceptor(lambda _: arrival.set(), None)
    await acceptor.listen("127.0.0.1", 0)
    (listener,) = acceptor._listeners
    accept, failures = type(listener).accept, [OSError(errno.EMFILE, "too many open files")]

    def accept_later(self: socket.socket) -> object:
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    stranger = Stranger(acceptor.address[1])
    await stranger.connect()
    async with asyncio.timeout(PATIENCE_S):
        await arrival.wait()
    assert not failures
    stranger.endpoint.close()
    acceptor.close()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.0.3", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("192.168.1.2", False), ("example", False)],
)  # fmt: skip
def test_what_only_this_machine_can_reach(host, loopback):
    assert is_loopback(host) is loopback


@on_uvloop
async def test_a_worker_of_this_user_comes_in_by_the_unix_socket(tmp_path):
    async with live_service(tmp_path, 1) as live:
        live.worker("w0")
        await live.result(live.service.submit(scripted_spec(steps=1)))
        channel = live.service.sessions["w0"].channel
        assert (channel.peer, channel.is_local, channel.certificate) == ("this machine", True, None)


@on_uvloop
async def test_no_proof_can_be_passed_on_between_the_unix_socket_and_the_port(tmp_path):
    async with live_service(tmp_path, 1) as live:
        async with HostileWorker(live.port, here=True) as joins:
            assert (await joins.join()).key
        for here in (True, False):
            async with HostileWorker(live.port, here=here) as relay:
                relay.greet()
                token = CoordinatorCredentials.open().join_token()
                challenge = await relay.until(Challenge)
                fingerprint = token.fingerprint if here else on_this_machine(token.fingerprint)
                with pytest.raises(NotAuthorized):
                    answer(relay.hello, challenge, fingerprint, token.secret)
                proof = Exchange(relay.hello, challenge.nonce, fingerprint).prove(
                    "worker", token.secret
                )
                relay.send(Proof(proof=proof))
                goodbye = await relay.farewell()
                assert goodbye is not None
                assert goodbye.exit_code == ExitCode.NOT_AUTHORIZED
