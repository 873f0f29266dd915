"""A plain training loop in torch for a `samestep.Task`, on samestep's order of samples.

Up to rounding, it computes the results of a run: gradients and buffers are means over microbatches.
Each microbatch starts from the buffers of the step before, with generators seeded for it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

import samestep
from protocol.exact.samples import SampleOrder, microbatch_seed
from protocol.spec.sections.tasks import BatchSpec
from worker.scripts.samplers import sampling_of


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def train_with_torch(build: Any, arguments: Mapping[str, Any]) -> tuple[nn.Module, list[float]]:
    """Train with torch's own optimizer and scheduler.

    Args:
        build: Returns the task.
        arguments: Arguments of `fit`, with functions that make optimizer and scheduler.

    Returns:
        The trained module, and the loss of each step.
    """
    seed = arguments.get("seed", 0)
    seed_all(seed)
    task: samestep.Task = build()
    module, samples = task.module.train(), len(task.train)
    batch = BatchSpec(samples=arguments["batch"], microbatch=arguments["microbatch"])
    order = SampleOrder(seed, samples, batch, sampling=sampling_of(task.sampler, samples))
    steps = arguments.get("steps") or math.ceil(arguments["epochs"] * order.steps_per_epoch)
    optimizer = _make_optimizer(arguments["optimizer"], module)
    scheduler = arguments["scheduler"](optimizer) if arguments.get("scheduler") else None
    optimizer_settings = arguments.get("settings", {}).get("optimizer", {})
    steps_per_update = (
        order.steps_per_epoch if arguments.get("scheduler_interval") == "epoch" else 1
    )
    losses = []
    for step in range(steps):
        module.zero_grad()
        losses.append(_accumulate_gradients(task, order, step, seed))
        if "clip_norm" in optimizer_settings:
            nn.utils.clip_grad_norm_(module.parameters(), optimizer_settings["clip_norm"])
        if "clip_value" in optimizer_settings:
            nn.utils.clip_grad_value_(module.parameters(), optimizer_settings["clip_value"])
        optimizer.step()
        if scheduler is not None and (step + 1) % steps_per_update == 0:
            scheduler.step()
    return module.eval(), losses


def _make_optimizer(make_optimizer: Any, module: nn.Module) -> torch.optim.Optimizer:
    factory = getattr(make_optimizer, "func", make_optimizer)
    optimizer: torch.optim.Optimizer
    optimizer = make_optimizer(module.parameters() if isinstance(factory, type) else module)
    return optimizer


def _accumulate_gradients(task: samestep.Task, order: SampleOrder, step: int, seed: int) -> float:
    """Average the gradients and the changed buffers of a step's microbatches; return the loss."""
    module, microbatches = task.module, order.microbatches(step)
    batches = []
    for leaf, numbers in enumerate(microbatches):
        seed_all(microbatch_seed(seed, step, leaf))
        batches.append((task.collate or default_collate)([task.train[n] for n in numbers]))
    weights = [
        float(task.weight(batch)) if task.weight else len(numbers)
        for batch, numbers in zip(batches, microbatches, strict=True)
    ]
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    state = {n: v.clone() for n, v in module.state_dict().items() if n not in trained}
    buffer_means = {n: torch.zeros(v.shape, dtype=torch.float64) for n, v in state.items()}
    total = 0.0
    for leaf, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
        module.load_state_dict(state, strict=False)
        seed_all(microbatch_seed(seed, step, leaf))
        assert task.loss is not None
        loss = task.loss(module, batch)
        scale = weight / sum(weights) if task.unit == "microbatch" else 1 / sum(weights)
        (loss * scale).backward()
        total += float(loss.detach()) * scale
        for name in buffer_means:
            buffer_means[name] += module.state_dict()[name].double() * weight / sum(weights)
    with torch.no_grad():
        for name, mean in buffer_means.items():
            target = module.state_dict()[name]
            target.copy_(mean if target.is_floating_point() else mean.round())
    return total
