"""What a microbatch takes on a card, counted and not timed: no device is needed.

    python -m benchmarks.vulkan_counts [--tasks classify causal-lm] [--hidden 1024]

Of the jobs of `benchmarks.vulkan`, with the kernels of a card that binds 16 buffers: dispatches, of
a microbatch and of a layer's forward and backward; what workgroups read and write of the card's
memory (caches are not thought of); barriers that workgroups pass; and how much longer workgroup
memory takes for what lies in one bank. See `benchmarks.shader_counts`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

import torch

from backends.base.interface import Batch, Trainable
from backends.wgpu.capture.capture import capture_step
from backends.wgpu.lowering.lowered_plan import lowered_plan
from backends.wgpu.lowering.lowering import Templates
from backends.wgpu.lowering.plan import Plan
from backends.wgpu.shaders.dispatch import Shader
from backends.wgpu.shaders.matmul import MatmulProblem, MatmulTraits, candidates, matmul_shader
from backends.wgpu.weights.narrow_base import BaseLayout
from benchmarks.machine import print_heading, print_table
from benchmarks.shader_counts import Counts, counts_of
from benchmarks.vulkan_steps import JOBS, Decoder, job_of
from protocol.base.byte_size import byte_size

CARD: Final = MatmulTraits(workgroup_bytes=2**15, invocations=1024)
_BINDINGS: Final = 16
_HEAD: Final = (
    "microbatch", "dispatches", "of a layer", "moved", "barriers", "workgroup memory takes",
)  # fmt: skip


def card_shader(problem: MatmulProblem) -> tuple[Shader, tuple[int, int, int]]:
    """The kernel that is expected to be the quickest."""
    return matmul_shader(problem, candidates(problem, CARD)[0])


def plan_of(trainable: Trainable, batch: Batch) -> tuple[Plan, float]:
    """What a card runs, and how many dispatches of it are one layer's."""
    module, loss = trainable.module, trainable.loss
    assert module is not None
    assert loss is not None
    trained = [tensor.name for block in trainable.blocks for tensor in block.tensors]
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
    templates = Templates(
        cooperative=True,
        matmul=card_shader,
        bindings=_BINDINGS,
        workgroup_bytes=CARD.workgroup_bytes,
    )
    capture = capture_step(module, loss, trained, arrays, templates.fuses)
    base = BaseLayout(module, trainable.base_dtype)
    constants = dict(module.named_buffers())
    plan = lowered_plan(capture, base, constants, templates, [[*range(1 + len(trained))]])
    paths = {kind.path for kind in capture.kinds}
    of_layers = sum(any(path in each.label for path in paths) for each in plan.dispatches)
    return plan, of_layers / max(len(capture.kinds), 1)


def row(name: str, trainable: Trainable, batch: Batch) -> Sequence[str]:
    """Of one job."""
    plan, of_a_layer = plan_of(trainable, batch)
    total = Counts()
    for each in plan.dispatches:
        total += counts_of(each.shader, each.grid)
    return [
        name,
        f"{len(plan.dispatches)}",
        f"{of_a_layer:.0f}",
        byte_size(total.bytes_moved),
        f"{total.barriers:,}",
        f"{total.served / max(total.accesses, 1):.2f} times as long",
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="*", choices=tuple(JOBS), default=list(JOBS))
    parser.add_argument("--hidden", nargs="*", type=int, default=[1024], help="of decoders")
    options = parser.parse_args()
    print_heading("Kernels of a card, counted")
    jobs = [job_of(task, 1) for task in options.tasks]
    rows = [row(job.name, job.trainable, job.batch) for job in jobs]
    for hidden in options.hidden:
        for trained in ("LoRA", "whole"):
            decoder = Decoder(hidden, 8, 512, trained)
            rows.append(row(str(decoder), decoder.trainable(1), decoder.batch()))
    print_table(_HEAD, rows)


if __name__ == "__main__":
    main()
