"""A hand-written PyTorch loop: the same arithmetic, without coordinator or worker.

Batches come from the same task, in the same order; everything else is plain torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from backends.base.interface import Array, Batch
from benchmarks.step_time import StepTime
from protocol.exact.parameter_groups import decays
from protocol.exact.samples import SampleOrder, microbatch_seed
from protocol.exact.schedule import learning_rate
from protocol.machine.trace import now_us
from protocol.spec.run_spec import RunSpec
from worker.tasks.registry import build


@dataclass(frozen=True, slots=True)
class BareRun:
    """One run from step 0.

    Attributes:
        steps: All steps except the first.
        losses: Mean loss of every step.
        cpu_s: Processor time of the whole run.
    """

    steps: list[StepTime]
    losses: list[float]
    cpu_s: float


class BareLoop:
    """A task's module, loss and batches, trained with torch.optim.AdamW.

    Args:
        spec: The run; its optimizer is adamw.
        device: `cpu`, `cuda` or `xpu`.
    """

    def __init__(self, spec: RunSpec, device: str = "cpu") -> None:
        assert spec.optimizer.name == "adamw"
        torch.set_num_threads(spec.threads)
        task = build(spec)
        trainable = task.trainable
        assert trainable.module is not None
        assert trainable.loss is not None
        self._spec, self._task, self._device = spec, task, torch.device(device)
        self._loss = trainable.loss
        self._module: torch.nn.Module = trainable.module.to(self._device)
        self._order = SampleOrder(spec.seed, task.manifest.train_samples, spec.batch)
        parameters = dict(self._module.named_parameters())
        names = [tensor.name for block in trainable.blocks for tensor in block.tensors]
        self._parameters = {name: parameters[name] for name in names}
        # Seeded as in samestep, so that dropout and losses are the same. torch.manual_seed takes
        # longer.
        self._generator = torch.default_generator
        if self._device.type != "cpu":
            device_module = torch.get_device_module(self._device)
            device_module.init()
            self._generator = device_module.default_generators[0]

    def run(self) -> BareRun:
        """Take all steps of the run, from the task's initial parameters."""
        self._load(self._task.initial_parameters())
        self._module.train()
        optimizer = self._optimizer()
        steps, losses = [], []
        start_s = time.process_time()
        begin_us = update_end_us = 0.0
        for step in range(self._spec.steps):
            compute_us = now_us()
            loss, weight = self._gradients(step)
            previous_begin_us, begin_us = begin_us, now_us()
            if step:
                spans_us = (
                    begin_us - previous_begin_us,
                    begin_us - compute_us,
                    update_end_us - previous_begin_us,
                )
                steps.append(StepTime(step, *(span_us / 1e3 for span_us in spans_us)))
            self._update(optimizer, step, weight)
            update_end_us = now_us()
            losses.append(loss / weight)
        return BareRun(steps, losses, time.process_time() - start_s)

    def _gradients(self, step: int) -> tuple[float, float]:
        """Sum gradients over the step's microbatches; return the sums of loss and weight."""
        total, weight = 0.0, 0.0
        for number, batch in enumerate(self._batches(step)):
            self._generator.manual_seed(microbatch_seed(self._spec.seed, step, number))
            arrays = {
                name: torch.from_numpy(values).to(self._device)
                for name, values in batch.arrays.items()
            }
            loss = self._loss(self._module, arrays)
            loss.backward()
            total += float(loss.detach())
            weight += batch.weight
        return total, weight

    def _batches(self, step: int) -> Iterator[Batch]:
        for samples in self._order.microbatches(step):
            yield self._task.batch(samples)

    def _update(self, optimizer: torch.optim.Optimizer, step: int, weight: float) -> None:
        """Scale and clip gradients, then update all tensors in one fused pass."""
        parameters = list(self._parameters.values())
        torch._foreach_mul_(
            [parameter.grad for parameter in parameters if parameter.grad is not None], 1.0 / weight
        )
        if self._spec.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._spec.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(self._spec.optimizer, step, self._spec.steps)
        optimizer.step()
        optimizer.zero_grad()

    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._spec.optimizer
        groups = [
            {
                "params": [
                    p
                    for name, p in self._parameters.items()
                    if decays(name, optimizer) == has_decay
                ],
                "weight_decay": optimizer.weight_decay if has_decay else 0.0,
            }
            for has_decay in (True, False)
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, foreach=True,
        )  # fmt: skip

    def _load(self, initial: list[Array]) -> None:
        with torch.no_grad():
            for block, values in zip(self._task.trainable.blocks, initial, strict=True):
                for tensor, span in block.slices():
                    source = torch.from_numpy(values[span].reshape(tensor.shape))
                    self._parameters[tensor.name].copy_(source)
