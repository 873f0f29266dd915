"""Limit unauthenticated connections, in total and per address.

A connection that closes without authenticating occupies its slot until a second after its start.
Otherwise one address could start TLS handshakes without a pause, and a handshake costs this side
more than the client.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from protocol.base import limits


class Pending(Protocol):
    """An unauthenticated connection.

    Attributes:
        host: The address that it comes from.
        name: The peer's name; empty until it has authenticated.
    """

    host: str
    name: str


P = TypeVar("P", bound=Pending)


class PendingConnections(Generic[P]):
    """Unauthenticated connections; `len` returns their number.

    Args:
        limit: Maximum number of connections in total.
        max_per_host: Maximum number of connections from one address.
        on_room: Called when a slot becomes free.
    """

    def __init__(
        self,
        limit: int = limits.UNAUTHENTICATED_CONNECTIONS,
        max_per_host: int = limits.UNAUTHENTICATED_CONNECTIONS_PER_ADDRESS,
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_room = on_room
        self._limit = limit
        self._max_per_host = max_per_host
        self._started_s: dict[P, float] = {}
        self._closed_by_address: Counter[str] = Counter()
        """Number of closed connections from each address that still occupy a slot."""

    def __iter__(self) -> Iterator[P]:
        return iter([*self._started_s])

    def __len__(self) -> int:
        return len(self._started_s)

    def has_room(self, host: str) -> bool:
        """Return whether one more connection from this address may start."""
        total = len(self._started_s) + self._closed_by_address.total()
        from_host = (
            sum(pending.host == host for pending in self._started_s) + self._closed_by_address[host]
        )
        return total < self._limit and from_host < self._max_per_host

    def add(self, pending: P) -> None:
        """Count a connection that starts."""
        self._started_s[pending] = asyncio.get_running_loop().time()

    def remove(self, pending: P) -> None:
        """Stop counting a connection that has authenticated or closed. Idempotent."""
        started_s = self._started_s.pop(pending, None)
        if started_s is None:
            return
        if pending.name:
            self._on_room()
            return
        self._closed_by_address[pending.host] += 1
        free_at_s = started_s + limits.UNAUTHENTICATED_SLOT_MS / 1000
        asyncio.get_running_loop().call_at(free_at_s, self._free, pending.host)

    def _free(self, host: str) -> None:
        self._closed_by_address[host] -= 1
        if not self._closed_by_address[host]:
            del self._closed_by_address[host]
        self._on_room()
