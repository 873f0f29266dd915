"""One run: its state machine, from the first ready worker to the last committed step.

`Run.step` takes one input and returns actions, in the order in which the shell must execute them.
It is pure: time and the results of actions come back as inputs.

The state is a phase and four parts: `Progress` has the steps and the exchange of the step in
progress, `Admission` the conditions for workers, `Evaluations` the evaluations, `Halts` the
work that remains after a halt. Only this file changes the phase. Between two inputs:

- WAITING: no worker computes; each member is IDLE, PREPARING or READY. Manifest and parts exist
  once the first worker is ready, or from the beginning after a restart. There is no round.
- TRAINING: the manifest exists. Either a round is in progress; or no step is left, and the run
  waits until all replicas agree and the newest state is saved. No evaluation delays training.
- EVALUATING: an evaluation of the newest state is in progress, and no round. No commit is being
  written.
- HALTED: `reason` says why. No step is planned, and no commit begins; one that was being written
  still becomes durable. An interrupted round or evaluation stays, and starts over afterwards.
- OVER: `outcome` is set. Of all messages only `Drain` is answered. Only a failed write of the
  result ends this phase: the run then halts.

The table at the end of `Run` has a row for each class of `Input` and for each message that a member
may send, with a handler for each phase. The handler acts, ignores the input, or raises OutOfOrder
because the sender breaks the protocol. mypy checks that a handler accepts its row's type; a test
checks that no row is missing. `_NEXT_PHASES` says which phase may follow which. Handlers of inputs
that may complete something (a payload, an answer, a durable write) call `_advance`, which commits
the step or ends evaluation or run once everything has arrived, so the order of these inputs does
not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from coordinator.run.checkpoint_schedule import CheckpointSchedule
from coordinator.run.evaluation import Evaluation, Evaluations
from coordinator.run.exchange.mesh import Mesh
from coordinator.run.exchange.peer_sums import WrongAverage
from coordinator.run.exchange.round import Allocate, new_array
from coordinator.run.halts import Halts
from coordinator.run.inputs import (
    CheckpointDurable,
    CommitDurable,
    ContinueRun,
    DrainRun,
    FailRun,
    HaltRun,
    Input,
    ReplicaApplied,
    ReplicaLoaded,
    ResultNotWritten,
    Resume,
    SaveState,
    Summarized,
    Tick,
    WorkerAvailable,
    WorkerCaughtUp,
    WorkerFellBehind,
    WorkerGone,
    WorkerMessage,
    WriteFailed,
)
from coordinator.run.outputs.actions import (
    Action,
    AdoptManifest,
    Dismiss,
    Finish,
    Replay,
    Report,
    SaveAdmissionRecord,
    Send,
)
from coordinator.run.outputs.events import (
    CapturePlanned,
    Change,
    DeviceFault,
    ManifestSettled,
    TrainingStarted,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerReady,
    WorkerUnready,
)
from coordinator.run.outputs.restart import Resumption
from coordinator.run.progress import (
    Fault,
    FromMember,
    M,
    MessageEffect,
    PeerMessage,
    Progress,
    RoundMessage,
)
from coordinator.run.workers.admission import Admission, is_stale, refuse, seed
from coordinator.run.workers.eligibility import Eligibility, Verdict
from coordinator.run.workers.membership import COMPUTING, Member, Membership, MemberState
from protocol.base.errors import ExitCode, OutOfOrder
from protocol.base.limits import byte_size
from protocol.exact.parameter_groups import unmatched_pattern
from protocol.exact.reduction.reducer import NonFinite
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec
from protocol.wire.messages import (
    AveragedBlockGradient,
    AveragedNonBlockGradient,
    AverageMismatch,
    AveragesRequest,
    BlockGradientPayload,
    CapturedRows,
    ChunkReduced,
    DeviceNote,
    Drain,
    EvalResult,
    InnerCheckpointChunk,
    InnerPhaseProgress,
    InnerStateRequest,
    Linked,
    LinkTraffic,
    Message,
    NonBlockGradientPayload,
    NonFiniteSum,
    Outcome,
    PeerPort,
    Ready,
    StartRun,
    StateChunk,
    StepApplied,
    SubtreeLoss,
    SumsArrived,
    Unlinked,
    Unready,
)

_MOST_STEPS_BEHIND: Final = 2
"""A joiner whose state was correct at most this many steps ago takes part: it has received every
later commit."""
I = TypeVar("I")  # noqa: E741 -- an input


class RunPhase(Enum):
    """The phases of a run; the docstring of the module describes them."""

    WAITING = "waiting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    HALTED = "halted"
    OVER = "over"


_NEXT_PHASES: Final[dict[RunPhase, set[RunPhase]]] = {
    RunPhase.WAITING: {RunPhase.TRAINING, RunPhase.OVER},
    RunPhase.TRAINING: {
        RunPhase.TRAINING, RunPhase.EVALUATING, RunPhase.HALTED, RunPhase.OVER,
    },
    RunPhase.EVALUATING: {RunPhase.TRAINING, RunPhase.HALTED, RunPhase.OVER},
    RunPhase.HALTED: {RunPhase.TRAINING, RunPhase.EVALUATING, RunPhase.OVER},
    RunPhase.OVER: {RunPhase.TRAINING},
}  # fmt: skip
"""TRAINING follows itself with each step, and OVER when the result cannot be written."""

_Row = Mapping[RunPhase, Callable[["Run", Any], list[Action]]]


def _row(input_type: type[I], *handlers: Callable[[Run, I], list[Action]]) -> tuple[type[I], _Row]:
    """Make a row of the table: an input's handlers in the order of the phases."""
    return input_type, dict(zip(RunPhase, handlers, strict=True))


def _message(
    message_type: type[M], *handlers: Callable[[Run, FromMember[M]], list[Action]]
) -> tuple[type[M], _Row]:
    """Make a row of the table for a member's message."""
    return message_type, dict(zip(RunPhase, handlers, strict=True))


def _step(
    handle: Callable[[Progress, FromMember[M]], MessageEffect],
) -> Callable[[Run, FromMember[M]], list[Action]]:
    """Make a handler from a method of `Progress`."""
    return lambda run, incoming: run.handle_step_message(handle, incoming)


@dataclass(frozen=True, slots=True)
class RunParts:
    """The parts of a run that exist once the first ready worker's manifest is adopted."""

    manifest: Manifest
    progress: Progress
    admission: Admission
    evaluations: Evaluations


class Run:
    """The state machine of one run; see the module's docstring.

    Attributes:
        phase: The phase of the run.
        reason: The reason for the phase; empty while the run trains.
        members: The workers that take part.
        run_parts: Manifest and parts, once they exist.
        checkpoints: The checkpoints that are due, being written, and durable.
        blobs: Digest of the list of files that workers may request, if there are any.
        outcome: Outcome of a run that is over.

    Args:
        run_id: The run's ID.
        spec: The run spec.
        term: Term of the coordinator.
        expect_workers: How many workers must be ready before the start; a multi-device worker
            counts once for each device.
        resumption: The point from which a restart continues; None for a new run.
        secret: Secret from which the keys of members that exchange chunks are derived; empty:
            members exchange none.
        allocate: Returns a flat float32 array for averages, with the given number of elements.
    """

    def __init__(
        self,
        run_id: str,
        spec: RunSpec,
        term: int,
        expect_workers: int,
        resumption: Resumption | None = None,
        *,
        secret: bytes = b"",
        allocate: Allocate = new_array,
    ) -> None:
        self.run_id = run_id
        self.spec = spec
        self.term = term
        self.expect_workers = expect_workers
        self.phase = RunPhase.WAITING
        self.reason = "waiting for workers"
        self.members = Membership(term)
        self.run_parts: RunParts | None = None
        self.checkpoints = CheckpointSchedule(spec.checkpoint)
        self.blobs: str | None = None
        self.outcome: Outcome | None = None
        self._eligibility = Eligibility(self.members, expect_workers)
        self._halts = Halts(self.members)
        self._secret = secret
        self._allocate = allocate
        self._is_draining = False
        self._recorded_profiles: set[str] = set()
        if resumption is not None:
            self._restore(resumption)

    def _restore(self, resumption: Resumption) -> None:
        record = resumption.admission
        parts = self._settle(resumption.manifest, resumption)
        parts.admission.resume(record, resumption.initial_digest)
        self.checkpoints = CheckpointSchedule(self.spec.checkpoint, resumption.saved)
        self._recorded_profiles = set(record.signatures) if record is not None else set()

    def _settle(self, manifest: Manifest, resumption: Resumption | None = None) -> RunParts:
        spec, members = self.spec, self.members
        # Replicas and captures send messages that only the coordinator accepts.
        secret = self._secret if spec.replicas is None and manifest.capture is None else b""
        mesh = Mesh(self.run_id, self.term, spec.exchange, manifest.blocks, secret)
        progress = Progress(
            spec, self.term, manifest, members, resumption, mesh=mesh, allocate=self._allocate
        )
        earlier = resumption.metrics if resumption is not None else {}
        self.run_parts = RunParts(
            manifest,
            progress,
            Admission(self.run_id, spec.exactness, members, manifest),
            Evaluations(spec, members, manifest, progress, earlier),
        )
        return self.run_parts

    # State that other chapters read.

    @property
    def _parts(self) -> RunParts:
        assert self.run_parts is not None, "no run leaves WAITING without a manifest"
        return self.run_parts

    @property
    def unfit(self) -> Mapping[str, str]:
        """Workers that cannot take part in this run, with the reasons."""
        return self._eligibility.unfit

    @property
    def evaluation(self) -> Evaluation | None:
        """The evaluation that training waits for, even while the run is halted."""
        return self.run_parts.evaluations.current if self.run_parts is not None else None

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the newest evaluation."""
        return self.run_parts.evaluations.metrics if self.run_parts is not None else {}

    @property
    def manifest(self) -> Manifest | None:
        """The manifest, once the workers have settled it."""
        return self.run_parts.manifest if self.run_parts is not None else None

    @property
    def progress(self) -> Progress | None:
        """The steps, once the manifest is settled."""
        return self.run_parts.progress if self.run_parts is not None else None

    @property
    def has_state(self) -> bool:
        """Whether the coordinator's replica has a state of this run."""
        return self.run_parts is not None and self.run_parts.admission.has_state

    @property
    def steps_committed(self) -> int:
        """The number of committed steps."""
        return self.run_parts.progress.step if self.run_parts is not None else 0

    @property
    def steps(self) -> int:
        """The number of steps; before the manifest is settled, that of the run spec."""
        return self.run_parts.progress.steps if self.run_parts is not None else self.spec.steps

    @property
    def known_steps(self) -> int | None:
        """The number of steps; None until it is known."""
        return self.steps if self.run_parts is not None else self.spec.known_steps

    @property
    def epochs(self) -> str:
        """The epoch as text, if the run spec counts epochs and the samples are known; else
        empty."""
        if self.run_parts is None:
            return ""
        return self.spec.epochs_after(self.steps_committed, self.run_parts.manifest.epoch_samples)

    @property
    def losses(self) -> list[float]:
        """Mean loss of each committed step; NaN for a skipped one."""
        return self.run_parts.progress.losses if self.run_parts is not None else []

    # The state machine.

    def step(self, input_: Input) -> list[Action]:
        """Take one input.

        Returns:
            The actions that follow, in order.

        Raises:
            RemoteProtocolError: A worker's message breaks the protocol: close its connection.
        """
        if isinstance(input_, WorkerMessage):
            return self._receive(input_)
        return self._INPUTS[type(input_)][self.phase](self, input_)

    def _receive(self, incoming: WorkerMessage) -> list[Action]:
        message, member = incoming.message, self.members.get(incoming.worker)
        if member is None:  # not part of the run: it may leave at once
            is_leaving = isinstance(message, Drain)
            return [Dismiss(incoming.worker, "drained", ExitCode.OK)] if is_leaving else []
        is_over = self.phase is RunPhase.OVER and not isinstance(message, Drain)
        if is_over or is_stale(member, message, self.run_id):
            return []
        row = self._MESSAGES.get(type(message))
        if row is None or not self._is_expected(member, message):
            raise OutOfOrder(f"{type(message).__name__} is out of order")
        return row[self.phase](self, FromMember(member, message, incoming.body))

    def _is_expected(self, member: Member, message: Message) -> bool:
        """Return whether the member may send the message now.

        Ready or Unready may come once after StartRun; Unready also once the run has started, for a
        cause that is not the worker's alone (changed data).
        """
        if not isinstance(message, Ready | Unready) or member.state is MemberState.PREPARING:
            return True
        has_begun = self.phase is not RunPhase.WAITING
        return isinstance(message, Unready) and not message.own and has_begun

    def _enter(self, phase: RunPhase, reason: str = "") -> None:
        assert phase in _NEXT_PHASES[self.phase], f"{self.phase} is never followed by {phase}"
        self.phase, self.reason = phase, reason

    def _ignore(self, input_: object) -> list[Action]:
        del input_
        return []

    def _refuse_early(self, incoming: FromMember[Message]) -> list[Action]:
        name = type(incoming.message).__name__
        raise OutOfOrder(f"{name} of {incoming.member.name!r} before the first step")

    def _check_late(self, incoming: FromMember[RoundMessage | PeerMessage]) -> list[Action]:
        """Drop a message of a step that is interrupted; refuse one that belongs to no step."""
        self._parts.progress.round_of(incoming.message)
        return []

    def _advance(self) -> list[Action]:
        """Continue if everything that the phase waits for has arrived."""
        match self.phase:
            case RunPhase.TRAINING:
                return self._advance_step()
            case RunPhase.EVALUATING:
                return self._end_evaluation()
            case RunPhase.WAITING | RunPhase.HALTED | RunPhase.OVER:
                return []

    def _reassign(self) -> list[Action]:
        """Assign unassigned work to the active workers."""
        match self.phase:
            case RunPhase.TRAINING:
                return self._parts.progress.reassign()
            case RunPhase.EVALUATING:
                return self._parts.evaluations.plan()
            case RunPhase.WAITING | RunPhase.HALTED | RunPhase.OVER:
                return []

    # Workers join and leave.

    def _on_connect_early(self, worker: WorkerAvailable) -> list[Action]:
        """Add a worker; an evaluator waits, since training workers settle the manifest and the
        initial state."""
        member = self._add(worker)
        return [] if member.evaluates else self._request_build(member)

    def _on_connect(self, worker: WorkerAvailable) -> list[Action]:
        return self._request_build(self._add(worker))

    def _add(self, worker: WorkerAvailable) -> Member:
        return self.members.add(
            worker.worker, worker.admitted_by, worker.host, devices=worker.devices,
            evaluates=worker.evaluates,
        )  # fmt: skip

    def _request_build(self, member: Member) -> list[Action]:
        if member.evaluates and not self._parts.evaluations.can_run_in_parallel:
            return []
        member.state = MemberState.PREPARING
        self._eligibility.unfit.pop(member.name, None)
        message = StartRun(
            run_id=self.run_id, term=self.term, step=self.steps_committed, blobs=self.blobs
        )
        return [Send(member.name, message, self.spec.to_bytes())]

    def _on_ready_early(self, incoming: FromMember[Ready]) -> list[Action]:
        """Before the start, take a ready worker; the first settles manifest and initial state."""
        manifest = Manifest.from_bytes(incoming.document)
        actions: list[Action] = []
        if self.run_parts is None:
            self._settle(manifest)
            actions += [
                AdoptManifest(manifest),
                Report(ManifestSettled.of(manifest)),
                *self._report_capture_size(),
            ]
            missing = self._missing_metric(manifest)
            if missing := missing or unmatched_pattern(self.spec.optimizer, manifest.blocks):
                return actions + self._finish("failed", missing, ExitCode.USAGE)
        actions += self._check_ready(incoming.member, manifest, incoming.message)
        if incoming.member.name not in self.members:
            return actions
        return actions + self._parts.admission.request_state() + self._start_if_enough()

    def _missing_metric(self, manifest: Manifest) -> str:
        """Describe a metric in the run spec that the task does not have; empty if there is none."""
        stop, best = self.spec.stop, self.spec.checkpoint.metric
        plateau = self.spec.optimizer.plateau
        names = [known_metric.name for known_metric in manifest.metrics]
        for key, metric in (
            ("stop.figure", stop.figure) if stop else ("checkpoint.metric", best),
            ("optimizer.plateau.metric", plateau.metric if plateau is not None else None),
        ):
            if metric is not None and metric not in names:
                available = f"it has {', '.join(names)}" if names else "it has none"
                return f"{key}: expected a metric of this task, got {metric!r}; {available}"
        return ""

    def _report_capture_size(self) -> list[Action]:
        """Report the expected size of a capture."""
        layout, progress = self._parts.manifest.capture, self._parts.progress
        if layout is None:
            return []
        samples = min(self._parts.manifest.train_samples, progress.steps * self.spec.batch.samples)
        size = byte_size(samples * layout.sample_bytes)
        return [Report(CapturePlanned(samples, progress.steps, size, layout.logits_bytes))]

    def _on_ready(self, incoming: FromMember[Ready]) -> list[Action]:
        """Admit a ready worker to a run in progress; it computes once it has the state."""
        parts, member = self._parts, incoming.member
        actions = self._check_ready(
            member, Manifest.from_bytes(incoming.document), incoming.message
        )
        if member.name not in self.members:
            return actions
        actions += parts.admission.admit(member, self.steps_committed, parts.progress.agreement)
        if member.state is MemberState.FOLLOWING:
            return actions + parts.evaluations.begin_pending()
        return actions + (self._on_joined(member) if member.state is MemberState.ACTIVE else [])

    def _check_ready(self, member: Member, manifest: Manifest, message: Ready) -> list[Action]:
        admission = self._parts.admission
        if not member.evaluates:
            admission.take_first_ready(message)
        if refusal := admission.find_refusal(manifest, message, evaluates=member.evaluates):
            self.members.remove(member.name)
            self._eligibility.reject(member, refusal)
            self._eligibility.judge(member, refusal, ExitCode.MISMATCH)
            return refuse(member.name, refusal)
        member.become_ready(message)
        event = WorkerReady(member.name, member.device, member.backend, member.numerics_text)
        if member.evaluates:
            return [Report(event)]
        return [Report(event), *self._parts.progress.mesh.add_worker(member.name, member.host)]

    def _on_unready_early(self, incoming: FromMember[Unready]) -> list[Action]:
        """Before the start, reject a worker that cannot build the task.

        The run ends, unless the cause is that worker's alone and others may still come.
        """
        actions = self._reject_member(incoming)
        verdict = self._eligibility.verdict
        if verdict is None or (incoming.message.own and self._eligibility.others_may_come):
            return actions
        return actions + self._end_with(verdict)

    def _on_unready(self, incoming: FromMember[Unready]) -> list[Action]:
        """Reject a worker; if it has taken part, the run ends as failed: its results, of a task
        that has changed, cannot be undone."""
        was_preparing = incoming.member.state is MemberState.PREPARING
        actions = self._reject_member(incoming)
        if was_preparing:
            return actions
        reason = f"worker {incoming.member.name!r}: {incoming.message.reason}"
        return actions + self._finish(
            "failed", reason, incoming.message.exit_code, is_resumable=False
        )

    def _reject_member(self, incoming: FromMember[Unready]) -> list[Action]:
        member, message = incoming.member, incoming.message
        self.members.remove(member.name)
        self._eligibility.reject(member, message.reason)
        self._eligibility.judge(
            member, message.reason, message.exit_code, rejects_all=not message.own
        )
        return [Report(WorkerUnready(member.name, message.reason))]

    def _end_with(self, verdict: Verdict) -> list[Action]:
        return self._finish("failed", verdict.reason, verdict.exit_code)

    def _on_state_chunk(self, incoming: FromMember[StateChunk]) -> list[Action]:
        if self.run_parts is None:
            raise OutOfOrder("StateChunk was not requested")
        return self.run_parts.admission.take_state_chunk(
            incoming.member.name, incoming.message, incoming.values
        )

    def _on_replica_loaded(self, replica: ReplicaLoaded) -> list[Action]:
        parts = self._parts
        actions = parts.admission.accept_upload(replica.upload, replica.initial_digest)
        if not parts.admission.has_state:
            return actions
        parts.progress.agreement.take_replica_answer(0, replica.digest)
        return actions + self.checkpoints.save(0) + self._start_if_enough()

    def _on_tick_waiting(self, tick: Tick) -> list[Action]:
        if verdict := self._eligibility.find_expired(tick.now_ms):
            return self._end_with(verdict)
        return self.run_parts.admission.tick(tick.now_ms) if self.run_parts is not None else []

    def _start_if_enough(self) -> list[Action]:
        ready_members = [member for member in self.members if member.state is MemberState.READY]
        admission, progress = self._parts.admission, self._parts.progress
        expected = self.expect_workers
        if sum(member.devices for member in ready_members) < expected or not admission.has_state:
            return []
        progress.is_mixed = not all(admission.has_initial_state(member) for member in ready_members)
        event = Report(TrainingStarted([member.name for member in ready_members]))
        admission_actions = admission.admit_ready()
        self._enter(RunPhase.TRAINING)
        view = self.members.report_view_change(self.steps_committed, "started")
        evaluators = [member for member in self.members if member.evaluates]
        build_requests = [action for member in evaluators for action in self._request_build(member)]
        return [event, *admission_actions, *view, *progress.begin(), *build_requests]

    def _remove(self, departure: WorkerGone) -> tuple[Member | None, list[Action]]:
        """Remove a worker; the others drop their links to it."""
        member = self.members.remove(departure.worker)
        if member is None or self.run_parts is None:
            return member, []
        return member, self.run_parts.progress.mesh.remove_worker(departure.worker)

    def _on_lost_early(self, departure: WorkerGone) -> list[Action]:
        member, actions = self._remove(departure)
        if member is None:
            return []
        actions.append(self._report_departure(member, departure))
        return actions + (
            self.run_parts.admission.replace_uploader(member.name) if self.run_parts else []
        )

    def _on_lost_late(self, departure: WorkerGone) -> list[Action]:
        return self._remove(departure)[1]

    def _on_lost(self, departure: WorkerGone) -> list[Action]:
        member, actions = self._remove(departure)
        if member is None:
            return []
        worker, progress = departure.worker, self._parts.progress
        failure_pattern = ""
        if departure.exit_code != ExitCode.OK and progress.round is not None:
            failure_pattern = self._halts.failures.note(worker, progress.round.unfinished(worker))
        self._halts.mismatched.discard(worker)
        actions.append(self._report_departure(member, departure))
        change: Change = "drained" if member.is_released else "lost"
        actions += self.members.report_view_change(
            self.steps_committed, change, worker, departure.reason
        )
        is_proven = progress.lose(worker)
        actions += self._parts.evaluations.lose(worker, is_proven=is_proven)
        if failure_pattern:
            self._halts.failures.clear()
            actions += self._halt(
                f"step {self.steps_committed}: {failure_pattern}; the last failure: "
                f"{departure.reason}"
            )
        actions += self._recall_all() + self._reassign() + self._advance()
        return actions + self._drain_now() if self._is_draining else actions

    def _recall_all(self) -> list[Action]:
        """Send the state to workers that were set aside, if no other worker is left."""
        if self._computing_workers:
            return []
        actions: list[Action] = []
        for member in self.members:
            if member.aside_until and member.state is MemberState.LOADING:
                member.aside_until = 0
                actions.append(seed(member))
        return actions

    def _report_departure(self, member: Member, departure: WorkerGone) -> Report:
        """Report a worker that has left; if it failed while it built the task, reject it."""
        reason, exit_code = departure.reason, departure.exit_code
        if member.state is MemberState.PREPARING and exit_code != ExitCode.OK:
            self._eligibility.reject(member, reason)
            if exit_code == ExitCode.MISMATCH:  # after other errors it may return, repaired
                self._eligibility.judge(member, reason, exit_code)
        event_type = WorkerLeft if member.is_released else WorkerLost
        return Report(event_type(member.name, reason, self.members.view))

    def _release(self, incoming: FromMember[Drain]) -> list[Action]:
        """Dismiss a worker that asks to leave and owes no work."""
        return [incoming.member.release()]

    def _on_drain_request_in_step(self, incoming: FromMember[Drain]) -> list[Action]:
        round_ = self._parts.progress.round
        if round_ is None or not round_.unfinished(incoming.member.name):
            return self._release(incoming)
        incoming.member.state = MemberState.DRAINING
        return []

    def _on_unlinked(self, incoming: FromMember[Unlinked]) -> list[Action]:
        self._parts.progress.mesh.remove_link(incoming.member.name, incoming.message.peer)
        return self._reassign() + self._advance()

    def _on_note(self, incoming: FromMember[DeviceNote]) -> list[Action]:
        return [
            Report(
                DeviceFault(incoming.member.name, incoming.message.device, incoming.message.text)
            )
        ]

    # Steps.

    def _on_resume(self, resume: Resume) -> list[Action]:
        del resume
        self._enter(RunPhase.TRAINING)
        return self._after_commit() + self._advance()

    def _begin_step(self) -> list[Action]:
        self._enter(RunPhase.TRAINING)
        return self._parts.progress.begin()

    def handle_step_message(
        self, handle: Callable[[Progress, FromMember[M]], MessageEffect], incoming: FromMember[M]
    ) -> list[Action]:
        """Handle a message of the step in progress; a fault halts the run."""
        result = handle(self._parts.progress, incoming)
        if result.fault is not None:
            return [*result.actions, *self._fail_step(result.fault)]
        return [*result.actions, *(self._advance() if result.may_complete else ())]

    def _on_summarized(self, summarized: Summarized) -> list[Action]:
        round_ = self._parts.progress.round
        attempt = {"step": summarized.step, "attempt": summarized.attempt}
        if round_ is None or not attempt.items() <= round_.step_id.items():
            return []
        round_.take_summaries(summarized.summaries)
        return self._advance()

    def _on_tick(self, tick: Tick) -> list[Action]:
        if verdict := self._eligibility.find_expired(tick.now_ms):
            return self._end_with(verdict)
        return self._parts.progress.tick(tick.now_ms) + self._advance()

    def _advance_step(self) -> list[Action]:
        """Commit if the round is complete and all replicas agree on the previous step.

        After a round of embeddings, begin the round of gradients, without waiting for agreement.
        """
        progress = self._parts.progress
        round_ = progress.round
        skip = self._halts.should_skip_step or progress.was_skipped
        if round_ is not None and round_.embedding_layout and round_.is_complete and not skip:
            return progress.continue_with_gradients(round_)
        if not progress.agreement.is_reached:
            return []
        if round_ is None:
            return self._end_if_done()
        # The first commit waits for the checkpoint of step 0: without it a restart has no state.
        if progress.is_persisting or self.checkpoints.saved_step is None:
            return []
        if not (skip or round_.is_complete):
            return []
        self._halts.should_skip_step = False
        return self._save_admission_record() + progress.persist(round_, skip=skip)

    def _save_admission_record(self) -> list[Action]:
        """Save the numerics profiles that may have contributed to the step, if they changed."""
        progress, admission = self._parts.progress, self._parts.admission
        if self._recorded_profiles == progress.numerics_profiles:
            return []
        self._recorded_profiles = set(progress.numerics_profiles)
        record = admission.make_record(progress.numerics_profiles, mixed=progress.is_mixed)
        return [SaveAdmissionRecord(record)]

    def _on_durable(self, commit: CommitDurable) -> list[Action]:
        actions = self._after_durable(commit)
        return actions and actions + self._after_commit() + self._advance()

    def _on_durable_halted(self, commit: CommitDurable) -> list[Action]:
        actions = self._after_durable(commit)
        self._halts.has_new_commit = self._halts.has_new_commit or bool(actions)
        return actions

    def _on_late_durable(self, commit: CommitDurable) -> list[Action]:
        """Count a step that became durable after the run had ended; no worker receives it."""
        self._parts.progress.end_step(commit.step, commit.own_digest)
        return []

    def _after_durable(self, commit: CommitDurable) -> list[Action]:
        actions = self._parts.progress.end_step(commit.step, commit.own_digest)
        if actions:
            self._halts.failures.clear()
            actions += self._parts.evaluations.evaluators.note_commit(self.steps_committed)
            actions += self.checkpoints.save_if_due(self.steps_committed)
        return actions

    def _after_commit(self) -> list[Action]:
        progress, evaluations = self._parts.progress, self._parts.evaluations
        if self._is_draining and not self._computing_workers:
            return []
        parallel_actions: list[Action] = []
        if evaluations.is_due:
            if evaluations.stops_training:
                return self._begin_evaluation()
            parallel_actions = evaluations.begin_in_parallel()
        if progress.all_committed or self._is_draining:
            return parallel_actions
        return parallel_actions + self._begin_step()

    # Agreement.

    def _on_applied(self, incoming: FromMember[StepApplied]) -> list[Action]:
        progress, member, step = self._parts.progress, incoming.member, incoming.message.step
        progress.take_answer(member.name, incoming.message)
        agreement = progress.agreement
        if member.evaluates:
            self._parts.evaluations.evaluators.take_answer(member, incoming.message)
            return self._judge(step) + self._parts.evaluations.end_in_parallel()
        if agreement.is_catching_up and agreement.digest(step) is None:
            # Provisional: compared with the other answers now, and with the replica once the
            # replica has caught up.
            return self._confirm_state(member, step) + self._advance()
        return self._judge(step)

    def _on_replica_applied(self, replica: ReplicaApplied) -> list[Action]:
        evaluations = self._parts.evaluations
        self._parts.progress.agreement.take_replica_answer(replica.step, replica.digest)
        evaluations.evaluators.take_replica_answer(replica.step, replica.digest)
        halt_actions: list[Action] = []
        if replica.not_finite:
            halt_actions = self._halt(
                f"the update of step {replica.step - 1} produced a non-finite value: "
                f"{replica.not_finite}; resume from an earlier checkpoint (--from-step N) with a "
                "lower learning rate"
            )
        return halt_actions + self._judge(replica.step) + evaluations.end_in_parallel()

    def _judge(self, step: int) -> list[Action]:
        """Compare the digests of a step with the replica's, once the replica's is known."""
        agreement = self._parts.progress.agreement
        agreeing_workers, differing_workers = agreement.judge(step)
        actions: list[Action] = []
        mismatched = []
        for name in differing_workers:
            member = self.members.get(name)
            if member is not None and member.evaluates:
                actions += self._parts.evaluations.refuse_evaluator(name, step)
            else:
                mismatched.append(name)
        if mismatched:
            self._halts.mismatched.update(mismatched)
            names = ", ".join(repr(name) for name in mismatched)
            actions += self._halt(
                f"the state of worker {names} after {step} steps differs from the coordinator's"
            )
        for name in agreeing_workers:
            actions += self._confirm_state(self.members.get(name), step)
        return actions + self._advance()

    def _confirm_state(self, member: Member | None, step: int) -> list[Action]:
        """Let a loading worker take part if its state after `step` steps is the run's.

        After a restart the confirmation may be provisional. A worker that still receives missed
        steps takes part later.
        """
        if member is None or member.state is not MemberState.LOADING or member.evaluates:
            return []
        if member.is_replaying:
            member.confirmed_step = step
            return []
        agreement, steps_behind = self._parts.progress.agreement, self.steps_committed - step
        is_provisional = agreement.digest(step) is None
        if steps_behind > (0 if is_provisional else _MOST_STEPS_BEHIND):
            return []
        if self.steps_committed < member.aside_until and self.members.names(MemberState.ACTIVE):
            return []
        if steps_behind or is_provisional:
            agreement.wait_for(member.name)  # its answers to the steps in between count too
        self.members.activate(member)
        return self._on_joined(member)

    def _on_joined(self, member: Member) -> list[Action]:
        report = Report(WorkerJoined(member.name, self.steps_committed, self.members.view))
        view = self.members.report_view_change(self.steps_committed, "joined", member.name)
        return [report, *view, *self._reassign()]

    def _on_fell_behind(self, worker: WorkerFellBehind) -> list[Action]:
        member = self.members.get(worker.worker)
        if member is None or member.state not in (MemberState.LOADING, MemberState.FOLLOWING):
            return []
        member.state, member.has_caught_up = MemberState.LOADING, False
        member.begin_replay()
        return [Replay(worker.worker, worker.step, None)]

    def _on_caught_up(self, worker: WorkerCaughtUp) -> list[Action]:
        member = self.members.get(worker.worker)
        if member is None or not member.is_replaying:
            return []
        member.is_replaying = False
        if member.evaluates:
            member.begin_following()
            return self._parts.evaluations.begin_pending()
        if member.confirmed_step is None:
            return []
        return self._confirm_state(member, member.confirmed_step) + self._advance()

    # Evaluation.

    def _begin_evaluation(self) -> list[Action]:
        self._enter(RunPhase.EVALUATING)
        return self._parts.evaluations.begin()

    def _on_eval_result(self, incoming: FromMember[EvalResult]) -> list[Action]:
        if incoming.member.evaluates:
            return self._on_parallel_result(incoming)
        if self.evaluation is not None:
            self.evaluation.take_result(incoming.member.name, incoming.message)
        return self._advance()

    def _on_parallel_result(self, incoming: FromMember[EvalResult]) -> list[Action]:
        return self._parts.evaluations.take_parallel_result(incoming.member, incoming.message)

    def _on_tick_evaluation(self, tick: Tick) -> list[Action]:
        if verdict := self._eligibility.find_expired(tick.now_ms):
            return self._end_with(verdict)
        return self._parts.evaluations.tick(tick.now_ms) + self._advance()

    def _end_evaluation(self) -> list[Action]:
        """End the evaluation once it is complete."""
        evaluations = self._parts.evaluations
        if not evaluations.is_complete:
            return []
        actions, is_best = evaluations.end()
        if is_best:
            actions += self.checkpoints.save(self.steps_committed)
        self._enter(RunPhase.TRAINING)
        return actions + (self._end_if_done() if self._should_end else self._begin_step())

    # Halts.

    def _fail_step(self, fault: Fault) -> list[Action]:
        """Retry with half the loss scale if a gradient overflowed, else halt."""
        if not isinstance(fault, NonFinite):
            return self._halt(f"step {self.steps_committed}: {fault}")
        progress = self._parts.progress
        text = fault.describe(progress.blocks, has_replicas=progress.has_replicas)
        retry_actions = progress.halve_loss_scale(text) if fault.block is not None else []
        return retry_actions or self._halt(f"step {self.steps_committed}: {text}", fault)

    def _on_average_mismatch(self, incoming: FromMember[AverageMismatch]) -> list[Action]:
        """Halt: a worker received averages that differ from the committed ones."""
        message, blocks = incoming.message, self._parts.manifest.blocks
        if message.block >= len(blocks) or message.step >= self.steps_committed:
            raise OutOfOrder(f"AverageMismatch: no block {message.block} of a committed step")
        if message.owner not in self.members:
            return []  # the owner has left
        block = blocks[message.block].name
        mismatch = WrongAverage(message.owner, block, f"to worker {incoming.member.name!r}")
        return self._halt(f"step {message.step}: {mismatch}")

    def _on_halt(self, halt: HaltRun) -> list[Action]:
        return self._halt(halt.reason)

    def _halt(self, reason: str, fault: NonFinite | None = None) -> list[Action]:
        """Halt if a step or evaluation is in progress; nothing is applied."""
        if self.phase not in (RunPhase.TRAINING, RunPhase.EVALUATING):
            return []
        self._enter(RunPhase.HALTED, reason)
        actions = self._halts.announce(self._parts.progress, reason, fault)
        return actions + self._drain_now() if self._is_draining else actions

    def _on_continue(self, command: ContinueRun) -> list[Action]:
        progress, halts = self._parts.progress, self._halts
        was_committing = progress.is_persisting or halts.has_new_commit
        actions = halts.end(progress, skip_step=command.skip_step)
        actions += self.checkpoints.retry(self.steps_committed)
        actions += halts.reseed(progress)
        if self.evaluation is not None:
            return actions + self._begin_evaluation()
        if progress.round is not None and not progress.is_persisting:
            halts.should_skip_step = command.skip_step
            return actions + self._begin_step() + self._advance()
        # The halted step was committed during the halt: skip_step refers to the next step.
        self._enter(RunPhase.TRAINING)
        halts.should_skip_step = command.skip_step and was_committing
        is_pending, halts.has_new_commit = halts.has_new_commit, False
        actions += self._after_commit() if is_pending else []
        return actions + self._advance()

    def _on_write_failed(self, failure: WriteFailed) -> list[Action]:
        self.checkpoints.note_failure()
        if failure.is_commit_lost:
            self._parts.progress.abandon_commit()
        return self._halt(failure.reason)

    def _on_write_failed_early(self, failure: WriteFailed) -> list[Action]:
        self.checkpoints.note_failure()
        return self._finish("failed", failure.reason, ExitCode.FAILED)

    # The end.

    @property
    def _computing_workers(self) -> list[str]:
        return self.members.names(*COMPUTING)

    def _on_save(self, request: SaveState) -> list[Action]:
        del request
        return self.checkpoints.save(self.steps_committed) if self.has_state else []

    def _on_saved(self, checkpoint: CheckpointDurable) -> list[Action]:
        self.checkpoints.note_saved(checkpoint.step)
        return self._advance()

    @property
    def _should_end(self) -> bool:
        """Whether no further step follows."""
        has_stopped = bool(self._parts.evaluations.stop_reason)
        return self._parts.progress.all_committed or self._is_draining or has_stopped

    def _end_if_done(self) -> list[Action]:
        """End the run if no further step follows, all replicas agree and the state is saved."""
        progress, evaluations = self._parts.progress, self._parts.evaluations
        if progress.is_persisting or not self._should_end:
            return []
        if progress.agreement.is_catching_up or self.checkpoints.saved_step != progress.step:
            return self.checkpoints.save(progress.step)
        stop_reason = evaluations.stop_reason
        if (progress.all_committed or stop_reason) and evaluations.is_evaluated:
            return self._finish("finished", stop_reason or "all steps are committed", ExitCode.OK)
        note = ", before their evaluation" if progress.all_committed else ""
        reason = f"drained after {progress.step} steps{note}"
        return self._finish("drained", reason, ExitCode.OK)

    def _on_drain(self, command: DrainRun) -> list[Action]:
        del command
        self._is_draining = True
        return self._drain_now()

    def _drain_now(self) -> list[Action]:
        """End the run as soon as that loses no work in progress."""
        match self.phase:
            case RunPhase.WAITING:
                return self._finish("drained", "drained before the start", ExitCode.OK)
            case RunPhase.HALTED:
                return self._finish("failed", f"halted: {self.reason}", ExitCode.FAILED)
            case RunPhase.OVER:
                return []
            case RunPhase.TRAINING | RunPhase.EVALUATING if self._computing_workers:
                return []
        # No worker is left to finish the step in progress: the run ends with the committed ones.
        if self.evaluation is not None:
            self._parts.evaluations.current = None
            self._enter(RunPhase.TRAINING)
        self._parts.progress.drop_step()
        return self._advance()

    def _on_fail(self, command: FailRun) -> list[Action]:
        return self._finish("failed", command.reason, ExitCode.FAILED)

    def _finish(
        self, outcome: Outcome, reason: str, exit_code: int, *, is_resumable: bool = True
    ) -> list[Action]:
        self._enter(RunPhase.OVER, reason)
        self.outcome = outcome
        missed_evaluations = (
            self.run_parts.evaluations.evaluators.end_run() if self.run_parts else []
        )
        return [*missed_evaluations, Finish(outcome, reason, exit_code, is_resumable)]

    def _on_result_not_written(self, result: ResultNotWritten) -> list[Action]:
        self._enter(RunPhase.TRAINING)  # the run is not over after all
        return self._halt(
            f"all steps are committed, but the result could not be written: {result.reason}"
        )

    # The table.

    _INPUTS: Final[Mapping[type, _Row]] = dict((
        # input, then its handler when WAITING, TRAINING, EVALUATING, HALTED, OVER
        _row(WorkerAvailable, _on_connect_early, _on_connect, _on_connect, _on_connect, _ignore),
        _row(WorkerGone, _on_lost_early, _on_lost, _on_lost, _on_lost, _on_lost_late),
        _row(Tick, _on_tick_waiting, _on_tick, _on_tick_evaluation, _ignore, _ignore),
        _row(Resume, _on_resume, _ignore, _ignore, _ignore, _ignore),
        _row(ReplicaLoaded, _on_replica_loaded, _ignore, _ignore, _ignore, _ignore),
        _row(ReplicaApplied, _ignore, *[_on_replica_applied] * 4),
        _row(WorkerCaughtUp, _ignore, _on_caught_up, _on_caught_up, _on_caught_up, _ignore),
        _row(WorkerFellBehind, _ignore, _on_fell_behind, _on_fell_behind, _on_fell_behind, _ignore),
        _row(Summarized, _ignore, _on_summarized, _ignore, _ignore, _ignore),
        _row(CommitDurable, _ignore, _on_durable, _ignore, _on_durable_halted, _on_late_durable),
        _row(CheckpointDurable, _on_saved, _on_saved, _on_saved, _on_saved, _on_saved),
        _row(WriteFailed, _on_write_failed_early, *[_on_write_failed] * 4),
        _row(ResultNotWritten, _ignore, _ignore, _ignore, _ignore, _on_result_not_written),
        _row(HaltRun, _ignore, _on_halt, _on_halt, _ignore, _ignore),
        _row(ContinueRun, _ignore, _ignore, _ignore, _on_continue, _ignore),
        _row(SaveState, _on_save, _on_save, _on_save, _on_save, _on_save),
        _row(DrainRun, _on_drain, _on_drain, _on_drain, _on_drain, _on_drain),
        _row(FailRun, _on_fail, _on_fail, _on_fail, _on_fail, _ignore),
    ))  # fmt: skip
    _NO_STEP: Final = (_check_late, _check_late, _ignore)
    """Handlers of a step's messages in the phases without a step in progress."""
    _MESSAGES: Final[Mapping[type, _Row]] = dict((
        # message, then its handlers; when the run is OVER, only Drain is handled
        _message(Ready, _on_ready_early, _on_ready, _on_ready, _on_ready, _ignore),
        _message(Unready, _on_unready_early, _on_unready, _on_unready, _on_unready, _ignore),
        _message(Drain, _release, _on_drain_request_in_step, _release, _release, _release),
        _message(StateChunk, *[_on_state_chunk] * 4, _ignore),
        _message(DeviceNote, *[_on_note] * 4, _ignore),
        _message(StepApplied, _refuse_early, _on_applied, _on_applied, _on_applied, _ignore),
        _message(
            EvalResult, _refuse_early, _on_parallel_result, _on_eval_result, _on_parallel_result,
            _ignore,
        ),
        # of a step
        _message(BlockGradientPayload, _refuse_early, _step(Progress.on_payload), *_NO_STEP),
        _message(NonBlockGradientPayload, _refuse_early, _step(Progress.on_payload), *_NO_STEP),
        _message(CapturedRows, _refuse_early, _step(Progress.on_captured_rows), *_NO_STEP),
        _message(InnerPhaseProgress, _refuse_early, _step(Progress.on_inner_phase), *_NO_STEP),
        _message(InnerCheckpointChunk, _refuse_early, _step(Progress.on_inner_phase), *_NO_STEP),
        _message(InnerStateRequest, _refuse_early, _step(Progress.on_inner_phase), *_NO_STEP),
        _message(SubtreeLoss, _refuse_early, _step(Progress.on_subtree_loss), *_NO_STEP),
        _message(NonFiniteSum, _refuse_early, _step(Progress.on_non_finite), *_NO_STEP),
        _message(
            AveragedBlockGradient, _refuse_early, _step(Progress.on_peer_average), *_NO_STEP
        ),
        _message(
            AveragedNonBlockGradient, _refuse_early, _step(Progress.on_peer_average), *_NO_STEP
        ),
        _message(ChunkReduced, _refuse_early, _step(Progress.on_peer_average), *_NO_STEP),
        _message(SumsArrived, _refuse_early, _step(Progress.on_sums_arrived), *_NO_STEP),
        # of the links between members, in any phase
        _message(PeerPort, *[_step(Progress.on_peer_listens)] * 4, _ignore),
        _message(Linked, *[_step(Progress.on_peer_linked)] * 4, _ignore),
        _message(LinkTraffic, *[_step(Progress.on_link_traffic)] * 4, _ignore),
        _message(Unlinked, *[_on_unlinked] * 4, _ignore),
        _message(AveragesRequest, _ignore, *[_step(Progress.on_averages_request)] * 3, _ignore),
        _message(AverageMismatch, _refuse_early, *[_on_average_mismatch] * 3, _ignore),
    ))  # fmt: skip
