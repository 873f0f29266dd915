"""The order in which the chunks of a node's gradient are sent, and how far it may be sent at once.

The last block comes first, as backward gives them. A worker with several nodes sends each of them
in this order. So whoever sums needs to hold, of all that it lets come, the same few chunks of
every node, whatever the number of workers: then they are summed, and the next ones may come.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from protocol.spec.manifest import Block


class UploadOrder:
    """Positions of a step's chunks.

    Attributes:
        chunks: How many there are.

    Args:
        blocks: Those of the manifest, in its order.
    """

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        counts = [block.chunks for block in reversed(blocks)]
        self._first = [0, *accumulate(counts)][:-1][::-1]
        count = len(blocks)
        self._places = [(count - 1 - n, c) for n in range(count) for c in range(counts[n])]
        slices = (b.chunk_slice(c) for b in reversed(blocks) for c in range(b.chunks))
        self._ends_bytes: list[int] = [
            0,
            *accumulate((part.stop - part.start) * 4 for part in slices),
        ]
        self.chunks = sum(counts)

    @property
    def total_bytes(self) -> int:
        """Of one node."""
        return self._ends_bytes[-1]

    def position(self, block: int, chunk: int) -> int:
        """Where a chunk comes, from 0."""
        return self._first[block] + chunk

    def chunk(self, position: int) -> tuple[int, int]:
        """Block and chunk that come there."""
        return self._places[position]

    def end(self, start: int, length_bytes: int) -> int:
        """The position after all that fit so many bytes from this one on; one at least does."""
        reach = bisect_right(self._ends_bytes, self._ends_bytes[start] + length_bytes) - 1
        return min(max(reach, start + 1), self.chunks)
