"""Whether the coordinator's ports can be had, and whether others can reach them.

A port that is in use is connected to: it may be this very coordinator that is at work there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Final

from coordinator.members.listening import (
    bind_failure,
    from_here,
    is_loopback,
    reachable_addresses,
    require_loopback,
)
from protocol.base.address import format_address
from protocol.base.errors import UsageError
from protocol.command.doctor import Finding, failure, ok, warning
from protocol.wire import dial, tls
from protocol.wire.dial import described

_PATIENCE_S: Final = 5.0
_ELSEWHERE: Final = "check from another machine with: worker doctor --coordinator"


def workers_port(host: str, port: int, certificate: bytes | None) -> Iterator[Finding]:
    """The address for workers.

    Args:
        host: As the user writes it.
        port: 0 for any free one.
        certificate: Fingerprint of this user's; None if there is none yet.
    """
    check = "workers' port"
    try:
        with _listening(host, port) as (listener, at):
            yield from _reached(check, host, at[1], listener)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            yield failure(check, bind_failure("--bind", host, port, error))
            return
        shown = _certificate_at(from_here(host), port)
        if shown is None or shown != certificate:
            yield failure(check, bind_failure("--bind", host, port, error))
            return
        yield ok(check, f"this user's coordinator listens at {format_address(host, port)}")
        yield from _open_to_others(check, host, port)


def control_port(host: str, port: int) -> Iterator[Finding]:
    """The address of the control port."""
    check = "control port"
    try:
        require_loopback(host, "--control")
        with _listening(host, port) as (_, at):
            yield ok(check, f"{format_address(host, at[1])} is free")
    except UsageError as error:
        yield failure(check, str(error))
    except OSError as error:
        if error.errno == errno.EADDRINUSE and _is_healthy(host, port):
            yield ok(check, f"a coordinator answers at {format_address(host, port)}")
        else:
            yield failure(check, bind_failure("--control", host, port, error))


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[tuple[socket.socket, tuple[str, int]]]:
    """A listener at the address, as the coordinator would have it; its own address.

    Raises:
        OSError: It cannot be had.
    """
    address, *_ = asyncio.run(dial.resolve(host, port, _PATIENCE_S, socket.AI_PASSIVE))
    with socket.socket(address.family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address.socket_address)
        listener.listen(1)
        yield listener, listener.getsockname()[:2]


def _reached(check: str, host: str, port: int, listener: socket.socket) -> Iterator[Finding]:
    """Connect to what listens, by the address that others are told."""
    for there in reachable_addresses(host):
        at = format_address(there, port)
        try:
            with dial.connect_blocking(there, port, _PATIENCE_S):
                listener.settimeout(_PATIENCE_S)
                listener.accept()[0].close()
        except OSError as error:
            yield failure(
                check, f"{format_address(host, port)} is free, but cannot be reached at {at} even "
                f"from here ({described(error, at).found})",
                "look at the addresses (ip addr) and the firewall",
            )  # fmt: skip
            return
    yield ok(check, f"{format_address(host, port)} is free")
    yield from _open_to_others(check, host, port)


def _open_to_others(check: str, host: str, port: int) -> Iterator[Finding]:
    """Whether other machines can come in, as far as that can be seen from here."""
    check = "reachable"
    here = _loopback_only(host)
    if here:
        yield warning(
            check, f"{here}: only workers on this machine can connect",
            f"for others: --bind 0.0.0.0:{port}",
        )  # fmt: skip
        return
    at = [format_address(there, port) for there in reachable_addresses(host)]
    if not at:
        yield failure(
            check, "this machine has no address that others know",
            "connect it to a network (ip addr)",
        )  # fmt: skip
        return
    yield ok(check, f"others connect to {' or '.join(at)}; {_ELSEWHERE} {at[0]}")


def _loopback_only(host: str) -> str:
    """What the host means if that is loopback alone; a machine's own name often is, to itself."""
    if is_loopback(host):
        return host
    found = {each.host for each in asyncio.run(dial.resolve(host, 0, _PATIENCE_S))}
    if all(is_loopback(address) for address in found):
        return f"{host} means {', '.join(sorted(found))} here (/etc/hosts)"
    return ""


def _certificate_at(host: str, port: int) -> bytes | None:
    """Fingerprint of what is shown there; None if nothing there speaks TLS 1.3."""
    with (
        contextlib.suppress(OSError),
        dial.connect_blocking(host, port, _PATIENCE_S) as plain,
        tls.client_context().wrap_socket(plain) as secured,
    ):
        shown = secured.getpeercert(binary_form=True)
        return tls.fingerprint(shown) if shown else None
    return None


def _is_healthy(host: str, port: int) -> bool:
    """Whether a coordinator's control port answers there."""
    connection = http.client.HTTPConnection(host, port, timeout=_PATIENCE_S)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/healthz")
            return bool(json.loads(connection.getresponse().read(4096)) == {"ok": True})
        except (OSError, http.client.HTTPException, ValueError):
            return False
