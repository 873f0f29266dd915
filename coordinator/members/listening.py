"""Listening addresses: loopback checks, the addresses that other machines reach, errors of bind."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import ifaddr

from protocol.base.address import format_address
from protocol.base.errors import UsageError

_INTERFACES: Final = Path("/sys/class/net")
_REMOTE_ADDRESS: Final = {4: (socket.AF_INET, "192.0.2.1"), 6: (socket.AF_INET6, "2001:db8::1")}
"""Documentation addresses behind the default route, for IPv4 and IPv6 (RFC 5737, RFC 3849)."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to the host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def address_from_here(host: str) -> str:
    """Return the address at which this machine reaches a listener; 0.0.0.0 and :: mean loopback."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104


def reachable_addresses(host: str) -> list[str]:
    """Return the addresses at which other machines reach a listener; the default route's first.

    For 0.0.0.0 or ::, these are the addresses of all interfaces that are up, except loopback
    addresses, which other machines cannot use, and link-local addresses, which need a zone; without
    any other address, link-local IPv4 addresses. The machine's hostname is not resolved, because it
    often maps to 127.0.1.1.

    Args:
        host: A name or an IP address, `0.0.0.0` or `::` for all.

    Returns:
        IP addresses, or the name; empty if this machine is on no network.
    """
    try:
        listening = ipaddress.ip_address(host)
    except ValueError:
        return [host]
    if not listening.is_unspecified:
        return [host]
    addresses = [ip for ip in _interface_addresses() if ip.version == listening.version]
    routable_addresses = [str(ip) for ip in addresses if not ip.is_link_local]
    # Two machines on one cable may have no other addresses.
    link_local_addresses = [str(ip) for ip in addresses if ip.is_link_local and ip.version == 4]
    default_address = _source_address(listening.version)
    return sorted(
        dict.fromkeys(routable_addresses or link_local_addresses),
        key=lambda address: address != default_address,
    )


def _interface_addresses() -> Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    for adapter in ifaddr.get_adapters():
        with contextlib.suppress(OSError):
            if (_INTERFACES / adapter.nice_name / "operstate").read_text().strip() == "down":
                continue
        for ip in adapter.ips:
            address = ipaddress.ip_address(ip.ip if isinstance(ip.ip, str) else ip.ip[0])
            if not (address.is_loopback or address.is_unspecified):
                yield address


def _source_address(version: int) -> str:
    """Return the source address of the default route; empty if there is none."""
    family, remote_address = _REMOTE_ADDRESS[version]
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((remote_address, 9))  # sends no packet, as the socket is a datagram socket
        return str(probe.getsockname()[0])
    return ""


def require_loopback(host: str, option: str) -> None:
    """Refuse to serve plain HTTP to other machines.

    Raises:
        UsageError: The host is not a loopback address.
    """
    if not is_loopback(host):
        raise UsageError(
            f"{option}: expected a loopback address such as 127.0.0.1, got {host!r}: this port is "
            "not encrypted; from another machine use a tunnel: ssh -N -L 9001:127.0.0.1:9001 HOST"
        )


def bind_failure(option: str, host: str, port: int, error: OSError) -> str:
    """Return the message for a port that cannot be bound."""
    address = format_address(host, port)
    if error.errno == errno.EADDRINUSE:
        return f"{option} {address} is in use; stop what uses it or choose another port"
    return f"{option} {address} cannot be bound: {error.strerror or error}"
