"""What a returning worker costs the coordinator, after a short and after a long run.

Writes a log of many steps, then reads the last few as for a worker that missed them: their
positions, commits and gradients. It also measures opening the log, which a start does once. No
network and no worker: the rest of a reconnect does not depend on the length of the run.
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
class Measured:
    """One length of log.

    Attributes:
        resident: Steps that it keeps.
        reconnect_ms: To read what was missed, each time.
        open_ms: To open the log anew.
    """

    resident: int
    reconnect_ms: list[float]
    open_ms: float


def measure(logged_steps: int, rounds: int) -> Measured:
    """Write a log of so many steps, and read its last few as often as told."""
    with tempfile.TemporaryDirectory(prefix="reconnect-") as directory:
        return asyncio.run(_measure(Path(directory), logged_steps, rounds))


async def _measure(path: Path, logged_steps: int, rounds: int) -> Measured:
    manifest, spec = _manifest(), _spec(logged_steps)
    directory = RunDirectory(path)
    directory.begin("reconnect", spec)
    storage = RunStorage(
        directory, "reconnect", spec, term=1, guard=lambda: None, failed=_refused
    )  # fmt: skip
    storage.begin_log(manifest, 0)
    values = np.ones(BLOCK_ELEMENTS, np.float32)
    for step in range(logged_steps):
        for block in range(BLOCKS):
            storage.append(ChunkId(1, step, 0, block, 0), values)
        await storage.commit(_record(step))
        if (step + 1) % STEPS_BETWEEN_CHECKPOINTS == 0:
            await storage.roll()
    times_ms = [await _reconnect(storage, logged_steps) for _ in range(rounds)]
    await storage.close()
    begin = time.perf_counter()
    scan_log(directory.log, "reconnect", manifest)
    return Measured(logged_steps, times_ms, (time.perf_counter() - begin) * 1e3)


async def _reconnect(storage: RunStorage, logged_steps: int) -> float:
    begin = time.perf_counter()
    row = await storage.logged(logged_steps - MISSED_STEPS)
    for logged in row:
        assert [chunk async for chunk in storage.chunks(logged)]
    assert len(row) == MISSED_STEPS
    return (time.perf_counter() - begin) * 1e3


def _refused(error: Exception) -> None:
    raise error


def _record(step: int) -> CommitRecord:
    scalars = step_scalars(Adamw(), step + 1, step, step + 1, 1.0)
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


def rows(measured: list[Measured]) -> list[list[str]]:
    """For the table."""
    return [
        [
            f"{each.resident} kept steps",
            f"{median(each.reconnect_ms):.2f}",
            f"{max(each.reconnect_ms):.2f}",
            f"{each.open_ms:.1f}",
        ]
        for each in measured
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kept", type=int, nargs="+", default=[10, 10_000])
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    print_heading(f"reconnect: a worker that has missed {MISSED_STEPS} steps")
    measured = [measure(kept, arguments.rounds) for kept in arguments.resident]
    print_table(["log", "reconnect ms", "worst", "open once ms"], rows(measured))


if __name__ == "__main__":
    main()
