"""The embeddings of all samples of a step, for a loss that couples the samples. Pure.

A step whose loss couples all its samples (contrastive learning with negatives from the whole step)
has two phases, as in GradCache (Gao et al. 2021, arXiv:2101.06983). In the first, each microbatch's
embeddings arrive as separate rows and are joined in the order of microbatches, so the result does
not depend on which worker computed them, or when. In the second, every worker has all rows,
computes the gradient of the loss with respect to the embeddings, and recomputes its microbatches
for their gradients.

Each phase is a separate attempt, so late messages of the first phase are dropped like those of any
earlier attempt. Joined embeddings are final. Recomputing a microbatch must give the same bits,
which checks machines with the same numerics profile at no cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from coordinator.run.exchange.double_check import ResultMismatch
from coordinator.run.outputs.side_outputs import Bytes
from protocol.base import limits
from protocol.base.errors import OutOfOrder
from protocol.exact.reduction.reducer import Origin
from protocol.exact.reduction.tree import Subtree
from protocol.wire.messages import StepEmbeddings, SubtreeLoss


@dataclass(frozen=True, slots=True)
class JoinedEmbeddings:
    """The rows of a step in the order of microbatches.

    Attributes:
        content: All rows, flat uint8.
        digest: BLAKE3 of the content.
        origin: The workers and subtrees that the rows are from.
        profiles: The numerics profiles of these workers.
        delivered: All workers that delivered rows in this attempt, used or not.
    """

    content: Bytes
    digest: str
    origin: Origin
    profiles: Mapping[str, str]
    delivered: frozenset[str]

    @staticmethod
    def join(
        pieces: list[Bytes], origin: Origin, profiles: Mapping[str, str], delivered: frozenset[str]
    ) -> JoinedEmbeddings:
        """Join the pieces of all microbatches."""
        content = np.concatenate(pieces)
        digest = blake3(content.data).hexdigest()
        return JoinedEmbeddings(content, digest, origin, profiles, delivered)

    def messages(self, step_id: Mapping[str, int]) -> Iterator[tuple[StepEmbeddings, Bytes]]:
        """Yield the messages that carry the rows, with their bodies."""
        chunks = -(-len(self.content) // limits.BODY_BYTES)
        for chunk in range(chunks):
            body = self.content[chunk * limits.BODY_BYTES :][: limits.BODY_BYTES]
            yield StepEmbeddings(**step_id, chunk=chunk, last=chunk == chunks - 1), body

    def compare(self, worker: str, profile: str, message: SubtreeLoss) -> ResultMismatch | None:
        """Check a worker's report of microbatches whose recomputed embeddings differ from these.

        Returns:
            The fault, if the worker has the same numerics profile as the one that computed the
            embeddings.

        Raises:
            OutOfOrder: A reported microbatch is not in the worker's subtree.
        """
        for leaf in message.unlike:
            if not message.lo <= leaf < message.hi:
                raise OutOfOrder(f"SubtreeLoss: microbatch {leaf} is not in {message.subtree}")
            other = next(name for name, part in self.origin if part.lo <= leaf < part.hi)
            if self.profiles[other] == profile:
                return ResultMismatch((worker, other), "embeddings", Subtree(leaf, leaf + 1))
        return None
