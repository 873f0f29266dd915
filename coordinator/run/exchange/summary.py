"""What a commit has to know of a block's averaged gradients."""

from __future__ import annotations

from typing import NamedTuple

from protocol.exact.digest import block_digest
from protocol.exact.update import Array, square_sum
from protocol.spec.manifest import Block


class Summary(NamedTuple):
    """Of one block.

    Attributes:
        square_sum: `protocol.exact.update.square_sum` of them.
        digest: `protocol.exact.digest.block_digest` of them.
    """

    square_sum: float
    digest: str


def summary_of(block: Block, average: Array) -> Summary:
    """Take both; of a gigabyte that is a second."""
    return Summary(square_sum(average), block_digest(block, average))
