"""Connections take bounded time, at whichever address answers, or one line explains the failure."""

import asyncio
import errno
import socket
import threading
import time

import pytest

from protocol.machine.event_loop import new_event_loop
from protocol.wire import dial
from protocol.wire.dial import Address, DialError
from tests.silent_address import refusing_port, silent_address

PATIENCE_S = 20.0
"""Much longer than any of these tests takes, and much shorter than the timeouts of the kernel or
a name server."""


def run(coroutine):
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(coroutine)


def failure(host: str, port: int, timeout_s: float = PATIENCE_S) -> DialError:
    with pytest.raises(DialError) as error_info:
        run(dial.connect(host, port, timeout_s))
    return error_info.value


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def resolve_to(monkeypatch, *addresses: tuple[str, int]) -> None:
    """Resolve the name `somewhere` to these addresses."""
    real_getaddrinfo = socket.getaddrinfo

    def getaddrinfo(host, port, *arguments, **options):
        if host != "somewhere":
            return real_getaddrinfo(host, port, *arguments, **options)
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not a number")
        return [
            info
            for address in addresses
            for info in real_getaddrinfo(*address, type=socket.SOCK_STREAM)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_connect_returns_a_connected_socket(listener):
    host, port = listener.getsockname()
    with run(dial.connect(host, port, PATIENCE_S)) as endpoint:
        assert endpoint.getpeername() == (host, port)
        assert not endpoint.getblocking()
    with dial.connect_blocking(host, port, PATIENCE_S) as endpoint:
        assert endpoint.gettimeout() == PATIENCE_S


def test_unresponsive_address_respects_the_timeout():
    with silent_address() as (host, port):
        error = failure(host, port, 0.1)
    assert error.cause == "no answer"
    assert str(error).startswith(f"no answer from {host}:{port} within 0 s; the machine is off")


def test_next_address_is_tried_while_the_first_is_silent(listener, monkeypatch):
    monkeypatch.setattr(dial, "STAGGER_S", 0.01)
    with silent_address() as silent_host:
        resolve_to(monkeypatch, silent_host, listener.getsockname())
        with run(dial.connect("somewhere", 1, PATIENCE_S)) as endpoint:
            assert endpoint.getpeername() == listener.getsockname()


def test_refusing_address_is_skipped_at_once(listener, monkeypatch):
    monkeypatch.setattr(dial, "STAGGER_S", 3600.0)
    resolve_to(monkeypatch, ("127.0.0.1", refusing_port()), listener.getsockname())
    run(dial.connect("somewhere", 1, PATIENCE_S)).close()


def test_address_families_alternate():
    ipv6_addresses = [Address(socket.AF_INET6, (f"2001:db8::{n}", 1, 0, 0)) for n in (1, 2, 3)]
    ipv4_addresses = [Address(socket.AF_INET, ("192.0.2.1", 1))]
    assert dial._interleave([*ipv6_addresses, *ipv4_addresses]) == [
        ipv6_addresses[0],
        ipv4_addresses[0],
        ipv6_addresses[1],
        ipv6_addresses[2],
    ]


def test_other_connections_are_closed_after_the_first_answer(listener, monkeypatch):
    endpoints = []
    connect_one = dial._connect_one

    async def recorded_connect(address):
        endpoints.append(await connect_one(address))
        return endpoints[-1]

    monkeypatch.setattr(dial, "_connect_one", recorded_connect)
    monkeypatch.setattr(dial, "STAGGER_S", 0.0)
    resolve_to(monkeypatch, *[listener.getsockname()] * 3)

    async def connect():
        address = Address(socket.AF_INET, listener.getsockname())
        endpoint, _ = await dial.connect_first([address] * 3, PATIENCE_S)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return endpoint

    with run(connect()) as endpoint:
        assert [e for e in endpoints if e.fileno() >= 0] == [endpoint]


def test_refused_connection_is_explained():
    port = refusing_port()
    error = failure("127.0.0.1", port)
    assert error.cause == "refused"
    assert error.observation == f"127.0.0.1:{port} refused the connection"
    assert "--bind 0.0.0.0:PORT" in error.advice


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EINVAL])
def test_unreachable_address_is_explained(number):
    error = dial.as_dial_error(OSError(number, "No route to host"), "192.0.2.1:9000")
    assert error.cause == "no route"
    assert str(error).startswith("no route to 192.0.2.1:9000 (No route to host); check the address")


def test_link_local_address_without_zone_gets_a_hint():
    error = dial.as_dial_error(OSError(errno.EINVAL, "Invalid argument"), "[fe80::7]:9000")
    assert error.advice == "give the interface of a link-local address: [fe80::1%eth0]:PORT"


@pytest.mark.parametrize(
    ("number", "cause", "observation"),
    [
        (socket.EAI_NONAME, "unknown name", "no address is known for 'nowhere.invalid'"),
        (socket.EAI_AGAIN, "no name server", "the name servers have no answer for "),
    ],
)
def test_name_without_an_address_is_explained(monkeypatch, number, cause, observation):
    def refuse(*_arguments, **_options):
        raise socket.gaierror(number, "refused by the test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    error = failure("nowhere.invalid", 9000)
    assert error.cause == cause
    assert error.observation.startswith(observation)
    assert "IP address" in error.advice


def test_impossible_host_name_is_unknown():
    assert failure("a" * 70 + ".example", 9000).cause == "unknown name"


def test_dead_name_server_blocks_nothing(monkeypatch):
    """Neither the connection nor the end of the process waits for getaddrinfo."""
    test_is_over = threading.Event()

    def hang(*_arguments, flags=0, **_options):
        if not flags & socket.AI_NUMERICHOST:
            test_is_over.wait()
        raise socket.gaierror(socket.EAI_NONAME, "refused by the test")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    start_s = time.monotonic()
    error = failure("coordinator.example", 9000, 0.05)
    assert time.monotonic() - start_s < PATIENCE_S
    assert error.cause == "no name server"
    assert "within 0 s" in error.observation
    threads = [thread for thread in threading.enumerate() if thread.name == "name resolution"]
    assert threads
    assert all(thread.daemon for thread in threads)
    test_is_over.set()


def test_the_zone_of_a_link_local_address_is_kept():
    index = socket.if_nametoindex("lo")
    assert dial.host_of(("fe80::7", 9000, 0, index)) == "fe80::7%lo"
    assert dial.host_of(("fe80::7", 9000, 0, 0)) == "fe80::7"
    assert dial.host_of(("::1", 9000, 0, index)) == "::1"
    assert dial.host_of(("192.0.2.1", 9000)) == "192.0.2.1"
    (address,) = run(dial.resolve("fe80::7%lo", 9000, PATIENCE_S))
    assert str(address) == "[fe80::7%lo]:9000"
