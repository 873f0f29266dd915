'''The interface of a task: what a worker needs for a training job, built from the run spec.

A custom task is a class whose constructor takes the run spec. Install its module on every
worker (the coordinator does not need it) and name it in the run spec, with the options it reads:

    task: "my_package:Curve"
    options: {width: 16}
    batch: {samples: 64, microbatch: 32}
    optimizer: {lr: 1.0e-2}
    steps: 150

`my_package.py`, any torch module with a loss that is a sum over samples:

    import math

    import numpy as np
    import torch

    from backends.base import draws
    from backends.base.interface import Batch, Trainable
    from protocol.spec.manifest import Manifest, Metric
    from worker.models.blocks import cut_into_blocks
    from protocol.exact.digest import digest_arrays


    class Curve:
        """Learns the sine."""

        def __init__(self, spec):
            width = spec.options.get("width", 16)
            self.x = np.linspace(-3, 3, 256, dtype=np.float32)[:, None]
            self.y = np.sin(self.x)
            self.seed = spec.seed
            module = torch.nn.Sequential(
                torch.nn.Linear(1, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
            )
            self.manifest = Manifest(
                blocks=cut_into_blocks(module),
                train_samples=len(self.x),
                evaluation_parts=1,
                metrics=(Metric(name="mse", numerator={"error": 1}, denominator={"samples": 1}),),
                digests={"data": digest_arrays({"x": self.x, "y": self.y})},
            )
            self.trainable = Trainable(
                blocks=self.manifest.blocks,
                module=module,
                loss=self.loss,
                evaluate=self.evaluate,
                seed=spec.seed,
                threads=spec.threads,
            )

        def initial_parameters(self):
            # torch's draws depend on the instruction set, so these are samestep's.
            return [
                np.concatenate([
                    draws.uniforms_with_deviation(
                        draws.derive_key(self.seed, tensor.name),
                        tensor.elements,
                        1 / math.sqrt(tensor.shape[-1]),
                    )
                    for tensor in block.tensors
                ])
                for block in self.manifest.blocks
            ]

        def batch(self, samples):
            rows = np.asarray(samples, np.int64)
            return Batch({"x": self.x[rows], "y": self.y[rows]}, weight=float(len(rows)))

        def evaluation_batch(self, part):
            return self.batch(range(len(self.x)))

        @staticmethod
        def loss(module, arrays):
            return ((module(arrays["x"]) - arrays["y"]) ** 2).sum()

        @classmethod
        def evaluate(cls, module, arrays):
            return {"error": float(cls.loss(module, arrays)), "samples": len(arrays["x"])}
'''

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from backends.base.interface import Array, Batch, Trainable
from protocol.spec.manifest import Manifest


@runtime_checkable
class ReadsFiles(Protocol):
    """A task whose samples are in files that are fetched on demand."""

    def missing(self, samples: Sequence[int]) -> tuple[str, ...]:
        """Return the listed names of missing files of these training samples."""

    def missing_of_part(self, part: int) -> tuple[str, ...]:
        """Return the listed names of missing files of an evaluation part."""

    def blank(self, samples: int) -> Batch:
        """Make a microbatch of the shapes of `batch` without reading any file."""

    def blank_part(self, part: int) -> Batch:
        """Make a batch of the shapes of `evaluation_batch` without reading any file."""


@runtime_checkable
class DrawsBatches(Protocol):
    """A task whose batches are random: a collator masks or augments."""

    def drawn_batch(self, samples: Sequence[int], seed: int) -> Batch:
        """Make a batch as `Task.batch` does, with the microbatch's seed: equal on every worker."""


@runtime_checkable
class HasUserObjects(Protocol):
    """A task made of the objects of a user's script."""

    def user_objects(self) -> Mapping[str, object]:
        """Return these objects by name: module, loss, data sets."""


class Task(Protocol):
    """A training job, the same on every worker: bit for bit where their numerics profiles agree."""

    @property
    def manifest(self) -> Manifest:
        """Return blocks, sample counts, metrics, digests of inputs, and the export's layout."""

    @property
    def trainable(self) -> Trainable:
        """Return the model and its loss for a backend."""

    def initial_parameters(self) -> list[Array]:
        """Return the initial values: one flat float32 array per block of the manifest."""

    def batch(self, samples: Sequence[int]) -> Batch:
        """Make a microbatch of these training samples (numbers below `manifest.train_samples`).

        Padding depends on the microbatch alone.
        """

    def evaluation_batch(self, part: int) -> Batch:
        """Make the batch of an evaluation part (a number below `manifest.evaluation_parts`)."""
