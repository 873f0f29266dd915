"""The chunks of a step's gradient, in the order in which they are sent.

A chunk is the unit of the exchange: one message carries a chunk, one owner averages it, and the
gradient log records it. The last block comes first, in the order of backward. A worker with several
subtrees sends each of them in this order. So the receiver holds only a few chunks of every subtree
at a time, for any number of workers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

from blake3 import blake3
from numpy.typing import NDArray

from protocol.exact.reduction.average import Array
from protocol.spec.manifest import Block

DIGEST_BYTES: Final = 16


class ChunkGrid:
    """Numbers the chunks of a step from 0, in the order in which they are sent.

    Attributes:
        blocks: The manifest's blocks.
        count: The number of chunks.
    """

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        self.blocks = blocks
        self._chunks = [
            (block, chunk)
            for block in reversed(range(len(blocks)))
            for chunk in range(blocks[block].chunks)
        ]
        counts: list[int] = [block.chunks for block in reversed(blocks)]
        self._first: list[int] = [0, *accumulate(counts)][:-1][::-1]
        parts = [blocks[block].chunk_slice(chunk) for block, chunk in self._chunks]
        self._ends_bytes: list[int] = [
            0,
            *accumulate((part.stop - part.start) * 4 for part in parts),
        ]
        self.count = len(self._chunks)

    @property
    def total_bytes(self) -> int:
        """Size of a whole gradient in float32."""
        return self._ends_bytes[-1]

    def has(self, block: int, chunk: int) -> bool:
        """Return whether this chunk exists."""
        return block < len(self.blocks) and chunk < self.blocks[block].chunks

    def number(self, block: int, chunk: int) -> int:
        """Return the number of a block's chunk."""
        return self._first[block] + chunk

    def chunk(self, number: int) -> tuple[int, int]:
        """Return the block, and the chunk within it."""
        return self._chunks[number]

    def of_block(self, block: int) -> range:
        """Return the numbers of a block's chunks."""
        return range(self._first[block], self._first[block] + self.blocks[block].chunks)

    def elements(self, number: int) -> int:
        """Return the number of values in a chunk."""
        return (self._ends_bytes[number + 1] - self._ends_bytes[number]) // 4

    def end(self, start: int, length_bytes: int) -> int:
        """Return the end of the range of chunks from `start` on that fits into `length_bytes`; the
        range has at least one chunk."""
        end = bisect_right(self._ends_bytes, self._ends_bytes[start] + length_bytes) - 1
        return min(max(end, start + 1), self.count)


def chunk_digest(values: Array | NDArray[Any]) -> bytes:
    """Return the first 16 bytes of BLAKE3 over an average; the owner announces this digest, and
    receivers check it."""
    return blake3(values.view("u1").data).digest(DIGEST_BYTES)


def divide_chunks(shares: Sequence[float], grid: ChunkGrid) -> list[int]:
    """Assign an owner to each chunk.

    Args:
        shares: Each owner's relative share of the elements; at least one is above 0.
        grid: The chunks.

    Returns:
        For each chunk the owner's index in `shares`. Each owner has about its share of any
        consecutive chunks.
    """
    total_share = sum(shares)
    assigned_elements = [0.0] * len(shares)
    owners, total_elements = [], 0.0
    for chunk in range(grid.count):
        elements = max(grid.elements(chunk), 1)
        total_elements += elements
        deficits = [
            share / total_share * total_elements - assigned
            for share, assigned in zip(shares, assigned_elements, strict=True)
        ]
        candidates = [index for index, share in enumerate(shares) if share > 0]
        owner = max(candidates, key=lambda index: (deficits[index], -index))
        assigned_elements[owner] += elements
        owners.append(owner)
    return owners
