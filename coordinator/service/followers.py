"""Who hears what is broadcast, and what was broadcast since the replica's state."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from coordinator.members.session import MemberSession
from protocol.exact.update import Array
from protocol.wire.connection import Encoded, encode
from protocol.wire.messages import AveragedBlockGradient, AveragedNonBlockGradient, Commit, Message


class Followers:
    """The workers that have the run's state, and the broadcasts that a joiner needs.

    Attributes:
        since: Everything broadcast for this step and later ones is kept for joiners.
        over: Whether the run is over: nobody is to get anything of it any more.

    Args:
        sessions: Members by name; others' names are passed over.
        since: Steps committed before the first broadcast.
    """

    def __init__(self, sessions: Mapping[str, MemberSession], since: int = 0) -> None:
        self.since = since
        self.over = False
        self._sessions = sessions
        self._names: set[str] = set()
        self._tail: deque[tuple[int, Encoded]] = deque()

    def discard(self, worker: str) -> None:
        """It hears no more."""
        self._names.discard(worker)

    def broadcast(self, message: Message, body: Array | None) -> None:
        """Send to all, and keep it for joiners."""
        encoded = encode(message, body)
        for name in sorted(self._names):
            session = self._sessions.get(name)
            if session is not None:
                session.channel.send(encoded)
        if isinstance(message, AveragedBlockGradient | AveragedNonBlockGradient | Commit):
            self._tail.append((message.step, encoded))

    def forget_before(self, step: int) -> None:
        """The replica has taken so many steps: joiners need only what came later."""
        self.since = max(self.since, step)
        while self._tail and self._tail[0][0] < self.since:
            self._tail.popleft()

    def join(self, session: MemberSession, step: int) -> None:
        """The worker has taken so many steps: send it what it has missed, then it hears all.

        `since` is not above that.
        """
        assert step >= self.since
        for broadcast_step, encoded in self._tail:
            if broadcast_step >= step:
                session.channel.send(encoded)
        self._names.add(session.name)

    def clear(self) -> None:
        """The run is over: let go of everything kept."""
        self.over = True
        self._tail.clear()
