"""One run: from the first ready worker to the last committed step.

Pure: every event is a method call that returns actions, in the order in which they are to be
done. No clock, socket, file or randomness. Completions (the replica has applied a step) come
back as events.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from pydantic import ValidationError

from coordinator.actions import (
    Action,
    Adopt,
    ApplyStep,
    Broadcast,
    Dismiss,
    Finish,
    Follow,
    Outcome,
    Report,
    Seed,
    Send,
)
from coordinator.agreement import Agreement
from coordinator.evaluation import Evaluation
from coordinator.membership import Member, Membership, MemberState
from coordinator.planner import Shares, divide, nodes_for, spread
from coordinator.reduction import Array
from coordinator.round import Averaged, NonFinite, Round
from protocol.errors import ExitCode, OutOfPlace, RunSpecError
from protocol.manifest import Manifest
from protocol.messages import (
    Assign,
    AveragedBlockGradient,
    AveragedNonBlockGradient,
    BlockGradientPayload,
    Commit,
    Continue,
    Drain,
    EvalPlan,
    EvalResult,
    GradientPayload,
    Halt,
    Message,
    NodeLoss,
    NonBlockGradientPayload,
    Ready,
    StartRun,
    StateRequest,
    StepApplied,
    StepPlan,
    Unready,
)
from protocol.run_spec import RunSpec
from protocol.samples import SampleOrder
from protocol.tree import Node
from protocol.update import step_scalars

_NO_AVERAGES: Final = "0" * 64
_MAX_NODES: Final = 64
_COMPUTING: Final = (MemberState.ACTIVE, MemberState.DRAINING)


class RunPhase(Enum):
    """WAITING for workers to be ready; TRAINING; EVALUATING held-out data; HALTED until an
    operator's word; OVER."""

    WAITING = "waiting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    HALTED = "halted"
    OVER = "over"


class Run:
    """The logic of one run; see the module's text.

    Attributes:
        phase: Where the run is.
        reason: Why, in words.
        step: Steps committed.
    """

    def __init__(self, run_id: str, spec: RunSpec, epoch: int, expect_workers: int) -> None:
        try:
            step_scalars(spec.optimizer, 1, 0, spec.steps, 0.0)
        except ValidationError:
            raise RunSpecError("optimizer: expected values within float32's range") from None
        self.run_id = run_id
        self.spec = spec
        self.epoch = epoch
        self.expect_workers = expect_workers
        self.phase = RunPhase.WAITING
        self.reason = "waiting for workers"
        self.step = 0
        self.optimizer_step = 0
        self.attempt = 0
        self.losses: list[float] = []
        self.metrics: dict[str, float] = {}
        self.members = Membership()
        self.manifest: Manifest | None = None
        self.manifest_digest = ""
        self.initial_digest = ""
        self.mixed = False
        self.round: Round | None = None
        self.evaluation: Evaluation | None = None
        self.agreement = Agreement()
        self._order: SampleOrder | None = None
        self.division: Shares | None = None
        self._uploader: str | None = None
        self._replica_loaded = False
        self._signature = ""
        self._odd: set[str] = set()
        self._skip_asked = False
        self._drain_asked = False

    # Events about workers.

    def invite(self, worker: str) -> list[Action]:
        """A worker is connected and free: ask it to build the task."""
        if self.phase is RunPhase.OVER:
            return []
        self.members.add(worker)
        message = StartRun(run_id=self.run_id, epoch=self.epoch)
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
        if member is None or self.phase is RunPhase.OVER:
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
                return self._eval_result(message)
            case Ready():
                assert isinstance(body, bytes)
                return self._ready(member, message, body)
            case Unready():
                return self._unready(worker, message)
            case Drain():
                return self._worker_drains(member)
            case _:
                raise OutOfPlace(f"{type(message).__name__} does not belong to a run")

    def lost(self, worker: str, reason: str) -> list[Action]:
        """A worker's session is over; its unfinished nodes go to others within the step."""
        member = self.members.remove(worker)
        if member is None or self.phase is RunPhase.OVER:
            return []
        self._odd.discard(worker)
        self.agreement.lose(worker)
        actions: list[Action] = [
            Report("worker_lost", {"worker": worker, "reason": reason, "view": self.members.view})
        ]
        if worker == self._uploader and not self._replica_loaded:
            self._uploader = None
            actions += self._request_state()
        if self.round is not None:
            self.round.lose(worker)
        if self.evaluation is not None:
            self.evaluation.lose(worker)
        return actions + self._take_up() + self._advance()

    # Events from the shell.

    def replica_loaded(self, digest: str) -> list[Action]:
        """The first ready worker's state has come: it is state 0, with this digest."""
        self._replica_loaded = True
        self.agreement.settle(0, digest)
        return self._start_if_enough()

    def replica_applied(self, step: int, digest: str) -> list[Action]:
        """The coordinator's own replica has taken `step` steps; it arbitrates."""
        self.agreement.settle(step, digest)
        return self._judge(step)

    # An operator's word.

    def halt(self, reason: str) -> list[Action]:
        """Stop now, apply nothing."""
        if self.phase not in (RunPhase.TRAINING, RunPhase.EVALUATING):
            return []
        self.phase, self.reason = RunPhase.HALTED, reason
        message = Halt(epoch=self.epoch, step=self.step, attempt=self.attempt, reason=reason[:400])
        return [
            Broadcast(message),
            Report("halted", {"step": self.step, "attempt": self.attempt, "reason": reason}),
        ]

    def resume(self, *, skip_step: bool) -> list[Action]:
        """End a halt: another attempt at the same step, or the next one."""
        if self.phase is not RunPhase.HALTED:
            return []
        self.attempt += 1
        self.reason = ""
        actions: list[Action] = [
            Broadcast(Continue(epoch=self.epoch, step=self.step, attempt=self.attempt)),
            Report("continued", {"step": self.step, "skip_step": skip_step}),
        ]
        for name in sorted(self._odd):
            member = self.members.get(name)
            if member is not None:
                member.state = MemberState.LOADING
                self.members.view += 1
                self.agreement.lose(name)
                actions.append(Seed(name))
        self._odd.clear()
        if self.evaluation is not None:
            return actions + self._begin_evaluation()
        if self.round is None:
            self.phase = RunPhase.TRAINING
            return actions + self._advance()
        self._skip_asked = skip_step
        return actions + self._begin_step() + self._advance()

    def drain(self) -> list[Action]:
        """Stop after the present step."""
        self._drain_asked = True
        if self.phase is RunPhase.WAITING:
            return self._finish("drained", "drained before the start", ExitCode.OK)
        if self.phase is RunPhase.HALTED:
            return self._finish("failed", f"halted: {self.reason}", ExitCode.FAILED)
        return []

    # Joining.

    def _ready(self, member: Member, message: Ready, document: bytes) -> list[Action]:
        if message.run_id != self.run_id or member.state is not MemberState.PREPARING:
            raise OutOfPlace(f"Ready for run {message.run_id!r} was not asked for")
        manifest = Manifest.from_bytes(document)
        actions: list[Action] = []
        if self.manifest is None:
            self._adopt(manifest, message)
            actions.append(Adopt(manifest))
        refusal = self._refusal(manifest, message)
        if refusal:
            self.members.remove(member.name)
            return [Dismiss(member.name, refusal, ExitCode.MISMATCH)]
        member.state = MemberState.READY
        member.backend, member.device = message.backend, message.device
        member.state_digest = message.state_digest
        member.signature = message.signature
        member.signature_text = message.signature_text
        actions.append(Report("worker_ready", {"worker": member.name, "device": message.device}))
        if self.phase is not RunPhase.WAITING:
            member.state = MemberState.LOADING
            return [*actions, Seed(member.name)]
        return actions + self._request_state() + self._start_if_enough()

    def _adopt(self, manifest: Manifest, message: Ready) -> None:
        self.manifest = manifest
        self.manifest_digest = manifest.digest()
        self.initial_digest = message.state_digest
        self._signature = message.signature
        self._order = SampleOrder(self.spec.seed, manifest.train_samples, self.spec.batch)

    def _refusal(self, manifest: Manifest, message: Ready) -> str:
        """Why this worker can't take part; empty if it can."""
        assert self.manifest is not None
        if manifest.digest() != self.manifest_digest:
            theirs, ours = manifest.digests, self.manifest.digests
            keys = sorted(k for k in theirs.keys() | ours.keys() if theirs.get(k) != ours.get(k))
            what = ", ".join(keys) or "model shape or metrics"
            return f"expected the same {what} as the run's first worker, got another digest"
        if self.spec.exactness == "require":
            if message.signature != self._signature:
                return (
                    "the run requires exactness and this worker has another numeric signature: "
                    f"{message.signature_text}"
                )
            if message.state_digest != self.initial_digest:
                return "the run requires exactness and this worker's initial weights differ"
        return ""

    def _unready(self, worker: str, message: Unready) -> list[Action]:
        self.members.remove(worker)
        report = Report("worker_unready", {"worker": worker, "reason": message.reason})
        if self.phase is not RunPhase.WAITING:
            return [report]
        code = message.exit_code
        known = ExitCode(code) if code in list(ExitCode) else ExitCode.FAILED
        return [report, *self._finish("failed", f"worker {worker!r}: {message.reason}", known)]

    def _request_state(self) -> list[Action]:
        """Ask the first ready worker for state 0, once."""
        ready = self.members.names(MemberState.READY)
        if self._uploader is not None or self._replica_loaded or not ready:
            return []
        same = [m.name for m in self.members if m.state_digest == self.initial_digest]
        self._uploader = next((name for name in ready if name in same), ready[0])
        return [Send(self._uploader, StateRequest(run_id=self.run_id))]

    def _start_if_enough(self) -> list[Action]:
        ready = self.members.names(MemberState.READY)
        if self.phase is not RunPhase.WAITING or len(ready) < self.expect_workers:
            return []
        if not self._replica_loaded:
            return []
        actions: list[Action] = [Report("started", {"workers": ready})]
        for name in ready:
            member = self.members.get(name)
            assert member is not None
            if member.state_digest == self.initial_digest:
                self.members.activate(member)
                actions.append(Follow(name))
            else:
                self.mixed = True
                member.state = MemberState.LOADING
                actions.append(Seed(name))
        return actions + self._begin_step()

    def _worker_drains(self, member: Member) -> list[Action]:
        busy = self.round is not None and self.round.unfinished(member.name)
        if busy and self.phase is RunPhase.TRAINING:
            member.state = MemberState.DRAINING
            return []
        return [Dismiss(member.name, "drained", ExitCode.OK)]

    # Steps.

    def _begin_step(self) -> list[Action]:
        assert self.manifest is not None
        assert self._order is not None
        self.phase, self.reason = RunPhase.TRAINING, ""
        microbatches = self._order.microbatch_count(self.step)
        self.round = Round(
            self.manifest.blocks, microbatches, self.epoch, self.step, self.attempt
        )
        actions: list[Action] = [
            Dismiss(name, "drained", ExitCode.OK)
            for name in self.members.names(MemberState.DRAINING)
        ]
        speeds = self.members.speeds()
        if not speeds:
            return actions
        self.mixed = self.mixed or len(self.members.signatures) > 1
        self.division = divide(microbatches, speeds, self.division)
        for name, nodes in nodes_for(self.division).items():
            actions.append(self._plan(name, nodes))
        return actions

    def _plan(self, worker: str, nodes: tuple[Node, ...]) -> Send:
        """Give nodes to a worker: its plan of this step, or more of it."""
        assert self.round is not None
        assert len(nodes) <= _MAX_NODES
        known = worker in self.round.shares
        self.round.assign(worker, nodes)
        place = {"epoch": self.epoch, "step": self.step, "attempt": self.attempt}
        if known:
            message: Message = Assign(**place, view=self.members.view, nodes=nodes)
        else:
            message = StepPlan(
                **place, view=self.members.view, nodes=nodes, microbatches=self.round.microbatches
            )
        return Send(worker, message)

    def _take_up(self) -> list[Action]:
        """Give what is nobody's to the active workers."""
        if self.phase is RunPhase.EVALUATING and self.evaluation is not None:
            return self._plan_evaluation()
        if self.phase is not RunPhase.TRAINING or self.round is None:
            return []
        speeds = self.members.speeds()
        orphans = self.round.unassigned()
        if not speeds or not orphans:
            return []
        actions: list[Action] = []
        for name, nodes in spread(orphans, self.round.microbatches, speeds).items():
            for at in range(0, len(nodes), _MAX_NODES):
                actions.append(self._plan(name, nodes[at : at + _MAX_NODES]))
        report = Report("reassigned", {"step": self.step, "nodes": [str(n) for n in orphans]})
        return [*actions, report]

    def _is_present(self, message: GradientPayload | NodeLoss) -> bool:
        """Whether it belongs to the attempt in progress; late ones are dropped.

        Raises:
            OutOfPlace: It belongs to no attempt that there has been.
        """
        theirs = (message.epoch, message.step, message.attempt)
        ours = (self.epoch, self.step, self.attempt)
        if message.epoch != self.epoch or theirs > ours:
            raise OutOfPlace(
                f"{type(message).__name__}: expected (epoch, step, attempt) {ours}, got {theirs}"
            )
        return theirs == ours and self.phase is RunPhase.TRAINING

    def _payload(self, worker: str, message: GradientPayload, values: Array) -> list[Action]:
        if not self._is_present(message):
            return []
        assert self.round is not None
        outcome = self.round.payload(worker, message, values)
        if isinstance(outcome, NonFinite):
            return self._halt_for(outcome)
        return [self.averaged(each) for each in outcome] + self._advance()

    def averaged(self, chunk: Averaged) -> Broadcast:
        """A completed chunk of the present step as a broadcast."""
        assert self.manifest is not None
        kind: Callable[..., Message] = (
            AveragedBlockGradient
            if self.manifest.blocks[chunk.block].kind == "block"
            else AveragedNonBlockGradient
        )
        place = {"epoch": self.epoch, "step": self.step, "attempt": self.attempt}
        return Broadcast(kind(**place, block=chunk.block, chunk=chunk.chunk), chunk.values)

    def _node_loss(self, member: Member, message: NodeLoss) -> list[Action]:
        if not self._is_present(message):
            return []
        assert self.round is not None
        fault = self.round.node_loss(member.name, message)
        if fault is not None:
            return self._halt_for(fault)
        member.measured(message.elapsed_ms / message.node.leaves)
        member.microbatches += message.node.leaves
        return self._advance()

    def _halt_for(self, fault: NonFinite) -> list[Action]:
        return self.halt(f"step {self.step}: {fault}")

    def _advance(self) -> list[Action]:
        """Commit if everything is there and everyone agrees on the step before."""
        if self.phase is not RunPhase.TRAINING or not self.agreement.reached:
            return self._conclude()
        if self.round is None:
            return self._conclude()
        if self._skip_asked:
            return self._commit(skip=True)
        return self._commit(skip=False) if self.round.complete else []

    def _commit(self, *, skip: bool) -> list[Action]:
        assert self.round is not None
        round_, self._skip_asked = self.round, False
        scalars, loss, digest = None, float("nan"), _NO_AVERAGES
        if not skip:
            norm = round_.gradient_norm
            self.optimizer_step += 1
            scalars = step_scalars(
                self.spec.optimizer, self.optimizer_step, self.step, self.spec.steps, norm
            )
            loss, digest = round_.loss, round_.averages_digest()
        commit = Commit(
            epoch=self.epoch, step=self.step, attempt=self.attempt,
            scalars=scalars, loss=loss, averages_digest=digest,
        )  # fmt: skip
        report = Report("committed", {"step": self.step, "loss": loss, "skipped": skip})
        actions = [Broadcast(commit), ApplyStep(self.step, round_.averages, scalars), report]
        self.losses.append(loss)
        self.step += 1
        self.attempt = 0
        self.round = None
        self.agreement.expect(self.step, self.members.names(*_COMPUTING))
        return actions + self._after_commit()

    def _after_commit(self) -> list[Action]:
        assert self.manifest is not None
        last = self.step == self.spec.steps
        every = self.spec.evaluate_every
        if self.manifest.evaluation_parts and (last or (every and self.step % every == 0)):
            return self._begin_evaluation()
        if last or self._drain_asked:
            return []
        return self._begin_step()

    # Agreement.

    def _step_applied(self, worker: str, message: StepApplied) -> list[Action]:
        if message.epoch != self.epoch or message.step > self.step:
            raise OutOfPlace(
                f"StepApplied: expected epoch {self.epoch} and at most {self.step} steps, "
                f"got {message.epoch} and {message.step}"
            )
        self.agreement.answer(worker, message.step, message.state_digest)
        return self._judge(message.step)

    def _judge(self, step: int) -> list[Action]:
        """Compare the answers to a step once the replica's own is known."""
        agreed, odd = self.agreement.judge(step)
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
        workers = self.members.names(MemberState.ACTIVE)
        return [
            Send(name, EvalPlan(epoch=self.epoch, step=self.step, lo=lo, hi=hi))
            for name, (lo, hi) in self.evaluation.assign(workers).items()
        ]

    def _eval_result(self, message: EvalResult) -> list[Action]:
        if self.evaluation is None or self.phase is not RunPhase.EVALUATING:
            return []
        if message.step == self.evaluation.step:
            self.evaluation.result(message.part, message.sums)
        return self._conclude()

    def _conclude(self) -> list[Action]:
        """End an evaluation, and the run when nothing is left."""
        if self.phase is RunPhase.EVALUATING and self.evaluation is not None:
            if not self.evaluation.complete or not self.agreement.reached:
                return []
            assert self.manifest is not None
            self.metrics = self.evaluation.metrics(self.manifest.metrics)
            self.evaluation = None
            report = Report("evaluated", {"step": self.step, **self.metrics})
            self.phase = RunPhase.TRAINING
            if self.step < self.spec.steps and not self._drain_asked:
                return [report, *self._begin_step()]
            return [report, *self._conclude()]
        ended = self.step == self.spec.steps or self._drain_asked
        if self.phase is RunPhase.TRAINING and self.round is None and ended:
            if not self.agreement.reached:
                return []
            if self.step == self.spec.steps:
                return self._finish("finished", "all steps are committed", ExitCode.OK)
            return self._finish("drained", f"drained after {self.step} steps", ExitCode.OK)
        return []

    def _finish(self, outcome: Outcome, reason: str, exit_code: ExitCode) -> list[Action]:
        self.phase, self.reason = RunPhase.OVER, reason
        return [Finish(outcome, reason, exit_code)]
