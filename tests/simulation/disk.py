"""A run's directory in memory, with what a crash leaves of it.

The same rules as the files: a segment of the log holds what was written, of which a crash keeps
what was synced and a random part of the rest, torn somewhere; small files are replaced whole.
What a restart makes of it is for the product's own code, as far as that is not about files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final, Protocol

import numpy as np

from coordinator.run.restart import CommitRecord, Resumption, Terms
from coordinator.service.after_restart import resumption_of
from coordinator.storage.log_index import LoggedStep
from coordinator.storage.log_records import Array, ChunkPlace
from coordinator.storage.recovery import _split
from coordinator.storage.replay import take
from protocol.base.errors import RunFailed, StorageFailed
from protocol.exact.replica import Replica
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import LogMode
from tests.simulation.job import Job

Averages = list[Array] | None
NOWHERE: Final = Path("log")


@dataclass(frozen=True, slots=True)
class Torn:
    """A record of which not every byte got to the disk, and what it reads as."""

    record: Any


class Log(Protocol):
    """What writes a run's log: `coordinator.storage.gradient_log.GradientLog`, or the one here."""

    next_step: int

    def append_chunk(self, place: ChunkPlace, values: Array) -> None: ...

    def commit(self, record: CommitRecord) -> None: ...

    def roll(self) -> object: ...

    def cut(self, step: int) -> object: ...


@dataclass(frozen=True, slots=True)
class Found:
    """What a coordinator finds when it starts."""

    resumption: Resumption
    replica: Callable[[], Replica]
    committed: tuple[bool, ...]
    """For each step that is known to be committed, whether it was skipped."""
    redo: tuple[CommitRecord, ...]
    """Those of which the averages are not kept."""


@dataclass
class Segment:
    """One file of the log: records in order, of which so many are synced."""

    epoch: int
    base: int
    mode: LogMode
    redo: tuple[CommitRecord, ...] = ()
    records: list[Any] = field(default_factory=list)
    synced: int = 0


class MemoryDirectory:
    """See the module's text.

    Attributes:
        epoch: Of the newest coordinator that has claimed it.
        full: Whether the disk refuses to be written.
        sync_fails: Whether the next sync fails, though what it was to sync can be read.
        saved: States by step, as checkpoints.
    """

    def __init__(self, run_id: str, job: Job) -> None:
        del run_id, job
        self.epoch = 0
        self.full = False
        self.sync_fails = False
        self.manifest: Manifest | None = None
        self.terms: Terms | None = None
        self.saved: dict[int, tuple[Replica, tuple[float, ...]]] = {}
        self.segments: list[Segment] = []

    def claim(self) -> int:
        """A coordinator starts here."""
        self.epoch += 1
        return self.epoch

    def check(self, epoch: int) -> None:
        """The guard of a coordinator of this epoch."""
        if epoch != self.epoch:
            raise RunFailed("another coordinator has the directory now")

    def refuse_if_full(self) -> None:
        if self.full:
            raise StorageFailed("write", "DIR", "no space left on device")

    def open_log(self, manifest: Manifest, epoch: int, found: Found | None, mode: LogMode) -> Log:
        """Keep the manifest and begin the log."""
        self.refuse_if_full()
        self.manifest = manifest
        return MemoryLog(self, epoch, found, mode)

    def write_terms(self, terms: Terms) -> None:
        self.refuse_if_full()
        self.terms = terms

    def save(self, epoch: int, replica: Replica, losses: tuple[float, ...]) -> int:
        """Write a checkpoint; gives the step from which the log is needed."""
        self.check(epoch)
        self.refuse_if_full()
        self.saved[replica.step] = (replica, losses)
        for old in sorted(self.saved)[:-2]:
            del self.saved[old]
        return max(self.saved)

    def logged(self, step: int, log: Log) -> list[tuple[CommitRecord, Averages]]:
        """The committed steps from this one on, in a row."""
        steps = self._scan()
        return [(s.record, a) for s, a in _row(steps, step) if s.step < log.next_step]

    def crash(self, rng: Random) -> None:
        """What was not synced may be there or not, whole or torn."""
        for segment in self.segments:
            unsynced = len(segment.records) - segment.synced
            if unsynced:
                kept = segment.synced + rng.choice((unsynced, int(rng.random() * unsynced)))
                del segment.records[kept:]
                for at in range(segment.synced, kept):
                    if rng.random() < 0.2:
                        segment.records[at] = Torn(_garbled(segment.records[at]))

    def recover(self) -> Found | None:
        """What `coordinator.storage.recovery.recover` would find; None if the run begins anew."""
        if self.manifest is None:
            return None
        steps = self._scan(repair=True)
        newest = max(self.saved, default=None)
        row = _row(steps, newest or 0)
        replica, losses = self.saved[newest] if newest is not None else (None, ())
        logged, redo = _split([step for step, _ in row])
        recovery = SimpleNamespace(
            manifest=self.manifest,
            checkpoint=replica
            and SimpleNamespace(
                info=SimpleNamespace(step=newest, state_digest=replica.state_digest())
            ),
            logged=logged,
            redo=redo,
            notes=(),
            step=(newest or 0) + len(logged),
            optimizer_step=_updates(replica, logged),
            losses=(*losses, *(step.record.commit.loss for step in logged)),
        )
        resumption = resumption_of(recovery, self.terms)  # type: ignore[arg-type]
        if resumption is None or replica is None:
            return None

        def catch_up() -> Replica:
            state = replica.copy()
            for step, averages in row[: len(logged)]:
                take(state, step.record, averages)
            return state

        skips = [math.isnan(loss) for loss in recovery.losses]
        skips += [record.commit.scalars is None for record in redo]
        return Found(resumption, catch_up, tuple(skips), tuple(redo))

    def _scan(self, *, repair: bool = False) -> dict[int, tuple[LoggedStep, Averages]]:
        """As `log_reader.scan_log`: a segment replaces what older ones hold from its base on."""
        steps: dict[int, tuple[LoggedStep, Averages]] = {}
        for segment in self.segments:
            for step in [step for step in steps if step >= segment.base]:
                del steps[step]
            for record in segment.redo:
                steps[record.commit.step] = (LoggedStep(NOWHERE, record, (), False, 0), None)
            end = _walk(segment, steps, self.manifest)
            if repair:
                # One that goes on writing there leaves a hole.
                segment.records[end:] = [Torn(None)] if end < len(segment.records) else []
                segment.synced = end
        return steps


def is_whole(record: Any) -> bool:
    """Whether a record's hashes fit."""
    return not isinstance(record, Torn)


def _walk(
    segment: Segment, steps: dict[int, tuple[LoggedStep, Averages]], manifest: Manifest | None
) -> int:
    """Take in a segment's steps; gives where its whole records end."""
    assert manifest is not None
    chunks: dict[tuple[int, int, int, int], Array] = {}
    end, step = 0, segment.base
    for at, written in enumerate(segment.records):
        record = written.record if isinstance(written, Torn) else written
        if record is None or not is_whole(written):
            return end
        if isinstance(record, CommitRecord):
            commit = record.commit
            assert commit.step == step
            averages = None
            if segment.mode == "full" and commit.scalars is not None:
                place = (commit.epoch, commit.attempt)
                averages = _joined(manifest, chunks, place)
            has = segment.mode == "full"
            steps[step] = (LoggedStep(NOWHERE, record, (), has, 0), averages)
            step, end, chunks = step + 1, at + 1, {}
        else:
            place, values = record
            chunks[place.epoch, place.attempt, place.block, place.chunk] = values
    return end


def _garbled(record: Any) -> Any:
    if isinstance(record, Torn):
        return record.record
    if isinstance(record, CommitRecord):
        return record
    place, values = record
    return place, values + np.float32(1)


def _joined(
    manifest: Manifest, chunks: dict[tuple[int, int, int, int], Array], place: tuple[int, int]
) -> list[Array]:
    return [
        np.concatenate([chunks[*place, number, chunk] for chunk in range(block.chunks)])
        for number, block in enumerate(manifest.blocks)
    ]


def _row(
    steps: dict[int, tuple[LoggedStep, Averages]], step: int
) -> list[tuple[LoggedStep, Averages]]:
    row = []
    while step in steps:
        row.append(steps[step])
        step += 1
    return row


def _updates(replica: Replica | None, logged: list[LoggedStep]) -> int:
    if logged:
        return logged[-1].record.optimizer_step
    return replica.optimizer_step if replica is not None else 0


class MemoryLog:
    """`coordinator.storage.gradient_log.GradientLog` without files."""

    def __init__(
        self, directory: MemoryDirectory, epoch: int, found: Found | None, mode: LogMode
    ) -> None:
        self.next_step = found.resumption.step if found is not None else 0
        self._redo = found.redo if found is not None else ()
        self._directory = directory
        self._epoch = epoch
        self._mode = mode
        self._pending: list[tuple[ChunkPlace, Array]] = []
        self._broken = False
        self._segment = self._new_segment()

    def append_chunk(self, place: ChunkPlace, values: Array) -> None:
        assert place.step == self.next_step
        if self._mode == "checkpoint" or any(known == place for known, _ in self._pending):
            return
        attempt = (place.epoch, place.attempt)
        self._pending = [p for p in self._pending if (p[0].epoch, p[0].attempt) == attempt]
        self._write((place, values))
        self._pending.append((place, values))

    def commit(self, record: CommitRecord) -> None:
        commit = record.commit
        assert commit.step == self.next_step
        if commit.scalars is not None and self._mode == "full":
            mine = {p for p, _ in self._pending if (p.epoch, p.attempt) == _attempt(commit)}
            assert self._directory.manifest is not None
            blocks = self._directory.manifest.blocks
            assert len(mine) == sum(block.chunks for block in blocks)
        self.write(record)
        self._sync()
        self._directory.check(self._epoch)
        self._settled = len(self._segment.records)
        self._pending.clear()
        self.next_step += 1

    def write(self, record: CommitRecord) -> None:
        """The first half of a commit."""
        self._write(record)

    def roll(self) -> None:
        self._segment = self._new_segment()
        self._broken = bool(self._pending)

    def cut(self, step: int) -> None:
        segments = self._directory.segments
        while len(segments) > 1 and segments[1].base <= step:
            segments.pop(0)

    def _new_segment(self) -> Segment:
        self._directory.refuse_if_full()
        redo = tuple(record for record in self._redo if record.commit.step >= self.next_step)
        segment = Segment(self._epoch, self.next_step, self._mode, redo)
        self._settled = 0
        key = (segment.epoch, segment.base)
        others = [s for s in self._directory.segments if (s.epoch, s.base) != key]
        self._directory.segments = sorted([*others, segment], key=lambda s: (s.epoch, s.base))
        return segment

    def _write(self, record: Any) -> None:
        if self._broken:
            self._directory.check(self._epoch)
            del self._segment.records[self._settled :]
            self._segment.records += self._pending
            self._broken = False
        if self._directory.full:
            self._broken = True
        self._directory.refuse_if_full()
        self._segment.records.append(record)

    def _sync(self) -> None:
        if self._directory.sync_fails:
            self._directory.sync_fails, self._broken = False, True
            raise StorageFailed("sync", "DIR", "input/output error")
        self._segment.synced = len(self._segment.records)


def _attempt(commit: Any) -> tuple[int, int]:
    return commit.epoch, commit.attempt
