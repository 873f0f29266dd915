"""Side outputs of one attempt: outputs of microbatches other than gradients, never summed.

Pure. The bytes of each microbatch are stored by the microbatch's number, so the result does not
depend on which worker computed them, or when they arrived. The result of a capture consists of side
outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.base import limits
from protocol.base.errors import OutOfOrder
from protocol.exact.reduction.tree import Subtree
from protocol.exact.update import counts_updates, moment_count
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec
from protocol.wire.messages import CapturedRows

Bytes = NDArray[np.uint8]


class SideOutputs:
    """Collects the pieces of each microbatch; the first copy of a piece counts.

    Args:
        sizes: Size of each microbatch's side output, in bytes.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._pieces: list[list[Bytes | None]] = [
            [None] * max(1, -(-size // limits.BODY_BYTES)) for size in sizes
        ]

    def put(self, message: CapturedRows, content: Bytes) -> None:
        """Take a piece, and ownership of its content.

        Raises:
            OutOfOrder: There is no such piece, or it has another size.
        """
        leaf, chunk = message.microbatch, message.chunk
        if not message.lo <= leaf < message.hi or chunk >= len(self._pieces[leaf]):
            raise OutOfOrder(f"CapturedRows: no chunk {chunk} of microbatch {leaf} in this subtree")
        expected = min(limits.BODY_BYTES, self._sizes[leaf] - chunk * limits.BODY_BYTES)
        if len(content) != expected:
            raise OutOfOrder(f"CapturedRows: expected {expected} bytes, got {len(content)}")
        if self._pieces[leaf][chunk] is None:
            self._pieces[leaf][chunk] = content

    def has_subtree(self, subtree: Subtree) -> bool:
        """Return whether all side outputs of a subtree's microbatches have arrived."""
        return all(piece is not None for leaf in range(*subtree) for piece in self._pieces[leaf])

    def join_with_copy(self, leaf: int, chunk: int, copy: Bytes) -> Bytes:
        """Return the content of a microbatch, with another copy of one of its chunks, flat
        uint8."""
        pieces = [
            copy if number == chunk else piece for number, piece in enumerate(self._pieces[leaf])
        ]
        return np.concatenate([piece for piece in pieces if piece is not None])

    @property
    def content(self) -> list[Bytes]:
        """All pieces in order; valid once all have arrived."""
        pieces = [piece for parts in self._pieces for piece in parts if piece is not None]
        assert sum(map(len, pieces)) == sum(self._sizes)
        return pieces


def replica_state_bytes(spec: RunSpec, manifest: Manifest) -> int:
    """Return the size of one replica's state in bytes: carried moments and counts of missed
    updates, and the values that topk has not sent; 0 without state."""
    return next(iter(replica_state_sizes(spec, manifest)), 0)


def replica_state_sizes(spec: RunSpec, manifest: Manifest) -> tuple[int, ...]:
    """Return the possible sizes of a replica's state in a file: the current size, then that of
    releases before protocol version 9, which counted no missed updates. Empty without state."""
    if spec.replicas is None:
        return ()
    is_carried = spec.replicas.inner_state == "carry"
    arrays = (moment_count(spec.optimizer) if is_carried else 0) + (spec.replicas.codec == "topk")
    length = arrays * manifest.elements * 4
    if is_carried and counts_updates(spec.optimizer):
        tensors = sum(len(block.tensors) for block in manifest.blocks)
        return (length + 4 * tensors, length)
    return (length,) if length else ()
