"""A join that stops one message short: can this worker come in?

The coordinator proves itself first, with the very secret that the worker would prove itself with.
So its Challenge shows that both have the same, and nobody has become a member: no name is taken,
no key is given, no run notices.
"""

from __future__ import annotations

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
from protocol.command.doctor import Finding, failure, ok, warning
from protocol.wire import tls
from protocol.wire.authentication import NO_CERTIFICATE, answer, new_nonce
from protocol.wire.connection import Connection
from protocol.wire.messages import Challenge, Goodbye, Hello, Message
from worker.joining.credentials import WorkerCredentials

_PATIENCE_S: Final = limits.HANDSHAKE_TIMEOUT_MS / 1000
_LISTENS: Final = (
    "start the coordinator, with --bind 0.0.0.0:PORT if it is on another machine: by default it "
    "listens to its own machine alone"
)
_SILENCE: Final = (
    "wrong address, the machine is off, or a firewall drops it: run there `coordinator doctor`"
)


def trial_join(
    host: str, port: int, name: str, credentials: WorkerCredentials
) -> Iterator[Finding]:
    """From the address to the token; it ends with the first failure.

    Args:
        host: Of the coordinator.
        port: Of the coordinator.
        name: The worker's.
        credentials: What it would prove itself with.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        yield failure(
            "address", f"{host!r} is no known name ({error.strerror or error})",
            f"use the coordinator's IP address; see also: getent hosts {host}",
        )  # fmt: skip
        return
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    yield _meaning(host, addresses)
    findings = list(_attempt(addresses, port, name, credentials))
    # As the worker itself does: a key that counts no more gives way to the token.
    if findings[-1].outcome == "failure" and credentials.try_token_next():
        findings = list(_attempt(addresses, port, name, credentials))
    yield from findings


def _meaning(host: str, addresses: list[str]) -> Finding:
    """What a name means here: to a machine its own name is often 127.0.1.1."""
    shown = ", ".join(addresses)
    local = all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses)
    if local and host not in {"localhost", *addresses}:
        return warning(
            "address", f"{host} means {shown} here: this very machine",
            "use the address that the coordinator prints; see also /etc/hosts",
        )  # fmt: skip
    return ok("address", shown if host in addresses else f"{host} is {shown}")


def _attempt(
    addresses: list[str], port: int, name: str, credentials: WorkerCredentials
) -> Iterator[Finding]:
    """One connection: TCP, TLS, the coordinator's proof."""
    connected, at, finding = _connect(addresses, port)
    yield finding
    if connected is None:
        return
    with connected:
        connected.settimeout(_PATIENCE_S)
        try:
            if credentials.plaintext:
                yield _greet(connected, None, name, credentials)
                return
            with tls.client_context().wrap_socket(connected) as secured:
                shown = secured.getpeercert(binary_form=True) or b""
                fingerprint = tls.fingerprint(shown)
                yield ok("encryption", f"{secured.version()}, certificate {fingerprint.hex()[:16]}")
                yield _greet(secured, fingerprint, name, credentials)
        except ssl.SSLError as error:
            yield _no_tls(at, error)
        except OSError as error:
            yield failure("connection", f"{at} closed it ({error.strerror or error})", _CLOSED)


_CLOSED: Final = (
    "another service has this port, or many newcomers are at the door: try again in some seconds"
)


def _no_tls(at: str, error: ssl.SSLError) -> Finding:
    if error.reason in tls.ERROR_MEANS_NO_TLS:
        return failure(
            "encryption", f"expected TLS at {at}, got something else",
            "another service has this port, or the coordinator was started with --plaintext; then "
            "give that here too",
        )  # fmt: skip
    return failure("encryption", f"no TLS 1.3 with {at}: {error.reason or error}", _CLOSED)


def _connect(addresses: list[str], port: int) -> tuple[socket.socket | None, str, Finding]:
    """A connection to the first address that takes one."""
    refusals = []
    for address in addresses:
        at = f"{address}:{port}"
        began_s = time.perf_counter()
        try:
            connected = socket.create_connection((address, port), _PATIENCE_S)
        except TimeoutError:
            refusals.append((f"no answer from {at} for {_PATIENCE_S:.0f} s", _SILENCE))
        except ConnectionRefusedError:
            refusals.append((f"nothing listens at {at}", _LISTENS))
        except OSError as error:
            refusals.append((f"no way to {at} ({error.strerror or error})", _SILENCE))
        else:
            took_ms = (time.perf_counter() - began_s) * 1000
            return connected, at, ok("connection", f"{at} answers after {took_ms:.1f} ms")
    found = ", ".join(found for found, _ in refusals)
    return None, "", failure("connection", found, refusals[0][1])


def _greet(
    connected: socket.socket, fingerprint: bytes | None, name: str, credentials: WorkerCredentials
) -> Finding:
    """Say Hello, and see whether the Challenge shows that the other side has the same secret.

    Raises:
        OSError: The connection broke.
    """
    name = cut_text(name, 48)
    try:
        secret, enrolled = credentials.secret(fingerprint, name)
    except SamestepError as error:
        return failure("token", str(error))
    hello = Hello(
        release=__version__, name=name, instance=uuid.uuid4().hex, backend="doctor",
        duty="train", nonce=new_nonce(), enrolled=enrolled,
    )  # fmt: skip
    try:
        connection = Connection("worker")
        _send(connected, connection, hello)
        message = _next_message(connected, connection)
        if isinstance(message, Challenge):
            answer(hello, message, fingerprint or NO_CERTIFICATE, secret)
            with contextlib.suppress(OSError):
                _send(connected, connection, Goodbye(reason="doctor", retry=False, exit_code=0))
            what = "the key of its own" if enrolled else "the join token"
            note = f"{what} fits, and both speak protocol version {PROTOCOL_VERSION}"
            return ok("token", note)
    except VersionMismatch as error:
        return failure("version", str(error))
    except ProtocolError as error:
        return failure("connection", f"what answers is no coordinator: {error}", _CLOSED)
    except SamestepError as error:
        return failure("token", str(error))
    reason = message.reason if isinstance(message, Goodbye) else "it ended the connection"
    return failure("token", f"the coordinator refused: {reason}", "" if message else _CLOSED)


def _send(connected: socket.socket, connection: Connection, message: Message) -> None:
    for buffer in connection.send(message).buffers:
        connected.sendall(buffer)


def _next_message(connected: socket.socket, connection: Connection) -> Message | None:
    """What comes first; None if the connection ends before.

    Raises:
        OSError: Nothing comes in time.
        ProtocolError: It is no message.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        data = connected.recv(4096)
        if not data:
            return None
        for received in connection.receive_data(data):
            return received.message
    raise TimeoutError("no answer to the handshake")
