"""Where the coordinator may listen, and what it says where it cannot."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import resource

from protocol.base.errors import UsageError


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to it."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def from_here(host: str) -> str:
    """Where this machine connects to what listens at a host; some hosts mean all addresses."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104


def require_loopback(host: str, option: str) -> None:
    """What speaks plain HTTP is for this machine only.

    Raises:
        UsageError: The host is no loopback address.
    """
    if not is_loopback(host):
        raise UsageError(
            f"{option}: expected a loopback address such as 127.0.0.1, got {host!r}: it is not "
            "encrypted; from another machine use a tunnel: ssh -N -L 9001:127.0.0.1:9001 HOST"
        )


def descriptors() -> float:
    """How many files and connections the system lets this process have open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit


def bind_failure(option: str, host: str, port: int, error: OSError) -> str:
    """One line for a port that cannot be bound."""
    if error.errno == errno.EADDRINUSE:
        return f"{option} {host}:{port} is in use; stop what uses it or choose another port"
    return f"{option} {host}:{port} cannot be bound: {error.strerror or error}"
