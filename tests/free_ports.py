"""Ports that stay free from the check until a test listens on them."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

_PORTS: Final = (15_000, 32_000)
"""Below the ephemeral range: a worker that connects to a port without a listener must not get
that port as its own end."""


def free_ports(count: int) -> list[int]:
    """Return loopback ports that are not in use."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(*_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def free_address() -> str:
    """Return HOST:PORT on loopback, without a listener."""
    (port,) = free_ports(1)
    return f"127.0.0.1:{port}"
