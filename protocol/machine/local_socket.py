"""Connect two processes of one user on one machine by a Unix socket beside the TCP port.

The data crosses no network and no other user can read it, so it is not encrypted. Any user can bind
a name in the abstract namespace, so both sides ask the kernel for the peer's user (SO_PEERCRED,
unix(7)). The listener names the certificate that it uses for TLS; the proofs that follow cover that
certificate, so only a process that knows the secret can complete the handshake. A name
consists of address and port, and is unique within one network namespace.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from protocol.machine.shared_segment import SharedSegment, open_segment

FINGERPRINT_BYTES: Final = 32
_BUFFER_BYTES: Final = 4 << 20
_TIMEOUT_S: Final = 2.0
_MAX_DESCRIPTORS: Final = 2
_CREDENTIALS: Final = struct.Struct("3i")
"""`struct ucred`: process, user, group."""


def is_supported() -> bool:
    """Return whether this system reports the peer's user, as Linux does."""
    return hasattr(socket, "SO_PEERCRED") and hasattr(os, "geteuid")


def listen(host: str, port: int) -> socket.socket | None:
    """Listen beside a TCP address; None if the system does not support it."""
    if not is_supported():
        return None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError:
        return None
    try:
        listener.bind(_socket_name(host, port))
        listener.listen(64)
    except OSError:
        listener.close()
        return None
    return listener


def welcome(endpoint: socket.socket, fingerprint: bytes, descriptors: Sequence[int] = ()) -> bool:
    """Send fingerprint and descriptors to a peer of the same user; return whether that succeeded.

    Args:
        endpoint: The connection.
        fingerprint: Fingerprint of this side's certificate.
        descriptors: Descriptors of shared memory; see `shared_segment`.
    """
    if not is_same_user(endpoint):
        return False
    _enlarge_send_buffer(endpoint)
    with suppress(OSError):
        return socket.send_fds(endpoint, [fingerprint], list(descriptors)) == len(fingerprint)
    return False


class LocalConnection(NamedTuple):
    """A connection to a listener on this machine.

    Attributes:
        endpoint: The socket.
        fingerprint: Fingerprint of the listener's TLS certificate.
        memory: Shared memory for large bodies; None if there is none.
    """

    endpoint: socket.socket
    fingerprint: bytes
    memory: SharedSegment | None


async def dial(host: str, port: int) -> LocalConnection | None:
    """Connect to the listener beside a port of this machine; None if there is none.

    Args:
        host: An address; a host name other than localhost counts as another machine.
        port: The port.
    """
    if not is_supported():
        return None
    for name in _socket_names(host, port):
        endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            endpoint.connect(name)
            if is_same_user(endpoint):
                async with asyncio.timeout(_TIMEOUT_S):
                    fingerprint, memory = await _read(endpoint)
                if len(fingerprint) == FINGERPRINT_BYTES:
                    _enlarge_send_buffer(endpoint)
                    return LocalConnection(endpoint, fingerprint, memory)
        except (OSError, TimeoutError):
            pass
        endpoint.close()
    return None


def is_same_user(endpoint: socket.socket) -> bool:
    """Return whether the peer's process has the same user."""
    raw = endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return bool(user == os.geteuid())


async def _read(endpoint: socket.socket) -> tuple[bytes, SharedSegment | None]:
    """Receive the fingerprint and the descriptors of the memory, which arrive together."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(endpoint, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(endpoint)
    data, descriptors, _, _ = socket.recv_fds(endpoint, FINGERPRINT_BYTES, _MAX_DESCRIPTORS)
    return data, open_segment(descriptors)


def _enlarge_send_buffer(endpoint: socket.socket) -> None:
    """Enlarge the send buffer, so that a chunk of a gradient takes few writes."""
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)


def _socket_name(host: str, port: int) -> bytes:
    return f"\0samestep {host} {port}".encode()


def _socket_names(host: str, port: int) -> list[bytes]:
    """Return the names of possible listeners of an address, if it is this machine's."""
    host = "127.0.0.1" if host == "localhost" else host
    wildcard = "::" if ":" in host else "0.0.0.0"  # noqa: S104 -- a name
    try:
        # A host name is not looked up: name servers may take minutes.
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)  # fails unless the address is this machine's
    except (OSError, UnicodeError):
        return []
    return [_socket_name(host, port), _socket_name(wildcard, port)]
