"""A user's task: three frozen layers, each with a trained layer in parallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from backends.base import draws
from backends.base.interface import Array, Batch, Trainable
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec
from worker.models.blocks import cut_into_blocks

SAMPLES, WIDTH = 28, 8


class _Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.parallel = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for name, tensor in self.named_parameters():
                values = draws.symmetric_uniforms(
                    draws.derive_key(number, name), tensor.numel(), 0.3
                )
                tensor.copy_(torch.from_numpy(values).reshape(tensor.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.parallel(x))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(number) for number in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class FrozenBase:
    """See `worker.tasks.base.task.Task`."""

    def __init__(self, spec: RunSpec) -> None:
        self._x = draws.symmetric_uniforms(1, SAMPLES * WIDTH, 1.0).reshape(SAMPLES, WIDTH)
        module = _Model()
        self.manifest = Manifest(blocks=cut_into_blocks(module), train_samples=SAMPLES)
        self.trainable = Trainable(
            blocks=self.manifest.blocks, module=module, loss=_loss, seed=spec.seed
        )
        parameters = dict(module.named_parameters())
        self._initial = [
            np.concatenate(
                [parameters[tensor.name].detach().numpy().ravel() for tensor in block.tensors]
            )
            for block in self.manifest.blocks
        ]

    def initial_parameters(self) -> list[Array]:
        return [values.copy() for values in self._initial]

    def batch(self, samples: Sequence[int]) -> Batch:
        return Batch({"x": self._x[np.asarray(samples)]}, float(len(samples)))

    def evaluation_batch(self, part: int) -> Batch:
        raise NotImplementedError(part)


def _loss(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = ((module(arrays["x"]) - 0.5) ** 2).sum()
    return loss
