"""Addresses as users write them: HOST:PORT, an IPv6 host in brackets."""

from __future__ import annotations

from protocol.base.errors import UsageError


def parse_address(text: str, option: str, port: int | None = None) -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    Args:
        text: What the user wrote.
        option: Where, for the error.
        port: Of a host alone; None if the port has to be said.

    Raises:
        UsageError: It is no address.
    """
    if port is not None and text and (":" not in text or text.endswith("]")):
        text = f"{text}:{port}"
    host, colon, number = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not number.isdecimal() or int(number) > 65_535:
        raise UsageError(f"{option}: expected HOST:PORT, for example 127.0.0.1:9000, got {text!r}")
    return host, int(number)
