"""A run's directory of real files, written and recovered by the product's own code.

What a crash leaves is made by hand: the newest segment of the log is cut somewhere after what was
synced, and a byte of the rest may be another.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from random import Random
from typing import Any

from coordinator.disk.claim import LOCK_FILE, Claim
from coordinator.run.restart import CommitRecord, Terms
from coordinator.service.after_restart import resumption_of
from coordinator.storage.checkpoint import checkpoint_steps, write_checkpoint
from coordinator.storage.gradient_log import GradientLog
from coordinator.storage.log_index import read_averages
from coordinator.storage.log_reader import scan_log
from coordinator.storage.recovery import recover
from coordinator.storage.retention import prune
from coordinator.storage.run_directory import RunDirectory
from protocol.base.errors import StorageFailed
from protocol.exact.replica import Replica
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import LogMode
from tests.simulation.disk import Averages, Found, Log
from tests.simulation.job import Job


class RealDirectory:
    """`disk.MemoryDirectory` with files."""

    def __init__(self, path: Path, run_id: str, job: Job) -> None:
        self.epoch = 0
        self.full = False
        self._sync_fails = False
        self._directory = RunDirectory(path)
        self._run_id = run_id
        self._job = job
        self._claims: dict[int, Claim] = {}
        self._logs: list[GradientLog] = []
        path.mkdir()
        self._directory.begin(run_id, job.spec)

    @property
    def saved(self) -> list[int]:
        return checkpoint_steps(self._directory.checkpoints)

    @property
    def terms(self) -> Terms | None:
        return self._directory.read_terms()

    @property
    def sync_fails(self) -> bool:
        return self._sync_fails

    @sync_fails.setter
    def sync_fails(self, fails: bool) -> None:
        self._sync_fails = fails
        if fails and self._logs:
            log = self._logs[-1]
            sync = log._file.sync

            def refuse() -> None:
                log._file.sync = sync  # type: ignore[method-assign]
                self._sync_fails = False
                raise OSError(5, "Input/output error")

            log._file.sync = refuse  # type: ignore[method-assign]

    def claim(self) -> int:
        """The one before may live on: then it has lost its lock."""
        (self._directory.path / LOCK_FILE).unlink(missing_ok=True)
        claim = Claim.take(self._directory.path)
        self.epoch = claim.epoch
        self._claims[claim.epoch] = claim
        return claim.epoch

    def check(self, epoch: int) -> None:
        self._claims[epoch].check()

    def refuse_if_full(self) -> None:
        if self.full:
            raise StorageFailed("write", "DIR", "no space left on device")

    def open_log(self, manifest: Manifest, epoch: int, found: Found | None, mode: LogMode) -> Log:
        self.refuse_if_full()
        self._directory.settle(manifest)
        log = GradientLog(
            self._directory.log, self._run_id, manifest, epoch=epoch, mode=mode,
            next_step=found.resumption.step if found is not None else 0,
            redo=found.redo if found is not None else (), guard=lambda: self.check(epoch),
        )  # fmt: skip
        self._logs.append(log)
        return log

    def write_terms(self, terms: Terms) -> None:
        self.refuse_if_full()
        self._directory.write_terms(terms)

    def save(self, epoch: int, replica: Replica, losses: tuple[float, ...]) -> int:
        self.check(epoch)
        self.refuse_if_full()
        root, manifest = self._directory.checkpoints, self._job.manifest
        write_checkpoint(root, manifest, replica, run_id=self._run_id, epoch=epoch, losses=losses)
        good = prune(root, self._run_id, manifest, self._job.spec.checkpoint).good
        assert good is not None
        return good

    def logged(self, step: int, log: Log) -> list[tuple[CommitRecord, Averages]]:
        scan = scan_log(self._directory.log, self._run_id, self._job.manifest)
        row = scan.index.following(step)
        return [
            (logged.record, read_averages(logged, self._job.blocks))
            for logged in row
            if logged.step < log.next_step
        ]

    def crash(self, rng: Random) -> None:
        for log in self._logs:
            path, synced = log._file.path, log._file._settled
            if not path.exists() or path.stat().st_size <= synced:
                continue
            os.truncate(path, rng.randint(synced, path.stat().st_size))
            size = path.stat().st_size
            if size > synced and rng.random() < 0.5:
                with path.open("r+b") as file:
                    file.seek(rng.randrange(synced, size))
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 1]))
        self._logs.clear()

    def recover(self) -> Found | None:
        recovery = recover(self._directory)
        assert recovery is not None
        resumption = resumption_of(recovery, self._directory.read_terms())
        if resumption is None:
            return None
        skips = [math.isnan(loss) for loss in recovery.losses]
        skips += [record.commit.scalars is None for record in recovery.redo]
        return Found(resumption, recovery.replica, tuple(skips), recovery.redo)

    def close(self) -> None:
        """Let go of all files."""
        for log in self._logs:
            log.close()
        for claim in self._claims.values():
            claim.release()


def directories(root: Path) -> tuple[Any, list[RealDirectory]]:
    """What makes directories below this one, and those that were made."""
    made: list[RealDirectory] = []

    def make(run_id: str, job: Job) -> RealDirectory:
        made.append(RealDirectory(root / run_id, run_id, job))
        return made[-1]

    return make, made
