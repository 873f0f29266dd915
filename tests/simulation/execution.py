"""One run of a simulated coordinator: what `execution` does around the real `Run`.

The threads of replica, log and checkpoints are queues; what they finish comes back later, in
order. What must hold at every action is checked as it is done, against the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from coordinator.run.actions import (
    Action,
    Adopt,
    ApplyStep,
    Broadcast,
    DigestReplica,
    Dismiss,
    FillReplica,
    Finish,
    Follow,
    MakeCheckpoint,
    Persist,
    Remember,
    Replay,
    Report,
    Seed,
    Send,
)
from coordinator.run.facts import (
    HeldOutMeasured,
    NodesSpeculated,
    RedoneOtherwise,
    RunHalted,
    StepCommitted,
    StepRestarted,
)
from coordinator.run.restart import CommitRecord, Terms
from coordinator.run.run import Run, RunPhase
from coordinator.storage.log_records import ChunkPlace
from protocol.base.errors import ExitCode, RunFailed, SamestepError, StorageFailed
from protocol.exact.replica import Replica
from protocol.wire.messages import (
    AveragedBlockGradient,
    AveragedGradient,
    AveragedNonBlockGradient,
    Commit,
    EndRun,
    Goodbye,
    Message,
    NodeLoss,
    StateChunk,
    StepApplied,
)
from tests.simulation.disk import Averages, Found, Log, MemoryLog
from tests.simulation.job import COVERAGE
from tests.simulation.ledger import Ledger
from tests.simulation.link import Link
from tests.simulation.thread import Failed, Halved, Then, Thread

if TYPE_CHECKING:
    from tests.simulation.coordinator import SimulatedCoordinator

_KEPT: Final = (AveragedBlockGradient, AveragedNonBlockGradient, Commit)


class SimulatedExecution:
    """`coordinator.service.execution.Execution` without a loop; see the module's text.

    Attributes:
        outcome: Set when the run is over; `ended` once its workers were told.
    """

    def __init__(
        self, coordinator: SimulatedCoordinator, ledger: Ledger, epoch: int, found: Found | None
    ) -> None:
        job = ledger.job
        self.ledger = ledger
        self.job = job
        self.outcome: Finish | None = None
        self.run = Run(
            ledger.run_id, job.spec, epoch, coordinator.expect_workers,
            found.resumption if found is not None else None,
        )  # fmt: skip
        self.pace = coordinator.pace
        self._coordinator = coordinator
        self._directory = ledger.directory
        self._sessions = coordinator.sessions
        self._threads = {
            name: Thread(coordinator.clock, coordinator.rng, coordinator)
            for name in ("log", "checkpoint", "keeper")
        }
        self._replica: Replica | None = None
        self._applied = self.run.step
        self._since = self.run.step
        self._followers: set[str] = set()
        self._tail: list[tuple[Message, Any]] = []
        self._answered: dict[str, int] = {}
        self._view = 0
        self._found = found
        self._log: Log | None = None
        self._lost: dict[tuple[int, int], SamestepError] = {}
        self._terms: Terms | None = None
        self._speculated = False
        self._over = False
        if found is not None:
            self._take_up(found)

    def _take_up(self, found: Found) -> None:
        def caught_up(_: object) -> None:
            assert self._replica is not None
            digest = self.ledger.replica_is(self._replica)
            self._applied = self._replica.step
            self.do(self.run.replica_applied(self._applied, digest))

        def catch_up() -> None:
            self._replica = found.replica()

        self._in("log", 0, self._opened)
        rng = self._coordinator.rng
        self._in("keeper", rng.choice((10.0, 300.0, 3000.0)), catch_up, caught_up)
        self.do(self.run.resume())

    def _in(
        self,
        thread: str,
        up_to_ms: float,
        work: Callable[[], Any],
        then: Then | None = None,
        failed: Failed | None = None,
    ) -> None:
        self._threads[thread].do(up_to_ms, work, then, failed or self._storage_failed)

    # Events.

    def invite(self, name: str) -> None:
        self.do(self.run.invite(name))

    def receive(self, name: str, message: Message, body: Any) -> None:
        if isinstance(message, StepApplied) and name in self.run.members:
            self._answered[name] = message.step
        self.do(self.run.receive(name, message, body))
        if self._speculated and isinstance(message, NodeLoss):
            self._check_cancelled()
        assert self.run.members.view >= self._view
        self._view = self.run.members.view

    def lost(self, name: str) -> None:
        self._followers.discard(name)
        self._answered.pop(name, None)
        self.do(self.run.lost(name, "the connection is over"))

    def tick(self) -> None:
        self.do(self.run.tick(self._coordinator.clock.now_ms))

    def _storage_failed(self, error: SamestepError) -> None:
        if isinstance(error, StorageFailed):
            self.do(self.run.storage_failed(str(error)))
        else:
            assert isinstance(error, RunFailed), error
            self.do(self.run.give_up(str(error)))

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
                case FillReplica(message, values):
                    self._fill(message, values)
                case DigestReplica(upload):
                    loaded = partial(self._state_loaded, upload)
                    self._in("keeper", self.pace, lambda: None, loaded)
                case ApplyStep():
                    self._in("keeper", self.pace, partial(self._apply, action), self._has_applied)
                case Follow():
                    self._join(action.worker, self._sessions.get(action.worker), action.step)
                case Seed():
                    self._followers.discard(action.worker)
                    self._seed(self._sessions.get(action.worker))
                case Replay():
                    self._replay(action, self._sessions.get(action.worker), action.step, None)
                case Persist():
                    self._persist(action.record)
                case Remember():
                    self._terms = action.terms
                case MakeCheckpoint():
                    self._save(action.step)
                case Adopt():
                    assert action.manifest == self.job.manifest, "the manifest of another run"
                    self._replica = self.job.replica()
                    self._in("log", 0, self._opened)
                case Dismiss():
                    self._dismiss(action)
                case Finish():
                    assert self.outcome is None, "a run ends once"
                    self.outcome = action
                    self._in("keeper", self.pace, lambda: None, self._finish)
        self._check()

    def _send(self, name: str, message: Message, body: Any = None) -> None:
        link = self._sessions.get(name)
        if link is not None:
            link.send_to_worker(message, body)

    def _broadcast(self, action: Broadcast) -> None:
        message, body = action.message, action.body
        if isinstance(message, Commit):
            self._check_commit(message)
        for name in sorted(self._followers):
            self._send(name, message, body)
        if isinstance(message, _KEPT):
            self._tail.append((message, body))
        if isinstance(message, AveragedGradient):
            self._check_coverage(message, body)
            place = ChunkPlace(
                message.epoch, message.step, message.attempt, message.block, message.chunk
            )
            self._in("log", 0, lambda: self._append(place, body))

    def die(self) -> None:
        """The process ends where it is."""
        self._threads["log"].die()

    def _append(self, place: ChunkPlace, values: Any) -> None:
        try:
            self._opened().append_chunk(place, values)
        except SamestepError as error:
            self._lost = {(place.step, place.attempt): error}
            raise

    def _opened(self) -> Log:
        if self._log is None:
            self._directory.check(self.run.epoch)
            self._log = self._directory.open_log(
                self.job.manifest, self.run.epoch, self._found, self.run.spec.log
            )
        return self._log

    def _persist(self, record: CommitRecord) -> None:
        step, terms, progress = record.commit.step, self._terms, self.run.progress
        assert progress is not None
        signatures, mixed = set(progress.signatures), progress.mixed

        def work() -> None:
            lost = self._lost.get((step, record.commit.attempt))
            if lost is not None:
                raise lost
            if terms is not None:
                self._directory.check(self.run.epoch)
                self._directory.write_terms(terms)
                self._terms = None if self._terms is terms else self._terms
            self._opened().commit(record)
            self._lost = {}
            self.ledger.synced(record)
            self.ledger.check_terms(signatures, mixed=mixed)

        def failed(error: SamestepError) -> None:
            if isinstance(error, StorageFailed):
                self.do(self.run.storage_failed(str(error), lost_commit=True))
            else:
                self._storage_failed(error)

        def half() -> None:
            log = self._log
            if isinstance(log, MemoryLog) and log.next_step == step and terms is None:
                log.write(record)

        job = Halved(half, work)
        self._coordinator.commits()
        self._in("log", self.pace, job, lambda _: self.do(self.run.durable(step)), failed)

    def _report(self, action: Report) -> None:
        fact = action.fact
        self.ledger.counts[fact.event] += 1
        match fact:
            case RunHalted():
                self.ledger.check_halt(fact.reason)
            case HeldOutMeasured():
                replica = self.ledger.expected(self.run.step).replica
                assert fact.metrics["ratio"] == self.job.figure(replica)
                self.ledger.evaluated_step = self.run.step
            case NodesSpeculated():
                self._speculated = True
            case StepCommitted() | StepRestarted():
                self._speculated = False
            case RedoneOtherwise():
                raise AssertionError("a step that is done again has other bits")

    def _apply(self, action: ApplyStep) -> tuple[int, str]:
        assert self._replica is not None
        assert self._replica.step == action.step
        if action.scalars is None:
            self._replica.skip()
        else:
            self._replica.apply(action.averages, action.scalars)
        return self._replica.step, self.ledger.replica_is(self._replica)

    def _has_applied(self, applied: tuple[int, str]) -> None:
        step, digest = applied
        self._applied = step
        self._since = max(self._since, step)
        self._tail = [item for item in self._tail if _step_of(item[0]) >= self._since]
        self.do(self.run.replica_applied(step, digest))

    def _save(self, step: int) -> None:
        losses = tuple(self.run.losses[:step])

        def copied(replica: Replica) -> None:
            assert replica.step == step
            self.ledger.check_losses(list(losses))
            if step:
                self._in("log", self.pace, lambda: self._opened().roll(), lambda _: write(replica))
            else:
                write(replica)

        def write(replica: Replica) -> None:
            def work() -> int:
                good = self._directory.save(self.run.epoch, replica, losses)
                self.ledger.saved(replica)
                return good

            self._in("checkpoint", 4 * self.pace, work, written)

        def written(good: int) -> None:
            self._in("log", self.pace, lambda: cut(good), done)

        def cut(good: int) -> None:
            self._directory.check(self.run.epoch)
            self._opened().cut(good)

        def done(_: object) -> None:
            self.do(self.run.checkpointed(step))

        self._in("keeper", self.pace, self._copy, copied)

    def _copy(self) -> Replica:
        assert self._replica is not None
        return self._replica.copy()

    def _join(self, name: str, link: Link | None, step: int) -> None:
        """`Followers.join`: what it has missed since, then it hears all."""
        if link is None:
            return
        assert step >= self._since
        for broadcast, body in self.missed(step):
            link.send_to_worker(broadcast, body)
        self._followers.add(name)

    def missed(self, step: int) -> list[tuple[Message, Any]]:
        """What was broadcast since so many steps."""
        return [item for item in self._tail if _step_of(item[0]) >= step]

    def _seed(self, link: Link | None, *, replayed: bool = False) -> None:
        def send(snapshot: Replica) -> None:
            assert link is not None
            if link.closed or self.outcome is not None:
                return
            self._send_state(link, snapshot)
            if replayed:
                self.do(self.run.replayed(link.name))

        if link is not None:
            self._in("keeper", self.pace, self._copy, send)

    def _send_state(self, link: Link, snapshot: Replica) -> None:
        blocks = self.job.blocks
        pieces = [(p, c) for p in snapshot.parts() for c in range(blocks[p.block].chunks)]
        for index, (part, chunk) in enumerate(pieces):
            message = StateChunk(
                run_id=self.run.run_id, kind=part.kind, block=part.block, chunk=chunk,
                step=snapshot.step, optimizer_step=snapshot.optimizer_step,
                last=index == len(pieces) - 1,
            )  # fmt: skip
            link.send_to_worker(message, part.values[blocks[part.block].chunk_slice(chunk)])
        self._join(link.name, link, snapshot.step)

    def _replay(
        self,
        action: Replay,
        link: Link | None,
        step: int,
        row: list[tuple[CommitRecord, Averages]] | None,
    ) -> None:
        """`state_transfer.send_missed`, one wait at a time; then as `Execution._replay`."""
        if link is None:
            return
        if not row and step >= self._since:
            if not (link.closed or self.outcome is not None):
                self._join(link.name, link, step)
                self.do(self.run.replayed(link.name))
        elif link.closed:
            pass
        elif row:
            self._wait(lambda: self._send_logged(action, link, step, row))
        else:

            def read(found: list[tuple[CommitRecord, Averages]]) -> None:
                known = action.state_digest if step == action.step else None
                if not found or known not in (None, found[0][0].state_before):
                    self._give_up_replay(link)
                else:
                    self._replay(action, link, step, found)

            log = self._opened
            work = lambda: self._directory.logged(step, log())  # noqa: E731
            self._in("log", self.pace, work, read, lambda _: self._give_up_replay(link))

    def _wait(self, act: Callable[[], None]) -> None:
        """Something is read by a thread of no queue."""
        coordinator = self._coordinator
        coordinator.clock.after(self.pace * coordinator.rng.random(), act, coordinator)

    def _send_logged(
        self, action: Replay, link: Link, step: int, row: list[tuple[CommitRecord, Averages]]
    ) -> None:
        if self._over:
            return
        record, averages = row.pop(0)
        commit = record.commit
        if averages is None and commit.scalars is not None:
            self._give_up_replay(link)
            return
        for number, values in enumerate(averages or ()):
            block = self.job.blocks[number]
            kind = AveragedBlockGradient if block.kind == "block" else AveragedNonBlockGradient
            for chunk in range(block.chunks):
                message = kind(
                    epoch=self.run.epoch, step=commit.step, attempt=commit.attempt, block=number,
                    chunk=chunk,
                )  # fmt: skip
                link.send_to_worker(message, values[block.chunk_slice(chunk)])
        link.send_to_worker(commit.model_copy(update={"epoch": self.run.epoch}))
        self._replay(action, link, step + 1, row)

    def _give_up_replay(self, link: Link) -> None:
        if not (link.closed or self.outcome is not None):
            self._seed(link, replayed=True)

    def _fill(self, message: StateChunk, values: Any) -> None:
        assert self._replica is not None
        piece = self.job.blocks[message.block].chunk_slice(message.chunk)
        self._replica.parameters[message.block][piece] = values

    def _state_loaded(self, upload: int, _: object) -> None:
        assert self._replica is not None
        assert self.run.settled is not None
        admission = self.run.settled.admission
        if admission.upload == upload and admission.uploader is not None:
            digest = self.ledger.begins_with(self._replica)
            self.do(self.run.replica_loaded(upload, digest))

    def _dismiss(self, action: Dismiss) -> None:
        assert action.exit_code != ExitCode.MISMATCH, "nobody here is of another run"
        self._followers.discard(action.worker)
        link = self._sessions.get(action.worker)
        if link is not None:
            goodbye = Goodbye(reason=action.reason, retry=False, exit_code=int(action.exit_code))
            self._coordinator.close(link, goodbye)

    def _finish(self, _: object) -> None:
        assert self.outcome is not None
        held = self._directory.epoch == self.run.epoch
        if held:
            known = self.run.has_state
            self.ledger.ended(self.outcome, self._replica if known else None, self.run.losses)
        # Else the journal's guard makes it fail.
        self._over = True
        message = EndRun(run_id=self.run.run_id, reason=self.outcome.reason[:400])
        for member in self.run.members:
            self._send(member.name, message)
        self._coordinator.ended(held=held)

    # What must hold.

    def _check(self) -> None:
        run = self.run
        assert len(run.losses) == run.step
        if run.phase in (RunPhase.WAITING, RunPhase.HALTED):
            assert run.reason, "a run that waits says why"
            if run.phase is RunPhase.HALTED:
                self._coordinator.halted(self)
        else:
            assert run.phase is RunPhase.OVER or not run.reason

    def _check_commit(self, commit: Commit) -> None:
        self.ledger.told(commit)
        progress = self.run.progress
        assert progress is not None
        if commit.step == 0 or progress.agreement.catching_up:
            return
        assert self._applied == commit.step, "the replica has not agreed on the step before"

    def _check_coverage(self, message: AveragedGradient, values: Any) -> None:
        """Every microbatch is in the sum exactly once."""
        if message.block != COVERAGE:
            return
        expected = self.job.coverage(message.step)
        piece = self.job.blocks[COVERAGE].chunk_slice(message.chunk)
        assert values.tobytes() == expected[piece].tobytes(), "a microbatch lost or doubled"

    def _check_cancelled(self) -> None:
        """What others have done, nobody is left to compute."""
        progress = self.run.progress
        round_ = progress.round if progress is not None else None
        if round_ is not None and self.run.phase is RunPhase.TRAINING:
            compared = round_.doubled[-1] if round_.doubled else None
            for share in round_.shares.values():
                left = [node for node in share.pending if node != compared]
                assert all(round_._missing(node) for node in left), "Cancel is lost"


def _step_of(message: Message) -> int:
    step: int = message.step  # type: ignore[attr-defined]
    return step
