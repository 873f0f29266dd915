"""Addresses and devices as users write them: HOST:PORT, an IPv6 host in brackets; 0,1 or radeon."""

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


def parse_devices(text: str, option: str) -> tuple[int | str, ...]:
    """Distinct device numbers such as 0,1, or parts of names such as radeon; none for no text.

    Raises:
        UsageError: It is no such list.
    """
    parts = [part.strip() for part in text.split(",")] if text else []
    devices = tuple(int(part) if part.isdecimal() else part.lower() for part in parts)
    if not all(map(_is_device, devices)) or len(set(devices)) != len(devices):
        raise UsageError(
            f"{option}: expected distinct device numbers such as 0,1, or parts of their names, "
            f"got {text!r}"
        )
    return devices


def _is_device(device: int | str) -> bool:
    return isinstance(device, int) or (device[:1].isalnum() and not device.isnumeric())
