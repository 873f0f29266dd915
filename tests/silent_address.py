"""Local addresses and names at which connections fail as on a network."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def silent_address(host: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
    """Yield an address that answers no SYN, as behind a firewall: its accept queue is full."""
    with contextlib.ExitStack() as sockets:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = sockets.enter_context(socket.socket(family))
        listener.bind((host, 0))
        listener.listen(0)
        address = listener.getsockname()[:2]
        # The kernel accepts one connection more than the backlog; from then on it answers no SYN.
        for _ in range(4):
            queued = sockets.enter_context(socket.socket(family))
            queued.settimeout(0.05)
            try:
                queued.connect(address)
            except TimeoutError:
                break
        yield address[0], address[1]


@contextlib.contextmanager
def dead_name_server(name: str) -> Iterator[threading.Event]:
    """Make lookups of this name hang; yield an event that is set at the first lookup."""
    lookup_started, release_event = threading.Event(), threading.Event()
    getaddrinfo = socket.getaddrinfo

    def hang(host: Any, *arguments: Any, **options: Any) -> Any:
        if host != name:
            return getaddrinfo(host, *arguments, **options)
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        lookup_started.set()
        release_event.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    with mock.patch.object(socket, "getaddrinfo", hang):
        yield lookup_started
        release_event.set()


def refusing_port() -> int:
    """Return a port of 127.0.0.1 without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
