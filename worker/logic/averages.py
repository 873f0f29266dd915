"""The averaged blocks of one attempt at a step, put together from their chunks."""

from __future__ import annotations

import numpy as np

from backends.base.interface import Array
from protocol.spec.manifest import Block


class Averages:
    """One flat array per block in `arrays`, whole once `complete`."""

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        self._blocks = blocks
        self._missing = {(b, c) for b, block in enumerate(blocks) for c in range(block.chunks)}
        self.arrays: list[Array] = [np.empty(0, np.float32)] * len(blocks)

    def put(self, block: int, chunk: int, values: Array) -> None:
        """Take a chunk; one that is there already changes nothing."""
        if (block, chunk) not in self._missing:
            return
        self._missing.discard((block, chunk))
        if self._blocks[block].chunks == 1:
            self.arrays[block] = values
            return
        if not len(self.arrays[block]):
            self.arrays[block] = np.empty(self._blocks[block].elements, np.float32)
        self.arrays[block][self._blocks[block].chunk_slice(chunk)] = values

    @property
    def complete(self) -> bool:
        return not self._missing
