"""One boundary of a replica at a time on its way to the coordinator.

A boundary is as large as a state. Where the link is slower than the steps between two of them, they
would fill the memory; one that is not sent costs a successor some steps, and decides no bit.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.wire.messages import Boundary, Message


class BoundaryTurns:
    """Of one connection; it is asked of all pieces of all boundaries, in order."""

    def __init__(self) -> None:
        self._left_out = False

    def leaves_out(self, piece: Boundary, waiting: Iterable[Message]) -> bool:
        """Whether this piece is not sent, for an earlier boundary of its replica waits still."""
        if piece.chunk == 0:
            replica = piece.replica
            self._left_out = any(
                isinstance(each, Boundary) and each.replica == replica for each in waiting
            )
        return self._left_out
