"""Count the work of a microbatch on a card, without a device.

    python -m benchmarks.vulkan_counts [--tasks classify causal-lm] [--hidden 1024]

For the jobs of `benchmarks.vulkan`, with the kernels of a card that binds 16 buffers: dispatches of
a microbatch and of a layer's forward and backward; bytes that workgroups read and write in the
card's memory (ignoring caches); barriers that workgroups pass; and the slowdown of workgroup memory
by bank conflicts. See `benchmarks.shader_counts`.

For a subtree of several microbatches, if each dispatch computes one of them or as many as are
worthwhile: that number, the memory of activations, and the dispatches per microbatch, with those
that add gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final

import torch

from backends.base.interface import Batch, Trainable
from backends.wgpu.capture.capture import capture_step
from backends.wgpu.device.running import Submission
from backends.wgpu.device.sum_stack import Sources, SumStack, largest_level_count
from backends.wgpu.device.target import Buffer, CommandList
from backends.wgpu.lowering.lowered_plan import lower_to_plan
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.lowering.microbatching import enlarge_for_microbatches
from backends.wgpu.lowering.plan import Plan
from backends.wgpu.shaders.dispatch import Dispatch, Shader
from backends.wgpu.shaders.matmul.shader import (
    MatmulProblem,
    MatmulTraits,
    candidates,
    matmul_shader,
)
from backends.wgpu.weights.quantized_base import BaseLayout
from benchmarks.machine import print_heading, print_table
from benchmarks.shader_counts import Counts, counts_of
from benchmarks.vulkan_steps import JOBS, SUBTREE_LEAVES, Decoder, job_of
from protocol.base.limits import MICROBATCHES_PER_DISPATCH, byte_size

CARD: Final = MatmulTraits(workgroup_bytes=2**15, invocations=1024)
_BINDINGS: Final = 16
_HEADER: Final = (
    "microbatch", "dispatches", "per layer", "moved", "barriers", "workgroup memory time",
)  # fmt: skip
_SUBTREE_HEADER: Final = (
    "microbatch", "microbatches at once", "activations of one", "of several",
    "dispatches per microbatch, one at a time", "several at once",
)  # fmt: skip


def card_shader(problem: MatmulProblem) -> tuple[Shader, tuple[int, int, int]]:
    """Return the kernel that is expected to be the fastest."""
    return matmul_shader(problem, candidates(problem, CARD)[0])


def plan_of(trainable: Trainable, batch: Batch) -> tuple[Plan, float]:
    """Return the plan for a card, and the number of its dispatches per layer."""
    module, loss = trainable.module, trainable.loss
    assert module is not None
    assert loss is not None
    trained_names = [tensor.name for block in trainable.blocks for tensor in block.tensors]
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
    options = KernelOptions(
        cooperative=True,
        matmul=card_shader,
        bindings=_BINDINGS,
        workgroup_bytes=CARD.workgroup_bytes,
    )
    capture = capture_step(module, loss, trained_names, arrays, options.fuses)
    base = BaseLayout(module, trainable.base_dtype)
    constants = dict(module.named_buffers())
    loss_and_gradients = [*range(1 + len(trained_names))]
    plan = lower_to_plan(capture, base, constants, options, [loss_and_gradients])
    paths = {kind.path for kind in capture.kinds}
    layer_dispatches = sum(
        any(path in dispatch.label for path in paths) for dispatch in plan.dispatches
    )
    return plan, layer_dispatches / max(len(capture.kinds), 1)


class _RecordingTarget:
    """A target that records dispatches instead of running them."""

    def buffer(self, nbytes: int) -> Buffer:
        """Return a buffer without memory."""
        return Buffer(nbytes, None)

    def prepare(self, dispatches: Sequence[Dispatch], _buffers: Sequence[Buffer]) -> CommandList:
        """Return the dispatches unchanged."""
        return CommandList([*dispatches], [])


def dispatches_of_subtree(
    trainable: Trainable, plan: Plan, microbatches_at_once: int, tensors_per_dispatch: int
) -> int:
    """Return the number of dispatches for a subtree of `SUBTREE_LEAVES` microbatches, including
    gradient sums."""
    target: Any = _RecordingTarget()
    sizes = [4 * tensor.elements for block in trainable.blocks for tensor in block.tensors]
    sums = SumStack(target, [sizes], tensors_per_dispatch)
    sums.reserve(largest_level_count(SUBTREE_LEAVES))
    total = 0
    for start in range(0, SUBTREE_LEAVES, microbatches_at_once):
        buffers = [
            [[Buffer(nbytes, None) for nbytes in sizes]] for _ in range(microbatches_at_once)
        ]
        step = Submission(CommandList([*plan.dispatches], []), (), is_last=True)
        sources = Sources(buffers, Buffer(4, None))
        parts = sums.append_additions([step], sources, start, SUBTREE_LEAVES)
        total += sum(len(part.commands.calls) for part in parts)
    return total


def subtree_row(name: str, trainable: Trainable, plan: Plan) -> Sequence[str]:
    """Return the row of one job's subtrees."""
    joint_plan = enlarge_for_microbatches(
        plan, min(MICROBATCHES_PER_DISPATCH, SUBTREE_LEAVES), lambda _: True
    )
    microbatches_at_once = joint_plan.microbatch_limit
    single_dispatches = dispatches_of_subtree(trainable, plan, 1, 1)
    # An addition binds two buffers.
    joint_dispatches = dispatches_of_subtree(trainable, plan, microbatches_at_once, _BINDINGS // 2)
    return [
        name,
        str(microbatches_at_once),
        byte_size(sum(plan.slots)),
        byte_size(sum(joint_plan.slots)),
        f"{single_dispatches / SUBTREE_LEAVES:.0f}",
        f"{joint_dispatches / SUBTREE_LEAVES:.0f}",
    ]


def row(name: str, plan: Plan, dispatches_per_layer: float) -> Sequence[str]:
    """Return the row of one job."""
    total = Counts()
    for dispatch in plan.dispatches:
        total += counts_of(dispatch.shader, dispatch.grid)
    return [
        name,
        f"{len(plan.dispatches)}",
        f"{dispatches_per_layer:.0f}",
        byte_size(total.bytes_moved),
        f"{total.barriers:,}",
        f"{total.served_accesses / max(total.accesses, 1):.2f} times as long",
    ]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="*", choices=tuple(JOBS), default=list(JOBS))
    parser.add_argument("--hidden", nargs="*", type=int, default=[1024], help="of decoders")
    options = parser.parse_args()
    print_heading("Kernels of a card, counted")
    jobs = [job_of(task, 1) for task in options.tasks]
    work = [(job.name, job.trainable, job.batch) for job in jobs]
    for hidden in options.hidden:
        for adaptation in ("LoRA", "whole"):
            decoder = Decoder(hidden, samples=8, tokens=512, adaptation=adaptation)
            work.append((str(decoder), decoder.trainable(1), decoder.batch()))
    rows, subtrees = [], []
    for name, trainable, batch in work:
        plan, dispatches_per_layer = plan_of(trainable, batch)
        rows.append(row(name, plan, dispatches_per_layer))
        subtrees.append(subtree_row(name, trainable, plan))
    print_table(_HEADER, rows)
    print_table(_SUBTREE_HEADER, subtrees)


if __name__ == "__main__":
    main()
