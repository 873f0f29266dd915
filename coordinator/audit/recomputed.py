"""A few steps of a run computed again from the state before them, and compared bit for bit.

Digests prove that what was kept fits together; that a gradient is that of the model on its samples,
nobody can tell from what was kept. What computes is given: this room knows no model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from coordinator.audit.state_proof import StateProof
from coordinator.storage.directory.journal_records import Committed
from coordinator.storage.directory.run_directory import RunDirectory, StoredRun
from coordinator.storage.log.log_index import LogIndex, read_averages
from coordinator.storage.log.log_reader import scan_log
from coordinator.storage.log.log_records import Array
from coordinator.storage.log.replay import take
from coordinator.storage.states.checkpoint import Checkpoint
from coordinator.storage.states.saved_state import load_replica
from protocol.base.errors import StorageDamaged, StorageFailed
from protocol.exact.digest import averages_digest, block_digest
from protocol.exact.replica import Replica
from protocol.spec.manifest import Block, Manifest


class StepFound(NamedTuple):
    """A step that was computed again: mean loss, and averages block by block."""

    loss: float
    averages: list[Array]


class Recompute(Protocol):
    """What computes steps; see `coordinator.recomputing`."""

    def __call__(self, step: int, loss_scale: float, parameters: Sequence[Array]) -> StepFound: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """How many steps, drawn at random, are computed again, and by what."""

    steps: int
    compute: Recompute


class Recomputed:
    """The comparison.

    A step can be computed again where the state before it can be had: at a checkpoint, or by the
    gradients that are kept since one.

    Attributes:
        steps: Those that were computed again.
        could: Those that could be.
        faults: What differs, step by step.
    """

    def __init__(
        self,
        directory: RunDirectory,
        run: StoredRun,
        manifest: Manifest,
        checkpoints: Sequence[Checkpoint],
        proof: StateProof,
    ) -> None:
        self.steps: list[int] = []
        self.faults: list[str] = []
        self._directory, self._run, self._manifest = directory, run, manifest
        self._checkpoints, self._history = checkpoints, proof.history
        starts = (checkpoint.info.step for checkpoint in checkpoints)
        known = ((step, self._history.commit_of(step)) for step in {*proof.taken, *starts})
        self.could = sorted(step for step, told in known if told is not None and not told.skipped)

    def compare(self, asked: Asked) -> None:
        """Draw steps, compute them and compare.

        Nobody can know beforehand which: whoever forges a step runs the risk.

        Raises:
            SamestepError: One cannot be computed on this machine.
        """
        count = min(asked.steps, len(self.could))
        self.steps = sorted(random.SystemRandom().sample(self.could, count))
        try:
            self._compare(asked.compute)
        except (StorageDamaged, StorageFailed) as error:
            self.faults.append(str(error))

    def _compare(self, compute: Recompute) -> None:
        index = scan_log(self._directory.log, self._run.run_id, self._manifest).index
        replica: Replica | None = None
        for step in self.steps:
            replica = self._before(step, replica, index)
            told = self._history.commit_of(step)
            assert told is not None
            found = compute(step, told.loss_scale or 1.0, replica.parameters)
            logged = next((each for each in index.following(step) if each.step == step), None)
            kept = None if logged is None else read_averages(logged, self._manifest.blocks)
            self.faults += [
                f"step {step}: recomputed, {what}" for what in self._differing(told, kept, found)
            ]

    def _before(self, step: int, replica: Replica | None, index: LogIndex) -> Replica:
        """The state before a step, going on from a replica if none nearer was saved."""
        until = [each for each in self._checkpoints if each.info.step <= step]
        nearest = max(until, key=lambda each: each.info.step)
        if replica is None or replica.step < nearest.info.step:
            replica = load_replica(nearest, self._manifest, self._run.spec.update)
        for logged in index.following(replica.step):
            if logged.step == step:
                break
            take(replica, logged.record, read_averages(logged, self._manifest.blocks))
        assert replica.step == step, "the proof took all before it"
        return replica

    def _differing(
        self, told: Committed, kept: Sequence[Array] | None, found: StepFound
    ) -> Iterator[str]:
        blocks = self._manifest.blocks
        if found.loss != told.loss:
            yield f"its loss is {found.loss}, in the journal {told.loss}"
        each = zip(blocks, found.averages, strict=True)
        digest = averages_digest(block_digest(block, values) for block, values in each)
        if digest != told.averages_digest:
            yield f"its gradients have digest {digest}, in the journal {told.averages_digest}"
        if kept is not None:
            yield from _differing_elements(blocks, kept, found.averages)


def _differing_elements(
    blocks: Sequence[Block], kept: Sequence[Array], found: Sequence[Array]
) -> Iterator[str]:
    for block, mine, theirs in zip(blocks, kept, found, strict=True):
        bits, others = mine.view(np.uint32), theirs.view(np.uint32)
        places = np.flatnonzero(bits != others)
        if not places.size:
            continue
        first = int(places[0])
        tensor, part = next((t, p) for t, p in block.slices() if p.start <= first < p.stop)
        yield (
            f"block {block.name!r}, tensor {tensor.name!r}, element {first - part.start} is "
            f"{theirs[first]} (0x{others[first]:08x}), in the log {mine[first]} "
            f"(0x{bits[first]:08x}); of {mine.size} elements {places.size} differ"
        )
