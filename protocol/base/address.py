"""Addresses as users write them: HOST:PORT, an IPv6 host in brackets."""

from __future__ import annotations

from protocol.base.errors import UsageError


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
