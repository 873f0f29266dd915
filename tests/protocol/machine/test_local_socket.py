"""The connection between two processes of one user on one machine."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from protocol.machine import local_socket

FINGERPRINT = bytes(range(32))


def open_listener(host: str, port: int) -> socket.socket:
    listener = local_socket.listen(host, port)
    assert listener is not None
    return listener


async def answer_dial(listener, fingerprint=FINGERPRINT):
    endpoint, _ = await asyncio.get_running_loop().sock_accept(listener)
    local_socket.welcome(endpoint, fingerprint)
    return endpoint


@pytest.mark.parametrize(
    ("host", "dialed_host", "is_found"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "localhost", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("::1", "127.0.0.1", False),
        ("0.0.0.0", "192.0.2.7", False),
        ("127.0.0.1", "a.name", False),
    ],
)
async def test_only_a_local_listener_at_that_address_is_found(host, dialed_host, is_found):
    port = os.getpid()
    with open_listener(host, port) as listener:
        dial_task = asyncio.create_task(local_socket.dial(dialed_host, port))
        accept_task = asyncio.create_task(answer_dial(listener))
        connection = await dial_task
        assert (connection is not None) == is_found
        if connection is None:
            accept_task.cancel()
            return
        endpoint, fingerprint, memory = connection
        assert memory is None, "none was passed"
        assert fingerprint == FINGERPRINT
        endpoint.close()
        (await accept_task).close()


async def test_dial_without_a_listener_returns_none():
    assert await local_socket.dial("127.0.0.1", os.getpid()) is None


async def test_socket_of_another_user_is_refused(monkeypatch):
    """The other user may have taken the name first, or may dial it."""
    with open_listener("127.0.0.1", os.getpid()) as listener:
        accept_task = asyncio.create_task(answer_dial(listener))
        monkeypatch.setattr(local_socket, "is_same_user", lambda _: False)
        assert await local_socket.dial("127.0.0.1", os.getpid()) is None
        endpoint = await accept_task
        assert not local_socket.welcome(endpoint, FINGERPRINT)
        endpoint.close()


async def test_dial_returns_none_after_an_early_hangup():
    with open_listener("127.0.0.1", os.getpid()) as listener:
        dial_task = asyncio.create_task(local_socket.dial("127.0.0.1", os.getpid()))
        (await answer_dial(listener, b"short")).close()
        assert await dial_task is None
