"""Where the coordinator may listen, where others reach it, and what it says where it cannot."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import ifaddr

from protocol.base.address import format_address
from protocol.base.errors import UsageError

_INTERFACES: Final = Path("/sys/class/net")
_SOMEWHERE: Final = {4: (socket.AF_INET, "192.0.2.1"), 6: (socket.AF_INET6, "2001:db8::1")}
"""Addresses by the default route, of either version (RFC 5737, RFC 3849)."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to it."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def from_here(host: str) -> str:
    """Where this machine connects to what listens at a host; some hosts mean all addresses."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104


def reachable_addresses(host: str) -> list[str]:
    """Where other machines reach what listens at a host; the one by the default route comes first.

    Of a host that stands for all addresses of its family, those of the interfaces that are up,
    without loopback and link-local ones: these others cannot use, or only with a zone of their own.
    Not what this machine's name means here: that is often 127.0.1.1.

    Args:
        host: A name or an IP address, `0.0.0.0` or `::` for all.

    Returns:
        IP addresses, or the name; none if this machine is on no network.
    """
    try:
        listening = ipaddress.ip_address(host)
    except ValueError:
        return [host]
    if not listening.is_unspecified:
        return [host]
    every = [each for each in _interface_addresses() if each.version == listening.version]
    usual = [str(each) for each in every if not each.is_link_local]
    by_cable = [str(each) for each in every if each.is_link_local and each.version == 4]
    first = _source_address(listening.version)
    return sorted(dict.fromkeys(usual or by_cable), key=lambda each: each != first)


def _interface_addresses() -> Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    for adapter in ifaddr.get_adapters():
        with contextlib.suppress(OSError):
            if (_INTERFACES / adapter.nice_name / "operstate").read_text().strip() == "down":
                continue
        for each in adapter.ips:
            address = ipaddress.ip_address(each.ip if isinstance(each.ip, str) else each.ip[0])
            if not (address.is_loopback or address.is_unspecified):
                yield address


def _source_address(version: int) -> str:
    """Of what this machine sends by its default route; empty if there is none."""
    family, somewhere = _SOMEWHERE[version]
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((somewhere, 9))  # of a datagram socket it sends nothing
        return str(probe.getsockname()[0])
    return ""


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
    at = format_address(host, port)
    if error.errno == errno.EADDRINUSE:
        return f"{option} {at} is in use; stop what uses it or choose another port"
    return f"{option} {at} cannot be bound: {error.strerror or error}"
