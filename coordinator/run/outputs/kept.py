"""What the microbatches of one attempt gave beside their losses: kept as it is, never summed.

Pure. A capture is a run whose steps keep something: the bytes of each microbatch stand at its
place, so neither who computed it nor when it came can show in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.base import limits
from protocol.base.errors import OutOfPlace
from protocol.exact.tree import Node
from protocol.wire.messages import CapturedRows

Bytes = NDArray[np.uint8]


class Kept:
    """Collects the pieces of each microbatch; the first answer for a piece counts.

    Args:
        sizes: Bytes of each microbatch.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._pieces: list[list[Bytes | None]] = [
            [None] * max(1, -(-size // limits.BODY_BYTES)) for size in sizes
        ]

    def put(self, message: CapturedRows, content: Bytes) -> None:
        """Take a piece; it belongs to this object from then on.

        Raises:
            OutOfPlace: There is no such piece, or it has another size.
        """
        leaf, chunk = message.microbatch, message.chunk
        if not message.lo <= leaf < message.hi or chunk >= len(self._pieces[leaf]):
            raise OutOfPlace(f"CapturedRows: no chunk {chunk} of microbatch {leaf} in this node")
        expected = min(limits.BODY_BYTES, self._sizes[leaf] - chunk * limits.BODY_BYTES)
        if len(content) != expected:
            raise OutOfPlace(f"CapturedRows: expected {expected} bytes, got {len(content)}")
        if self._pieces[leaf][chunk] is None:
            self._pieces[leaf][chunk] = content

    def has(self, node: Node) -> bool:
        """Whether all of a node's microbatches are there."""
        return all(piece is not None for leaf in range(*node) for piece in self._pieces[leaf])

    @property
    def content(self) -> list[Bytes]:
        """All pieces in order; the round is complete."""
        found = [piece for pieces in self._pieces for piece in pieces if piece is not None]
        assert sum(map(len, found)) == sum(self._sizes)
        return found
