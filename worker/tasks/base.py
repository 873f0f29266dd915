"""What a task is: everything the worker needs of a training job, made from the run spec alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from backends.interface import Array, Batch, Trainable
from protocol.manifest import Manifest


class Task(Protocol):
    """A training job, built; the same on every worker, bit for bit where the machines allow."""

    @property
    def manifest(self) -> Manifest:
        """Blocks, sample counts, metrics, digests of what was read, and how to save."""

    @property
    def trainable(self) -> Trainable:
        """Model and loss for a backend."""

    def initial_parameters(self) -> list[Array]:
        """Trainable values at step 0: one flat float32 array per block of the manifest."""

    def batch(self, samples: Sequence[int]) -> Batch:
        """A microbatch of these training samples (numbers below `manifest.train_samples`).

        Padding depends on the microbatch alone.
        """

    def evaluation_batch(self, part: int) -> Batch:
        """One held-out part, below `manifest.evaluation_parts`."""
