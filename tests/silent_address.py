"""Addresses on this machine where connections fail in the ways of a network."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def silent_address(host: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
    """An address that answers no SYN, like one behind a firewall that drops: its queue of
    connections is full."""
    with contextlib.ExitStack() as sockets:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = sockets.enter_context(socket.socket(family))
        listener.bind((host, 0))
        listener.listen(0)
        at = listener.getsockname()[:2]
        # The kernel takes one more than the queue holds; the next ones wait for an answer.
        for _ in range(4):
            queued = sockets.enter_context(socket.socket(family))
            queued.settimeout(0.05)
            try:
                queued.connect(at)
            except TimeoutError:
                break
        yield at[0], at[1]


@contextlib.contextmanager
def dead_name_server(name: str) -> Iterator[threading.Event]:
    """Meanwhile nobody answers for that name; the event is set once it is asked for."""
    asked, over, real = threading.Event(), threading.Event(), socket.getaddrinfo

    def hang(host: Any, *arguments: Any, **options: Any) -> Any:
        if host != name:
            return real(host, *arguments, **options)
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        asked.set()
        over.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    with mock.patch.object(socket, "getaddrinfo", hang):
        yield asked
        over.set()


def refusing_port() -> int:
    """A port of 127.0.0.1 at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
