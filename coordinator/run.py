"""One run: from the first ready worker to the last committed step.

Pure: every event is a method call that returns actions, in the order in which they are to be
done. No clock, socket, file or randomness. Completions (the replica has applied a step) come
back as events.
"""

from __future__ import annotations

from coordinator.actions import (
    Action,
    Adopt,
    Broadcast,
    Dismiss,
    Finish,
    Outcome,
    Report,
    Seed,
    Send,
)
from coordinator.admission import Admission, is_stale
from coordinator.evaluation import Evaluation
from coordinator.membership import Member, Membership, MemberState
from coordinator.phase import RunPhase
from coordinator.progress import Progress
from coordinator.reduction import Array
from coordinator.round import NonFinite
from protocol.errors import ExitCode, OutOfPlace
from protocol.manifest import Manifest
from protocol.messages import (
    BlockGradientPayload,
    Continue,
    Drain,
    EvalResult,
    GradientPayload,
    Halt,
    Message,
    NodeLoss,
    NonBlockGradientPayload,
    Ready,
    StartRun,
    StepApplied,
    Unready,
    cut_text,
)
from protocol.run_spec import RunSpec


class Run:
    """The logic of one run; see the module's text.

    Attributes:
        phase: Where the run is.
        reason: Why, in words; empty while all goes well.
        members: Who takes part.
        manifest: Settled by the first ready worker.
        progress: The steps, once the manifest is settled.
        evaluation: The one in progress.
        metrics: Figures of the newest evaluation.
    """

    def __init__(self, run_id: str, spec: RunSpec, epoch: int, expect_workers: int) -> None:
        self.run_id = run_id
        self.spec = spec
        self.epoch = epoch
        self.expect_workers = expect_workers
        self.phase = RunPhase.WAITING
        self.reason = "waiting for workers"
        self.members = Membership()
        self.manifest: Manifest | None = None
        self.progress: Progress | None = None
        self.evaluation: Evaluation | None = None
        self.metrics: dict[str, float] = {}
        self.admission: Admission | None = None
        self.blobs: str | None = None
        self._odd: set[str] = set()
        self._skip_asked = False
        self._drain_asked = False

    @property
    def step(self) -> int:
        """Steps committed."""
        return self.progress.step if self.progress is not None else 0

    @property
    def losses(self) -> list[float]:
        """Mean loss of each committed step; NaN for a skipped one."""
        return self.progress.losses if self.progress is not None else []

    # Events about workers.

    def invite(self, worker: str) -> list[Action]:
        """A worker is connected and free: ask it to build the task."""
        if self.phase is RunPhase.OVER:
            return []
        self.members.add(worker)
        message = StartRun(run_id=self.run_id, epoch=self.epoch, blobs=self.blobs)
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
                return self._payload(worker, message, body)
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

    def lost(self, worker: str, reason: str) -> list[Action]:
        """A worker's session is over; its unfinished nodes go to others within the step."""
        member = self.members.remove(worker)
        if member is None or self.phase is RunPhase.OVER:
            return []
        self._odd.discard(worker)
        report = {"worker": worker, "reason": reason, "view": self.members.view}
        actions: list[Action] = [Report("worker_lost", report)]
        if self.admission is not None:
            actions += self.admission.lost(worker)
        if self.progress is not None:
            proven = self.progress.lose(worker)
            if self.evaluation is not None:
                self.evaluation.lose(worker, proven=proven)
        actions += self._take_up() + self._advance()
        return actions + self.drain() if self._drain_asked else actions

    # Events from the shell.

    def replica_loaded(self, digest: str) -> list[Action]:
        """The first ready worker's state has come: it is state 0, with this digest."""
        assert self.progress is not None
        assert self.admission is not None
        if refused := self.admission.state_loaded(digest):
            return refused
        self.progress.agreement.settle(0, digest)
        return self._start_if_enough()

    def replica_applied(self, step: int, digest: str) -> list[Action]:
        """The coordinator's own replica has taken `step` steps; it arbitrates."""
        assert self.progress is not None
        self.progress.agreement.settle(step, digest)
        return self._judge(self.progress, step)

    # An operator's word.

    def halt(self, reason: str) -> list[Action]:
        """Stop now, apply nothing."""
        if self.progress is None or self.phase not in (RunPhase.TRAINING, RunPhase.EVALUATING):
            return []
        self.phase, self.reason = RunPhase.HALTED, reason
        place = self.progress.place()
        report = Report("halted", {**place, "reason": reason})
        actions: list[Action] = [Broadcast(Halt(**place, reason=cut_text(reason))), report]
        return actions + self.drain() if self._drain_asked else actions

    def resume(self, *, skip_step: bool) -> list[Action]:
        """End a halt: another attempt at the same step, or the next one."""
        if self.progress is None or self.phase is not RunPhase.HALTED:
            return []
        self.progress.attempt += 1
        self.reason = ""
        place = self.progress.place()
        report = Report("continued", {**place, "skip_step": skip_step})
        actions = [Broadcast(Continue(**place)), report, *self.progress.let_go()]
        for name in sorted(self._odd.difference(self.members.names(MemberState.DRAINING))):
            self.progress.agreement.lose(name)
            self.members.deactivate(name)
            actions.append(Seed(name))
        self._odd.clear()
        if self.evaluation is not None:
            return actions + self._begin_evaluation()
        if self.progress.round is None:
            self.phase = RunPhase.TRAINING
            return actions + self._advance()
        self._skip_asked = skip_step
        return actions + self._begin_step(self.progress) + self._advance()

    def drain(self) -> list[Action]:
        """Stop after the present step."""
        self._drain_asked = True
        if self.phase is RunPhase.OVER:
            return []
        if self.phase is RunPhase.WAITING:
            return self._finish("drained", "drained before the start", ExitCode.OK)
        if self.phase is RunPhase.HALTED:
            return self._finish("failed", f"halted: {self.reason}", ExitCode.FAILED)
        if not self.members.names(MemberState.ACTIVE, MemberState.DRAINING):
            return self._finish("drained", f"drained after {self.step} steps", ExitCode.OK)
        return []

    def give_up(self, reason: str) -> list[Action]:
        """Nothing more can come: end as failed."""
        if self.phase is RunPhase.OVER:
            return []
        return self._finish("failed", reason, ExitCode.FAILED)

    # Joining.

    def _ready(self, member: Member, message: Ready, document: bytes) -> list[Action]:
        manifest = Manifest.from_bytes(document)
        actions: list[Action] = []
        if self.admission is None:
            self.manifest = manifest
            self.progress = Progress(self.spec, self.epoch, manifest, self.members)
            self.admission = Admission(
                self.run_id, self.spec.exactness, self.members, manifest, message
            )
            actions.append(Adopt(manifest))
        refusal = self.admission.refusal(manifest, message)
        if refusal:
            self.members.remove(member.name)
            return [Dismiss(member.name, refusal, ExitCode.MISMATCH)]
        member.now_ready(message)
        actions.append(member.ready_report())
        if self.phase is not RunPhase.WAITING:
            member.state = MemberState.LOADING
            return [*actions, Seed(member.name)]
        return actions + self.admission.request_state() + self._start_if_enough()

    def _unready(self, worker: str, message: Unready) -> list[Action]:
        self.members.remove(worker)
        report = Report("worker_unready", {"worker": worker, "reason": message.reason})
        if self.phase is not RunPhase.WAITING:
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

    # Steps.

    def _begin_step(self, progress: Progress) -> list[Action]:
        self.phase, self.reason = RunPhase.TRAINING, ""
        return progress.begin()

    def _take_up(self) -> list[Action]:
        """Give what a lost worker leaves to others."""
        if self.phase is RunPhase.EVALUATING:
            return self._plan_evaluation()
        if self.phase is RunPhase.TRAINING and self.progress is not None:
            return self.progress.take_up()
        return []

    def _payload(self, worker: str, message: GradientPayload, values: Array) -> list[Action]:
        if not self._is_present(message):
            return []
        assert self.progress is not None
        outcome = self.progress.payload(worker, message, values)
        if isinstance(outcome, NonFinite):
            return self._halt_for(outcome)
        return outcome + self._advance()

    def _node_loss(self, member: Member, message: NodeLoss) -> list[Action]:
        if not self._is_present(message):
            return []
        assert self.progress is not None
        fault = self.progress.node_loss(member, message)
        going = self.progress.let_go()
        return going + (self._halt_for(fault) if fault is not None else self._advance())

    def _is_present(self, message: GradientPayload | NodeLoss) -> bool:
        present = self.progress is not None and self.progress.is_present(message)
        return present and self.phase is RunPhase.TRAINING

    def _halt_for(self, fault: NonFinite) -> list[Action]:
        return self.halt(f"step {self.step}: {fault}")

    def _advance(self) -> list[Action]:
        """Commit if everything is there and everyone agrees on the step before."""
        progress = self.progress
        if progress is None or not progress.agreement.reached:
            return []
        if self.phase is not RunPhase.TRAINING or progress.round is None:
            return self._conclude(progress)
        if not (self._skip_asked or progress.round.complete):
            return []
        skip, self._skip_asked = self._skip_asked, False
        return progress.commit(skip=skip) + self._after_commit(progress)

    def _after_commit(self, progress: Progress) -> list[Action]:
        assert self.manifest is not None
        every = self.spec.evaluate_every
        due = progress.all_committed or (every and progress.step % every == 0)
        if self.manifest.evaluation_parts and due:
            return self._begin_evaluation()
        if progress.all_committed or self._drain_asked:
            return []
        return self._begin_step(progress)

    # Agreement.

    def _step_applied(self, worker: str, message: StepApplied) -> list[Action]:
        if self.progress is None:
            raise OutOfPlace("StepApplied before the first step")
        self.progress.applied(worker, message)
        return self._judge(self.progress, message.step)

    def _judge(self, progress: Progress, step: int) -> list[Action]:
        """Compare the answers to a step once the replica's own is known."""
        agreed, odd = progress.agreement.judge(step)
        actions: list[Action] = []
        if odd:
            self._odd.update(odd)
            names = ", ".join(repr(name) for name in odd)
            actions += self.halt(
                f"the state of worker {names} after {step} steps differs from the coordinator's"
            )
        for name in agreed:
            member = self.members.get(name)
            if member is not None and member.state is MemberState.LOADING and step == self.step:
                self.members.activate(member)
                report = {"worker": name, "step": step, "view": self.members.view}
                actions += [Report("worker_joined", report), *self._take_up()]
        return actions + self._advance()

    # Evaluation and end.

    def _begin_evaluation(self) -> list[Action]:
        assert self.manifest is not None
        self.phase, self.reason = RunPhase.EVALUATING, ""
        self.evaluation = Evaluation(self.step, self.manifest.evaluation_parts)
        return self._plan_evaluation()

    def _plan_evaluation(self) -> list[Action]:
        assert self.evaluation is not None
        return self.evaluation.plan(self.epoch, self.members.names(MemberState.ACTIVE))

    def _eval_result(self, worker: str, message: EvalResult) -> list[Action]:
        if self.evaluation is not None and self.phase is RunPhase.EVALUATING:
            self.evaluation.result(worker, message)
        return self._advance()

    def _conclude(self, progress: Progress) -> list[Action]:
        """Everyone agrees: end an evaluation, and the run when nothing is left."""
        actions: list[Action] = []
        if self.phase is RunPhase.EVALUATING and self.evaluation is not None:
            if not self.evaluation.complete:
                return []
            assert self.manifest is not None
            self.metrics = self.evaluation.metrics(self.manifest.metrics)
            self.evaluation = None
            self.phase = RunPhase.TRAINING
            actions.append(Report("evaluated", {"step": self.step, **self.metrics}))
            if not (progress.all_committed or self._drain_asked):
                return actions + self._begin_step(progress)
        if self.phase is not RunPhase.TRAINING:
            return actions
        if progress.all_committed:
            return actions + self._finish("finished", "all steps are committed", ExitCode.OK)
        if self._drain_asked:
            reason = f"drained after {progress.step} steps"
            return actions + self._finish("drained", reason, ExitCode.OK)
        return actions

    def _finish(self, outcome: Outcome, reason: str, exit_code: int) -> list[Action]:
        self.phase, self.reason = RunPhase.OVER, reason
        return [Finish(outcome, reason, exit_code)]
