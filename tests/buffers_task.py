"""A user's task whose forward changes buffers (BatchNorm with its counter), and whose loss couples
the samples of a microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from backends.base import draws
from backends.base.interface import Array, Batch, Trainable
from backends.base.step_buffers import buffer_blocks
from protocol.spec.manifest import Manifest, Metric
from protocol.spec.run_spec import RunSpec
from worker.models.blocks import cut_into_blocks

SAMPLES, WIDTH = 28, 8
EVALUATION_PART_SAMPLES = 8


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))
        with torch.no_grad():
            for name, tensor in self.named_parameters():
                if "layers" in name:
                    values = draws.symmetric_uniforms(
                        draws.derive_key(1, name), tensor.numel(), 0.3
                    )
                    tensor.copy_(torch.from_numpy(values).reshape(tensor.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(norm(layer(x)))
        return x


class BuffersTask:
    """See `worker.tasks.base.task.Task`."""

    def __init__(self, spec: RunSpec) -> None:
        self._x = draws.symmetric_uniforms(1, SAMPLES * WIDTH, 1.0).reshape(SAMPLES, WIDTH)
        module = _Model()
        buffer_names = [name for name, _ in module.named_buffers()]
        self.manifest = Manifest(
            blocks=(*buffer_blocks(module, buffer_names, 1 << 20), *cut_into_blocks(module)),
            train_samples=SAMPLES,
            evaluation_parts=2,
            metrics=(Metric(name="loss", numerator={"loss": 1}, denominator={"samples": 1}),),
        )
        self.trainable = Trainable(
            blocks=self.manifest.blocks, module=module, loss=_loss, evaluate=_evaluate,
            seed=spec.seed,
        )  # fmt: skip
        state = module.state_dict()
        self._initial = [
            np.concatenate([state[tensor.name].float().numpy().ravel() for tensor in block.tensors])
            for block in self.manifest.blocks
        ]

    def initial_parameters(self) -> list[Array]:
        return [values.copy() for values in self._initial]

    def batch(self, samples: Sequence[int]) -> Batch:
        return Batch({"x": self._x[np.asarray(samples)]}, float(len(samples)))

    def evaluation_batch(self, part: int) -> Batch:
        first = part * EVALUATION_PART_SAMPLES
        return self.batch(range(first, first + EVALUATION_PART_SAMPLES))


def _loss(module: Any, arrays: Mapping[str, Any]) -> torch.Tensor:
    """Classify each sample among those of its microbatch."""
    rows = functional.normalize(module(arrays["x"]), dim=1)
    target = torch.arange(len(rows), device=rows.device)
    return functional.cross_entropy(rows @ functional.normalize(arrays["x"], dim=1).T, target)


def _evaluate(module: Any, arrays: Mapping[str, Any]) -> dict[str, float]:
    samples = len(arrays["x"])
    return {"loss": float(_loss(module, arrays)) * samples, "samples": samples}
