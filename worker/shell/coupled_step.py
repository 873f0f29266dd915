"""A step whose loss couples all its samples: embeddings first, then gradients.

See `coordinator.run.exchange.embeddings` for the two phases, and
`backends.losses.coupled_loss` for the gradient. Every worker computes the loss over all rows of the
step, with the same operations in the same order, and uses the gradient rows of the microbatches
that it computes.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.base.interface import CoupledLossProgram, Leaf, Loss, StepLoss
from protocol.base import limits
from protocol.base.errors import DataError
from protocol.exact.embedding_rows import Rows
from protocol.exact.reduction.tree import Subtree
from protocol.exact.reduction.tree_sum import tree_sum
from protocol.exact.samples import microbatch_seed
from protocol.spec.manifest import EmbeddingLayout
from protocol.spec.run_spec import RunSpec
from worker.logic.events import StepId


def check_embeddings(spec: RunSpec, layout: EmbeddingLayout) -> None:
    """Refuse a run whose steps cannot have two phases.

    Raises:
        DataError: The run has replicas, or the embeddings of a step are too large.
    """
    if spec.replicas is not None:
        raise DataError(
            "expected a run without replicas, got one with replicas: each replica takes its inner "
            "steps alone, but this loss reads all samples of a step; remove replicas"
        )
    step_bytes = spec.batch.samples * layout.sample_bytes
    if step_bytes > limits.STEP_EMBEDDINGS_BYTES:
        raise DataError(
            f"expected at most {limits.byte_size(limits.STEP_EMBEDDINGS_BYTES)} of embeddings per "
            f"step, got {limits.byte_size(step_bytes)} ({layout.sample_bytes} bytes per sample): "
            "lower batch.samples"
        )


class CoupledStep:
    """The loss of one attempt, and its gradient by microbatch.

    Attributes:
        step_id: The attempt.

    Args:
        program: The compiled task.
        step_id: The attempt.
        rows: The rows of all samples, flat uint8.
        sizes: The number of samples of each microbatch.
        seed: The run spec's seed.

    Raises:
        DataError: The number of rows is not the number of samples.
    """

    def __init__(
        self,
        program: CoupledLossProgram,
        step_id: StepId,
        rows: Rows,
        sizes: Sequence[int],
        seed: int,
    ) -> None:
        self.step_id = step_id
        samples = sum(sizes)
        if len(rows) % samples:
            raise DataError(
                f"step {step_id.step}: expected embeddings of {samples} samples, got {len(rows)} "
                "bytes; make sure that coordinator and worker read the same data"
            )
        self._program = program
        self._rows: Rows = rows.reshape(samples, -1)
        ends = [sum(sizes[: leaf + 1]) for leaf in range(len(sizes))]
        self._samples = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        # No microbatch has this seed, so the loss and a dropout layer draw different numbers.
        self._seed = microbatch_seed(seed, step_id.step, len(sizes))
        self._loss: StepLoss | None = None

    def leaves(self, subtree: Subtree, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Return the microbatches with the gradient of the step's loss for their embeddings."""
        return [
            (
                self._step_loss.add_gradients_to(batch, self._samples[number], is_first=not number),
                seed,
            )
            for number, (batch, seed) in zip(range(*subtree), leaves, strict=True)
        ]

    def loss(self, subtree: Subtree, weight: float) -> Loss:
        """Return the part of the step's loss that belongs to a subtree's samples."""
        losses = [
            sum(self._step_loss.losses[self._samples[leaf]].tolist()) for leaf in range(*subtree)
        ]
        return Loss(tree_sum(losses), weight)

    def unlike_microbatches(self, subtree: Subtree, embeddings: Sequence[Rows]) -> tuple[int, ...]:
        """Return the microbatches whose embeddings, computed again, have different bits."""
        leaves = range(*subtree)
        assert len(embeddings) == len(leaves), "one for each microbatch"
        return tuple(
            leaf
            for leaf, rows in zip(leaves, embeddings, strict=True)
            if rows.tobytes() != self._rows[self._samples[leaf]].tobytes()
        )

    @property
    def _step_loss(self) -> StepLoss:
        """The loss over all samples, computed at the first access."""
        if self._loss is None:
            self._loss = self._program.step_loss(self._rows, self._seed)
        return self._loss

    def check(self) -> None:
        """Compute the loss a second time and compare: a user's code may keep state between calls.

        Raises:
            DataError: The same embeddings give another loss, or other gradients.
        """
        first_loss, second_loss = self._step_loss, self._program.step_loss(self._rows, self._seed)
        is_same = second_loss.losses.tobytes() == first_loss.losses.tobytes() and all(
            second_loss.embedding_gradients[name].tobytes() == gradient.tobytes()
            for name, gradient in first_loss.embedding_gradients.items()
        )
        if not is_same:
            raise DataError(
                "expected batch_loss to give the same losses and gradients for the same "
                "embeddings, got others the second time: keep no state from one call to the next, "
                "and draw with torch's functions, which are seeded"
            )
