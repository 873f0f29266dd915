"""A task made ready on a target: captured, lowered, compared with torch."""

from __future__ import annotations

from collections.abc import Sequence

from backends.base.frozen_base import widen
from backends.base.interface import Batch, Trainable
from backends.wgpu.device.target import ComputeTarget
from backends.wgpu.lowering.lowering import Templates
from backends.wgpu.parity import Parity
from backends.wgpu.program import VulkanProgram
from protocol.base.errors import SamestepError


def compiled_program(
    target: ComputeTarget,
    trainable: Trainable,
    template: Templates,
    batches: Sequence[Batch],
    evaluations: Sequence[Batch],
    *,
    adds: bool,
) -> VulkanProgram:
    """Capture the step for batches like these, and upload the weights.

    Args:
        target: Where it is to run.
        trainable: The task.
        template: How kernels are written for the target.
        batches: At least one: microbatches of each shape.
        evaluations: Held-out parts, one of each shape.
        adds: Whether node sums may be added there.

    Raises:
        SamestepError: The precision is not to be had, the step or an evaluation cannot be
            captured, or an operator has no rule.
    """
    if trainable.precision != "float32":
        raise SamestepError(
            f"expected model.precision float32, got {trainable.precision}: the vulkan backend "
            "computes in float32 only"
        )
    if trainable.module is not None:
        widen(trainable.module)
    program = VulkanProgram(target, trainable, template, adds=adds)
    if trainable.rows is not None:
        for batch in batches:
            program.rows(batch)
        return program
    example, *others = batches
    parity = Parity(program, trainable, [*batches])
    program.check(example)
    for other in others:
        program.warm_up(other)
    if trainable.evaluate is not None:
        for part in evaluations:
            program.evaluate(part)
    program.parity = parity.check()
    return program
