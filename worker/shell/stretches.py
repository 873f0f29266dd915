"""What a worker computes of a run with replicas: one stretch after the other.

A stretch begins at the run's parameters and, where replicas have a state of their own (moments
that are carried, what topk left for later), at that of its replica; it may go on from a boundary
that another machine has reached, or from where this one was interrupted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from backends.base.inner_steps import InnerPlace, InnerState, InnerSteps, inner_steps
from backends.base.interface import Array, Batch, Loss, Program
from protocol.base.errors import DataError
from protocol.exact.absent import mark_absent
from protocol.exact.codecs import projected
from protocol.exact.replica import Replica, are_counts
from protocol.exact.stretches import StretchOrder
from protocol.exact.tree import Node
from protocol.exact.update import counts_updates, moment_count
from protocol.spec.manifest import Block
from protocol.spec.run_spec import RunSpec
from worker.logic.events import (
    BlockSum,
    BoundaryReached,
    Event,
    MicrobatchRows,
    NodeDone,
    StepAttempt,
    StretchStep,
)
from worker.shell.samples_named import samples_named

_TOLD_EVERY_S: Final = 0.5
_FEEDBACK: Final = np.float32(0.95)
"""How much of what topk left is still there a round later (SparseLoCo, arXiv:2508.15706)."""
_LOSS: Final = struct.Struct("<d")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class OwnState:
    """What a replica has of its own at the start of a round.

    Attributes:
        moments: Of its inner optimizer, where they are carried; else none.
        rest: What topk has not sent so far, one flat array per block; else none.
        missed: The updates that each tensor has missed, by block, where moments are carried and
            they count; else none.
    """

    moments: list[list[Array]]
    rest: list[Array]
    missed: list[Array] = field(default_factory=list)

    def to_bytes(self) -> Bytes:
        """What travels of it."""
        moments = (a for moment in self.moments for a in moment)
        return _joined([*moments, *self.rest, *self.missed])


@dataclass(frozen=True, slots=True)
class _Reached:
    """A replica in the middle of a stretch: `inner` steps taken, the sum of their mean losses."""

    inner: int
    losses: float
    state: InnerState

    def to_bytes(self) -> Bytes:
        moments = (a for moment in self.state.moments for a in moment)
        arrays = [*self.state.parameters, *moments, *self.state.missed]
        head = np.frombuffer(_LOSS.pack(self.losses), np.uint8)
        return np.concatenate([head, _joined(arrays)])


class Stretches:
    """The stretches of one run on one device.

    Args:
        spec: The run's.
        blocks: Of the manifest.
        program: The compiled task.
        order: Says what an inner step reads.
        batch: Makes a microbatch of sample numbers.
    """

    def __init__(
        self,
        spec: RunSpec,
        blocks: tuple[Block, ...],
        program: Program,
        order: StretchOrder,
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
        self._own: dict[int, tuple[int, OwnState]] = {}
        """By replica, with the round at whose start it is that."""
        self._left: dict[int, tuple[StepAttempt, OwnState]] = {}
        """By stretches of a round that is not committed: by replica, with the attempt."""
        self._reached: dict[tuple[StepAttempt, int], _Reached] = {}
        self._asked: set[tuple[StepAttempt, int]] = set()

    def forget(self) -> None:
        """The parameters are others than they were, or a round was skipped: nothing that was begun
        counts any more, nor what its stretches would have left to the next."""
        self._own.clear()
        self.round_over()

    def begun_again(self) -> None:
        """A coordinator that was restarted counts attempts anew: none of before is its own."""
        self._left.clear()

    def round_over(self, committed: StepAttempt | None = None) -> None:
        """What was begun of a round is of no use in the next; what its stretches have left is, if
        theirs is the attempt that was committed: in another a device may have failed."""
        for replica, (place, own) in self._left.items():
            if place == committed:
                self._own[replica] = (place.step + 1, own)
        self._left.clear()
        self._reached.clear()
        self._asked.clear()

    def lacks(self, place: StepAttempt, replica: int) -> bool:
        """Whether the coordinator is to be asked first for what is known of this stretch."""
        if not self.has_own(place.step, replica):  # it may have been at the end of it before
            return True
        key = (place, replica)
        known = key in self._reached or key in self._asked
        return self._replicas.boundary_every > 0 and not known

    def has_own(self, step: int, replica: int) -> bool:
        """Whether the replica's own state at the start of this round is here, if it has any."""
        if not self._replicas.carries or step == 0:
            return True
        return self._own.get(replica, (-1, None))[0] == step

    def given(
        self, place: StepAttempt, replica: int, inner: int, content: Bytes, *, own: bool
    ) -> None:
        """The coordinator's answer: own state if it has one and was asked for it, then a boundary.

        Raises:
            DataError: It has not the length that this takes.
        """
        arrays = _Reader(content, self._blocks)
        if own:
            self._own[replica] = (place.step, self._read_own(arrays))
        if inner:
            losses = arrays.number()
            moments = moment_count(self._spec.optimizer)
            state = InnerState(
                arrays.blocks(),
                [arrays.blocks() for _ in range(moments)],
                arrays.counts() if arrays.left else [],
            )
            self._reached[place, replica] = _Reached(inner, losses, state)
        arrays.end()
        self._asked.add((place, replica))

    def _read_own(self, arrays: _Reader) -> OwnState:
        carried = self._replicas.inner_state == "carry"
        moments = moment_count(self._spec.optimizer) if carried else 0
        rest = self._replicas.codec == "topk"
        return OwnState(
            [arrays.blocks() for _ in range(moments)],
            arrays.blocks() if rest else [],
            arrays.counts() if self._carries_counts else [],
        )

    @property
    def _carries_counts(self) -> bool:
        return self._replicas.inner_state == "carry" and counts_updates(self._spec.optimizer)

    def compute(
        self, place: StepAttempt, node: Node, run: Replica, now_s: Callable[[], float]
    ) -> Generator[Event | None]:
        """One stretch, to its end or until it is closed.

        Args:
            place: The round, and which attempt at it.
            node: The replica, as a leaf.
            run: The run's state at the round's start.
            now_s: A clock.

        Yields:
            What the coordinator is to hear; None where the device has computed.
        """
        replica, start, since_s = node.lo, run.parameters, now_s()
        taken = run.optimizer_step * self._order.inner_steps  # by moments that are carried
        told_s, reached = since_s, self._begin(place, replica, start)
        carried = taken if self._replicas.inner_state == "carry" else 0
        _check_counts(replica, reached.state.missed, carried + reached.inner)
        steps, losses, inner = self._inner(), reached.losses, reached.inner
        steps.begin(reached.state)
        try:
            while inner < self._order.inner_steps:
                loss = yield from self._step(steps, place.step, replica, inner, taken)
                losses += loss.loss_sum / loss.weight if loss.weight else 0.0
                inner += 1
                if inner == 1 or now_s() - told_s > _TOLD_EVERY_S:
                    told_s = now_s()
                    yield StretchStep(place, node, inner)
                if self._is_boundary(inner):
                    at = _Reached(inner, losses, steps.state())
                    yield BoundaryReached(place, node, inner, at.to_bytes())
        except GeneratorExit:
            # Most interruptions are no end: the same stretch is given out again.
            self._reached[place, replica] = _Reached(inner, losses, steps.state())
            raise
        self._reached.pop((place, replica), None)
        yield from self._end(place, node, start, steps)
        mean = losses / self._order.inner_steps
        # As if all of it had been computed here: that is what the next share follows.
        share = (inner - reached.inner) / inner
        yield NodeDone(place, node, Loss(mean, 1.0), (now_s() - since_s) * 1e3 / share)

    def _begin(self, place: StepAttempt, replica: int, start: Sequence[Array]) -> _Reached:
        reached = self._reached.get((place, replica))
        if reached is not None:
            return reached
        own = self._own_at(place.step, replica)
        moments = own.moments or self._zeros_of_moments()
        return _Reached(0, 0.0, InnerState(list(start), moments, own.missed))

    def _own_at(self, step: int, replica: int) -> OwnState:
        """At the start of this round; at the very start there is nothing but zeros."""
        if not self._replicas.carries or step == 0:
            return OwnState([], [])
        if not self.has_own(step, replica):
            raise DataError(f"expected the own state of replica {replica} in round {step}")
        return self._own[replica][1]

    def _zeros_of_moments(self) -> list[list[Array]]:
        return [self._zeros() for _ in range(moment_count(self._spec.optimizer))]

    def _zeros(self) -> list[Array]:
        return [np.zeros(block.elements, np.float32) for block in self._blocks]

    def _inner(self) -> InnerSteps:
        if self._steps is None:
            self._steps = inner_steps(self._program, self._blocks, self._spec.optimizer)
        return self._steps

    def _is_boundary(self, inner: int) -> bool:
        every = self._replicas.boundary_every
        return every > 0 and inner % every == 0 and inner < self._order.inner_steps

    def _step(
        self, steps: InnerSteps, round_: int, replica: int, inner: int, taken: int
    ) -> Generator[None, None, Loss]:
        samples = self._order.microbatches(round_, replica, inner)
        batches = [self._batch(part) for part in samples]
        leaves = list(zip(batches, self._order.seeds(round_, replica, inner), strict=True))
        carried = self._replicas.inner_state == "carry"
        update = inner + 1 + (taken if carried else 0)
        step = self._order.global_step(round_, inner)
        with samples_named(round_, batches, samples):
            return (yield from steps.step(leaves, InnerPlace(update, step, self._order.total)))

    def _end(
        self, place: StepAttempt, node: Node, start: Sequence[Array], steps: InnerSteps
    ) -> Generator[Event]:
        """The difference, start minus end, as its codec has it; and the replica's own state."""
        replica, carried = node.lo, self._replicas.inner_state == "carry"
        state = steps.state() if carried else InnerState(steps.parameters(), [])
        rest: list[Array] = []
        differences = self._differences(place.step, replica, start, state.parameters, rest)
        if self._replicas.carries:
            missed = state.missed or [np.zeros(len(b.tensors), np.float32) for b in self._blocks]
            own = OwnState(
                state.moments if carried else [], rest, missed if self._carries_counts else []
            )
            self._left[replica] = (place, own)
            yield MicrobatchRows(place, node, replica, own.to_bytes().reshape(1, -1))
        for number in reversed(range(len(self._blocks))):
            yield BlockSum(place, node, number, differences[number], 1.0)

    def _differences(
        self, step: int, replica: int, start: Sequence[Array], end: Sequence[Array],
        rest: list[Array],
    ) -> list[Array]:  # fmt: skip
        before = self._rest_before(step, replica)
        found = []
        with np.errstate(all="ignore"):
            for number, block in enumerate(self._blocks):
                difference = np.subtract(start[number], end[number])
                if before:
                    difference += before[number] * _FEEDBACK
                sent = difference.copy()
                for chunk in range(block.chunks):
                    piece = block.chunk_slice(chunk)
                    sent[piece] = projected(sent[piece].copy(), self._replicas.codec)
                mark_absent(block, sent)  # a difference is there of every tensor
                found.append(sent)
                if before:
                    rest.append(difference - sent)
        return found

    def _rest_before(self, step: int, replica: int) -> list[Array]:
        """What topk has left for this round."""
        if self._replicas.codec != "topk":
            return []
        return self._own_at(step, replica).rest or self._zeros()


def _check_counts(replica: int, missed: Sequence[Array], updates: int) -> None:
    if not all(are_counts(counts, updates) for counts in missed):
        raise DataError(
            f"replica {replica}: expected missed updates, whole numbers up to {updates}"
        )


class _Reader:
    """Takes what was joined apart.

    Args:
        content: All of it.
        blocks: Say how long each array is.
    """

    def __init__(self, content: Bytes, blocks: tuple[Block, ...]) -> None:
        self._content = content
        self._blocks = blocks
        self._at = 0

    def number(self) -> float:
        return float(_LOSS.unpack(self._take(_LOSS.size).tobytes())[0])

    def blocks(self) -> list[Array]:
        """One flat array for each block."""
        return [
            np.frombuffer(self._take(4 * block.elements).tobytes(), "<f4").copy()
            for block in self._blocks
        ]

    @property
    def left(self) -> int:
        """Bytes that are still to be read."""
        return len(self._content) - self._at

    def counts(self) -> list[Array]:
        """Missed updates of each block's tensors."""
        return [
            np.frombuffer(self._take(4 * len(block.tensors)).tobytes(), "<f4").copy()
            for block in self._blocks
        ]

    def end(self) -> None:
        if self._at != len(self._content):
            raise DataError(
                f"expected {self._at} bytes of a replica's state, got {len(self._content)}"
            )

    def _take(self, length: int) -> Bytes:
        piece = self._content[self._at : self._at + length]
        self._at += length
        if len(piece) != length:
            raise DataError(
                f"expected at least {self._at} bytes of a replica's state, got {len(self._content)}"
            )
        return piece


def _joined(arrays: Sequence[Array]) -> Bytes:
    if not arrays:
        return np.zeros(0, np.uint8)
    return np.concatenate([np.ascontiguousarray(a, "<f4").view(np.uint8) for a in arrays])
