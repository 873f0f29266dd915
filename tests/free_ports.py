"""Ports that stay free from the check until a test listens on them."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

_PORTS: Final = (15_000, 32_000)
"""Below those that the system gives out by itself: a worker that tries to connect to a port where
nobody listens must not be given that very port as its own end."""


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody has now."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(*_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def free_address() -> str:
    """HOST:PORT on loopback, with nobody there."""
    (port,) = free_ports(1)
    return f"127.0.0.1:{port}"
