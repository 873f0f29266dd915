"""What a worker has to send of a step's gradients, and how far it may."""

from __future__ import annotations

from protocol.exact.tree import Node
from protocol.exact.upload_order import UploadOrder
from worker.logic.actions import Transmit


class Uploads:
    """Of one attempt at a step.

    Args:
        order: In which chunks are sent.
        allowed: How many of each node may be sent now.
    """

    def __init__(self, order: UploadOrder, allowed: int) -> None:
        self._order = order
        self._allowed = allowed
        self._held: list[tuple[int, Node, Transmit]] = []

    def offer(self, node: Node, block: int, chunks: list[Transmit]) -> list[Transmit]:
        """A block's sum over a node is there: what of it may be sent; the rest is held."""
        first = self._order.position(block, 0)
        may = max(0, self._allowed - first)
        self._held += [(first + n, node, chunks[n]) for n in range(may, len(chunks))]
        return chunks[:may]

    def allow(self, allowed: int) -> list[Transmit]:
        """More may be sent: what was held of that."""
        self._allowed = max(allowed, self._allowed)
        ready = [transmit for at, _, transmit in self._held if at < self._allowed]
        self._held = [entry for entry in self._held if entry[0] >= self._allowed]
        return ready

    def drop(self, nodes: set[Node]) -> None:
        """Nobody wants these any more."""
        self._held = [entry for entry in self._held if entry[1] not in nodes]
