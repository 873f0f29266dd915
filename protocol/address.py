"""Addresses and device numbers as users write them: HOST:PORT, an IPv6 host in brackets; 0,1."""

from __future__ import annotations

from protocol.errors import UsageError


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    Args:
        text: What the user wrote.
        option: Where, for the error.

    Raises:
        UsageError: It is no address.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise UsageError(f"{option}: expected HOST:PORT, for example 127.0.0.1:9000, got {text!r}")
    return host, int(port)


def parse_device_numbers(text: str, option: str) -> tuple[int, ...]:
    """Distinct device numbers such as 0,1; none for an empty text.

    Raises:
        UsageError: It is no such list.
    """
    parts = text.split(",") if text else []
    if not all(part.isdecimal() for part in parts) or len(set(parts)) != len(parts):
        raise UsageError(f"{option}: expected distinct device numbers such as 0,1, got {text!r}")
    return tuple(int(part) for part in parts)
