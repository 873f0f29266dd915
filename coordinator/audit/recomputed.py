"""Recompute a few steps of a run from the state before them, and compare them bit for bit.

Digests prove that the files are consistent; only recomputing proves that a gradient is that of the
model on its samples. The function that recomputes is an argument: this package does not depend on
models.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from coordinator.audit.state_proof import StateProof
from coordinator.run.outputs.events import Committed
from coordinator.storage.directory.run_directory import RunDirectory, StoredRun
from coordinator.storage.log.log_index import LogIndex, apply_logged_step, read_averages
from coordinator.storage.log.log_reader import scan_log
from coordinator.storage.log.log_records import Array
from coordinator.storage.states.checkpoint import Checkpoint
from coordinator.storage.states.checkpoint_state import load_replica
from protocol.base.errors import StorageDamaged, StorageFailed
from protocol.exact.digest import averages_digest, block_digest
from protocol.exact.replica import Replica
from protocol.spec.manifest import Block, Manifest


class RecomputedStep(NamedTuple):
    """A recomputed step: mean loss, and averages block by block."""

    loss: float
    averages: list[Array]


class Recompute(Protocol):
    """A function that recomputes a step; see `coordinator.recomputing`."""

    def __call__(
        self, step: int, loss_scale: float, parameters: Sequence[Array]
    ) -> RecomputedStep: ...


@dataclass(frozen=True, slots=True)
class RecomputeRequest:
    """How many random steps to recompute, and the function that does it."""

    steps: int
    compute: Recompute


class RecomputeCheck:
    """The comparison of recomputed steps.

    A step can be recomputed if the state before it is available: from a checkpoint, or from a
    checkpoint and the logged gradients that follow it.

    Attributes:
        steps: The recomputed steps.
        candidates: The steps that can be recomputed.
        faults: The differences, step by step.
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
        checkpoint_steps = (checkpoint.info.step for checkpoint in checkpoints)
        commits = (
            (step, self._history.commit_of(step))
            for step in {*proof.replayed_steps, *checkpoint_steps}
        )
        self.candidates = sorted(
            step for step, commit in commits if commit is not None and not commit.skipped
        )

    def compare(self, request: RecomputeRequest) -> None:
        """Choose random steps, recompute them and compare.

        Nobody can predict the chosen steps, which deters forgery.

        Raises:
            SamestepError: A step cannot be recomputed on this machine.
        """
        count = min(request.steps, len(self.candidates))
        self.steps = sorted(random.SystemRandom().sample(self.candidates, count))
        try:
            self._compare(request.compute)
        except (StorageDamaged, StorageFailed) as error:
            self.faults.append(str(error))

    def _compare(self, compute: Recompute) -> None:
        index = scan_log(self._directory.log, self._run.run_id, self._manifest).index
        replica: Replica | None = None
        for step in self.steps:
            replica = self._state_before(step, replica, index)
            commit = self._history.commit_of(step)
            assert commit is not None
            recomputed = compute(step, commit.loss_scale or 1.0, replica.parameters)
            logged_step = next(
                (candidate for candidate in index.steps_from(step) if candidate.step == step), None
            )
            logged_averages = (
                None if logged_step is None else read_averages(logged_step, self._manifest.blocks)
            )
            self.faults += [
                f"step {step}: {difference}"
                for difference in self._differences(commit, logged_averages, recomputed)
            ]

    def _state_before(self, step: int, replica: Replica | None, index: LogIndex) -> Replica:
        """Return the state before a step, continuing from `replica` if no checkpoint is nearer."""
        earlier_checkpoints = [c for c in self._checkpoints if c.info.step <= step]
        checkpoint = max(earlier_checkpoints, key=lambda c: c.info.step)
        if replica is None or replica.step < checkpoint.info.step:
            replica = load_replica(checkpoint, self._manifest, self._run.spec.step_optimizer)
        for logged_step in index.steps_from(replica.step):
            if logged_step.step == step:
                break
            apply_logged_step(
                replica, logged_step.record, read_averages(logged_step, self._manifest.blocks)
            )
        assert replica.step == step, "the proof replayed all steps before this one"
        return replica

    def _differences(
        self, commit: Committed, logged_averages: Sequence[Array] | None, recomputed: RecomputedStep
    ) -> Iterator[str]:
        blocks = self._manifest.blocks
        if recomputed.loss != commit.loss:
            yield f"the recomputed loss is {recomputed.loss}, the journal's is {commit.loss}"
        pairs = zip(blocks, recomputed.averages, strict=True)
        digest = averages_digest(block_digest(block, values) for block, values in pairs)
        if digest != commit.averages_digest:
            yield (
                f"the recomputed gradients have digest {digest}, the journal's have "
                f"{commit.averages_digest}"
            )
        if logged_averages is not None:
            yield from _differing_elements(blocks, logged_averages, recomputed.averages)


def _differing_elements(
    blocks: Sequence[Block], logged_averages: Sequence[Array], recomputed: Sequence[Array]
) -> Iterator[str]:
    for block, logged_average, recomputed_average in zip(
        blocks, logged_averages, recomputed, strict=True
    ):
        logged_bits = logged_average.view(np.uint32)
        recomputed_bits = recomputed_average.view(np.uint32)
        positions = np.flatnonzero(logged_bits != recomputed_bits)
        if not positions.size:
            continue
        first = int(positions[0])
        tensor, part = next((t, p) for t, p in block.slices() if p.start <= first < p.stop)
        yield (
            f"block {block.name!r}, tensor {tensor.name!r}, element {first - part.start}: "
            f"recomputed {recomputed_average[first]} (0x{recomputed_bits[first]:08x}), logged "
            f"{logged_average[first]} (0x{logged_bits[first]:08x}); {positions.size} of "
            f"{logged_average.size} elements differ"
        )
