"""Task digits: a multi-layer perceptron on scikit-learn's 8 x 8 digits, without transformers.

The data is a file of the installed scikit-learn; scikit-learn itself is not imported.
"""

from __future__ import annotations

import gzip
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from backends.base import draws
from backends.base.interface import Array, Batch, Sums, Trainable
from protocol.base.errors import DataError
from protocol.exact.digest import digest_arrays
from protocol.spec.files import sources
from protocol.spec.manifest import Manifest, Metric
from protocol.spec.run_spec import RunSpec
from protocol.spec.sections.tasks import DigitsSpec
from worker.data import holdout
from worker.models.blocks import cut_into_blocks

PART_SAMPLES: Final = 64
PIXELS: Final = 64
CLASSES: Final = 10
_LARGEST_PIXEL: Final = 16.0


class Digits:
    """The task digits. Batches have x, (samples, 64) float32 in [0, 1], and labels, (samples,)."""

    def __init__(self, spec: RunSpec) -> None:
        self._x, self._labels = read_digits()
        keys = [str(number) for number in range(len(self._labels))]
        train, held_out = holdout.split(keys, spec.seed, spec.digits.holdout)
        self._train, self._held_out = np.array(train), np.array(held_out, np.int64)
        self._seed = spec.seed
        module = Mlp(spec.digits)
        self.manifest = Manifest(
            blocks=cut_into_blocks(module),
            train_samples=len(train),
            evaluation_parts=-(-len(held_out) // PART_SAMPLES),
            metrics=(
                Metric(name="accuracy", numerator={"correct": 1}, denominator={"samples": 1}),
            ),
            digests={"data": digest_arrays({"x": self._x, "labels": self._labels})},
        )
        self.trainable = Trainable(
            blocks=self.manifest.blocks,
            module=module,
            loss=_loss,
            evaluate=_evaluate,
            seed=spec.seed,
            threads=spec.threads,
        )

    def initial_parameters(self) -> list[Array]:
        """Return uniform values in +-1/sqrt(inputs), as torch does, from `backends.base.draws`."""
        return [
            np.concatenate([
                draws.symmetric_uniforms(
                    draws.derive_key(self._seed, tensor.name),
                    tensor.elements,
                    self._bound(tensor.name),
                )
                for tensor in block.tensors
            ])
            for block in self.manifest.blocks
        ]  # fmt: skip

    def batch(self, samples: Sequence[int]) -> Batch:
        """Make a batch of these training samples."""
        return self._rows(self._train[np.asarray(samples, np.int64)])

    def evaluation_batch(self, part: int) -> Batch:
        """Make a batch of up to `PART_SAMPLES` held-out samples."""
        return self._rows(self._held_out[part * PART_SAMPLES : (part + 1) * PART_SAMPLES])

    def _rows(self, rows: NDArray[np.int64]) -> Batch:
        return Batch({"x": self._x[rows], "labels": self._labels[rows]}, float(len(rows)))

    def _bound(self, name: str) -> float:
        weight = name.rpartition(".")[0] + ".weight"
        shapes = {t.name: t.shape for block in self.manifest.blocks for t in block.tensors}
        return 1.0 / math.sqrt(shapes[weight][1])


class Mlp(nn.Module):
    """Hidden layers with ReLU, then a linear head."""

    def __init__(self, spec: DigitsSpec) -> None:
        super().__init__()
        widths = (PIXELS, *spec.hidden)
        self.layers = nn.ModuleList(
            _Layer(inputs, width, spec.dropout) for inputs, width in itertools.pairwise(widths)
        )
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (samples, 64) to logits (samples, 10)."""
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class _Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.dropout(torch.relu(self.linear(x)))
        return y


def read_digits() -> tuple[Array, NDArray[np.int64]]:
    """Return images (1797, 64) in [0, 1], exact in float32, and labels (1797,).

    Raises:
        DataError: scikit-learn is not installed, or lacks its data.
    """
    files = sources.package_files("scikit-learn")
    paths = [file for file in files if file.name == "digits.csv.gz" and file.is_file()]
    if not paths:
        raise DataError("the installed scikit-learn lacks digits.csv.gz; reinstall scikit-learn")
    with gzip.open(paths[0], "rt", encoding="ascii") as lines:
        table = np.loadtxt(lines, dtype=np.float32, delimiter=",")
    return table[:, :-1] / np.float32(_LARGEST_PIXEL), table[:, -1].astype(np.int64)


def _loss(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    """Return the cross-entropy summed over samples."""
    logits = module(arrays["x"])
    return nn.functional.cross_entropy(logits, arrays["labels"], reduction="sum")


def _evaluate(module: nn.Module, arrays: Mapping[str, Any]) -> Sums:
    predictions = module(arrays["x"]).argmax(dim=1)
    correct = int((predictions == arrays["labels"]).sum())
    return {"correct": correct, "samples": len(predictions)}
