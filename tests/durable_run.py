"""A small synthetic run for tests of storage: manifest, gradients, commits."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from coordinator.disk.artifacts import write_model
from coordinator.disk.canonical_json import json_digest
from coordinator.run.outputs.events import (
    Checkpointed,
    Committed,
    Evaluated,
    ManifestSettled,
    MemberInfo,
    Planned,
    ViewChanged,
)
from coordinator.run.outputs.restart import CommitRecord
from coordinator.storage.directory.journal import Entry, Journal, verify_journal
from coordinator.storage.directory.journal_records import Ended, FileDigests, Resumed, RunStarted
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.file_digests import lock_directory, present_digests
from coordinator.storage.log.gradient_log import GradientLog
from coordinator.storage.log.log_index import apply_logged_step
from coordinator.storage.log.log_records import Array, ChunkId
from coordinator.storage.recovery import Recovery, recover
from coordinator.storage.states.checkpoint import write_checkpoint
from protocol.exact.digest import weights_digest
from protocol.exact.reduction.average import square_sum
from protocol.exact.replica import Replica
from protocol.exact.update import global_norm, step_scalars
from protocol.spec.manifest import Block, Export, Manifest, Metric, TensorSpec
from protocol.spec.run_spec import LogMode, RegressRun
from protocol.spec.sections.optimizer import Adamw
from protocol.spec.sections.tasks import BatchSpec
from protocol.wire.messages import Commit

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
SPEC = RegressRun(
    name="made-up",
    task="regress",
    seed=3,
    batch=BatchSpec(samples=4, microbatch=2),
    optimizer=Adamw(name="adamw", lr=0.01, weight_decay=0.1, clip_norm=1.0),
    steps=9,
)


def read_journal(path: Path) -> tuple[Entry, ...]:
    """Return the entries of a journal; it must be valid."""
    verified = verify_journal(path)
    assert verified.bad_line is None, (verified.bad_line, verified.reason)
    return verified.entries


def averages(step: int, attempt: int = 0) -> list[Array]:
    """Return random averages of a step, float32, one array per block."""
    rng = np.random.default_rng((step, attempt))
    return [rng.standard_normal(block.elements).astype(np.float32) for block in BLOCKS]


def averages_digest(values: list[Array]) -> str:
    digests = [
        weights_digest(
            {tensor.name: array[part].reshape(tensor.shape) for tensor, part in block.slices()}
        )
        for block, array in zip(BLOCKS, values, strict=True)
    ]
    return blake3("".join(digests).encode()).hexdigest()


def norm_of(step: int, attempt: int) -> float:
    return global_norm([square_sum(array) for array in averages(step, attempt)])


def commit_of(
    step: int, optimizer_step: int, *, term: int = 1, attempt: int = 0, skip: bool = False
) -> Commit:
    values = averages(step, attempt)
    norm = norm_of(step, attempt)
    scalars = step_scalars(SPEC.optimizer, max(1, optimizer_step), step, SPEC.steps, norm)
    return Commit(
        term=term,
        step=step,
        attempt=attempt,
        scalars=None if skip else scalars,
        loss=float("nan") if skip else 1.0 / (1 + step),
        averages_digest="0" * 64 if skip else averages_digest(values),
    )


def record_of(
    step: int,
    optimizer_step: int,
    *,
    term: int = 1,
    attempt: int = 0,
    skip: bool = False,
    state_before: str | None = None,
) -> CommitRecord:
    commit = commit_of(step, optimizer_step, term=term, attempt=attempt, skip=skip)
    return CommitRecord(
        commit=commit, optimizer_step=optimizer_step, state_before=state_before,
        norm=None if skip else norm_of(step, attempt),
    )  # fmt: skip


def append_averages(log: GradientLog, step: int, *, term: int = 1, attempt: int = 0) -> None:
    for index, (block, values) in enumerate(zip(BLOCKS, averages(step, attempt), strict=True)):
        for chunk in range(block.chunks):
            chunk_id = ChunkId(term, step, attempt, index, chunk)
            log.append_chunk(chunk_id, values[block.chunk_slice(chunk)])


def log_step(log: GradientLog, step: int, *, term: int = 1, attempt: int = 0) -> None:
    append_averages(log, step, term=term, attempt=attempt)
    log.commit(record_of(step, step + 1, term=term, attempt=attempt))


def initial_replica() -> Replica:
    replica = Replica(BLOCKS, SPEC.optimizer)
    rng = np.random.default_rng(99)
    replica.load_parameters(
        [rng.standard_normal(block.elements).astype(np.float32) for block in BLOCKS]
    )
    return replica


@contextmanager
def small_disk(directory: Path, size_kib: int) -> Iterator[Path]:
    """Mount a tmpfs of this size; skip the test where that is impossible."""
    directory.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "none", str(directory)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mount.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mount.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


class WrittenRun:
    """A run's directory, written step by step as by a coordinator with two workers.

    Args:
        path: Directory of the run.
        mode: Mode of the log.
        skip: Steps to skip.
    """

    def __init__(self, path: Path, mode: LogMode = "full", skip: tuple[int, ...] = ()) -> None:
        self.directory = RunDirectory(path)
        self.mode = mode
        self.skip = skip
        self.replica = initial_replica()
        self.losses: list[float] = []
        self.term = 1
        lock_directory(path).release()
        self.directory.begin(RUN_ID, SPEC)
        self.directory.write_manifest(MANIFEST)
        self.journal = self.open_journal()
        stored_run = self.directory.read_run()
        assert stored_run is not None
        self.journal.append(RunStarted.of(RUN_ID, stored_run.document, {"samestep": "0.1.0"}))
        self.journal.append(
            ManifestSettled(
                manifest_digest=MANIFEST.digest(),
                digests=MANIFEST.digests,
                train_samples=MANIFEST.train_samples,
                evaluation_parts=MANIFEST.evaluation_parts,
            )
        )
        self.record_files()
        self.checkpoint()
        self.record_view("started", "a", "b")
        self.log = self.open_log()

    def record_files(self) -> None:
        self.journal.append(FileDigests(term=self.term, digests=present_digests(self.directory)))

    def open_journal(self) -> Journal:
        times_s = itertools.count(1_700_000_000, 60)  # one minute per line
        return Journal(self.directory.journal, clock=lambda: float(next(times_s)))

    def open_log(self) -> GradientLog:
        return GradientLog(
            self.directory.log, RUN_ID, MANIFEST, term=self.term,
            next_step=self.replica.step, mode=self.mode,
        )  # fmt: skip

    def record_view(self, change: Any, *names: str, worker: str | None = None) -> None:
        members = tuple(
            MemberInfo(name=name, backend="cpu", device="cpu", signature="5" * 12) for name in names
        )
        self.journal.append(
            ViewChanged(
                term=self.term, step=self.replica.step, view=1, change=change, worker=worker,
                members=members,
            )
        )  # fmt: skip

    def step(self, *, journal: bool = True) -> None:
        """Commit or skip the next step; without `journal`, as if a crash lost its journal lines."""
        step, is_skipped = self.replica.step, self.replica.step in self.skip
        updates = self.replica.optimizer_step + (not is_skipped)
        state_before = self.replica.state_digest()
        record = record_of(
            step, updates, term=self.term, skip=is_skipped, state_before=state_before
        )
        if journal:
            self.record_plan(step)
        if not is_skipped:
            append_averages(self.log, step, term=self.term)
        self.log.commit(record)
        if journal:
            self.journal.append(Committed.of(record))
            self.journal.sync()
        self.losses.append(record.commit.loss)
        apply_logged_step(self.replica, record, averages(step))

    def record_plan(self, step: int) -> None:
        """Append the plan of a step: 10 samples an epoch are two whole batches and one half."""
        microbatches = 2 if step % 3 < 2 else 1
        subtrees = {"a": ((0, 1),), "b": ((1, 2),)} if microbatches == 2 else {"a": ((0, 1),)}
        self.journal.append(
            Planned(
                term=self.term,
                step=step,
                attempt=0,
                view=1,
                microbatches=microbatches,
                nodes=subtrees,
            )
        )

    def checkpoint(self) -> None:
        if self.replica.step:
            self.log.roll()
        checkpoint = write_checkpoint(
            self.directory.checkpoints, MANIFEST, self.replica, run_id=RUN_ID, term=self.term,
            losses=self.losses,
        )  # fmt: skip
        info = checkpoint.info
        self.journal.append(
            Checkpointed(
                term=self.term, step=info.step, optimizer_step=info.optimizer_step,
                weights_digest=info.weights_digest, state_digest=info.state_digest,
                directory=checkpoint.path.name,
            )
        )  # fmt: skip
        self.journal.sync()

    def crash_and_resume(self) -> Recovery:
        """Drop all state in memory, and continue from the files on disk."""
        self.log.close()
        self.journal.close()
        lock = lock_directory(self.directory.path)
        self.term = lock.term
        lock.release()
        recovery = recover(self.directory)
        assert recovery is not None
        self.replica = recovery.load_replica()
        self.losses = list(recovery.losses)
        self.journal = self.open_journal()
        self.journal.append(
            Resumed(
                term=self.term, step=recovery.step, optimizer_step=recovery.optimizer_step,
                notes=recovery.notes,
            )
        )  # fmt: skip
        self.record_files()
        self.record_view("started", "a", "b")
        self.log = self.open_log()
        return recovery

    def finish(self) -> Path:
        self.journal.append(
            Evaluated(term=self.term, step=self.replica.step, metrics={"accuracy": 0.75})
        )
        result = {
            "run_id": RUN_ID,
            "outcome": "finished",
            "steps": self.replica.step,
            "weights_digest": self.replica.weights_digest(),
            "losses": [loss if np.isfinite(loss) else None for loss in self.losses],
            "eval": {"accuracy": 0.75},
            "exported": write_model(self.directory.path, MANIFEST, self.replica),
        }
        result["journal_head"] = self.journal.append(
            Ended(
                term=self.term, step=self.replica.step, outcome="finished", reason="all done",
                weights_digest=self.replica.weights_digest(),
                state_digest=self.replica.state_digest(), result_digest=json_digest(result),
            )
        )  # fmt: skip
        self.journal.sync()
        self.directory.result_file.write_text(json.dumps(result))
        self.journal.close()
        self.log.close()
        return self.directory.path


def written_run(path: Path, steps: int = SPEC.steps, **options: Any) -> Path:
    """Write a finished run of this many steps, with a checkpoint after every third step."""
    run = WrittenRun(path, **options)
    while run.replica.step < steps:
        run.step()
        if run.replica.step % 3 == 0:
            run.checkpoint()
    return run.finish()
