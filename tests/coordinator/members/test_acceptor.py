"""Unauthenticated connections: how many, from which addresses, and the end of silent ones."""

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
from protocol.wire.authentication import Exchange, answer_challenge, local_fingerprint
from protocol.wire.messages import Challenge, Proof
from tests.event_loop import on_uvloop
from tests.hostile_worker import HostileWorker
from tests.live_service import PATIENCE_S, LiveService, live_service, scripted_spec

HELLO_OF_TLS = bytes.fromhex("1603010200010001fc0303") + bytes(32)


class PlainConnection:
    """A TCP connection that sends only the data of the test."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.endpoint = socket.socket()
        self.endpoint.setblocking(False)
        self.endpoint.bind((host, 0))
        self._port = port

    async def connect(self, data: bytes = b"") -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.endpoint, ("127.0.0.1", self._port))
        await loop.sock_sendall(self.endpoint, data)

    async def is_closed(self) -> bool:
        """Discard received data until the end of the connection."""
        loop = asyncio.get_running_loop()
        try:
            while await loop.sock_recv(self.endpoint, 4096):
                pass
        except ConnectionResetError:
            return True
        return True


async def connect_many(
    live: LiveService, count: int, host: str, data: bytes = b""
) -> list[PlainConnection]:
    connections = [PlainConnection(live.port, host) for _ in range(count)]
    for connection in connections:
        await connection.connect(data)
    return connections


async def wait_for_pending(live: LiveService, count: int) -> None:
    """Wait until `count` connections are in the handshake."""
    async with asyncio.timeout(PATIENCE_S):
        while len(live.service._pending) != count:  # noqa: ASYNC110 -- raises no event
            await asyncio.sleep(0)


def close_all(connections: list[PlainConnection]) -> None:
    for connection in connections:
        connection.endpoint.close()


@pytest.mark.parametrize("data", [b"", HELLO_OF_TLS[:20]], ids=["silent", "half a TLS handshake"])
@on_uvloop
async def test_connections_per_address_are_limited(tmp_path, data, monkeypatch):
    monkeypatch.setattr(limits, "UNAUTHENTICATED_SLOT_MS", 0)
    async with live_service(tmp_path, 1) as live:
        limit = limits.UNAUTHENTICATED_CONNECTIONS_PER_ADDRESS
        connections = await connect_many(live, limit, "127.0.0.1", data)
        await wait_for_pending(live, limit)
        async with asyncio.timeout(limits.HANDSHAKE_TIMEOUT_MS / 1000 - 1):
            (refused_connection,) = await connect_many(live, 1, "127.0.0.1")
            assert await refused_connection.is_closed()
            async with HostileWorker(live.port, host="127.0.0.2") as other_host:
                await other_host.join()
        close_all([*connections, refused_connection])
        await wait_for_pending(live, 0)
        async with HostileWorker(live.port, "later") as late_worker:
            await late_worker.join()


@on_uvloop
async def test_connections_are_limited_in_total(tmp_path):
    async with live_service(tmp_path, 1) as live:
        limit, limit_per_address = (
            limits.UNAUTHENTICATED_CONNECTIONS,
            limits.UNAUTHENTICATED_CONNECTIONS_PER_ADDRESS,
        )
        connections: list[PlainConnection] = []
        for number in range(limit // limit_per_address):
            connections += await connect_many(live, limit_per_address, f"127.0.0.{10 + number}")
        await wait_for_pending(live, limit)
        async with asyncio.timeout(limits.HANDSHAKE_TIMEOUT_MS / 1000 - 1):
            (refused_connection,) = await connect_many(live, 1, "127.0.0.99")
            assert await refused_connection.is_closed()
        assert len(live.service._pending) == limit
        close_all([*connections, refused_connection])
        await wait_for_pending(live, 0)


@pytest.mark.parametrize(
    "data", [b"", HELLO_OF_TLS[:20], HELLO_OF_TLS], ids=["silent", "part", "hello"]
)
@on_uvloop
async def test_unfinished_tls_handshake_is_closed_in_time(tmp_path, data, monkeypatch):
    monkeypatch.setattr(limits, "HANDSHAKE_TIMEOUT_MS", 200)
    async with live_service(tmp_path, 1) as live:
        (connection,) = await connect_many(live, 1, "127.0.0.1", data)
        async with asyncio.timeout(3):
            assert await connection.is_closed()
        await wait_for_pending(live, 0)
        connection.endpoint.close()


@on_uvloop
async def test_unauthenticated_connection_counts_for_a_while(tmp_path, monkeypatch):
    limit = limits.UNAUTHENTICATED_CONNECTIONS_PER_ADDRESS
    monkeypatch.setattr(limits, "UNAUTHENTICATED_SLOT_MS", 600_000)
    async with live_service(tmp_path, 1) as live:
        async with HostileWorker(live.port) as member:
            await member.join()
        for _ in range(limit):
            (connection,) = await connect_many(live, 1, "127.0.0.1")
            await wait_for_pending(live, 1)
            close_all([connection])
            await wait_for_pending(live, 0)
        (refused_connection,) = await connect_many(live, 1, "127.0.0.1")
        assert await refused_connection.is_closed()
        async with HostileWorker(live.port, host="127.0.0.2") as other_host:
            await other_host.join()
        close_all([refused_connection])


@on_uvloop
async def test_members_do_not_count_as_unauthenticated(tmp_path):
    async with live_service(tmp_path, 1) as live:
        for number in range(limits.UNAUTHENTICATED_CONNECTIONS_PER_ADDRESS + 2):
            live.start_worker(f"w{number}")
        for number in range(limits.UNAUTHENTICATED_CONNECTIONS_PER_ADDRESS + 2):
            await live.wait_for("worker_connected", worker=f"w{number}")
        assert not live.service._pending


@on_uvloop
async def test_acceptor_waits_without_file_descriptors_and_continues(monkeypatch):
    """`accept` fails with EMFILE once: the listener pauses, and then accepts the caller."""
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
    connection = PlainConnection(acceptor.address[1])
    await connection.connect()
    async with asyncio.timeout(PATIENCE_S):
        await arrival.wait()
    assert not failures
    connection.endpoint.close()
    acceptor.close()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.0.3", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("192.168.1.2", False), ("example", False)],
)  # fmt: skip
def test_loopback_addresses_are_recognized(host, loopback):
    assert is_loopback(host) is loopback


@on_uvloop
async def test_worker_of_this_user_joins_by_the_unix_socket(tmp_path):
    async with live_service(tmp_path, 1) as live:
        live.start_worker("w0")
        await live.result(live.service.submit(scripted_spec(steps=1)))
        channel = live.service.sessions["w0"].channel
        assert (channel.peer, channel.is_local, channel.certificate) == ("this machine", True, None)


@on_uvloop
async def test_proof_cannot_be_relayed_between_unix_socket_and_port(tmp_path):
    async with live_service(tmp_path, 1) as live:
        async with HostileWorker(live.port, is_local=True) as worker:
            assert (await worker.join()).key
        for is_local in (True, False):
            async with HostileWorker(live.port, is_local=is_local) as relay:
                relay.send_hello()
                token = CoordinatorCredentials.open().join_token()
                challenge = await relay.wait_for_message(Challenge)
                fingerprint = (
                    token.fingerprint if is_local else local_fingerprint(token.fingerprint)
                )
                with pytest.raises(NotAuthorized):
                    answer_challenge(relay.hello, challenge, fingerprint, token.secret)
                proof = Exchange(relay.hello, challenge.nonce, fingerprint).prove(
                    "worker", token.secret
                )
                relay.send(Proof(proof=proof))
                goodbye = await relay.wait_for_goodbye()
                assert goodbye is not None
                assert goodbye.exit_code == ExitCode.NOT_AUTHORIZED
