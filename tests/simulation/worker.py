"""A simulated worker process: the real session, a scripted engine, and the client's duties.

The engine's thread is a queue of jobs, of which the schedule runs one small piece at a time; its
results reach the session later, in order, as they do through the event loop. Hashing is a thread
of its own, which the next change of the replica waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from backends.interface import Loss
from protocol.errors import DataError
from protocol.messages import Welcome
from protocol.replica import Replica, StatePart
from protocol.tree import Node
from tests.simulation.job import Job
from tests.simulation.link import LOST, Link
from worker import actions as act
from worker import engine
from worker.accumulate import TreeAccumulator
from worker.session import Session

Work = Iterator[None]


@dataclass
class Flaws:
    """What is wrong with a worker."""

    slowness: float = 1.0
    cannot_build: bool = False
    flavour: int = 0
    nonfinite_once: set[tuple[int, int]] = field(default_factory=set)
    """(step, block) of which the next gradient is not finite."""
    flips: set[int] = field(default_factory=set)
    """Steps after which a bit of the replica flips."""
    dies_of_it: bool = False
    """Soon after a bit has flipped."""


class ScriptedEngine:
    """`worker.engine.Engine` without a thread."""

    def __init__(self, jobs: Callable[[str], Job], flaws: Flaws, poison: set[Any]) -> None:
        self.emitted: deque[engine.Event] = deque()
        self.flipped = False
        self._jobs_by_run = jobs
        self._flaws = flaws
        self._poison = poison
        self._queue: deque[Callable[[], Work]] = deque()
        self._working: Work | None = None
        self._generation = 0
        self._job: Job | None = None
        self._replica: Replica | None = None
        self._hash: Callable[[], None] | None = None

    @property
    def has_work(self) -> bool:
        return self._working is not None or bool(self._queue)

    @property
    def hashes(self) -> bool:
        return self._hash is not None

    def work(self) -> None:
        """One piece of the job in hand."""
        if self._working is None:
            self._working = self._queue.popleft()()
        if next(self._working, self) is self:
            self._working = None

    def finish_hash(self) -> None:
        """The hashing thread is done."""
        if self._hash is not None:
            work, self._hash = self._hash, None
            work()

    def cancel(self) -> None:
        self._generation += 1

    def do(self, action: act.Action) -> None:
        """What `Client._do_one` asks of the device."""
        generation = self._generation
        match action:
            case act.Build():
                self._queue.append(lambda: self._build(action.run_id))
            case act.Compute():
                self._queue.append(lambda: self._compute(generation, action))
            case act.CancelWork():
                self.cancel()
            case act.Apply():
                self._queue.append(lambda: self._apply(action))
            case act.LoadChunk():
                self._queue.append(lambda: self._load_chunk(action))
            case act.Restore():
                self._queue.append(lambda: self._restore(action))
            case act.Evaluate():
                self._queue.append(lambda: self._evaluate(generation, action))
            case act.CopyState():
                self._queue.append(self._copy_state)
            case _:
                raise AssertionError(f"not for the engine: {action}")

    def _build(self, run_id: str) -> Work:
        job = self._jobs_by_run(run_id)
        yield
        yield
        if self._flaws.cannot_build:
            self.emitted.append(engine.BuildFailed(run_id, DataError("scripted to fail")))
            return
        self.finish_hash()
        self._job, self.flipped = job, False
        self._replica = Replica(job.blocks, job.spec.optimizer)
        self._replica.load_parameters(job.initial(self._flaws.flavour))
        signature = str(self._flaws.flavour) * 64
        self.emitted.append(
            engine.Built(
                run_id=run_id, manifest=job.manifest.to_bytes(),
                state_digest=self._replica.state_digest(), signature=signature,
                signature_text="", backend="scripted", device="simulated",
                task=job,  # type: ignore[arg-type] # the session looks at the manifest alone
            )
        )  # fmt: skip

    def _compute(self, generation: int, action: act.Compute) -> Work:
        job, replica = self._built()
        place, node = action.place, action.node
        assert replica.step == place.step, "a node is computed with the weights of its step"
        assert job.order.microbatch_count(place.step) == action.microbatches
        sums = TreeAccumulator(node, len(job.blocks))
        weight = _weight(job, place.step, node)
        loss: Loss | None = None
        for leaf in range(node.lo, node.hi):
            for block in reversed(range(len(job.blocks))):
                yield
                if generation != self._generation:
                    return
                gradient = job.gradient(replica.parameters, place.step, leaf, block)
                if self._spoilt(place.step, leaf, block):
                    gradient[0] = np.nan
                total = sums.add(leaf, block, gradient)
                if total is not None:
                    self.emitted.append(engine.BlockSum(place, node, block, total, weight))
            loss_sum = job.loss(replica.parameters, place.step, leaf)
            if self._spoilt(place.step, leaf, -1):
                loss_sum = float("inf")
            loss = sums.add_loss(leaf, loss_sum, job.weight(place.step, leaf))
        assert loss is not None
        elapsed_ms = node.leaves * self._flaws.slowness
        self.emitted.append(engine.NodeDone(place, node, loss, elapsed_ms))

    def _spoilt(self, step: int, leaf: int, block: int) -> bool:
        if (step, leaf, block) in self._poison:
            return True
        if (step, block) in self._flaws.nonfinite_once:
            self._flaws.nonfinite_once.discard((step, block))
            return True
        return False

    def _apply(self, action: act.Apply) -> Work:
        _, replica = self._built()
        self.finish_hash()
        yield
        if action.scalars is None:
            replica.skip()
        else:
            replica.apply(action.averages, action.scalars)
        self._flip(replica)
        self._start_hash(replica)

    def _restore(self, action: act.Restore) -> Work:
        _, replica = self._built()
        replica.restore(action.step, action.optimizer_step)
        self.flipped = False
        self._flip(replica)
        self._start_hash(replica)
        yield

    def _flip(self, replica: Replica) -> None:
        if replica.step in self._flaws.flips:
            self._flaws.flips.discard(replica.step)
            replica.parameters[1].view(np.uint32)[0] ^= 1 << 21
            self.flipped = True

    def _start_hash(self, replica: Replica) -> None:
        def work() -> None:
            self.emitted.append(engine.Applied(replica.step, replica.state_digest()))

        self._hash = work

    def _load_chunk(self, action: act.LoadChunk) -> Work:
        job, replica = self._built()
        self.finish_hash()
        piece = job.blocks[action.block].chunk_slice(action.chunk)
        for part in replica.parts():
            if part.kind == action.kind and part.block == action.block:
                part.values[piece] = action.values
        yield

    def _evaluate(self, generation: int, action: act.Evaluate) -> Work:
        if generation != self._generation:
            return
        job, replica = self._built()
        assert replica.step == action.step, "evaluation with the weights of its step"
        yield
        sums = job.sums(replica.parameters, action.part)
        self.emitted.append(engine.Evaluated(action.step, action.part, sums))

    def _copy_state(self) -> Work:
        _, replica = self._built()
        yield
        parts = [StatePart(p.kind, p.block, p.values.copy()) for p in replica.parts()]
        self.emitted.append(engine.StateCopied(parts, replica.step, replica.optimizer_step))

    def _built(self) -> tuple[Job, Replica]:
        assert self._job is not None
        assert self._replica is not None
        return self._job, self._replica


class SimulatedWorker:
    """One process: it connects again and again until it is told to leave.

    Attributes:
        link: The connection, as this side sees it.
        alive: Whether the process runs.
    """

    def __init__(
        self, instance: int, jobs: Callable[[str], Job], flaws: Flaws, poison: set[Any]
    ) -> None:
        self.instance = instance
        self.flaws = flaws
        self.engine = ScriptedEngine(jobs, flaws, poison)
        self.session: Session | None = None
        self.link: Link | None = None
        self.alive = True
        self.draining = False
        self._epoch = 0

    def connect(self, link: Link) -> None:
        self.link, self.session = link, Session(self._epoch)

    def receive(self) -> None:
        """The oldest message of the connection."""
        assert self.link is not None
        assert self.session is not None
        item = self.link.to_worker.popleft()
        if item is LOST:
            self._disconnected()
            return
        message, body = item
        raw = None if body is None else _received(body)
        if isinstance(message, Welcome):
            self._do(self.session.welcome(message))
            self._epoch = self.session.epoch
            if self.draining:
                self._do(self.session.drain())
        else:
            self._do(self.session.receive(message, raw))

    def take_result(self) -> None:
        """The oldest result of the engine; without a session it is nobody's."""
        event = self.engine.emitted.popleft()
        if self.session is not None:
            self._do(self.session.result(event))

    def drain(self) -> None:
        """SIGTERM."""
        self.draining = True
        if self.session is not None and self.session.name:
            self._do(self.session.drain())
        else:
            if self.link is not None:
                self.link.close_at_worker()
            self._die()

    def kill(self, rng: Random) -> None:
        """SIGKILL: what is on its way may or may not arrive."""
        if self.link is not None:
            self.link.cut(rng)
        self._die()

    def _die(self) -> None:
        self.alive, self.session, self.link = False, None, None

    def _disconnected(self) -> None:
        self.engine.cancel()
        self.session = self.link = None

    def _do(self, actions: list[act.Action]) -> None:
        for action in actions:
            match action:
                case act.Transmit():
                    if self.link is not None:
                        self.link.send_to_coordinator(action.message, action.body)
                case act.Expect() | act.Tell():
                    pass
                case act.Leave():
                    assert not action.retry
                    assert self.link is not None
                    self.link.close_at_worker()
                    self._die()
                case _:
                    self.engine.do(action)


def _weight(job: Job, step: int, node: Node) -> float:
    weights = TreeAccumulator(node, 0)
    for leaf in range(node.lo, node.hi):
        total = weights.add_loss(leaf, 0.0, job.weight(step, leaf))
    assert total is not None
    return total.weight


def _received(body: Any) -> Any:
    """The bytes as they lie in the receiver's memory."""
    if isinstance(body, bytes):
        return np.frombuffer(body, np.uint8)
    return np.array(body, "<f4").view(np.uint8)
