"""Compile a task for a target: capture, lower, compare with torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from backends.base.interface import Batch, Trainable
from backends.losses.coupled_loss import with_backward_loss
from backends.wgpu.device.target import ComputeTarget
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.parity import Parity
from backends.wgpu.program import CompiledProgram
from protocol.base.errors import SamestepError
from protocol.spec.sections.model import ComputePrecision

_FLOAT32_ONLY: Final = "canonical arithmetic is float32 only"


def compile_program(
    target: ComputeTarget,
    trainable: Trainable,
    options: KernelOptions,
    batches: Sequence[Batch],
    evaluations: Sequence[Batch],
    *,
    adds_on_device: bool,
    float16_refusal: str = _FLOAT32_ONLY,
) -> CompiledProgram:
    """Compile a task for a target: capture the step for batches like these, upload the weights.

    Args:
        target: The device to run on.
        trainable: The task.
        options: Options of kernel generation for the target.
        batches: Microbatches, at least one, one of each shape.
        evaluations: Evaluation batches, one of each shape.
        adds_on_device: Whether the target may add subtree sums, because its additions are exact.
        float16_refusal: Why float16 is not supported; empty if it is supported.

    Raises:
        SamestepError: The precision is not supported, the step or an evaluation cannot be
            captured, or an operator has no rule.
    """
    if trainable.unit == "microbatch":
        raise SamestepError(
            "expected a loss that is a sum over samples, got unit: microbatch, which compiled "
            "programs do not support; use a cpu or cuda worker with native arithmetic"
        )
    _refuse_precision(trainable.precision, float16_refusal)
    options = replace(options, is_float16=trainable.precision == "float16")
    trainable = with_backward_loss(trainable)
    program = CompiledProgram(target, trainable, options, adds_on_device=adds_on_device)
    if trainable.capture_rows is not None:
        for batch in batches:
            program.capture_rows(batch)
        return program
    example, *other_shapes = full_batches = [program.complete_batch(batch) for batch in batches]
    parity = Parity(program, trainable, full_batches)
    step_loss_parity = program.step_loss_parity()
    program.check(example)
    for shape in other_shapes:
        program.warm_up(shape)
    if step_loss_parity is not None:
        (embedded,) = program.embed([(example, trainable.seed)])
        step_loss_parity.check(program, embedded, trainable.seed)
    if trainable.evaluate is not None:
        for part in evaluations:
            program.evaluate(part)
    program.parity = parity.check()
    return program


def _refuse_precision(precision: ComputePrecision, float16_refusal: str) -> None:
    if precision == "float32" or (precision == "float16" and not float16_refusal):
        return
    supported = "float32" if float16_refusal else "float32 or float16"
    reason = (
        float16_refusal
        if float16_refusal and precision == "float16"
        else "Vulkan and canonical arithmetic support no other"
    )
    raise SamestepError(f"expected model.precision {supported}, got {precision}: {reason}")
