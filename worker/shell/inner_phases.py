"""Inner phases: the inner steps of one replica in one round, in a run with replicas (DiLoCo).

An inner phase starts from the run's parameters and, if replicas carry state from round to round
(the inner optimizer's moments, the residual of topk), from its replica's carried state. It can
continue from an inner checkpoint of another worker, or where this worker was interrupted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from backends.base.inner_steps import InnerState, InnerSteps, SchedulePosition, inner_steps
from backends.base.interface import Array, Batch, Loss, Program
from protocol.base.errors import DataError
from protocol.exact.inner_phases import InnerPhaseOrder
from protocol.exact.reduction.absent import mark_absent
from protocol.exact.reduction.codecs import project
from protocol.exact.reduction.tree import Subtree
from protocol.exact.replica import Replica, are_counts
from protocol.exact.update import counts_updates, moment_count
from protocol.spec.manifest import Block
from protocol.spec.run_spec import RunSpec
from worker.logic.events import (
    BlockSum,
    Event,
    InnerCheckpoint,
    InnerPhaseStep,
    MicrobatchRows,
    StepId,
    SubtreeDone,
)
from worker.shell.example_batches import report_samples

_PROGRESS_EVERY_S: Final = 0.5
_FEEDBACK: Final = np.float32(0.95)
"""Decay of topk's residual per round (SparseLoCo, arXiv:2508.15706)."""
_LOSS: Final = struct.Struct("<d")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CarriedState:
    """State that a replica carries into a round. All lists are empty if it carries none.

    Attributes:
        moments: The inner optimizer's moments: for each, one flat float32 array per block.
        residual: Differences that topk has not sent yet: one flat float32 array per block.
        missed: Updates that each tensor has missed, by block, if the optimizer counts them.
    """

    moments: list[list[Array]]
    residual: list[Array]
    missed: list[Array] = field(default_factory=list)

    def to_bytes(self) -> Bytes:
        """Serialize as little-endian float32: moments, residual, missed updates."""
        moments = (a for moment in self.moments for a in moment)
        return _concatenate([*moments, *self.residual, *self.missed])


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A replica after `inner` steps of its phase; `losses` is the sum of their mean losses."""

    inner: int
    losses: float
    state: InnerState

    def to_bytes(self) -> Bytes:
        moments = (a for moment in self.state.moments for a in moment)
        arrays = [*self.state.parameters, *moments, *self.state.missed_updates]
        head = np.frombuffer(_LOSS.pack(self.losses), np.uint8)
        return np.concatenate([head, _concatenate(arrays)])


class InnerPhases:
    """Computes the inner phases of one run on one device.

    Args:
        spec: The run spec.
        blocks: The manifest's blocks.
        program: The compiled task.
        order: The samples of each inner step.
        batch: Returns a microbatch with the given samples.
    """

    def __init__(
        self,
        spec: RunSpec,
        blocks: tuple[Block, ...],
        program: Program,
        order: InnerPhaseOrder,
        batch: Callable[[Sequence[int]], Batch],
    ) -> None:
        assert spec.replicas is not None
        self._spec = spec
        self._replicas = spec.replicas
        self._blocks = blocks
        self._program = program
        self._order = order
        self._batch = batch
        self._steps: InnerSteps | None = None
        self._carried_states: dict[int, tuple[int, CarriedState]] = {}
        """Carried state by replica, with the round that starts from it."""
        self._uncommitted_states: dict[int, tuple[StepId, CarriedState]] = {}
        """Carried state by replica from phases of a round that is not committed yet."""
        self._checkpoints: dict[tuple[StepId, int], _Checkpoint] = {}
        self._loaded_phases: set[tuple[StepId, int]] = set()

    def forget(self) -> None:
        """Drop all state, because other parameters were loaded or the round was skipped."""
        self._carried_states.clear()
        self.end_round()

    def coordinator_restarted(self) -> None:
        """Drop uncommitted carried state: a restarted coordinator counts attempts from 0 again."""
        self._uncommitted_states.clear()

    def end_round(self, committed: StepId | None = None) -> None:
        """Keep the carried state of the committed attempt for the next round; drop all other state.

        The state of another attempt may come from a device that failed.
        """
        for replica, (step_id, state) in self._uncommitted_states.items():
            if step_id == committed:
                self._carried_states[replica] = (step_id.step + 1, state)
        self._uncommitted_states.clear()
        self._checkpoints.clear()
        self._loaded_phases.clear()

    def needs_state(self, step_id: StepId, replica: int) -> bool:
        """Return whether this phase needs a state from the coordinator first."""
        if not self.has_carried_state(step_id.step, replica):
            return True
        key = (step_id, replica)
        is_available = key in self._checkpoints or key in self._loaded_phases
        return self._replicas.boundary_every > 0 and not is_available

    def has_carried_state(self, step: int, replica: int) -> bool:
        """Return whether the replica's carried state of this round is here or not needed."""
        if not self._replicas.has_carried_state or step == 0:
            return True
        return self._carried_states.get(replica, (-1, None))[0] == step

    def load(
        self, step_id: StepId, replica: int, inner: int, content: Bytes, *, with_carried: bool
    ) -> None:
        """Load the coordinator's state of a phase: carried state, then an inner checkpoint.

        Args:
            step_id: The round and its attempt.
            replica: Number of the replica.
            inner: Inner steps that the checkpoint contains; 0 if `content` has no checkpoint.
            content: Little-endian float32 arrays, uint8 (bytes,).
            with_carried: Whether `content` begins with carried state.

        Raises:
            DataError: `content` has the wrong length.
        """
        arrays = _Reader(content, self._blocks)
        if with_carried:
            self._carried_states[replica] = (step_id.step, self._read_carried_state(arrays))
        if inner:
            losses = arrays.read_float()
            moments = moment_count(self._spec.optimizer)
            state = InnerState(
                arrays.blocks(),
                [arrays.blocks() for _ in range(moments)],
                arrays.counts() if arrays.unread_bytes else [],
            )
            self._checkpoints[step_id, replica] = _Checkpoint(inner, losses, state)
        arrays.check_end()
        self._loaded_phases.add((step_id, replica))

    def _read_carried_state(self, arrays: _Reader) -> CarriedState:
        carries_moments = self._replicas.inner_state == "carry"
        moments = moment_count(self._spec.optimizer) if carries_moments else 0
        has_residual = self._replicas.codec == "topk"
        return CarriedState(
            [arrays.blocks() for _ in range(moments)],
            arrays.blocks() if has_residual else [],
            arrays.counts() if self._carries_counts else [],
        )

    @property
    def _carries_counts(self) -> bool:
        return self._replicas.inner_state == "carry" and counts_updates(self._spec.optimizer)

    def compute(
        self, step_id: StepId, subtree: Subtree, run: Replica, now_s: Callable[[], float]
    ) -> Generator[Event | None]:
        """Compute one inner phase; if the generator is closed, its progress is stored for later.

        Args:
            step_id: The round and its attempt.
            subtree: The replica's leaf of the tree.
            run: The run's state at the start of the round.
            now_s: Returns the time in seconds.

        Yields:
            Events for the coordinator; None after each piece of device work.
        """
        replica, start, start_s = subtree.lo, run.parameters, now_s()
        updates = run.optimizer_step * self._order.inner_steps  # updates that carried moments count
        reported_s, checkpoint = start_s, self._starting_checkpoint(step_id, replica, start)
        counted_updates = updates if self._replicas.inner_state == "carry" else 0
        _check_counts(replica, checkpoint.state.missed_updates, counted_updates + checkpoint.inner)
        steps, losses, inner = self._inner_steps(), checkpoint.losses, checkpoint.inner
        steps.begin(checkpoint.state)
        try:
            while inner < self._order.inner_steps:
                loss = yield from self._step(steps, step_id.step, replica, inner, updates)
                losses += loss.loss_sum / loss.weight if loss.weight else 0.0
                inner += 1
                if inner == 1 or now_s() - reported_s > _PROGRESS_EVERY_S:
                    reported_s = now_s()
                    yield InnerPhaseStep(step_id, subtree, inner)
                if self._is_checkpoint_due(inner):
                    snapshot = _Checkpoint(inner, losses, steps.state())
                    yield InnerCheckpoint(step_id, subtree, inner, snapshot.to_bytes())
        except GeneratorExit:
            # Most interrupted phases are assigned to this worker again.
            self._checkpoints[step_id, replica] = _Checkpoint(inner, losses, steps.state())
            raise
        self._checkpoints.pop((step_id, replica), None)
        yield from self._emit_result(step_id, subtree, start, steps)
        mean = losses / self._order.inner_steps
        # Scaled to a whole phase, which is the unit of speed for the planner.
        fraction = (inner - checkpoint.inner) / inner
        yield SubtreeDone(step_id, subtree, Loss(mean, 1.0), (now_s() - start_s) * 1e3 / fraction)

    def _starting_checkpoint(
        self, step_id: StepId, replica: int, start: Sequence[Array]
    ) -> _Checkpoint:
        checkpoint = self._checkpoints.get((step_id, replica))
        if checkpoint is not None:
            return checkpoint
        carried = self._carried_state_at(step_id.step, replica)
        moments = carried.moments or self._zeros_of_moments()
        return _Checkpoint(0, 0.0, InnerState(list(start), moments, carried.missed))

    def _carried_state_at(self, step: int, replica: int) -> CarriedState:
        """Return the carried state of this round; empty in the first round."""
        if not self._replicas.has_carried_state or step == 0:
            return CarriedState([], [])
        if not self.has_carried_state(step, replica):
            raise DataError(
                f"round {step}: expected the carried state of replica {replica}, got none"
            )
        return self._carried_states[replica][1]

    def _zeros_of_moments(self) -> list[list[Array]]:
        return [self._zeros() for _ in range(moment_count(self._spec.optimizer))]

    def _zeros(self) -> list[Array]:
        return [np.zeros(block.elements, np.float32) for block in self._blocks]

    def _inner_steps(self) -> InnerSteps:
        if self._steps is None:
            # `RunSpec.update` averages committed rounds, not inner steps.
            optimizer = self._spec.optimizer.model_copy(update={"ema": None, "swa": None})
            self._steps = inner_steps(self._program, self._blocks, optimizer)
        return self._steps

    def _is_checkpoint_due(self, inner: int) -> bool:
        every = self._replicas.boundary_every
        return every > 0 and inner % every == 0 and inner < self._order.inner_steps

    def _step(
        self, steps: InnerSteps, round_: int, replica: int, inner: int, updates: int
    ) -> Generator[None, None, Loss]:
        samples = self._order.microbatches(round_, replica, inner)
        batches = [self._batch(part) for part in samples]
        leaves = list(zip(batches, self._order.seeds(round_, replica, inner), strict=True))
        carries_moments = self._replicas.inner_state == "carry"
        update = inner + 1 + (updates if carries_moments else 0)
        step = self._order.global_step(round_, inner)
        with report_samples(round_, batches, samples):
            return (
                yield from steps.step(leaves, SchedulePosition(update, step, self._order.total))
            )

    def _emit_result(
        self, step_id: StepId, subtree: Subtree, start: Sequence[Array], steps: InnerSteps
    ) -> Generator[Event]:
        """Emit the pseudo-gradient (start minus end, rounded by the codec) and carried state."""
        replica, carries_moments = subtree.lo, self._replicas.inner_state == "carry"
        state = steps.state() if carries_moments else InnerState(steps.parameters(), [])
        residual: list[Array] = []
        differences = self._differences(step_id.step, replica, start, state.parameters, residual)
        if self._replicas.has_carried_state:
            missed = state.missed_updates or [
                np.zeros(len(b.tensors), np.float32) for b in self._blocks
            ]
            carried = CarriedState(
                state.moments if carries_moments else [],
                residual,
                missed if self._carries_counts else [],
            )
            self._uncommitted_states[replica] = (step_id, carried)
            yield MicrobatchRows(step_id, subtree, replica, carried.to_bytes().reshape(1, -1))
        for number in reversed(range(len(self._blocks))):
            yield BlockSum(step_id, subtree, number, differences[number], 1.0)

    def _differences(
        self, step: int, replica: int, start: Sequence[Array], end: Sequence[Array],
        residual: list[Array],
    ) -> list[Array]:  # fmt: skip
        previous_residual = self._previous_residual(step, replica)
        differences = []
        with np.errstate(all="ignore"):
            for number, block in enumerate(self._blocks):
                difference = np.subtract(start[number], end[number])
                if previous_residual:
                    difference += previous_residual[number] * _FEEDBACK
                payload = difference.copy()
                for chunk in range(block.chunks):
                    part = block.chunk_slice(chunk)
                    payload[part] = project(payload[part].copy(), self._replicas.codec)
                mark_absent(block, payload)  # every tensor has a difference
                differences.append(payload)
                if previous_residual:
                    residual.append(difference - payload)
        return differences

    def _previous_residual(self, step: int, replica: int) -> list[Array]:
        """Return topk's residual of the previous round, by block; empty for other codecs."""
        if self._replicas.codec != "topk":
            return []
        return self._carried_state_at(step, replica).residual or self._zeros()


def _check_counts(replica: int, missed: Sequence[Array], updates: int) -> None:
    if not all(are_counts(counts, updates) for counts in missed):
        raise DataError(
            f"replica {replica}: expected counts of missed updates from 0 to {updates}, got others"
        )


class _Reader:
    """Reads the arrays of a serialized state.

    Args:
        content: The whole state, uint8 (bytes,).
        blocks: The manifest's blocks, whose sizes are the arrays' lengths.
    """

    def __init__(self, content: Bytes, blocks: tuple[Block, ...]) -> None:
        self._content = content
        self._blocks = blocks
        self._offset = 0

    def read_float(self) -> float:
        return float(_LOSS.unpack(self._take(_LOSS.size).tobytes())[0])

    def blocks(self) -> list[Array]:
        """Read one flat float32 array for each block."""
        return [
            np.frombuffer(self._take(4 * block.elements).tobytes(), "<f4").copy()
            for block in self._blocks
        ]

    @property
    def unread_bytes(self) -> int:
        """Number of bytes that are not read yet."""
        return len(self._content) - self._offset

    def counts(self) -> list[Array]:
        """Read counts of missed updates: for each block one float32 per tensor."""
        return [
            np.frombuffer(self._take(4 * len(block.tensors)).tobytes(), "<f4").copy()
            for block in self._blocks
        ]

    def check_end(self) -> None:
        if self._offset != len(self._content):
            raise DataError(
                f"expected {self._offset} bytes of a replica's state, got {len(self._content)}"
            )

    def _take(self, length: int) -> Bytes:
        part = self._content[self._offset : self._offset + length]
        self._offset += length
        if len(part) != length:
            raise DataError(
                f"expected at least {self._offset} bytes of a replica's state, "
                f"got {len(self._content)}"
            )
        return part


def _concatenate(arrays: Sequence[Array]) -> Bytes:
    if not arrays:
        return np.zeros(0, np.uint8)
    return np.concatenate([np.ascontiguousarray(a, "<f4").view(np.uint8) for a in arrays])
