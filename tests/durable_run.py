"""A small run made up for tests of what is kept on disk: manifest, gradients, commits."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from coordinator.gradient_log import GradientLog
from coordinator.log_records import Array, ChunkPlace
from protocol.digest import weights_digest
from protocol.manifest import Block, Export, Manifest, Metric, TensorSpec
from protocol.messages import Commit
from protocol.replica import Replica
from protocol.run_spec import BatchSpec, OptimizerSpec, RunSpec
from protocol.update import global_norm, square_sum, step_scalars

RUN_ID = "made-up-1"
BLOCKS = (
    Block(
        name="layer.0",
        kind="block",
        tensors=(
            TensorSpec(name="layer.0.weight", shape=(5, 7)),
            TensorSpec(name="layer.0.bias", shape=(5,)),
        ),
    ),
    Block(name="head", kind="non_block", tensors=(TensorSpec(name="head", shape=(2, 3)),)),
)
MANIFEST = Manifest(
    blocks=BLOCKS,
    train_samples=10,
    evaluation_parts=2,
    metrics=(Metric(name="accuracy", numerator={"correct": 1}, denominator={"samples": 1}),),
    digests={"data": "a" * 64, "base_weights": "b" * 64},
    export=Export(
        directory="adapter",
        weights_file="adapter_model.safetensors",
        names={"head": "base_model.model.head"},
        files={"adapter_config.json": "{}"},
    ),
)
SPEC = RunSpec(
    name="made-up",
    task="regress",
    seed=3,
    batch=BatchSpec(samples=4, microbatch=2),
    optimizer=OptimizerSpec(name="adamw", lr=0.01, weight_decay=0.1, clip_norm=1.0),
    steps=9,
)


def averages(step: int, attempt: int = 0) -> list[Array]:
    random = np.random.default_rng((step, attempt))
    return [random.standard_normal(block.elements).astype(np.float32) for block in BLOCKS]


def averages_digest(values: list[Array]) -> str:
    return weights_digest(
        {
            tensor.name: array[part].reshape(tensor.shape)
            for block, array in zip(BLOCKS, values, strict=True)
            for tensor, part in block.slices()
        }
    )


def commit_of(
    step: int, optimizer_step: int, *, epoch: int = 1, attempt: int = 0, skip: bool = False
) -> Commit:
    values = averages(step, attempt)
    norm = global_norm([square_sum(array) for array in values])
    scalars = step_scalars(SPEC.optimizer, max(1, optimizer_step), step, SPEC.steps, norm)
    return Commit(
        epoch=epoch,
        step=step,
        attempt=attempt,
        scalars=None if skip else scalars,
        loss=float("nan") if skip else 1.0 / (1 + step),
        averages_digest="0" * 64 if skip else averages_digest(values),
    )


def append_step(log: GradientLog, step: int, *, epoch: int = 1, attempt: int = 0) -> None:
    for index, (block, values) in enumerate(zip(BLOCKS, averages(step, attempt), strict=True)):
        for chunk in range(block.chunks):
            place = ChunkPlace(epoch, step, attempt, index, chunk)
            log.append_chunk(place, values[block.chunk_slice(chunk)])


def log_step(log: GradientLog, step: int, *, epoch: int = 1, attempt: int = 0) -> None:
    append_step(log, step, epoch=epoch, attempt=attempt)
    log.commit(commit_of(step, step + 1, epoch=epoch, attempt=attempt), step + 1)


def state_zero() -> Replica:
    replica = Replica(BLOCKS, SPEC.optimizer)
    random = np.random.default_rng(99)
    replica.load_parameters(
        [random.standard_normal(block.elements).astype(np.float32) for block in BLOCKS]
    )
    return replica


@contextmanager
def small_disk(directory: Path, size_kib: int) -> Iterator[Path]:
    """A tmpfs of that size; skips the test where none can be mounted."""
    directory.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "none", str(directory)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {made.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
