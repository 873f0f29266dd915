"""The cost of a returning worker for the coordinator, after a short and after a long run.

Writes a log of many steps, then reads the last few steps as for a worker that missed them, with
their commits and gradients. It also measures opening the log, which happens once per start. There
is no network and no worker: the other costs of a reconnect do not depend on the length of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from benchmarks.machine import print_heading, print_table
from coordinator.run.outputs.restart import CommitRecord
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.log.log_reader import scan_log
from coordinator.storage.log.log_records import ChunkId
from coordinator.storage.run_storage import RunStorage
from protocol.exact.update import step_scalars
from protocol.spec.manifest import Block, Manifest, TensorSpec
from protocol.spec.run_spec import RunSpec, parse_run_spec
from protocol.spec.sections.optimizer import Adamw
from protocol.wire.messages import Commit

BLOCKS: Final = 4
BLOCK_ELEMENTS: Final = 1024
MISSED_STEPS: Final = 5
STEPS_BETWEEN_CHECKPOINTS: Final = 100


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurements for one length of the log.

    Attributes:
        logged_steps: Number of steps in the log.
        reconnect_ms: Times to read the missed steps.
        open_ms: Time to open the log again.
    """

    logged_steps: int
    reconnect_ms: list[float]
    open_ms: float


def measure(logged_steps: int, rounds: int) -> Measurement:
    """Write a log of steps, and read its last few steps several times."""
    with tempfile.TemporaryDirectory(prefix="reconnect-") as directory:
        return asyncio.run(_measure(Path(directory), logged_steps, rounds))


async def _measure(path: Path, logged_steps: int, rounds: int) -> Measurement:
    manifest, spec = _manifest(), _spec(logged_steps)
    directory = RunDirectory(path)
    directory.begin("reconnect", spec)
    storage = RunStorage(
        directory, "reconnect", spec, term=1, guard=lambda: None, failed=_raise_error
    )  # fmt: skip
    storage.begin_log(manifest, 0)
    values = np.ones(BLOCK_ELEMENTS, np.float32)
    for step in range(logged_steps):
        for block in range(BLOCKS):
            chunk_id = ChunkId(term=1, step=step, attempt=0, block=block, chunk=0)
            storage.append(chunk_id, values)
        await storage.commit(_record(step))
        if (step + 1) % STEPS_BETWEEN_CHECKPOINTS == 0:
            await storage.roll_log()
    times_ms = [await _reconnect(storage, logged_steps) for _ in range(rounds)]
    await storage.close()
    start_s = time.perf_counter()
    scan_log(directory.log, "reconnect", manifest)
    return Measurement(logged_steps, times_ms, (time.perf_counter() - start_s) * 1e3)


async def _reconnect(storage: RunStorage, logged_steps: int) -> float:
    start_s = time.perf_counter()
    missed_steps = await storage.read_logged_steps(logged_steps - MISSED_STEPS)
    for logged_step in missed_steps:
        assert [chunk async for chunk in storage.stream_chunks(logged_step)]
    assert len(missed_steps) == MISSED_STEPS
    return (time.perf_counter() - start_s) * 1e3


def _raise_error(error: Exception) -> None:
    raise error


def _record(step: int) -> CommitRecord:
    scalars = step_scalars(Adamw(), optimizer_step=step + 1, step=step, steps=step + 1, norms=1.0)
    commit = Commit(
        term=1, step=step, attempt=0, scalars=scalars, loss=1.0, averages_digest="0" * 64
    )
    return CommitRecord(commit=commit, optimizer_step=step + 1, state_before="0" * 64)


def _manifest() -> Manifest:
    shape = (BLOCK_ELEMENTS,)
    blocks = tuple(
        Block(name=f"b{n}", kind="block", tensors=(TensorSpec(name=f"b{n}.w", shape=shape),))
        for n in range(BLOCKS)
    )
    return Manifest(blocks=blocks, train_samples=64)


def _spec(steps: int) -> RunSpec:
    return parse_run_spec(
        {"name": "reconnect", "task": "regress", "steps": steps, "checkpoint": {"keep_log": True}}
    )


def rows(measurements: list[Measurement]) -> list[list[str]]:
    """Return the rows of the table."""
    return [
        [
            f"{measurement.logged_steps} logged steps",
            f"{median(measurement.reconnect_ms):.2f}",
            f"{max(measurement.reconnect_ms):.2f}",
            f"{measurement.open_ms:.1f}",
        ]
        for measurement in measurements
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kept", type=int, nargs="+", default=[10, 10_000], metavar="STEPS",
        help="steps in the log, for each row of the table",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=21, help="reconnects for each row")
    arguments = parser.parse_args()
    print_heading(f"reconnect: a worker that has missed {MISSED_STEPS} steps")
    measurements = [measure(logged_steps, arguments.rounds) for logged_steps in arguments.kept]
    print_table(["log", "reconnect ms", "max ms", "open once ms"], rows(measurements))


if __name__ == "__main__":
    main()
