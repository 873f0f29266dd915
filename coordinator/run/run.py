"""One run: from the first ready worker to the last committed step.

Pure: every event is a method call that returns actions, in the order in which they are to be
done. No clock, socket, file or randomness. Completions (the replica has applied a step) come
back as events.
"""

from __future__ import annotations

from coordinator.run.actions import Action, Adopt, Broadcast, Dismiss, Report, Seed, Send
from coordinator.run.admission import is_stale
from coordinator.run.course import Course
from coordinator.run.membership import Member, MemberState
from coordinator.run.phase import RunPhase
from coordinator.run.reduction import Array
from coordinator.run.round import NonFinite
from protocol.base.errors import ExitCode, OutOfPlace
from protocol.spec.manifest import Manifest
from protocol.wire.messages import (
    BlockGradientPayload,
    Continue,
    Drain,
    EvalResult,
    GradientPayload,
    Message,
    NodeLoss,
    NonBlockGradientPayload,
    Ready,
    StartRun,
    StepApplied,
    Unready,
)


class Run(Course):
    """The logic of one run: what workers, the shell and an operator say, and what follows."""

    # Events about workers.

    def invite(self, worker: str, admitted_by: str = "") -> list[Action]:
        """A worker is connected and free: ask it to build the task.

        Args:
            worker: Its name.
            admitted_by: What it proved itself with.
        """
        if self.phase is RunPhase.OVER:
            return []
        self.members.add(worker, admitted_by)
        self.unfit.pop(worker, None)
        message = StartRun(run_id=self.run_id, epoch=self.epoch, step=self.step, blobs=self.blobs)
        return [Send(worker, message, self.spec.to_bytes())]

    def receive(self, worker: str, message: Message, body: Array | bytes | None) -> list[Action]:
        """A worker's message.

        Args:
            worker: Its name.
            message: What it sent.
            body: float32 values of a gradient, or the document of `Ready`.

        Raises:
            RemoteProtocolError: The message does not fit the present; its connection is to end.
        """
        member = self.members.get(worker)
        if member is None or self.phase is RunPhase.OVER or is_stale(member, message, self.run_id):
            return []
        match message:
            case BlockGradientPayload() | NonBlockGradientPayload():
                assert body is not None
                assert not isinstance(body, bytes)
                return self._payload(member, message, body)
            case NodeLoss():
                return self._node_loss(member, message)
            case StepApplied():
                return self._step_applied(worker, message)
            case EvalResult():
                return self._eval_result(worker, message)
            case Ready() if member.state is MemberState.PREPARING:
                assert isinstance(body, bytes)
                return self._ready(member, message, body)
            case Unready() if member.state is MemberState.PREPARING:
                return self._unready(worker, message)
            case Drain():
                return self._worker_drains(member)
            case _:
                raise OutOfPlace(f"{type(message).__name__} is out of place here")

    def lost(self, worker: str, reason: str, *, failed: bool = False) -> list[Action]:
        """A worker's session is over; its unfinished nodes go to others within the step.

        Args:
            worker: Its name.
            reason: Why.
            failed: Whether its device failed, or cannot be used. When a second one fails at the
                same microbatches the run halts: the others would follow.
        """
        member = self.members.remove(worker)
        if member is None or self.phase is RunPhase.OVER:
            return []
        round_ = self.progress.round if self.progress is not None else None
        pattern = ""
        if failed and round_ is not None:
            pattern = self._failures.note(worker, round_.unfinished(worker))
        self._odd.discard(worker)
        actions: list[Action] = [
            Report("worker_lost", {"worker": worker, "reason": reason, "view": self.members.view})
        ]
        if self.admission is not None:
            actions += self.admission.lost(worker)
        if failed and member.state is MemberState.PREPARING:
            self.unfit[worker] = reason  # it may come again, mended, or another in its place
        if self.progress is not None:
            proven = self.progress.lose(worker)
            if self.evaluation is not None:
                self.evaluation.lose(worker, proven=proven)
        if pattern:
            self._failures.clear()
            actions += self.halt(f"step {self.step}: {pattern}; the last said: {reason}")
        actions += self._take_up() + self._advance()
        return actions + self.drain() if self._drain_asked else actions

    # Events from the shell.

    def replica_loaded(self, digest: str) -> list[Action]:
        """The first ready worker's state has come: it is state 0, with this digest."""
        if self.phase is RunPhase.OVER:
            return []
        assert self.progress is not None
        assert self.admission is not None
        if refused := self.admission.state_loaded(digest):
            return refused
        self.progress.agreement.settle(0, digest)
        return self.saves.save(0) + self._start_if_enough()

    def replayed(self, worker: str) -> list[Action]:
        """A worker was sent what it had missed, and hears broadcasts from now on."""
        member = self.members.get(worker)
        if member is None or not member.replaying or self.phase is RunPhase.OVER:
            return []
        member.replaying = False
        if member.right_at is None:
            return []
        return self._is_right(member, member.right_at) + self._advance()

    # An operator's word.

    def resume(self, *, skip_step: bool) -> list[Action]:
        """End a halt: another attempt at the same step, or the next one."""
        if self.progress is None or self.phase is not RunPhase.HALTED:
            return []
        progress = self.progress
        passing = progress.persisting or self._next_owed
        if not passing:
            progress.attempt += 1
        self.reason = ""
        place = progress.next_place()
        report = Report("continued", {**place, "skip_step": skip_step})
        actions = [Broadcast(Continue(**place)), report, *self.progress.let_go()]
        actions += self.saves.again(self.step)
        for name in sorted(self._odd.difference(self.members.names(MemberState.DRAINING))):
            self.progress.agreement.lose(name)
            self.members.deactivate(name)
            actions.append(Seed(name))
        self._odd.clear()
        if self.evaluation is not None:
            return actions + self._begin_evaluation()
        if self.progress.round is None or self.progress.persisting:
            self.phase = RunPhase.TRAINING
            self._skip_asked = skip_step and passing
            owed, self._next_owed = self._next_owed, False
            actions += self._after_commit(self.progress) if owed else []
            return actions + self._advance()
        self._skip_asked = skip_step
        return actions + self._begin_step(self.progress) + self._advance()

    # Joining.

    def _ready(self, member: Member, message: Ready, document: bytes) -> list[Action]:
        manifest = Manifest.from_bytes(document)
        actions: list[Action] = []
        if self.admission is None:
            self._settle(manifest)
            actions.append(Adopt(manifest))
        assert self.admission is not None
        self.admission.settle(message)
        refusal = self.admission.refusal(manifest, message)
        if refusal:
            self.members.remove(member.name)
            return [Dismiss(member.name, refusal, ExitCode.MISMATCH)]
        member.now_ready(message)
        actions.append(member.ready_report())
        if self.phase is not RunPhase.WAITING:
            return actions + self._take_in(member)
        return actions + self.admission.request_state() + self._start_if_enough()

    def _take_in(self, member: Member) -> list[Action]:
        """A worker is ready while the run goes on: it computes once it has the state."""
        assert self.admission is not None
        assert self.progress is not None
        actions = self.admission.take_in(member, self.step, self.progress.agreement)
        return actions + (self._joined(member) if member.state is MemberState.ACTIVE else [])

    def _unready(self, worker: str, message: Unready) -> list[Action]:
        self.members.remove(worker)
        report = Report("worker_unready", {"worker": worker, "reason": message.reason})
        if message.own:
            self.unfit[worker] = message.reason
        able = self.members.names(MemberState.PREPARING, MemberState.READY)
        others_may = message.own and (able or len(self.unfit) < self.expect_workers)
        if self.phase is not RunPhase.WAITING or others_may:
            return [report]
        reason = f"worker {worker!r}: {message.reason}"
        return [report, *self._finish("failed", reason, message.exit_code)]

    def _start_if_enough(self) -> list[Action]:
        ready = self.members.names(MemberState.READY)
        admission, progress = self.admission, self.progress
        if self.phase is not RunPhase.WAITING or len(ready) < self.expect_workers:
            return []
        if admission is None or progress is None or not admission.state_known:
            return []
        members = [member for member in self.members if member.name in ready]
        progress.mixed = not all(admission.starts_alike(member) for member in members)
        started = Report("started", {"workers": ready})
        return [started, *admission.admit_ready(), *self._begin_step(progress)]

    def _worker_drains(self, member: Member) -> list[Action]:
        round_ = self.progress.round if self.progress is not None else None
        busy = round_ is not None and round_.unfinished(member.name)
        if busy and self.phase is RunPhase.TRAINING:
            member.state = MemberState.DRAINING
            return []
        return [Dismiss(member.name, "drained", ExitCode.OK)]

    # Work.

    def _payload(self, member: Member, message: GradientPayload, values: Array) -> list[Action]:
        if not self._is_present(message) or member.state is MemberState.LOADING:
            return []
        assert self.progress is not None
        outcome = self.progress.payload(member.name, message, values)
        if isinstance(outcome, NonFinite):
            return self._halt_for(outcome)
        return outcome + self._advance()

    def _node_loss(self, member: Member, message: NodeLoss) -> list[Action]:
        if not self._is_present(message) or member.state is MemberState.LOADING:
            return []
        assert self.progress is not None
        fault = self.progress.node_loss(member, message)
        going = self.progress.let_go() + self.progress.cancel_surplus()
        return going + (self._halt_for(fault) if fault is not None else self._advance())

    def _is_present(self, message: GradientPayload | NodeLoss) -> bool:
        present = self.progress is not None and self.progress.is_present(message)
        return present and self.phase is RunPhase.TRAINING

    def _step_applied(self, worker: str, message: StepApplied) -> list[Action]:
        if self.progress is None:
            raise OutOfPlace("StepApplied before the first step")
        progress, member = self.progress, self.members.get(worker)
        assert member is not None
        progress.applied(worker, message)
        agreement = progress.agreement
        if agreement.catching_up and agreement.digest(message.step) is None:
            # On trust: compared with the others now, with the replica once that is there.
            return self._is_right(member, message.step) + self._advance()
        return self._judge(progress, message.step)

    def _eval_result(self, worker: str, message: EvalResult) -> list[Action]:
        if self.evaluation is not None and self.phase is RunPhase.EVALUATING:
            self.evaluation.result(worker, message)
        return self._advance()

    def _halt_for(self, fault: NonFinite) -> list[Action]:
        return self.halt(f"step {self.step}: {fault}", fault)
