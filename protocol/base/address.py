"""Network addresses as users write them: HOST:PORT, with an IPv6 host in brackets.

A zone (RFC 4007) names the interface of a link-local address: `[fe80::1%eth0]:9000`.
"""

from __future__ import annotations

import ipaddress

from protocol.base.errors import UsageError


def parse_address(text: str, option: str, port: int | None = None) -> tuple[str, int]:
    """Split `HOST:PORT` into host and port.

    Args:
        text: The user's text.
        option: The option with this text, for the error.
        port: Default port; None if a port is required.

    Raises:
        UsageError: The text is not an address.
    """
    if port is not None and text and _is_host_alone(text):
        text = format_address(text.removeprefix("[").removesuffix("]"), port)
    host, colon, number = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not number.isdecimal() or int(number) > 65_535:
        raise UsageError(f"{option}: expected HOST:PORT, for example 127.0.0.1:9000, got {text!r}")
    return host, int(number)


def format_address(host: str, port: int) -> str:
    """Return `HOST:PORT`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_host_alone(text: str) -> bool:
    """Return whether the text has no port; `::1:9000` has one, `2001:db8::7` has none."""
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]"):
        return True
    is_address_and_port = number.isdecimal() and (":" not in host or _is_ipv6(host))
    return _is_ipv6(text) and not text.startswith("[") and not is_address_and_port


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
