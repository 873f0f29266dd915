"""Reduce gradients along the tree: subtree sums in, averages (or larger sums) out.

One class wherever gradients are reduced: at the owner of a chunk, be it the coordinator or a
worker, and among the devices of one worker by blocks. Arrival order cannot change a bit: the tree
fixes both operands of each addition. Sums may arrive twice, from several workers, or as parts of
sums that arrive later; a sum that is already included changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from operator import add
from typing import Annotated, Final, Generic, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from protocol.base import limits
from protocol.base.errors import MessageError
from protocol.base.fields import Number, ShortText
from protocol.exact.reduction.average import Array, average, is_finite
from protocol.exact.reduction.codecs import project
from protocol.exact.reduction.tree import Subtree, root
from protocol.exact.reduction.tree_sum import ADDITIONS, TreeSum
from protocol.spec.manifest import Block
from protocol.spec.sections.exchange import Codecs

Piece = TypeVar("Piece", bound=Hashable)
Origin = tuple[tuple[str, Subtree], ...]
"""The workers and subtrees that make up a sum, from left to right."""
_ORIGIN: Final = TypeAdapter[list[tuple[str, int, int]]](
    Annotated[
        list[tuple[ShortText, Number, Number]], Field(max_length=limits.MICROBATCHES_PER_STEP)
    ]
)


def origin_document(origin: Origin) -> bytes:
    """Encode an origin as JSON."""
    return json.dumps([[worker, *subtree] for worker, subtree in origin]).encode()


def parse_origin(document: bytes) -> Origin:
    """Decode an origin.

    Raises:
        MessageError: The document is not a list of (worker, lo, hi).
    """
    try:
        pairs = _ORIGIN.validate_json(document)
    except ValidationError as error:
        raise MessageError(f"ChunkReduced: {error.errors()[0]['msg']}") from None
    return tuple((worker, Subtree(lo, hi)) for worker, lo, hi in pairs)


@dataclass(frozen=True, slots=True)
class NonFinite:
    """NaN or infinity in a gradient or a loss.

    Attributes:
        subtree: The microbatches whose sum has it.
        worker: The worker that computed that sum; None if only the sum over workers is non-finite.
        block: The number of the gradient's block; None for a loss or an embedding.
        device: The worker's device, if it has several.
        is_embedding: Whether it is in an embedding.
    """

    subtree: Subtree
    worker: str | None = None
    block: int | None = None
    device: str = ""
    is_embedding: bool = False

    def describe(self, blocks: Sequence[Block], *, has_replicas: bool) -> str:
        """Describe the non-finite value. If the run `has_replicas`, a leaf is a whole replica."""
        gradient = "difference" if has_replicas else "gradient"
        quantity = "embedding" if self.is_embedding else "loss"
        if self.block is not None:
            quantity = f"{gradient} in block {blocks[self.block].name!r}"
        device = f", device {self.device!r}" if self.device else ""
        worker = f", from worker {self.worker!r}{device}" if self.worker is not None else ""
        if has_replicas:
            contributor = (
                f"replica {self.subtree.lo}" if self.subtree.leaves == 1 else "all replicas"
            )
            return f"non-finite {quantity} of {contributor}{worker}"
        overflow = ", when summed over workers, each of which sent finite ones"
        return f"non-finite {quantity}, microbatches {self.subtree}{worker or overflow}"


@dataclass(frozen=True, slots=True)
class ReductionResult:
    """The result for one piece, once the sums of all microbatches have arrived.

    Attributes:
        values: The average, or the sum where the reducer does not average. Flat float32.
        weight: Total weight of the microbatches.
        origin: The workers whose sums were added, with their subtrees.
    """

    values: Array
    weight: float
    origin: Origin


class _PartialSums:
    """Partial sums of one piece; `sums` is None once the piece is reduced."""

    __slots__ = ("origins", "sums", "weights")

    def __init__(self, microbatches: int, exchange: Codecs) -> None:
        self.sums: TreeSum[Array] | None = TreeSum(microbatches, ADDITIONS[exchange.sums])
        self.origins = TreeSum[Origin](microbatches, add)
        self.weights = TreeSum[float](microbatches, add)


class Reducer(Generic[Piece]):
    """Reduce the pieces of a gradient along the tree over a step's microbatches.

    Args:
        microbatches: Number of leaves of the tree.
        exchange: The codecs, by which sums and averages are rounded.
        pieces: The pieces to reduce.
        average_into: Returns the flat float32 array that receives a piece's average. None makes a
            pre-reducer, which returns sums and leaves the check for NaN to the reducer that
            averages.
    """

    def __init__(
        self,
        microbatches: int,
        exchange: Codecs,
        pieces: Collection[Piece],
        average_into: Callable[[Piece], Array] | None,
    ) -> None:
        self._microbatches = microbatches
        self._exchange = exchange
        self._average_into = average_into
        self._partials = {piece: _PartialSums(microbatches, exchange) for piece in pieces}

    def __len__(self) -> int:
        return len(self._partials)

    def __contains__(self, piece: object) -> bool:
        return piece in self._partials

    def set_pieces(self, pieces: Collection[Piece]) -> set[Piece]:
        """Reduce these pieces from now on; other pieces stay only if they are completely reduced.

        Returns:
            The pieces whose partial sums were dropped.
        """
        dropped_pieces = {
            piece for piece in self._partials if piece not in pieces and not self.is_done(piece)
        }
        for piece in dropped_pieces:
            del self._partials[piece]
        for piece in pieces:
            if piece not in self._partials:
                self._partials[piece] = _PartialSums(self._microbatches, self._exchange)
        return dropped_pieces

    def is_done(self, piece: Piece) -> bool:
        """Return whether the piece is completely reduced."""
        return piece in self._partials and self._partials[piece].sums is None

    def covers(self, piece: Piece, subtree: Subtree) -> bool:
        """Return whether a subtree's sum of this piece is already included."""
        sums = self._partials[piece].sums
        return sums is None or sums.covers(subtree)

    def missing(self, subtree: Subtree, known_missing: Collection[int] = ()) -> set[int]:
        """Return the microbatches of `subtree` that lack any piece, and those in
        `known_missing`."""
        missing = set(known_missing)
        for partial in self._partials.values():
            if len(missing) == subtree.leaves:
                break
            if partial.sums is not None and not partial.sums.covers(subtree):
                missing.update(partial.sums.missing(subtree))
        return missing

    def put(
        self, piece: Piece, worker: str, subtree: Subtree, weight: float, values: Array
    ) -> ReductionResult | NonFinite | None:
        """Add a subtree's sum of a piece; `values` belongs to the reducer from then on.

        Args:
            piece: The piece; one of those to reduce.
            worker: The worker that computed the sum.
            subtree: The microbatches of the sum.
            weight: The weight of these microbatches.
            values: The sum, flat float32, rounded to the precision of the exchange.

        Returns:
            The result once all microbatches are included, or a description of the non-finite sum
            (without the block).
        """
        partial = self._partials[piece]
        sums = partial.sums
        if sums is None or sums.covers(subtree):
            return None
        # Checked before adding, since a sum does not show which term had a NaN. A sum over all
        # microbatches needs no check here: the check of the average finds it, unless the weight is
        # 0.
        is_whole_step = weight > 0 and subtree == root(self._microbatches)
        if self._average_into is not None and not (is_whole_step or is_finite(values)):
            return NonFinite(subtree, worker)
        partial.weights.put(subtree, weight)
        partial.origins.put(subtree, ((worker, subtree),))
        sums.put(subtree, values)
        total, total_weight = sums.total, partial.weights.total
        if total is None:
            return None
        assert total_weight is not None, "every sum comes with its weight"
        if self._average_into is not None:
            out = self._average_into(piece)
            if not self._average(total, total_weight, out):
                contributor = worker if is_whole_step and not is_finite(values) else None
                return NonFinite(root(self._microbatches), contributor)
            total = out
        partial.sums = None  # frees the memory now: all pieces together are as large as the model
        return ReductionResult(total, total_weight, partial.origins.total or ())

    def _average(self, total: Array, weight: float, out: Array) -> bool:
        """Write the average, rounded to its codec; return whether it is finite."""
        if not math.isfinite(weight):
            return False
        # Dividing by a small weight can overflow although the sum is finite.
        average_is_finite = average(total, weight, out=out)
        if self._exchange.averages == "float32":
            return average_is_finite
        project(out, self._exchange.averages)
        return is_finite(out)
