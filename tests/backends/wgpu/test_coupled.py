"""A loss over all samples of a step on a compiled device: equal to torch, and the same bits
everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from backends.base.interface import Batch, BlockGradient, Trainable
from backends.cpu import CpuBackend
from backends.wgpu.backend import VulkanBackend
from backends.wgpu.device.adapters import adapters
from protocol.base.errors import DataError, SamestepError
from protocol.exact.reduction.tree import Subtree
from protocol.spec.sections.model import ArithmeticSpec
from tests.backends.eager.test_coupled_loss import (
    SAMPLES,
    STEP_ID,
    disable_dropout,
    embed,
    losses,
    make_batch,
    make_trainable,
)
from worker.shell.coupled_step import CoupledStep

CANONICAL = ArithmeticSpec(mode="canonical", multiply_add="separate")


def task(loss: Any = losses, arithmetic: ArithmeticSpec = CANONICAL, **changes: Any) -> Trainable:
    job = make_trainable(loss)
    assert job.coupled is not None
    coupled = replace(job.coupled, samples=SAMPLES)
    return replace(job, coupled=coupled, arithmetic=arithmetic, **changes)


def vulkan() -> VulkanBackend:
    available = adapters()
    if isinstance(available, str):
        pytest.skip(available)
    return VulkanBackend(0)


def in_two_phases(backend: Any, job: Trainable, microbatch: int) -> Any:
    """Return embeddings, losses and gradient sums of a step, as bytes and arrays."""
    parts = [make_batch(lo, lo + microbatch) for lo in range(0, SAMPLES, microbatch)]
    program: Any = backend.compile(job, parts[0])
    leaves = [(part, number) for number, part in enumerate(parts)]
    rows = np.concatenate([*program.embed(leaves)])
    step = CoupledStep(program, STEP_ID, rows.reshape(-1), [microbatch] * len(parts), 0)
    root = Subtree(0, len(parts))
    sums: dict[int, Any] = {}
    program.take_embeddings()  # for the comparison with torch
    for item in program.gradients(step.leaves(root, leaves)):
        if isinstance(item, BlockGradient):
            sums[item.block] = item.values
    unlike = step.unlike_microbatches(root, program.take_embeddings())
    assert unlike == (), "the second pass has the same bits"
    loss = step.loss(root, SAMPLES)
    program.close()
    return rows, loss.loss_sum, [sums[block] for block in range(len(job.blocks))]


def as_bytes(result: Any) -> list[bytes]:
    rows, loss, sums = result
    return [rows.tobytes(), np.float64(loss).tobytes(), *(each.tobytes() for each in sums)]


def close_to_torch(job: Trainable, result: Any) -> None:
    module: Any = job.module
    parameters = dict(module.named_parameters())
    arrays = {name: torch.tensor(values) for name, values in make_batch().arrays.items()}
    expected = losses(module, embed(module, arrays)).sum()
    gradients = dict(
        zip(parameters, torch.autograd.grad(expected, [*parameters.values()]), strict=True)
    )
    assert result[1] == pytest.approx(expected.item(), rel=1e-5)
    for block, sums in zip(job.blocks, result[2], strict=True):
        for tensor, part in block.slices():
            flat = gradients[tensor.name].numpy().reshape(-1)
            assert np.allclose(sums[part], flat, rtol=1e-5, atol=1e-5), tensor.name


def test_canonical_is_torch_over_the_whole_step():
    job = task()
    disable_dropout(job.module)
    close_to_torch(job, in_two_phases(CpuBackend(), job, 8))


@pytest.mark.slow
def test_canonical_has_one_set_of_bits():
    """On the CPU with one thread and two, and on the software device, with dropout."""
    backends = [(CpuBackend(), 1), (CpuBackend(), 2), (vulkan(), 1)]
    first, *others = (
        as_bytes(in_two_phases(backend, task(threads=threads), 8)) for backend, threads in backends
    )
    for other in others:
        assert other == first


@pytest.mark.slow
@pytest.mark.parametrize("microbatch", [1, 4, SAMPLES])
def test_a_vulkan_device_is_torch_over_the_whole_step(microbatch):
    job = task(arithmetic=ArithmeticSpec())
    disable_dropout(job.module)
    close_to_torch(job, in_two_phases(vulkan(), job, microbatch))


@pytest.mark.slow
def test_second_pass_names_the_microbatch_with_other_embeddings():
    parts = [make_batch(lo, lo + 8) for lo in range(0, SAMPLES, 8)]
    program: Any = CpuBackend().compile(task(), parts[0])
    leaves = [(part, number) for number, part in enumerate(parts)]
    rows = np.concatenate([*program.embed(leaves)])
    step = CoupledStep(program, STEP_ID, rows.reshape(-1), [8] * 4, 0)
    drawn_anew = [*leaves[:2], (parts[2], 99), leaves[3]]
    program.take_embeddings()  # for the comparison with torch
    list(program.gradients(step.leaves(Subtree(0, 4), drawn_anew)))
    assert step.unlike_microbatches(Subtree(0, 4), program.take_embeddings()) == (2,)
    program.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda m, f: losses(m, f).mean(), r"one loss for each of the 32 samples.*shape \(\)"),
        (lambda m, f: losses(m, f) * f["label"].max().item(), "reads a tensor's value"),
        (lambda _, f: f["query"].sort(dim=1).values.sum(dim=1), "sort"),
    ],
)
def test_unsupported_loss_is_refused_before_the_run(loss, text):
    with pytest.raises(SamestepError, match=text):
        CpuBackend().compile(task(loss), make_batch(0, 8))


@pytest.mark.slow
def test_a_field_of_more_than_32_bits_is_named():
    program: Any = CpuBackend().compile(task(), make_batch(0, 8))
    arrays = dict(make_batch(0, 8).arrays)
    arrays["label"] = arrays["label"] + 2**40
    with pytest.raises(DataError, match=r"expected 32-bit integers, got 1099511627776 to"):
        list(program.embed([(Batch(arrays, 8.0), 0)]))
    program.close()
