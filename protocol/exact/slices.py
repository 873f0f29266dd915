"""Slices of a step's gradient: what one member owns, sums and averages.

A slice is a piece of a block, and all of a block are about equally long: so any number of owners
can have about as much each, and of every block, whose gradients come one after the other. Slices
are numbered in the order in which gradients come: those of the last block first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from blake3 import blake3
from numpy.typing import NDArray

from protocol.base import limits
from protocol.exact.update import Array
from protocol.spec.manifest import Block

DIGEST_BYTES: Final = 16
_ALIGNED_ELEMENTS: Final = 16


class SliceGrid:
    """Where the slices of a step lie.

    Attributes:
        blocks: Those of the manifest.
        count: How many slices there are.
    """

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        self.blocks = blocks
        total = sum(block.elements for block in blocks)
        most = max(limits.SLICE_ELEMENTS, total // limits.SLICES)
        most = min(most, max(limits.LARGE_SLICE_ELEMENTS, limits.SLICE_ELEMENTS))
        self._places: list[tuple[int, slice]] = []
        self._of_block: dict[int, range] = {}
        for number in reversed(range(len(blocks))):
            first = len(self._places)
            parts = _equal_parts(blocks[number].elements, most)
            self._places += [(number, part) for part in parts]
            self._of_block[number] = range(first, len(self._places))
        self.count = len(self._places)

    def place(self, number: int) -> tuple[int, slice]:
        """Block, and elements of its flat array."""
        return self._places[number]

    def elements(self, number: int) -> int:
        """How many values a slice has."""
        _, part = self._places[number]
        return int(part.stop - part.start)

    def of_block(self, block: int) -> range:
        """The numbers of a block's slices."""
        return self._of_block[block]


def _equal_parts(elements: int, most: int) -> list[slice]:
    """At most so many elements each; one part at least, which may be empty."""
    count = max(1, -(-elements // most))
    even = -(-elements // count)
    if even > _ALIGNED_ELEMENTS:
        even = -(-even // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS
    starts = range(0, elements, even) if elements else range(1)
    return [slice(lo, min(lo + even, elements)) for lo in starts]


def slice_digest(values: Array | NDArray[Any]) -> bytes:
    """BLAKE3, the first 16 bytes: what an owner says of an average, and all others check."""
    return blake3(values.view("u1").data).digest(DIGEST_BYTES)


def owned_by(shares: Sequence[float], grid: SliceGrid) -> list[int]:
    """The owner of each slice, as an index into `shares`.

    Args:
        shares: What each is to own of all elements; their sum is above 0.
        grid: The slices.

    Returns:
        In each stretch of slices every owner has about its share, and in all of them too.
    """
    total = sum(shares)
    given = [0.0] * len(shares)
    owners, done = [], 0.0
    for number in range(grid.count):
        done += max(grid.elements(number), 1)
        # Whoever lacks the most of what it should have by now.
        lacking = [share / total * done - had for share, had in zip(shares, given, strict=True)]
        able = [index for index, share in enumerate(shares) if share > 0]
        owner = max(able, key=lambda index: (lacking[index], -index))
        given[owner] += max(grid.elements(number), 1)
        owners.append(owner)
    return owners
