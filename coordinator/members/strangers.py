"""Who is connected and no member yet: how many there may be, and from where.

Whoever does not become a member keeps its place for a moment after it has gone. Without that one
address could begin a TLS handshake after the other, each of which costs the coordinator more than
it costs the other side.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

from coordinator.members.session import MemberSession
from protocol.base import limits


class Strangers:
    """The connections in the handshake; their number is its length."""

    def __init__(self) -> None:
        self._entered_s: dict[MemberSession, float] = {}
        self._kept: Counter[str] = Counter()

    def __iter__(self) -> Iterator[MemberSession]:
        return iter([*self._entered_s])

    def __len__(self) -> int:
        return len(self._entered_s)

    def admits(self, host: str) -> bool:
        """Whether there is a place for one more from there."""
        everywhere = len(self._entered_s) + self._kept.total()
        there = sum(session.host == host for session in self._entered_s) + self._kept[host]
        return (
            everywhere < limits.UNAUTHENTICATED_CONNECTIONS
            and there < limits.UNAUTHENTICATED_CONNECTIONS_PER_ADDRESS
        )

    def enter(self, session: MemberSession) -> None:
        """It takes a place."""
        self._entered_s[session] = asyncio.get_running_loop().time()

    def leave(self, session: MemberSession) -> None:
        """It has become a member, or has gone; done twice it is done once."""
        entered_s = self._entered_s.pop(session, None)
        if entered_s is None or session.name:
            return
        self._kept[session.host] += 1
        until_s = entered_s + limits.UNAUTHENTICATED_PLACE_MS / 1000
        asyncio.get_running_loop().call_at(until_s, self._free, session.host)

    def _free(self, host: str) -> None:
        self._kept[host] -= 1
        if not self._kept[host]:
            del self._kept[host]
