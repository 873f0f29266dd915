"""Where the coordinator may listen, and what to say when it cannot."""

from __future__ import annotations

import errno
import ipaddress

from protocol.errors import UsageError


def require_loopback(host: str, option: str) -> None:
    """Until there is authentication, only this machine may connect.

    Raises:
        UsageError: The host is no loopback address.
    """
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise UsageError(
            f"{option}: expected a loopback address such as 127.0.0.1, got {host!r}: "
            "this version has no authentication yet, so it does not listen to other machines"
        )


def bind_failure(option: str, host: str, port: int, error: OSError) -> str:
    """One line for a port that cannot be bound."""
    if error.errno == errno.EADDRINUSE:
        return f"{option} {host}:{port} is in use; stop what uses it or choose another port"
    return f"{option} {host}:{port} cannot be bound: {error.strerror or error}"
