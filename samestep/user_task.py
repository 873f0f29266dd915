"""`samestep.Task`: what is trained, on what, with what loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

Loss = Callable[[Any, Any], Any]
Metric = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class UserTask:
    """A model, its data and its loss, as plain PyTorch has them.

    Attributes:
        module: A torch module on the CPU, trainable tensors in float32. What it is initialised
            with is what the run begins with; what is frozen stays as it is.
        train: A data set with a length and items by number (any map-style data set, or a list).
        held_out: One to measure on, at the end and every `evaluate_every` steps.
        collate: Makes a batch of a list of items: tensors in dicts, lists or tuples, on the CPU.
            Default: torch's. It may draw from torch's, numpy's and Python's global generators,
            which are seeded for each microbatch; one with a parameter `seed` is given that seed.
        loss: Takes the module and a batch on the device; gives the loss *summed* over the batch.
        weight: Takes a batch; gives what the sum of gradients is divided by in the end, such as the
            number of tokens that count. Default: the number of samples.
        metrics: By name, beside the loss: each takes the module and a held-out batch, and gives a
            sum over it, to be divided by the number of samples, or a pair of sums to be divided.
    """

    module: nn.Module
    train: Any
    held_out: Any = None
    collate: Callable[..., Any] | None = None
    loss: Loss | None = None
    weight: Callable[[Any], Any] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
