"""A simulated worker process: the real session, a scripted engine, and the client's duties.

The engine's thread is a queue of jobs, of which one piece at a time is done, as long as it takes;
its results reach the session later, in order, as they do through the event loop. Hashing is a
thread of its own, which the next change of the replica waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from backends.base.accumulate import TreeAccumulator
from backends.base.interface import Loss
from protocol.base.errors import DataError, OutOfPlace
from protocol.exact.replica import Replica, StatePart
from protocol.exact.tree import Node
from protocol.wire.messages import Cancel, GradientPayload, NodeLoss, Welcome
from tests.simulation.clock import Clock, Process
from tests.simulation.job import Job
from tests.simulation.link import LOST, Link
from worker.logic import actions as act
from worker.logic import events
from worker.logic.session import WorkerSession

if TYPE_CHECKING:
    from tests.simulation.ledger import Ledger

Work = Iterator[float]
"""A job in pieces; each says how many milliseconds it takes."""

_HOST_MS: Final = 1.0
"""To apply a step, to hash, to copy."""


@dataclass
class Flaws:
    """What is wrong with a worker."""

    microbatch_ms: float
    pace_ms: float
    """What that is if nothing slows it down."""
    cannot_build: bool = False
    flavour: int = 0
    nonfinite_once: set[tuple[int, int]] = field(default_factory=set)
    """(step, block) of which the next gradient is not finite."""
    flips: set[int] = field(default_factory=set)
    """Steps after which a bit of the replica flips."""
    dies_of_it: bool = False
    """Soon after a bit has flipped."""


@dataclass(frozen=True)
class World:
    """What all workers of a simulation share."""

    clock: Clock
    rng: Random
    ledgers: dict[str, Ledger]
    poison: set[Any]
    may_flip: Callable[[], bool]
    flipped: Callable[[SimulatedWorker], None]
    came_loose: Callable[[SimulatedWorker], None]

    def job(self, run_id: str) -> Job:
        return self.ledgers[run_id].job


class ScriptedEngine:
    """`worker.shell.engine.Engine` without a thread."""

    def __init__(self, worker: SimulatedWorker, world: World, flaws: Flaws) -> None:
        self.spoilt = False
        self._worker = worker
        self._world = world
        self._flaws = flaws
        self._queue: deque[Callable[[], Work]] = deque()
        self._working: Work | None = None
        self._busy = False
        self._emitted: deque[events.Event] = deque()
        self._generation = 0
        self._cancelled: set[tuple[events.StepAttempt, Node]] = set()
        self._job: Job | None = None
        self._replica: Replica | None = None
        self._run_id = ""
        self._whole = True
        self._hash: Callable[[], None] | None = None

    @property
    def step(self) -> int:
        """Of the replica."""
        return self._replica.step if self._replica is not None else 0

    def cancel(self) -> None:
        self._generation += 1
        self._cancelled.clear()

    def do(self, action: act.Action) -> None:
        """What `Client._do_one` asks of the device."""
        generation = self._generation
        match action:
            case act.Build():
                self._put(lambda: self._build(action))
            case act.Compute():
                self._put(lambda: self._compute(generation, action))
            case act.CancelWork():
                self.cancel()
            case act.CancelNode():
                self._cancelled.add((action.place, action.node))
            case act.Apply():
                self._put(lambda: self._apply(action))
            case act.LoadChunk():
                self._put(lambda: self._load_chunk(action))
            case act.Restore():
                self._put(lambda: self._restore(action))
            case act.Evaluate():
                self._put(lambda: self._evaluate(generation, action))
            case act.CopyState():
                self._put(self._copy_state)
            case _:
                raise AssertionError(f"not for the engine: {action}")

    def _put(self, job: Callable[[], Work]) -> None:
        self._queue.append(job)
        if not self._busy:
            self._busy = True
            self._later(0.0, self._work)

    def _later(self, delay_ms: float, act: Callable[[], None]) -> None:
        self._world.clock.after(delay_ms, act, self._worker)

    def _work(self) -> None:
        """The piece in hand is done; the next takes as long as it says."""
        while True:
            if self._working is None:
                if not self._queue:
                    self._busy = False
                    return
                self._working = self._queue.popleft()()
            piece_ms = next(self._working, None)
            if piece_ms is not None:
                self._later(piece_ms, self._work)
                return
            self._working = None

    def _emit(self, event: events.Event) -> None:
        self._emitted.append(event)
        self._later(0.2 * self._world.rng.random(), self._taken)

    def _taken(self) -> None:
        """The oldest result reaches the session."""
        self._worker.take_result(self._emitted.popleft())

    def _finish_hash(self) -> None:
        if self._hash is not None:
            work, self._hash = self._hash, None
            work()

    def _build(self, action: act.Build) -> Work:
        run_id, job = action.run_id, self._world.job(action.run_id)
        if self._job is not job:
            yield self._world.rng.choice((5.0, 50.0, 300.0))
        if self._flaws.cannot_build:
            self._emit(events.BuildFailed(run_id, DataError("scripted to fail")))
            return
        self._finish_hash()
        if not (action.keep and self._run_id == run_id and self._whole):
            self._replica = job.replica(self._flaws.flavour)
            self._run_id, self._whole, self.spoilt = run_id, True, False
        self._job = job
        assert self._replica is not None
        self._emit(
            events.Built(
                run_id=run_id, manifest=job.manifest,
                initial_digest=job.undisturbed((), self._flaws.flavour).state_digest,
                step=self._replica.step, state_digest=self._replica.state_digest(),
                signature=str(self._flaws.flavour) * 64, signature_text="",
                backend="scripted", device="simulated",
            )
        )  # fmt: skip

    def _compute(self, generation: int, action: act.Compute) -> Work:
        job, replica = self._built()
        place, node = action.place, action.node
        if self._is_cancelled(generation, place, node):
            return
        assert replica.step == place.step, "a node is computed with the weights of its step"
        assert job.order.microbatch_count(place.step) == action.microbatches
        sums = TreeAccumulator(node, len(job.blocks))
        weight = job.node_weight(place.step, node)
        loss: Loss | None = None
        for leaf in range(node.lo, node.hi):
            yield self._flaws.microbatch_ms
            if self._is_cancelled(generation, place, node):
                return
            for block in reversed(range(len(job.blocks))):
                gradient = job.gradient(replica.parameters, place.step, leaf, block)
                if self._spoilt(place.step, leaf, block):
                    gradient[0] = np.nan
                total = sums.add(leaf, block, gradient)
                if total is not None:
                    self._emit(events.BlockSum(place, node, block, total, weight))
                    if self._world.rng.random() < 0.3:
                        yield self._flaws.microbatch_ms / 8
                    if self._is_cancelled(generation, place, node):
                        return
            loss_sum = job.loss(replica.parameters, place.step, leaf)
            if self._spoilt(place.step, leaf, -1):
                loss_sum = float("inf")
            loss = sums.add_loss(leaf, loss_sum, job.weight(place.step, leaf))
        assert loss is not None
        elapsed_ms = node.leaves * self._flaws.microbatch_ms
        self._emit(events.NodeDone(place, node, loss, elapsed_ms))

    def _is_cancelled(self, generation: int, place: events.StepAttempt, node: Node) -> bool:
        return generation != self._generation or (place, node) in self._cancelled

    def _spoilt(self, step: int, leaf: int, block: int) -> bool:
        if (step, leaf, block) in self._world.poison:
            return True
        if (step, block) in self._flaws.nonfinite_once:
            self._flaws.nonfinite_once.discard((step, block))
            return True
        return False

    def _apply(self, action: act.Apply) -> Work:
        _, replica = self._built()
        self._finish_hash()
        yield _HOST_MS
        if action.scalars is None:
            replica.skip()
        else:
            replica.apply(action.averages, action.scalars)
        self._flip(replica)
        self._start_hash(replica)

    def _restore(self, action: act.Restore) -> Work:
        _, replica = self._built()
        replica.restore(action.step, action.optimizer_step)
        self._whole, self.spoilt = True, False
        self._flip(replica)
        self._start_hash(replica)
        yield from ()

    def _flip(self, replica: Replica) -> None:
        if replica.step in self._flaws.flips and self._world.may_flip():
            self._flaws.flips.discard(replica.step)
            replica.parameters[1].view(np.uint32)[0] ^= 1 << 21
            self.spoilt = True
            self._world.flipped(self._worker)

    def _start_hash(self, replica: Replica) -> None:
        def work() -> None:
            digest = replica.state_digest()
            if not self.spoilt:
                self._world.ledgers[self._run_id].worker_is(replica.step, digest)
            self._emit(events.Applied(replica.step, digest))

        self._hash = work

        def done() -> None:
            if self._hash is work:
                self._finish_hash()

        self._later(2 * _HOST_MS * self._world.rng.random(), done)

    def _load_chunk(self, action: act.LoadChunk) -> Work:
        job, replica = self._built()
        self._finish_hash()
        self._whole = False
        piece = job.blocks[action.block].chunk_slice(action.chunk)
        for part in replica.parts():
            if part.kind == action.kind and part.block == action.block:
                part.values[piece] = action.values
        yield from ()

    def _evaluate(self, generation: int, action: act.Evaluate) -> Work:
        if generation != self._generation:
            return
        job, replica = self._built()
        assert replica.step == action.step, "evaluation with the weights of its step"
        yield self._flaws.microbatch_ms
        sums = job.sums(replica.parameters, action.part)
        self._emit(events.PartEvaluated(action.step, action.part, sums))

    def _copy_state(self) -> Work:
        _, replica = self._built()
        yield _HOST_MS
        parts = [StatePart(p.kind, p.block, p.values.copy()) for p in replica.parts()]
        self._emit(events.StateCopied(parts, replica.step, replica.optimizer_step))

    def _built(self) -> tuple[Job, Replica]:
        assert self._job is not None
        assert self._replica is not None
        return self._job, self._replica


class SimulatedWorker(Process):
    """One process: it connects again and again until it is told to leave.

    Attributes:
        link: The connection, as this side sees it.
        side: Of a split network.
    """

    def __init__(self, instance: int, world: World, flaws: Flaws) -> None:
        super().__init__()
        self.instance = instance
        self.flaws = flaws
        self.engine = ScriptedEngine(self, world, flaws)
        self.session: WorkerSession | None = None
        self.link: Link | None = None
        self.side = 0
        self.draining = False
        self._came_loose = world.came_loose
        self._epochs: dict[str, int] = {}
        self._cancelled: set[tuple[int, int, int, Node]] = set()
        self._newest: dict[str, int] = {}

    def connect(self, link: Link) -> None:
        self.link, self.session = link, WorkerSession(self._epochs)

    def receive(self, link: Link, item: Any) -> None:
        """The oldest message of a connection."""
        if self.link is not link:
            return
        assert self.session is not None
        if item is LOST:
            self._disconnected()
            return
        message, body = item
        try:
            if isinstance(message, Welcome):
                self._do(self.session.welcome(message))
                if self.draining:
                    self._do(self.session.drain())
            else:
                raw = None if body is None else _received(body)
                self._do(self.session.receive(message, raw))
                if isinstance(message, Cancel):
                    place = (message.epoch, message.step, message.attempt)
                    self._cancelled.update((*place, Node(*node)) for node in message.nodes)
        except OutOfPlace as error:
            if "an older coordinator must not go on" not in str(error):
                raise
            link.close_at_worker()
            self._disconnected()

    def take_result(self, event: events.Event) -> None:
        """A result of the engine; without a session it is nobody's."""
        if self.session is not None:
            self._do(self.session.result(event))

    def silent(self, link: Link) -> None:
        """Nothing was heard of the coordinator for too long."""
        if self.link is link:
            link.close_at_worker(orderly=False)
            self._disconnected()

    def drain(self) -> None:
        """SIGTERM."""
        self.draining = True
        if self.session is not None and self.session.name:
            self._do(self.session.drain())
        else:
            if self.link is not None:
                self.link.close_at_worker()
            self._die()

    def kill(self) -> None:
        """SIGKILL: what is on its way may or may not arrive."""
        if self.link is not None:
            self.link.cut()
        self._die()

    def _die(self) -> None:
        self.alive, self.session, self.link = False, None, None

    def _disconnected(self) -> None:
        self.engine.cancel()
        self.session = self.link = None
        if self.draining:
            self._die()
        else:
            self._came_loose(self)

    def _do(self, actions: list[act.Action]) -> None:
        for action in actions:
            match action:
                case act.Transmit():
                    if self.link is not None:
                        self._check_sent(action.message)
                        self.link.send_to_coordinator(action.message, action.body)
                case act.Expect() | act.Tell() | act.OpenDevice():
                    pass
                case act.Leave():
                    assert not action.retry
                    assert self.link is not None
                    self.link.close_at_worker()
                    self._die()
                case act.Build():
                    assert self.session is not None
                    newest = self._newest.get(action.run_id, 0)
                    assert self.session.epoch >= newest, "an older coordinator is obeyed"
                    self._newest[action.run_id] = self.session.epoch
                    self._cancelled.clear()
                    self.engine.do(action)
                case _:
                    self.engine.do(action)

    def _check_sent(self, message: Any) -> None:
        """Of a node that it was told to leave out nothing is sent."""
        if isinstance(message, GradientPayload | NodeLoss):
            place = (message.epoch, message.step, message.attempt, message.node)
            assert place not in self._cancelled, "a cancelled node is sent"


def _received(body: Any) -> Any:
    """The bytes as they lie in the receiver's memory."""
    if isinstance(body, bytes):
        return np.frombuffer(body, np.uint8)
    return np.array(body, "<f4").view(np.uint8)
