"""Task regress: linear regression on generated data, y = x w + b plus optional noise.

Without noise the data is exact in float32: features and coefficients are small fractions, and
their products are summed as integers. So the mean squared error can reach nearly zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from backends.base import draws
from backends.base.interface import Array, Batch, Sums, Trainable
from protocol.exact.digest import digest_arrays
from protocol.spec.manifest import Block, Export, Manifest, Metric, TensorSpec
from protocol.spec.run_spec import RunSpec

PART_SAMPLES: Final = 256
_FLOAT32_BITS: Final = 24


class Regress:
    """The task regress. Batches have x, (samples, features), and y, (samples,), both float32."""

    def __init__(self, spec: RunSpec) -> None:
        samples, features = spec.regress.samples, spec.regress.features
        self._x, self._y = generate(spec.seed, samples, features, spec.regress.noise)
        weight = TensorSpec(name="weight", shape=(1, features))
        bias = TensorSpec(name="bias", shape=(1,))
        block = Block(name="linear", kind="block", tensors=(weight, bias))
        self.manifest = Manifest(
            blocks=(block,),
            train_samples=samples,
            evaluation_parts=-(-samples // PART_SAMPLES),
            metrics=(
                Metric(name="mse", numerator={"squared_error": 1}, denominator={"samples": 1}),
            ),
            digests={"data": digest_arrays({"x": self._x, "y": self._y})},
            export=Export(directory="model"),
        )
        self.trainable = Trainable(
            blocks=self.manifest.blocks,
            module=torch.nn.Linear(features, 1),
            loss=_loss,
            evaluate=_evaluate,
            seed=spec.seed,
            threads=spec.threads,
        )

    def initial_parameters(self) -> list[Array]:
        """Return zeros."""
        return [np.zeros(block.elements, np.float32) for block in self.manifest.blocks]

    def batch(self, samples: Sequence[int]) -> Batch:
        """Make a batch of these rows."""
        rows = np.asarray(samples, np.int64)
        return Batch({"x": self._x[rows], "y": self._y[rows]}, float(len(rows)))

    def evaluation_batch(self, part: int) -> Batch:
        """Make a batch of up to `PART_SAMPLES` training samples, which also serve evaluation."""
        lo = part * PART_SAMPLES
        return self.batch(range(lo, min(lo + PART_SAMPLES, len(self._y))))


def generate(seed: int, samples: int, features: int, noise: float) -> tuple[Array, Array]:
    """Generate features in [-1, 1), and targets of a linear law with coefficients in [-1, 1).

    Args:
        seed: Seed of all random values.
        samples: Number of rows.
        features: Number of columns.
        noise: Standard deviation of the noise on the targets.

    Returns:
        x: (samples, features) and y: (samples,), float32.
    """
    # A product has twice as many bits as its factors, a sum at most log2(features + 1) more.
    spare = _FLOAT32_BITS - 1 - features.bit_length()
    bits = max(1, min(8, spare // 2))
    x = _fractions(draws.derive_key(seed, "regress x"), samples * features, bits)
    x = x.reshape(samples, features)
    w = _fractions(draws.derive_key(seed, "regress w"), features, bits)
    b = _fractions(draws.derive_key(seed, "regress b"), 1, bits)
    sums = (x @ w + (b << bits)).astype(np.float64)
    y = sums * 2.0 ** (-2 * bits)
    if noise:
        y += noise * _nearly_normal(draws.derive_key(seed, "regress noise"), samples)
    return (x * 2.0**-bits).astype(np.float32), y.astype(np.float32)


def _fractions(key: int, count: int, bits: int) -> NDArray[np.int64]:
    """Draw numerators in [-2^bits, 2^bits): the fractions are multiples of 2^-bits."""
    shift = np.uint64(64 - bits - 1)
    return (draws.hashes(key, count) >> shift).astype(np.int64) - (1 << bits)


def _nearly_normal(key: int, count: int) -> NDArray[np.float64]:
    """Draw sums of twelve uniforms minus six: nearly normal, with standard deviation 1."""
    rows = draws.uniforms(key, 12 * count).astype(np.float64).reshape(12, count)
    total: NDArray[np.float64] = rows.sum(axis=0)
    return total - 6.0


def _loss(module: torch.nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    """Return the sum of squared errors."""
    error: torch.Tensor = module(arrays["x"])[:, 0] - arrays["y"]
    return (error * error).sum()


def _evaluate(module: torch.nn.Module, arrays: Mapping[str, Any]) -> Sums:
    error = (module(arrays["x"])[:, 0] - arrays["y"]).cpu().double()
    return {"squared_error": float((error * error).sum()), "samples": float(len(error))}
