"""A loss over all samples of a step, on Vulkan and in canonical arithmetic.

Its results equal torch's; canonical results have the same bits on every backend.
"""

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


def coupled_task(
    loss: Any = losses, arithmetic: ArithmeticSpec = CANONICAL, **options: Any
) -> Trainable:
    job = make_trainable(loss)
    assert job.coupled is not None
    coupled = replace(job.coupled, samples=SAMPLES)
    return replace(job, coupled=coupled, arithmetic=arithmetic, **options)


def vulkan_backend() -> VulkanBackend:
    available = adapters()
    if isinstance(available, str):
        pytest.skip(available)
    return VulkanBackend(0)


def compute_step(backend: Any, job: Trainable, microbatch: int) -> Any:
    """Return a step's embeddings, loss sum, and gradient sums by block."""
    batches = [make_batch(lo, lo + microbatch) for lo in range(0, SAMPLES, microbatch)]
    program: Any = backend.compile(job, batches[0])
    leaves = [(batch, number) for number, batch in enumerate(batches)]
    embeddings = np.concatenate([*program.embed(leaves)])
    step = CoupledStep(program, STEP_ID, embeddings.reshape(-1), [microbatch] * len(batches), 0)
    root = Subtree(0, len(batches))
    sums: dict[int, Any] = {}
    program.take_embeddings()  # discard the embeddings of the comparison with torch
    for item in program.gradients(step.leaves(root, leaves)):
        if isinstance(item, BlockGradient):
            sums[item.block] = item.values
    changed = step.unlike_microbatches(root, program.take_embeddings())
    assert changed == (), "the second pass has the same embeddings, bit by bit"
    loss = step.loss(root, SAMPLES)
    program.close()
    return embeddings, loss.loss_sum, [sums[block] for block in range(len(job.blocks))]


def result_bytes(result: Any) -> list[bytes]:
    embeddings, loss, sums = result
    return [
        embeddings.tobytes(),
        np.float64(loss).tobytes(),
        *(values.tobytes() for values in sums),
    ]


def assert_close_to_torch(job: Trainable, result: Any) -> None:
    """Compare the result with torch's loss and gradients over all samples at once."""
    _, loss, sums_by_block = result
    module: Any = job.module
    parameters = dict(module.named_parameters())
    arrays = {name: torch.tensor(values) for name, values in make_batch().arrays.items()}
    expected_loss = losses(module, embed(module, arrays)).sum()
    gradients = dict(
        zip(parameters, torch.autograd.grad(expected_loss, [*parameters.values()]), strict=True)
    )
    assert loss == pytest.approx(expected_loss.item(), rel=1e-5)
    for block, sums in zip(job.blocks, sums_by_block, strict=True):
        for tensor, elements in block.slices():
            expected = gradients[tensor.name].numpy().reshape(-1)
            assert np.allclose(sums[elements], expected, rtol=1e-5, atol=1e-5), tensor.name


def test_canonical_results_equal_torch_over_the_whole_step():
    job = coupled_task()
    disable_dropout(job.module)
    assert_close_to_torch(job, compute_step(CpuBackend(), job, 8))


@pytest.mark.slow
def test_canonical_bits_do_not_depend_on_threads_or_backend():
    """The model has dropout."""
    backends = [(CpuBackend(), 1), (CpuBackend(), 2), (vulkan_backend(), 1)]
    first, *others = (
        result_bytes(compute_step(backend, coupled_task(threads=threads), 8))
        for backend, threads in backends
    )
    for other in others:
        assert other == first


@pytest.mark.slow
@pytest.mark.parametrize("microbatch", [1, 4, SAMPLES])
def test_vulkan_results_equal_torch_over_the_whole_step(microbatch):
    job = coupled_task(arithmetic=ArithmeticSpec())
    disable_dropout(job.module)
    assert_close_to_torch(job, compute_step(vulkan_backend(), job, microbatch))


@pytest.mark.slow
def test_second_pass_names_the_microbatch_with_changed_embeddings():
    batches = [make_batch(lo, lo + 8) for lo in range(0, SAMPLES, 8)]
    program: Any = CpuBackend().compile(coupled_task(), batches[0])
    leaves = [(batch, number) for number, batch in enumerate(batches)]
    embeddings = np.concatenate([*program.embed(leaves)])
    step = CoupledStep(program, STEP_ID, embeddings.reshape(-1), [8] * 4, 0)
    another_seed = 99  # so microbatch 2 has another dropout mask
    changed_leaves = [*leaves[:2], (batches[2], another_seed), leaves[3]]
    program.take_embeddings()  # discard the embeddings of the comparison with torch
    list(program.gradients(step.leaves(Subtree(0, 4), changed_leaves)))
    assert step.unlike_microbatches(Subtree(0, 4), program.take_embeddings()) == (2,)
    program.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, f: losses(m, f).mean(), r"one loss for each of the 32 samples.*shape \(\)"),
        (lambda m, f: losses(m, f) * f["label"].max().item(), "reads a tensor's value"),
        (lambda _, f: f["query"].sort(dim=1).values.sum(dim=1), "sort"),
    ],
)
def test_unsupported_loss_is_refused_before_the_run(loss, message):
    with pytest.raises(SamestepError, match=message):
        CpuBackend().compile(coupled_task(loss), make_batch(0, 8))


@pytest.mark.slow
def test_integers_of_more_than_32_bits_are_refused():
    program: Any = CpuBackend().compile(coupled_task(), make_batch(0, 8))
    arrays = dict(make_batch(0, 8).arrays)
    arrays["label"] = arrays["label"] + 2**40
    with pytest.raises(DataError, match=r"expected 32-bit integers, got 1099511627776 to"):
        list(program.embed([(Batch(arrays, 8.0), 0)]))
    program.close()
