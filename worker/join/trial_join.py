"""Test whether this worker can join, with a handshake that stops before the worker's Proof.

The coordinator authenticates itself first, with the secret that the worker uses. Its Challenge thus
proves that both have the same secret, before the worker joins: no name is assigned, no key is
issued, and no run is affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import time
import uuid
from collections.abc import Iterator
from typing import Final

from protocol import PROTOCOL_VERSION, __version__
from protocol.base import limits
from protocol.base.errors import ProtocolError, SamestepError, VersionMismatch
from protocol.base.fields import cut_text
from protocol.cli.doctor import Finding, failure, ok, warning
from protocol.wire import dial, tls
from protocol.wire.authentication import NO_CERTIFICATE, answer_challenge, new_nonce
from protocol.wire.connection import Connection, encode
from protocol.wire.dial import Address, DialError
from protocol.wire.messages import Challenge, Goodbye, Hello, Message
from worker.join.credentials import WorkerCredentials

_TIMEOUT_S: Final = limits.HANDSHAKE_TIMEOUT_MS / 1000
_LARGE_BYTES: Final = 4_096
"""More than two packets of Ethernet, which has an MTU of 1,500 bytes."""
_LARGE_TIMEOUT_S: Final = 2.0
"""Enough for three retransmissions, and less than the coordinator's handshake timeout, after which
it closes the connection as if it had read the message."""
_POLL_INTERVAL_S: Final = 0.2
_REFUSED_ADVICE: Final = (
    "start the coordinator, with --bind 0.0.0.0:PORT if it is on another machine: by default it "
    "listens only on its own machine"
)
_SILENCE_ADVICE: Final = (
    "wrong address, the machine is off, or a firewall drops packets: run `coordinator doctor` there"
)


def trial_join(
    host: str, port: int, name: str, credentials: WorkerCredentials
) -> Iterator[Finding]:
    """Yield findings about address, connection, encryption and token, until the first failure.

    Args:
        host: The coordinator's host.
        port: The coordinator's port.
        name: The worker's name.
        credentials: The worker's credentials.
    """
    try:
        addresses = asyncio.run(dial.resolve(host, port, _TIMEOUT_S))
    except DialError as error:
        yield failure(
            "address", error.observation,
            f"use the coordinator's IP address; see also: getent hosts {host}",
        )  # fmt: skip
        return
    yield _address_finding(host, [address.host for address in addresses])
    findings = list(_try_connection(addresses, name, credentials))
    # Like the worker itself: if the key was refused, try the token.
    if findings[-1].outcome == "failure" and credentials.try_token_next():
        findings = list(_try_connection(addresses, name, credentials))
    yield from findings


def _address_finding(host: str, addresses: list[str]) -> Finding:
    """Report the host's addresses: on the machine itself, its name is often 127.0.1.1."""
    listing = ", ".join(addresses)
    is_local = all(
        ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses
    )
    if is_local and host not in {"localhost", *addresses}:
        return warning(
            "address", f"{host} resolves to {listing}, which is this machine",
            "use the address that the coordinator prints; see also /etc/hosts",
        )  # fmt: skip
    return ok("address", listing if host in addresses else f"{host} is {listing}")


def _try_connection(
    addresses: list[Address], name: str, credentials: WorkerCredentials
) -> Iterator[Finding]:
    """Try one connection: TCP, TLS, and authentication of the coordinator."""
    start_s = time.perf_counter()
    try:
        endpoint, address = asyncio.run(dial.connect_first(addresses, _TIMEOUT_S))
    except DialError as error:
        advice = {"refused": _REFUSED_ADVICE, "no answer": _SILENCE_ADVICE}.get(
            error.cause, error.advice
        )
        yield failure("connection", error.observation, advice)
        return
    coordinator, took_ms = str(address), (time.perf_counter() - start_s) * 1000
    yield ok("connection", f"{coordinator} answers after {took_ms:.1f} ms")
    with endpoint:
        endpoint.settimeout(_TIMEOUT_S)
        try:
            if credentials.plaintext:
                yield from _check_secret(endpoint, coordinator, None, name, credentials)
                return
            with tls.client_context().wrap_socket(endpoint) as tls_socket:
                certificate = tls_socket.getpeercert(binary_form=True) or b""
                fingerprint = tls.fingerprint(certificate)
                yield ok(
                    "encryption", f"{tls_socket.version()}, certificate {fingerprint.hex()[:16]}"
                )
                yield from _check_secret(tls_socket, coordinator, fingerprint, name, credentials)
        except ssl.SSLError as error:
            yield _tls_failure(coordinator, error)
        except TimeoutError:
            yield failure(
                "connection", f"{coordinator} is silent for {_TIMEOUT_S:.0f} s", _TIMEOUT_ADVICE
            )
        except OSError as error:
            yield failure(
                "connection",
                f"{coordinator} closed the connection ({error.strerror or error})",
                _CLOSED_ADVICE,
            )


_CLOSED_ADVICE: Final = (
    "another service has this port, or many connections wait there: try again in some seconds"
)
_TIMEOUT_ADVICE: Final = (
    "another service has this port, that machine is overloaded, or the path drops large packets: "
    "try with a smaller MTU (ip link set dev INTERFACE mtu 1280)"
)


def _tls_failure(coordinator: str, error: ssl.SSLError) -> Finding:
    if error.reason in tls.ERROR_MEANS_NO_TLS:
        return failure(
            "encryption", f"expected TLS at {coordinator}, got something else",
            "another service has this port, or the coordinator was started with --plaintext; in "
            "that case use --plaintext here too",
        )  # fmt: skip
    return failure(
        "encryption", f"no TLS 1.3 with {coordinator}: {error.reason or error}", _CLOSED_ADVICE
    )


def _check_secret(
    endpoint: socket.socket,
    coordinator: str,
    fingerprint: bytes | None,
    name: str,
    credentials: WorkerCredentials,
) -> Iterator[Finding]:
    """Send Hello, and check that the Challenge proves that both have the same secret.

    If it does, test a large message too; see `_check_large_message`.

    Raises:
        OSError: The connection is lost.
    """
    name = cut_text(name, 48)
    try:
        secret, enrolled = credentials.secret(fingerprint, name)
    except SamestepError as error:
        yield failure("token", str(error))
        return
    hello = Hello(
        release=__version__, name=name, instance=uuid.uuid4().hex, backend="doctor",
        duty="train", nonce=new_nonce(), enrolled=enrolled,
    )  # fmt: skip
    try:
        connection = Connection("worker")
        _send(endpoint, connection, hello)
        message = _next_message(endpoint, connection)
        if isinstance(message, Challenge):
            answer_challenge(hello, message, fingerprint or NO_CERTIFICATE, secret)
            yield _check_large_message(endpoint, coordinator)
            secret_name = "its key" if enrolled else "the join token"
            note = f"{secret_name} fits, and both have protocol version {PROTOCOL_VERSION}"
            yield ok("token", note)
            return
    except VersionMismatch as error:
        yield failure("version", str(error))
    except ProtocolError as error:
        yield failure("connection", f"the server is not a coordinator: {error}", _CLOSED_ADVICE)
    except SamestepError as error:
        yield failure("token", str(error))
    else:
        reason = message.reason if isinstance(message, Goodbye) else "it closed the connection"
        yield failure(
            "token", f"the coordinator refused: {reason}", "" if message else _CLOSED_ADVICE
        )


def _check_large_message(endpoint: socket.socket, coordinator: str) -> Finding:
    """Send a goodbye of several full packets, and check that it arrives.

    A path that drops packets above its MTU, and the ICMP errors about them, passes a handshake but
    no state or gradient. The goodbye is repeated to fill the packets: the coordinator reads the
    first one and closes the connection.
    """
    goodbye = b"".join(encode(Goodbye(reason="doctor", retry=False, exit_code=0)).buffers)
    count = _LARGE_BYTES // len(goodbye) + 1
    message = goodbye * count
    deadline_s = time.monotonic() + _LARGE_TIMEOUT_S
    try:
        endpoint.sendall(message)
        endpoint.settimeout(_POLL_INTERVAL_S)
        while time.monotonic() < deadline_s:
            with contextlib.suppress(TimeoutError):
                if not endpoint.recv(4096):
                    break
    except OSError:
        pass  # closed at once, so the message was read
    if time.monotonic() < deadline_s:
        return ok("large messages", f"a message of {len(message)} bytes arrives")
    return failure(
        "large messages",
        f"small messages reach {coordinator}, but one of {len(message)} bytes does not within "
        f"{_LARGE_TIMEOUT_S:.0f} s: the path silently drops packets above its MTU",
        "lower the MTU on both machines (ip link set dev INTERFACE mtu 1280), have the kernel find "
        "it (sysctl -w net.ipv4.tcp_mtu_probing=1), or let ICMP through the firewalls in between",
    )


def _send(endpoint: socket.socket, connection: Connection, message: Message) -> None:
    for buffer in connection.send(message).buffers:
        endpoint.sendall(buffer)


def _next_message(endpoint: socket.socket, connection: Connection) -> Message | None:
    """Return the next message; None if the connection is closed first.

    Raises:
        OSError: The connection is lost, or no message arrives in time.
        ProtocolError: The received bytes are not a message.
    """
    deadline_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        data = endpoint.recv(4096)
        if not data:
            return None
        for delivery in connection.receive_data(data):
            return delivery.message
    raise TimeoutError("no answer to the handshake")
