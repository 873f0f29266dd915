"""Test a device with a microbatch whose gradient is known, since drivers can be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from backends.base.interface import Batch, BlockGradient, Trainable
from backends.registry import choose
from protocol.spec.manifest import Block, TensorSpec

_SAMPLES: Final = 8
_WIDTH: Final = 16


def is_gradient_right(backend: str, index: int) -> bool:
    """Whether the device computes a linear layer's gradient exactly.

    The layer's weights are zero and its targets minus one, so the gradient of the squared error is
    2 * sum(x) for each weight: small integers, which every order of additions gives exactly.

    Args:
        backend: The backend's name.
        index: Number of the device among devices of this backend.

    Raises:
        Exception: Whatever the driver raises.
    """
    x = np.arange(_SAMPLES * _WIDTH, dtype=np.float32).reshape(_SAMPLES, _WIDTH)
    batch = Batch({"x": x, "y": np.full((_SAMPLES, _WIDTH), -1, np.float32)}, _SAMPLES)
    program = choose(backend, index).backend.compile(_trainable(), batch)
    try:
        gradients = [
            item.values
            for item in program.gradients([(batch, 0)])
            if isinstance(item, BlockGradient)
        ]
    finally:
        program.close()
    expected = np.tile(2 * x.sum(axis=0), _WIDTH)
    return len(gradients) == 1 and np.array_equal(gradients[0], expected)


def _trainable() -> Trainable:
    module = torch.nn.Linear(_WIDTH, _WIDTH, bias=False)
    torch.nn.init.zeros_(module.weight)
    weight = TensorSpec(name="weight", shape=(_WIDTH, _WIDTH))
    return Trainable(
        (Block(name="layer", kind="block", tensors=(weight,)),), module, _squared_error
    )


def _squared_error(module: torch.nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    error: torch.Tensor = module(arrays["x"]) - arrays["y"]
    return (error**2).sum()
