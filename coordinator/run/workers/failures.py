"""Whether workers fail one after the other at the same microbatches. Pure.

One device that fails is that machine's matter. When a second one fails while the same microbatches
are its own, it is theirs: each worker that is given them would go the same way.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.exact.tree import Node


class Failures:
    """Failed workers of one attempt at a step, and what they still owed."""

    def __init__(self) -> None:
        self._owed: list[tuple[str, frozenset[int]]] = []

    def note(self, worker: str, owed: Iterable[Node]) -> str:
        """A worker's device has failed while it owed these nodes.

        Returns:
            Who failed at what, if it is not the first that failed there; else empty.
        """
        leaves = frozenset(leaf for node in owed for leaf in range(node.lo, node.hi))
        for other, earlier in self._owed:
            if common := sorted(leaves & earlier):
                return (
                    f"workers {other!r} and {worker!r} failed one after the other, each while it "
                    f"had microbatches {common[0]} to {common[-1]}"
                )
        self._owed.append((worker, leaves))
        return ""

    def clear(self) -> None:
        """The step is over, or is tried again."""
        self._owed.clear()
