"""The sum of one piece of a step's gradient along the tree, and what becomes of it.

One class wherever a piece is summed: at the coordinator by chunks, at whoever owns a slice. Node
sums in, from whom they are; their average out, once all are there. Arrival order cannot change a
bit: the tree fixes what is added to what. Nodes may come twice, from several workers, or as parts
of nodes that come later; what is covered already changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import add
from typing import Annotated, Final

from pydantic import Field, TypeAdapter, ValidationError

from protocol.base import limits
from protocol.base.errors import MessageError
from protocol.base.fields import Number, Small
from protocol.exact.codecs import projected
from protocol.exact.tree import Node, root
from protocol.exact.tree_sum import ADDITIONS, TreeSum
from protocol.exact.update import Array, average, is_finite
from protocol.spec.replicas_spec import Codecs

Origin = tuple[tuple[str, Node], ...]
"""Whose nodes make up a sum, from left to right."""
_ORIGIN: Final = TypeAdapter[list[tuple[str, int, int]]](
    Annotated[list[tuple[Small, Number, Number]], Field(max_length=limits.MICROBATCHES_PER_STEP)]
)


def origin_document(origin: Origin) -> bytes:
    """As it travels."""
    return json.dumps([[worker, *node] for worker, node in origin]).encode()


def parse_origin(document: bytes) -> Origin:
    """What has travelled.

    Raises:
        MessageError: It is no such list.
    """
    try:
        found = _ORIGIN.validate_json(document)
    except ValidationError as error:
        raise MessageError(f"SliceDone: {error.errors()[0]['msg']}") from None
    return tuple((worker, Node(lo, hi)) for worker, lo, hi in found)


@dataclass(frozen=True, slots=True)
class Infinite:
    """A worker's sum, or without one that of all, has NaN or infinity."""

    worker: str | None
    node: Node


class SliceMerge:
    """One piece in one attempt at a step.

    Attributes:
        done: Whether its average was given; then all is covered, and nothing is held.
        origin: Whose nodes made it up, once it is done.
    """

    def __init__(self, microbatches: int, exchange: Codecs) -> None:
        self.done = False
        self.origin: Origin = ()
        self._microbatches = microbatches
        self._exchange = exchange
        self._begin()

    def _begin(self) -> None:
        self._sums = TreeSum[Array](self._microbatches, ADDITIONS[self._exchange.sums])
        self._origins = TreeSum[Origin](self._microbatches, add)
        self._weights = TreeSum[float](self._microbatches, add)

    def covers(self, node: Node) -> bool:
        """Whether nothing of the node is wanted."""
        return self.done or self._sums.covers(node)

    def missing(self, node: Node) -> Iterator[int]:
        """The microbatches of `node` that are not there."""
        return iter(()) if self.done else self._sums.missing(node)

    def put(
        self, worker: str, node: Node, weight: float, values: Array, out: Array
    ) -> Infinite | bool:
        """Take a node's sum; `values` belongs to the merge from then on.

        Args:
            worker: Whose it is.
            node: What it sums.
            weight: Of the node.
            values: Flat float32, as the run's precision has them.
            out: Where the average goes, of the same shape.

        Returns:
            Whether the average is in `out` now; or what is not finite.
        """
        if self.covers(node):
            return False
        # Once it is in a sum nobody can tell whose it was. What is the whole sum by itself shows in
        # its average, but for one without weight.
        alone = weight > 0 and node == root(self._microbatches)
        if not (alone or is_finite(values)):
            return Infinite(worker, node)
        self._weights.put(node, weight)
        self._origins.put(node, ((worker, node),))
        self._sums.put(node, values)
        total, total_weight = self._sums.total, self._weights.total
        if total is None:
            return False
        assert total_weight is not None, "all nodes came with their weights"
        if math.isfinite(total_weight):
            average(total, total_weight, out=out)
        projected(out, self._exchange.averages)
        # A small weight can make an average overflow where the sum did not.
        if not (math.isfinite(total_weight) and is_finite(out)):
            whose = worker if alone and not is_finite(values) else None
            return Infinite(whose, root(self._microbatches))
        self.done, self.origin = True, self._origins.total or ()
        self._begin()  # the sum's memory goes now: it may be as large as the model
        return True
