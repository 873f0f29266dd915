"""The way between two processes of one user on one machine: a Unix socket beside the TCP port.

What passes there no network carries and no other user can read, so nothing is gained by encrypting
it. The kernel says whose process is at the other end (SO_PEERCRED, unix(7)), and both sides ask:
a name in the abstract namespace can be taken by anyone. Who answers says which certificate it has
over TLS; the proofs that follow are made for that one, as there, so only who knows the secret can
have said so rightly. Names are of an address and a port, in one network namespace, as ports are.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from protocol.host.lent_memory import LentMemory, borrowed

FINGERPRINT_BYTES: Final = 32
_BUFFER_BYTES: Final = 4 << 20
_TIMEOUT_S: Final = 2.0
_MOST_DESCRIPTORS: Final = 2
_CREDENTIALS: Final = struct.Struct("3i")
"""Of `struct ucred`: process, user, group."""


def is_offered() -> bool:
    """Whether this system says whose process is at the other end; Linux does."""
    return hasattr(socket, "SO_PEERCRED") and hasattr(os, "geteuid")


def listen(host: str, port: int) -> socket.socket | None:
    """A listening socket beside the one of this address; None where the system has none."""
    if not is_offered():
        return None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError:
        return None
    try:
        listener.bind(_name(host, port))
        listener.listen(64)
    except OSError:
        listener.close()
        return None
    return listener


def welcome(endpoint: socket.socket, fingerprint: bytes, descriptors: Sequence[int] = ()) -> bool:
    """Tell one that was accepted whom it has found, if it is of the same user.

    Args:
        endpoint: Where it is.
        fingerprint: Of this side's certificate.
        descriptors: Of memory for both; see `lent_memory`.
    """
    if not is_same_user(endpoint):
        return False
    _enlarge(endpoint)
    with suppress(OSError):
        return socket.send_fds(endpoint, [fingerprint], list(descriptors)) == len(fingerprint)
    return False


class Found(NamedTuple):
    """Who listens on this machine.

    Attributes:
        endpoint: The way there.
        fingerprint: Of the certificate that it has over TLS.
        memory: For what is large; None if it has given none.
    """

    endpoint: socket.socket
    fingerprint: bytes
    memory: LentMemory | None


async def dial(host: str, port: int) -> Found | None:
    """Whoever listens beside this port on this machine; None if nobody.

    Args:
        host: An address; a name other than localhost is another machine's, or is taken for that.
        port: Its port.
    """
    if not is_offered():
        return None
    for name in _names(host, port):
        endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            endpoint.connect(name)
            if is_same_user(endpoint):
                async with asyncio.timeout(_TIMEOUT_S):
                    fingerprint, memory = await _read(endpoint)
                if len(fingerprint) == FINGERPRINT_BYTES:
                    _enlarge(endpoint)
                    return Found(endpoint, fingerprint, memory)
        except (OSError, TimeoutError):
            pass
        endpoint.close()
    return None


def is_same_user(endpoint: socket.socket) -> bool:
    """Whether the process at the other end is of this one's user."""
    raw = endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return bool(user == os.geteuid())


async def _read(endpoint: socket.socket) -> tuple[bytes, LentMemory | None]:
    """Fingerprint and memory: they were sent in one go, and come so."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(endpoint, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(endpoint)
    data, descriptors, _, _ = socket.recv_fds(endpoint, FINGERPRINT_BYTES, _MOST_DESCRIPTORS)
    return data, borrowed(descriptors)


def _enlarge(endpoint: socket.socket) -> None:
    """So that a chunk of a gradient takes few turns."""
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)


def _name(host: str, port: int) -> bytes:
    return f"\0samestep {host} {port}".encode()


def _names(host: str, port: int) -> list[bytes]:
    """Where a listener of this address is, if that is one of this machine's."""
    host = "127.0.0.1" if host == "localhost" else host
    everywhere = "::" if ":" in host else "0.0.0.0"  # noqa: S104 -- a name
    try:
        # A host name is not looked up: name servers may take minutes.
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)  # only an address of this machine can be had
    except (OSError, UnicodeError):
        return []
    return [_name(host, port), _name(everywhere, port)]
