"""The way between two processes of one user on one machine."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from protocol.machine import local_socket

FINGERPRINT = bytes(range(32))


def listening(host: str, port: int) -> socket.socket:
    listener = local_socket.listen(host, port)
    assert listener is not None
    return listener


async def answered(listener, fingerprint=FINGERPRINT):
    endpoint, _ = await asyncio.get_running_loop().sock_accept(listener)
    local_socket.welcome(endpoint, fingerprint)
    return endpoint


@pytest.mark.parametrize(
    ("host", "dialled", "found"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "localhost", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("::1", "127.0.0.1", False),
        ("0.0.0.0", "192.0.2.7", False),
        ("127.0.0.1", "a.name", False),
    ],
)
async def test_only_who_listens_at_that_address_of_this_machine_is_found(host, dialled, found):
    port = os.getpid()
    with listening(host, port) as listener:
        dial_task = asyncio.create_task(local_socket.dial(dialled, port))
        accepting = asyncio.create_task(answered(listener))
        here = await dial_task
        assert (here is not None) == found
        if here is None:
            accepting.cancel()
            return
        endpoint, fingerprint, memory = here
        assert memory is None, "none was given"
        assert fingerprint == FINGERPRINT
        endpoint.close()
        (await accepting).close()


async def test_nobody_is_nobody():
    assert await local_socket.dial("127.0.0.1", os.getpid()) is None


async def test_another_user_is_not_spoken_to(monkeypatch):
    """Whoever has taken the name, or has found it."""
    with listening("127.0.0.1", os.getpid()) as listener:
        accepting = asyncio.create_task(answered(listener))
        monkeypatch.setattr(local_socket, "is_same_user", lambda _: False)
        assert await local_socket.dial("127.0.0.1", os.getpid()) is None
        endpoint = await accepting
        assert not local_socket.welcome(endpoint, FINGERPRINT)
        endpoint.close()


async def test_one_that_hangs_up_early_is_nobody():
    with listening("127.0.0.1", os.getpid()) as listener:
        dial_task = asyncio.create_task(local_socket.dial("127.0.0.1", os.getpid()))
        (await answered(listener, b"short")).close()
        assert await dial_task is None
