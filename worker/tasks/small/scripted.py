"""Task scripted: blocks of a chosen size, without a model or data, for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from backends.base import draws
from backends.base.interface import Array, Batch, Trainable
from protocol.spec.manifest import Block, Manifest, Metric, TensorSpec
from protocol.spec.run_spec import RunSpec

PARTS: Final = 4


class Scripted:
    """A task that only the scripted backend can compute."""

    def __init__(self, spec: RunSpec) -> None:
        elements = spec.scripted.block_bytes // 4
        self._seed = spec.seed
        self.manifest = Manifest(
            blocks=tuple(
                Block(
                    name=f"layer.{number}",
                    kind="block",
                    tensors=(TensorSpec(name=f"layer.{number}.weight", shape=(elements,)),),
                )
                for number in range(spec.scripted.blocks)
            ),
            train_samples=spec.scripted.samples,
            evaluation_parts=PARTS,
            metrics=(
                Metric(
                    name="samples_held_out", numerator={"samples": PARTS}, denominator={"parts": 1}
                ),
            ),
        )
        self.trainable = Trainable(
            blocks=self.manifest.blocks, seed=spec.seed, threads=spec.threads
        )

    def initial_parameters(self) -> list[Array]:
        """Return uniform values in [-1, 1)."""
        return [
            draws.symmetric_uniforms(draws.derive_key(self._seed, block.name), block.elements, 1.0)
            for block in self.manifest.blocks
        ]

    def batch(self, samples: Sequence[int]) -> Batch:
        """Make an empty batch; its weight is the number of samples."""
        return Batch({}, float(len(samples)))

    def evaluation_batch(self, part: int) -> Batch:
        """Make an empty batch of one sample."""
        del part
        return Batch({}, 1.0)
