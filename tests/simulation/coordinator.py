"""The coordinator's shell, simulated: what `service` and `execution` do around the real `Run`.

The replica's thread is a queue; what it finishes comes back in order, later. What must hold at
every action is checked as it is done, against the undisturbed run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from coordinator.actions import (
    Action,
    Adopt,
    ApplyStep,
    Broadcast,
    Dismiss,
    Finish,
    Follow,
    Report,
    Seed,
    Send,
)
from coordinator.membership import MemberState
from coordinator.run import Run
from protocol.errors import OutOfPlace
from protocol.messages import (
    AveragedBlockGradient,
    AveragedNonBlockGradient,
    Commit,
    EndRun,
    Goodbye,
    Message,
    StateChunk,
    StepApplied,
    Welcome,
)
from protocol.replica import Replica
from tests.simulation.job import COVERAGE, MOST_MICROBATCHES, Job
from tests.simulation.link import LOST, Link
from tests.simulation.worker import SimulatedWorker

EPOCH = 3

Completion = Callable[[], None]


class SimulatedExecution:
    """`coordinator.execution.Execution` without a loop; see the module's text.

    Attributes:
        skips: For each committed step, whether it was skipped.
        excused: Workers whose replica was spoilt by the schedule, for a halt to name.
        outcome: Set when the run is over and its workers were told.
    """

    def __init__(
        self, run: Run, job: Job, sessions: dict[str, Link], excused: set[str], rng: Random
    ) -> None:
        self.run = run
        self.job = job
        self.skips: tuple[bool, ...] = ()
        self.flavour = 0
        self.excused = excused
        self.outcome: Finish | None = None
        self.ended = False
        self.state_known = False
        self.halts = 0
        self.keeper: deque[Callable[[], Completion]] = deque()
        self.completions: deque[Completion] = deque()
        self._sessions = sessions
        self._rng = rng
        self._replica: Replica | None = None
        self._applied = 0
        self._followers: set[str] = set()
        self._tail: list[tuple[Message, Any]] = []
        self._answered: dict[str, int] = {}
        self._view = 0
        self._state_complete = False

    # Events.

    def invite(self, name: str) -> None:
        self.do(self.run.invite(name))

    def receive(self, name: str, message: Message, body: Any) -> None:
        if isinstance(message, StateChunk):
            self._state_chunk(message, body)
            return
        if isinstance(message, StepApplied) and name in self.run.members:
            self._answered[name] = message.step
        self.do(self.run.receive(name, message, body))
        assert self.run.members.view >= self._view
        self._view = self.run.members.view

    def lost(self, name: str) -> None:
        self._followers.discard(name)
        self._answered.pop(name, None)
        self.do(self.run.lost(name, "the connection is over"))

    def work(self) -> None:
        """One job of the replica's thread."""
        self.completions.append(self.keeper.popleft()())

    # Actions.

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._send(action.worker, action.message, action.body)
                case Broadcast():
                    self._broadcast(action)
                case Report():
                    self._report(action)
                case ApplyStep():
                    self.keeper.append(lambda action=action: self._apply(action))  # type: ignore[misc]
                case Follow():
                    self._followers.add(action.worker)
                case Seed():
                    self._followers.discard(action.worker)
                    self._start_seed(action.worker)
                case Adopt():
                    self._replica = Replica(action.manifest.blocks, self.run.spec.optimizer)
                case Dismiss():
                    self._dismiss(action)
                case Finish():
                    assert self.outcome is None, "a run ends once"
                    self.outcome = action
                    self.keeper.append(lambda: self._finish)

    def _send(self, name: str, message: Message, body: Any = None) -> None:
        link = self._sessions.get(name)
        if link is not None:
            link.send_to_worker(message, body)

    def _broadcast(self, action: Broadcast) -> None:
        message = action.message
        if isinstance(message, Commit):
            self._check_commit(message)
        if isinstance(message, AveragedBlockGradient | AveragedNonBlockGradient):
            assert action.body is not None
            self._check_coverage(message, action.body)
        for name in sorted(self._followers):
            self._send(name, message, action.body)
        if isinstance(message, AveragedBlockGradient | AveragedNonBlockGradient | Commit):
            self._tail.append((message, action.body))

    def _report(self, action: Report) -> None:
        if action.event == "halted":
            self.halts += 1
            self._check_halt(str(action.fields["reason"]))
        if action.event == "evaluated":
            replica = self.job.undisturbed(self.skips, self.flavour).replica
            assert action.fields["ratio"] == self.job.figure(replica)

    def _apply(self, action: ApplyStep) -> Completion:
        assert self._replica is not None
        if action.scalars is None:
            self._replica.skip()
        else:
            self._replica.apply(action.averages, action.scalars)
        step, digest = self._replica.step, self._replica.state_digest()
        expected = self.job.undisturbed(self.skips[:step], self.flavour)
        assert digest == expected.state_digest, f"the state after {step} steps is another"

        def told() -> None:
            self._applied = step
            self._tail = [item for item in self._tail if _step_of(item[0]) >= step]
            self.do(self.run.replica_applied(step, digest))

        return told

    def _start_seed(self, name: str) -> None:
        link = self._sessions.get(name)

        def snapshot() -> Completion:
            assert self._replica is not None
            copy = self._replica.copy()
            return lambda: self._seed(link, copy)

        self.keeper.append(snapshot)

    def _seed(self, link: Link | None, snapshot: Replica) -> None:
        if link is None or link.closed or self.outcome is not None:
            return
        blocks = self.job.blocks
        pieces = [(p, c) for p in snapshot.parts() for c in range(blocks[p.block].chunks)]
        for index, (part, chunk) in enumerate(pieces):
            message = StateChunk(
                run_id=self.run.run_id, kind=part.kind, block=part.block, chunk=chunk,
                step=snapshot.step, optimizer_step=snapshot.optimizer_step,
                last=index == len(pieces) - 1,
            )  # fmt: skip
            link.send_to_worker(message, part.values[blocks[part.block].chunk_slice(chunk)])
        for broadcast, body in self.missed(snapshot.step):
            link.send_to_worker(broadcast, body)
        self._followers.add(link.name)

    def missed(self, step: int) -> list[tuple[Message, Any]]:
        """What was broadcast since the snapshot."""
        return [item for item in self._tail if _step_of(item[0]) >= step]

    def _state_chunk(self, message: StateChunk, body: Any) -> None:
        if message.run_id != self.run.run_id or self._state_complete:
            return
        if self._replica is None:
            raise OutOfPlace("StateChunk was not asked for")
        assert message.kind == "parameters"
        piece = self.job.blocks[message.block].chunk_slice(message.chunk)
        self._replica.parameters[message.block][piece] = body
        if message.last:
            self._state_complete = True
            self.keeper.append(self._load)

    def _load(self) -> Completion:
        assert self._replica is not None
        digest = self._replica.state_digest()
        digests = [self.job.undisturbed((), flavour).state_digest for flavour in (0, 1)]
        assert digest in digests
        self.flavour, self.state_known = digests.index(digest), True
        return lambda: self.do(self.run.replica_loaded(digest))

    def _dismiss(self, action: Dismiss) -> None:
        self._followers.discard(action.worker)
        link = self._sessions.get(action.worker)
        if link is not None:
            goodbye = Goodbye(reason=action.reason, retry=False, exit_code=int(action.exit_code))
            link.close_at_coordinator(self._rng, goodbye)

    def _finish(self) -> None:
        assert self.outcome is not None
        if self.state_known and self.outcome.outcome != "failed":
            assert self._replica is not None
            expected = self.job.undisturbed(self.skips, self.flavour).replica
            assert self._replica.weights_digest() == expected.weights_digest()
            assert self.run.step == self._replica.step == len(self.skips)
        message = EndRun(run_id=self.run.run_id, reason=self.outcome.reason[:400])
        for member in self.run.members:
            self._send(member.name, message)
        self.ended = True

    # What must hold.

    def _check_commit(self, commit: Commit) -> None:
        step, skipped = len(self.skips), commit.scalars is None
        assert (commit.epoch, commit.step) == (EPOCH, step)
        self.skips = (*self.skips, skipped)
        expected = self.job.undisturbed(self.skips, self.flavour)
        assert commit.scalars == expected.scalars
        assert commit.averages_digest == expected.averages_digest
        assert skipped or commit.loss == expected.loss
        if step == 0:
            return
        assert self._applied == step, "the replica has not agreed on the step before"
        for member in self.run.members:
            if member.state in (MemberState.ACTIVE, MemberState.DRAINING):
                assert self._answered.get(member.name) == step, "a commit before agreement"

    def _check_coverage(
        self, message: AveragedBlockGradient | AveragedNonBlockGradient, values: Any
    ) -> None:
        """Every microbatch is in the sum exactly once."""
        if message.block != COVERAGE:
            return
        step = len(self.skips)
        total = self.job.total_weight(step)
        expected = np.zeros(MOST_MICROBATCHES, np.float32)
        if total:
            expected[: self.job.order.microbatch_count(step)] = np.float32(1 / total)
        piece = self.job.blocks[COVERAGE].chunk_slice(message.chunk)
        assert values.tolist() == expected[piece].tolist(), "a microbatch lost or doubled"

    def _check_halt(self, reason: str) -> None:
        """The schedule made a cause for it, and the reason names it."""
        causes = ("operator", "non-finite gradient in block", "non-finite loss")
        named = [name for name in self.excused if repr(name) in reason]
        assert named or any(cause in reason for cause in causes), f"no cause for: {reason}"


class SimulatedService:
    """`coordinator.service.Service` without a loop: members, and runs one after the other."""

    def __init__(
        self, jobs: dict[str, Job], expect_workers: int, excused: set[str], rng: Random
    ) -> None:
        self.sessions: dict[str, Link] = {}
        self.current: SimulatedExecution | None = None
        self.finished: list[SimulatedExecution] = []
        self._waiting = list(jobs.items())
        self._expect_workers = expect_workers
        self._excused = excused
        self._rng = rng
        self._start_next()

    def join(self, worker: SimulatedWorker) -> Link:
        """A handshake: the worker gets a name, its old connection is forgotten."""
        for other in list(self.sessions.values()):
            if other.worker is worker:
                other.close_at_coordinator(self._rng, None)
                self._forget(other)
        wanted = f"worker-{worker.instance}"
        link = Link(worker, wanted)
        welcome = Welcome(
            worker=wanted, epoch=EPOCH, heartbeat_interval_ms=1000, liveness_timeout_ms=8000
        )
        link.send_to_worker(welcome)
        self.sessions[wanted] = link
        if self.current is not None:
            self.current.invite(wanted)
        return link

    def receive(self, link: Link) -> None:
        """The oldest message of a connection."""
        item = link.to_coordinator.popleft()
        if item is LOST:
            link.closed = True
            self._forget(link)
            return
        message, body = item
        if self.current is not None and self.sessions.get(link.name) is link:
            received = body if body is None or isinstance(body, bytes) else np.array(body, "<f4")
            self.current.receive(link.name, message, received)
        self.settle()

    def silent(self, link: Link) -> None:
        """The worker was silent for too long."""
        link.close_at_coordinator(self._rng, None)

    def complete(self) -> None:
        """The oldest thing that the replica's thread has finished."""
        assert self.current is not None
        self.current.completions.popleft()()
        self.settle()

    def _forget(self, link: Link) -> None:
        if self.sessions.get(link.name) is link:
            del self.sessions[link.name]
            if self.current is not None:
                self.current.lost(link.name)
        self.settle()

    def settle(self) -> None:
        """Go on to the next run once one is over."""
        if self.current is not None and self.current.ended:
            self.finished.append(self.current)
            self.current = None
            self._start_next()

    def _start_next(self) -> None:
        if self._waiting:
            run_id, job = self._waiting.pop(0)
            run = Run(run_id, job.spec, EPOCH, self._expect_workers)
            self.current = SimulatedExecution(run, job, self.sessions, self._excused, self._rng)
            for name in list(self.sessions):
                self.current.invite(name)


def _step_of(message: Message) -> int:
    step: int = message.step  # type: ignore[attr-defined]
    return step
