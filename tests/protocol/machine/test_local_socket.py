"""The connection between two processes of one user on one machine."""

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


async def answer_dial(listener, fingerprint=FINGERPRINT):
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
async def test_only_a_local_listener_at_that_address_is_found(host, dialled, found):
    port = os.getpid()
    with listening(host, port) as listener:
        dial_task = asyncio.create_task(local_socket.dial(dialled, port))
        accepting = asyncio.create_task(answer_dial(listener))
        connection = await dial_task
        assert (connection is not None) == found
        if connection is None:
            accepting.cancel()
            return
        endpoint, fingerprint, memory = connection
        assert memory is None, "none was given"
        assert fingerprint == FINGERPRINT
        endpoint.close()
        (await accepting).close()


async def test_missing_listener_is_none():
    assert await local_socket.dial("127.0.0.1", os.getpid()) is None


async def test_socket_of_another_user_is_refused(monkeypatch):
    """Whether another user took the name first, or found it."""
    with listening("127.0.0.1", os.getpid()) as listener:
        accepting = asyncio.create_task(answer_dial(listener))
        monkeypatch.setattr(local_socket, "is_same_user", lambda _: False)
        assert await local_socket.dial("127.0.0.1", os.getpid()) is None
        endpoint = await accepting
        assert not local_socket.welcome(endpoint, FINGERPRINT)
        endpoint.close()


async def test_early_hangup_is_none():
    with listening("127.0.0.1", os.getpid()) as listener:
        dial_task = asyncio.create_task(local_socket.dial("127.0.0.1", os.getpid()))
        (await answer_dial(listener, b"short")).close()
        assert await dial_task is None
