"""One run: its state machine, from the first ready worker to the last committed step.

`Run.step` takes one input and returns actions, in the order in which the shell must execute them.
It is pure: time and the results of actions come back as inputs.

The state is a phase and four parts, each of which owns what it names: `Progress` the steps and the
exchange of the step in progress, `Admission` the conditions for workers, `Evaluations` the
evaluations, `Halts` what a halt leaves to do. Only this file changes the phase. Between two inputs:

- WAITING: no worker computes; each member is IDLE, PREPARING or READY. Manifest and parts exist
  once the first worker is ready, or from the beginning after a restart. There is no round.
- TRAINING: the manifest exists. Either a round is in progress; or no step is left, and the run
  waits until all replicas agree and the newest state is saved. No evaluation delays training.
- EVALUATING: an evaluation of the newest state is in progress, and no round. No commit is being
  written.
- HALTED: `reason` says why. No step is planned, and no commit begins; one that was being written
  still becomes durable. An interrupted round or evaluation stays, and starts over afterwards.
- OVER: `outcome` is set, and no message changes anything. Only a failed write of the result leads
  out: then the run was not over, and halts.

The table at the end of `Run` has a row for each class of `Input` and for each message that a member
may send, with a handler for each phase. The handler acts, ignores the input, or raises OutOfOrder
because the sender breaks the protocol. mypy checks that a handler accepts its row's type; a test
checks that no row is missing. `_NEXT` says which phase may follow which. Inputs that may complete
something (a payload, an answer, a durable write) end in `_advance`, which commits the step or ends
evaluation or run once everything has arrived, so the order of these inputs does not matter.
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
    OfRound,
    PeerMessage,
    Progress,
    Taken,
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

_MAX_STEPS_BEHIND: Final = 2
"""A joiner whose state was right so few steps ago takes part: it gets every later commit."""
I = TypeVar("I")  # noqa: E741 -- an input


class RunPhase(Enum):
    """The phases of a run; the module's docstring says what holds in each."""

    WAITING = "waiting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    HALTED = "halted"
    OVER = "over"


_NEXT: Final[dict[RunPhase, set[RunPhase]]] = {
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


def _row(kind: type[I], *handlers: Callable[[Run, I], list[Action]]) -> tuple[type[I], _Row]:
    """Make a row of the table: an input's handlers in the order of the phases."""
    return kind, dict(zip(RunPhase, handlers, strict=True))


def _message(
    kind: type[M], *handlers: Callable[[Run, FromMember[M]], list[Action]]
) -> tuple[type[M], _Row]:
    """Make a row of the table for a member's message."""
    return kind, dict(zip(RunPhase, handlers, strict=True))


def _step(
    handle: Callable[[Progress, FromMember[M]], Taken],
) -> Callable[[Run, FromMember[M]], list[Action]]:
    """Make a handler out of a method of `Progress`."""
    return lambda run, incoming: run.take(handle, incoming)


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
        reason: Why the run is in this phase; empty while it trains.
        members: The workers that take part.
        settled: Manifest and parts, once they exist.
        checkpoints: Which checkpoints are due, being written, and durable.
        blobs: Digest of the list of files that workers may request, if there are any.
        outcome: Outcome of a run that is over.

    Args:
        run_id: The run's ID.
        spec: The run spec.
        term: Term of the coordinator.
        expect_workers: How many workers must be ready before the start.
        resumption: Where a restart continues; None for a new run.
        secret: Derives the keys of members that exchange chunks; empty if they do not.
        allocate: Returns an array for averages, with the given number of elements.
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
        self.settled: RunParts | None = None
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
            self._take_from(resumption)

    def _take_from(self, resumption: Resumption) -> None:
        record = resumption.admission
        settled = self._settle(resumption.manifest, resumption)
        settled.admission.resume(record, resumption.initial_digest)
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
        self.settled = RunParts(
            manifest,
            progress,
            Admission(self.run_id, spec.exactness, members, manifest),
            Evaluations(spec, members, manifest, progress, earlier),
        )
        return self.settled

    # State that others read.

    @property
    def _parts(self) -> RunParts:
        assert self.settled is not None, "no run leaves WAITING without a manifest"
        return self.settled

    @property
    def unfit(self) -> Mapping[str, str]:
        """Workers that cannot take part in this run, with the reasons."""
        return self._eligibility.unfit

    @property
    def evaluation(self) -> Evaluation | None:
        """The evaluation that training waits for, even while the run is halted."""
        return self.settled.evaluations.current if self.settled is not None else None

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the newest evaluation."""
        return self.settled.evaluations.metrics if self.settled is not None else {}

    @property
    def manifest(self) -> Manifest | None:
        """The manifest, once the workers have settled it."""
        return self.settled.manifest if self.settled is not None else None

    @property
    def progress(self) -> Progress | None:
        """The steps, once the manifest is settled."""
        return self.settled.progress if self.settled is not None else None

    @property
    def has_state(self) -> bool:
        """Whether the coordinator's replica has a state of this run."""
        return self.settled is not None and self.settled.admission.state_known

    @property
    def steps_committed(self) -> int:
        """Steps committed."""
        return self.settled.progress.step if self.settled is not None else 0

    @property
    def steps(self) -> int:
        """The number of steps, as far as it is known."""
        return self.settled.progress.steps if self.settled is not None else self.spec.steps

    @property
    def known_steps(self) -> int | None:
        """The number of steps; None until it is known."""
        return self.steps if self.settled is not None else self.spec.known_steps

    @property
    def epochs(self) -> str:
        """The epoch of the data, if the run spec counts epochs and they are known; else empty."""
        if self.settled is None:
            return ""
        return self.spec.epochs_after(self.steps_committed, self.settled.manifest.epoch_samples)

    @property
    def losses(self) -> list[float]:
        """Mean loss of each committed step; NaN for a skipped one."""
        return self.settled.progress.losses if self.settled is not None else []

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
            leaves = isinstance(message, Drain)
            return [Dismiss(incoming.worker, "drained", ExitCode.OK)] if leaves else []
        over = self.phase is RunPhase.OVER and not isinstance(message, Drain)
        if over or is_stale(member, message, self.run_id):
            return []
        row = self._MESSAGES.get(type(message))
        if row is None or not self._may_come(member, message):
            raise OutOfOrder(f"{type(message).__name__} is out of order")
        return row[self.phase](self, FromMember(member, message, incoming.body))

    def _may_come(self, member: Member, message: Message) -> bool:
        """Whether Ready or Unready may come: once after StartRun; Unready later if data changed."""
        if not isinstance(message, Ready | Unready) or member.state is MemberState.PREPARING:
            return True
        has_begun = self.phase is not RunPhase.WAITING
        return isinstance(message, Unready) and not message.own and has_begun

    def _enter(self, phase: RunPhase, reason: str = "") -> None:
        assert phase in _NEXT[self.phase], f"{self.phase} is never followed by {phase}"
        self.phase, self.reason = phase, reason

    def _ignore(self, input_: object) -> list[Action]:
        del input_
        return []

    def _refuse_early(self, incoming: FromMember[Message]) -> list[Action]:
        name = type(incoming.message).__name__
        raise OutOfOrder(f"{name} of {incoming.member.name!r} before the first step")

    def _check_late(self, incoming: FromMember[OfRound | PeerMessage]) -> list[Action]:
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

    def _connect_early(self, worker: WorkerAvailable) -> list[Action]:
        """Let evaluators wait: training workers settle manifest and initial state."""
        member = self._add(worker)
        return [] if member.evaluates else self._ask(member)

    def _connect(self, worker: WorkerAvailable) -> list[Action]:
        return self._ask(self._add(worker))

    def _add(self, worker: WorkerAvailable) -> Member:
        return self.members.add(
            worker.worker, worker.admitted_by, worker.host, devices=worker.devices,
            evaluates=worker.evaluates,
        )  # fmt: skip

    def _ask(self, member: Member) -> list[Action]:
        if member.evaluates and not self._parts.evaluations.run_beside_training:
            return []
        member.state = MemberState.PREPARING
        self._eligibility.unfit.pop(member.name, None)
        message = StartRun(
            run_id=self.run_id, term=self.term, step=self.steps_committed, blobs=self.blobs
        )
        return [Send(member.name, message, self.spec.to_bytes())]

    def _ready_early(self, incoming: FromMember[Ready]) -> list[Action]:
        """Before the start, take a ready worker; the first settles manifest and initial state."""
        manifest = Manifest.from_bytes(incoming.document)
        actions: list[Action] = []
        if self.settled is None:
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
        """Report how large a capture is going to be."""
        layout, progress = self._parts.manifest.capture, self._parts.progress
        if layout is None:
            return []
        samples = min(self._parts.manifest.train_samples, progress.steps * self.spec.batch.samples)
        size = byte_size(samples * layout.sample_bytes)
        return [Report(CapturePlanned(samples, progress.steps, size, layout.logits_bytes))]

    def _on_ready(self, incoming: FromMember[Ready]) -> list[Action]:
        """Admit a ready worker to a run in progress; it computes once it has the state."""
        settled, member = self._parts, incoming.member
        actions = self._check_ready(
            member, Manifest.from_bytes(incoming.document), incoming.message
        )
        if member.name not in self.members:
            return actions
        actions += settled.admission.admit(member, self.steps_committed, settled.progress.agreement)
        if member.state is MemberState.FOLLOWING:
            return actions + settled.evaluations.begin_pending()
        return actions + (self._on_joined(member) if member.state is MemberState.ACTIVE else [])

    def _check_ready(self, member: Member, manifest: Manifest, message: Ready) -> list[Action]:
        admission = self._parts.admission
        if not member.evaluates:
            admission.first_ready(message)
        if refusal := admission.refusal(manifest, message, evaluates=member.evaluates):
            self.members.remove(member.name)
            self._eligibility.reject(member, refusal)
            self._eligibility.judge(member, refusal, ExitCode.MISMATCH)
            return refuse(member.name, refusal)
        member.now_ready(message)
        event = WorkerReady(member.name, member.device, member.backend, member.numerics_text)
        if member.evaluates:
            return [Report(event)]
        return [Report(event), *self._parts.progress.mesh.joined(member.name, member.host)]

    def _unready_early(self, incoming: FromMember[Unready]) -> list[Action]:
        """Before the start, reject a worker that cannot build the task.

        The run ends, unless the cause is that worker's alone and others may still come.
        """
        actions = self._reject_member(incoming)
        verdict = self._eligibility.verdict
        if verdict is None or (incoming.message.own and self._eligibility.others_may_come):
            return actions
        return actions + self._end_by(verdict)

    def _unready(self, incoming: FromMember[Unready]) -> list[Action]:
        """Reject a worker; if it took part and its task changed, its results cannot be undone."""
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

    def _end_by(self, verdict: Verdict) -> list[Action]:
        return self._finish("failed", verdict.reason, verdict.exit_code)

    def _state_chunk(self, incoming: FromMember[StateChunk]) -> list[Action]:
        if self.settled is None:
            raise OutOfOrder("StateChunk was not requested")
        return self.settled.admission.state_chunk(
            incoming.member.name, incoming.message, incoming.values
        )

    def _loaded(self, replica: ReplicaLoaded) -> list[Action]:
        settled = self._parts
        actions = settled.admission.state_loaded(replica.upload, replica.initial_digest)
        if not settled.admission.state_known:
            return actions
        settled.progress.agreement.replica_answer(0, replica.digest)
        return actions + self.checkpoints.save(0) + self._start_if_enough()

    def _tick_waiting(self, tick: Tick) -> list[Action]:
        if verdict := self._eligibility.expired(tick.now_ms):
            return self._end_by(verdict)
        return self.settled.admission.tick(tick.now_ms) if self.settled is not None else []

    def _start_if_enough(self) -> list[Action]:
        ready_members = [member for member in self.members if member.state is MemberState.READY]
        admission, progress = self._parts.admission, self._parts.progress
        expected = self.expect_workers
        if sum(member.devices for member in ready_members) < expected or not admission.state_known:
            return []
        progress.mixed = not all(admission.has_initial_state(member) for member in ready_members)
        event = Report(TrainingStarted([member.name for member in ready_members]))
        admission_actions = admission.admit_ready()
        self._enter(RunPhase.TRAINING)
        view = self.members.view_begins(self.steps_committed, "started")
        evaluators = [member for member in self.members if member.evaluates]
        invited = [action for member in evaluators for action in self._ask(member)]
        return [event, *admission_actions, *view, *progress.begin(), *invited]

    def _remove(self, departure: WorkerGone) -> tuple[Member | None, list[Action]]:
        """Remove a worker; the others drop their links to it."""
        member = self.members.remove(departure.worker)
        if member is None or self.settled is None:
            return member, []
        return member, self.settled.progress.mesh.lost(departure.worker)

    def _lost_early(self, departure: WorkerGone) -> list[Action]:
        member, actions = self._remove(departure)
        if member is None:
            return []
        actions.append(self._report_departure(member, departure))
        return actions + (self.settled.admission.lost(member.name) if self.settled else [])

    def _lost_late(self, departure: WorkerGone) -> list[Action]:
        return self._remove(departure)[1]

    def _on_lost(self, departure: WorkerGone) -> list[Action]:
        member, actions = self._remove(departure)
        if member is None:
            return []
        worker, progress = departure.worker, self._parts.progress
        pattern = ""
        if departure.exit_code != ExitCode.OK and progress.round is not None:
            pattern = self._halts.failures.note(worker, progress.round.unfinished(worker))
        self._halts.mismatched.discard(worker)
        actions.append(self._report_departure(member, departure))
        change: Change = "drained" if member.released else "lost"
        actions += self.members.view_begins(self.steps_committed, change, worker, departure.reason)
        is_proven = progress.lose(worker)
        actions += self._parts.evaluations.lose(worker, is_proven=is_proven)
        if pattern:
            self._halts.failures.clear()
            actions += self._halt(
                f"step {self.steps_committed}: {pattern}; the last one: {departure.reason}"
            )
        actions += self._recall_all() + self._reassign() + self._advance()
        return actions + self._drain_now() if self._is_draining else actions

    def _recall_all(self) -> list[Action]:
        """Send workers that were set aside the state, if no other worker is left."""
        if self._computing:
            return []
        actions: list[Action] = []
        for member in self.members:
            if member.aside_until and member.state is MemberState.LOADING:
                member.aside_until = 0
                actions.append(seed(member))
        return actions

    def _report_departure(self, member: Member, departure: WorkerGone) -> Report:
        """Report a worker that has left; while it built the task, that may rule it out."""
        reason, exit_code = departure.reason, departure.exit_code
        if member.state is MemberState.PREPARING and exit_code != ExitCode.OK:
            self._eligibility.reject(member, reason)
            if exit_code == ExitCode.MISMATCH:  # after other errors it may return, repaired
                self._eligibility.judge(member, reason, exit_code)
        kind = WorkerLeft if member.released else WorkerLost
        return Report(kind(member.name, reason, self.members.view))

    def _release(self, incoming: FromMember[Drain]) -> list[Action]:
        """Let a worker go that wants to leave; nothing waits for it."""
        return [incoming.member.release()]

    def _release_when_done(self, incoming: FromMember[Drain]) -> list[Action]:
        round_ = self._parts.progress.round
        if round_ is None or not round_.unfinished(incoming.member.name):
            return self._release(incoming)
        incoming.member.state = MemberState.DRAINING
        return []

    def _on_unlinked(self, incoming: FromMember[Unlinked]) -> list[Action]:
        self._parts.progress.mesh.unlinked(incoming.member.name, incoming.message.peer)
        return self._reassign() + self._advance()

    def _on_note(self, incoming: FromMember[DeviceNote]) -> list[Action]:
        return [
            Report(
                DeviceFault(incoming.member.name, incoming.message.device, incoming.message.text)
            )
        ]

    # Steps.

    def _resume(self, resume: Resume) -> list[Action]:
        del resume
        self._enter(RunPhase.TRAINING)
        return self._after_commit() + self._advance()

    def _begin_step(self) -> list[Action]:
        self._enter(RunPhase.TRAINING)
        return self._parts.progress.begin()

    def take(
        self, handle: Callable[[Progress, FromMember[M]], Taken], incoming: FromMember[M]
    ) -> list[Action]:
        """Handle a message of the step in progress; a fault halts the run."""
        result = handle(self._parts.progress, incoming)
        if result.fault is not None:
            return [*result.actions, *self._fail_step(result.fault)]
        return [*result.actions, *(self._advance() if result.may_complete else ())]

    def _summarized(self, blocks: Summarized) -> list[Action]:
        round_ = self._parts.progress.round
        attempt = {"step": blocks.step, "attempt": blocks.attempt}
        if round_ is None or not attempt.items() <= round_.step_id.items():
            return []
        round_.summarized(blocks.summaries)
        return self._advance()

    def _tick(self, tick: Tick) -> list[Action]:
        if verdict := self._eligibility.expired(tick.now_ms):
            return self._end_by(verdict)
        return self._parts.progress.tick(tick.now_ms) + self._advance()

    def _advance_step(self) -> list[Action]:
        """Commit if the round is complete and all replicas agree on the step before.

        A round of embeddings is followed by that of gradients, and waits for no agreement.
        """
        progress = self._parts.progress
        round_ = progress.round
        skip = self._halts.skip_requested or progress.was_skipped
        if round_ is not None and round_.embeds and round_.complete and not skip:
            return progress.continue_with_gradients(round_)
        if not progress.agreement.reached:
            return []
        if round_ is None:
            return self._end_if_done()
        # The first commit waits for the checkpoint of step 0: without it a restart has no state.
        if progress.persisting or self.checkpoints.saved is None:
            return []
        if not (skip or round_.complete):
            return []
        self._halts.skip_requested = False
        return self._save_admission_record() + progress.persist(round_, skip=skip)

    def _save_admission_record(self) -> list[Action]:
        """Save whose bits may be in the step that is committed now, if that changed."""
        progress, admission = self._parts.progress, self._parts.admission
        if self._recorded_profiles == progress.numerics_profiles:
            return []
        self._recorded_profiles = set(progress.numerics_profiles)
        record = admission.record(progress.numerics_profiles, mixed=progress.mixed)
        return [SaveAdmissionRecord(record)]

    def _on_durable(self, commit: CommitDurable) -> list[Action]:
        actions = self._after_durable(commit)
        return actions and actions + self._after_commit() + self._advance()

    def _durable_in_halt(self, commit: CommitDurable) -> list[Action]:
        actions = self._after_durable(commit)
        self._halts.commit_pending = self._halts.commit_pending or bool(actions)
        return actions

    def _durable_too_late(self, commit: CommitDurable) -> list[Action]:
        """Count a step that became durable after the run had ended; no worker receives it."""
        self._parts.progress.durable(commit.step, commit.own_digest)
        return []

    def _after_durable(self, commit: CommitDurable) -> list[Action]:
        actions = self._parts.progress.durable(commit.step, commit.own_digest)
        if actions:
            self._halts.failures.clear()
            actions += self._parts.evaluations.evaluators.committed(self.steps_committed)
            actions += self.checkpoints.committed(self.steps_committed)
        return actions

    def _after_commit(self) -> list[Action]:
        progress, evaluations = self._parts.progress, self._parts.evaluations
        if self._is_draining and not self._computing:
            return []
        actions_beside: list[Action] = []
        if evaluations.is_due:
            if evaluations.stops_training:
                return self._begin_evaluation()
            actions_beside = evaluations.begin_beside()
        if progress.all_committed or self._is_draining:
            return actions_beside
        return actions_beside + self._begin_step()

    # Agreement.

    def _applied(self, incoming: FromMember[StepApplied]) -> list[Action]:
        progress, member, step = self._parts.progress, incoming.member, incoming.message.step
        progress.applied(member.name, incoming.message)
        agreement = progress.agreement
        if member.evaluates:
            self._parts.evaluations.evaluators.applied(member, incoming.message)
            return self._judge(step) + self._parts.evaluations.end_beside()
        if agreement.catching_up and agreement.digest(step) is None:
            # Provisional: compared with the others now, and with the replica once that has caught
            # up.
            return self._confirm_state(member, step) + self._advance()
        return self._judge(step)

    def _replica_applied(self, replica: ReplicaApplied) -> list[Action]:
        evaluations = self._parts.evaluations
        self._parts.progress.agreement.replica_answer(replica.step, replica.digest)
        evaluations.evaluators.replica_answer(replica.step, replica.digest)
        halted: list[Action] = []
        if replica.not_finite:
            halted = self._halt(
                f"the update of step {replica.step - 1} produced a non-finite value: "
                f"{replica.not_finite}; resume from an earlier checkpoint (--from-step N) with a "
                "lower learning rate"
            )
        return halted + self._judge(replica.step) + evaluations.end_beside()

    def _judge(self, step: int) -> list[Action]:
        """Compare the digests of a step with the replica's, once that is known."""
        agreement = self._parts.progress.agreement
        agreeing, differing = agreement.judge(step)
        actions: list[Action] = []
        mismatched = []
        for name in differing:
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
        for name in agreeing:
            actions += self._confirm_state(self.members.get(name), step)
        return actions + self._advance()

    def _confirm_state(self, member: Member | None, step: int) -> list[Action]:
        """Let a loading worker take part, whose state after `step` steps is the run's.

        After a restart that may be provisional. The worker must receive broadcasts by now.
        """
        if member is None or member.state is not MemberState.LOADING or member.evaluates:
            return []
        if member.replaying:
            member.confirmed_step = step
            return []
        agreement, steps_behind = self._parts.progress.agreement, self.steps_committed - step
        is_provisional = agreement.digest(step) is None
        if steps_behind > (0 if is_provisional else _MAX_STEPS_BEHIND):
            return []
        if self.steps_committed < member.aside_until and self.members.names(MemberState.ACTIVE):
            return []
        if steps_behind or is_provisional:
            agreement.wait_for(member.name)  # its answers to the steps in between count too
        self.members.activate(member)
        return self._on_joined(member)

    def _on_joined(self, member: Member) -> list[Action]:
        report = Report(WorkerJoined(member.name, self.steps_committed, self.members.view))
        view = self.members.view_begins(self.steps_committed, "joined", member.name)
        return [report, *view, *self._reassign()]

    def _fell_behind(self, worker: WorkerFellBehind) -> list[Action]:
        member = self.members.get(worker.worker)
        if member is None or member.state not in (MemberState.LOADING, MemberState.FOLLOWING):
            return []
        member.state, member.caught_up = MemberState.LOADING, False
        member.gets_state()
        return [Replay(worker.worker, worker.step, None)]

    def _caught_up(self, worker: WorkerCaughtUp) -> list[Action]:
        member = self.members.get(worker.worker)
        if member is None or not member.replaying:
            return []
        member.replaying = False
        if member.evaluates:
            member.follows()
            return self._parts.evaluations.begin_pending()
        if member.confirmed_step is None:
            return []
        return self._confirm_state(member, member.confirmed_step) + self._advance()

    # Evaluation.

    def _begin_evaluation(self) -> list[Action]:
        self._enter(RunPhase.EVALUATING)
        return self._parts.evaluations.begin()

    def _eval_result(self, incoming: FromMember[EvalResult]) -> list[Action]:
        if incoming.member.evaluates:
            return self._result_beside(incoming)
        if self.evaluation is not None:
            self.evaluation.result(incoming.member.name, incoming.message)
        return self._advance()

    def _result_beside(self, incoming: FromMember[EvalResult]) -> list[Action]:
        return self._parts.evaluations.result_beside(incoming.member, incoming.message)

    def _tick_evaluation(self, tick: Tick) -> list[Action]:
        if verdict := self._eligibility.expired(tick.now_ms):
            return self._end_by(verdict)
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
        return actions + (self._end_if_done() if self._ends else self._begin_step())

    # Halts.

    def _fail_step(self, fault: Fault) -> list[Action]:
        """Retry with half the loss scale if a gradient overflowed, else halt."""
        if not isinstance(fault, NonFinite):
            return self._halt(f"step {self.steps_committed}: {fault}")
        progress = self._parts.progress
        text = fault.describe(progress.blocks, has_replicas=progress.has_replicas)
        retry_actions = progress.halve_loss_scale(text) if fault.block is not None else []
        return retry_actions or self._halt(f"step {self.steps_committed}: {text}", fault)

    def _average_mismatch(self, incoming: FromMember[AverageMismatch]) -> list[Action]:
        """Halt: a worker received other averages than those committed; it gets the right ones."""
        message, blocks = incoming.message, self._parts.manifest.blocks
        if message.block >= len(blocks) or message.step >= self.steps_committed:
            raise OutOfOrder(f"AverageMismatch: no block {message.block} of a committed step")
        if message.owner not in self.members:
            return []  # the owner has left
        block = blocks[message.block].name
        mismatch = WrongAverage(message.owner, block, f"to worker {incoming.member.name!r}")
        return self._halt(f"step {message.step}: {mismatch}")

    def _halt_asked(self, halt: HaltRun) -> list[Action]:
        return self._halt(halt.reason)

    def _halt(self, reason: str, fault: NonFinite | None = None) -> list[Action]:
        """Stop and apply nothing, if a step or evaluation is in progress."""
        if self.phase not in (RunPhase.TRAINING, RunPhase.EVALUATING):
            return []
        self._enter(RunPhase.HALTED, reason)
        actions = self._halts.announce(self._parts.progress, reason, fault)
        return actions + self._drain_now() if self._is_draining else actions

    def _end_halt(self, command: ContinueRun) -> list[Action]:
        progress, halts = self._parts.progress, self._halts
        was_committing = progress.persisting or halts.commit_pending
        actions = halts.end(progress, skip_step=command.skip_step)
        actions += self.checkpoints.retry(self.steps_committed)
        actions += halts.reseed(progress)
        if self.evaluation is not None:
            return actions + self._begin_evaluation()
        if progress.round is not None and not progress.persisting:
            halts.skip_requested = command.skip_step
            return actions + self._begin_step() + self._advance()
        # The halted step was committed during the halt: skip_step refers to the next one.
        self._enter(RunPhase.TRAINING)
        halts.skip_requested = command.skip_step and was_committing
        is_pending, halts.commit_pending = halts.commit_pending, False
        actions += self._after_commit() if is_pending else []
        return actions + self._advance()

    def _write_failed(self, failure: WriteFailed) -> list[Action]:
        self.checkpoints.failed()
        if failure.lost_commit:
            self._parts.progress.abandon_commit()
        return self._halt(failure.reason)

    def _write_failed_early(self, failure: WriteFailed) -> list[Action]:
        self.checkpoints.failed()
        return self._finish("failed", failure.reason, ExitCode.FAILED)

    # The end.

    @property
    def _computing(self) -> list[str]:
        return self.members.names(*COMPUTING)

    def _save(self, request: SaveState) -> list[Action]:
        del request
        return self.checkpoints.save(self.steps_committed) if self.has_state else []

    def _on_saved(self, checkpoint: CheckpointDurable) -> list[Action]:
        self.checkpoints.done(checkpoint.step)
        return self._advance()

    @property
    def _ends(self) -> bool:
        """Whether no further step follows."""
        stopped = bool(self._parts.evaluations.stopped)
        return self._parts.progress.all_committed or self._is_draining or stopped

    def _end_if_done(self) -> list[Action]:
        """End the run if no further step follows, all replicas agree and the state is saved."""
        progress, evaluations = self._parts.progress, self._parts.evaluations
        if progress.persisting or not self._ends:
            return []
        if progress.agreement.catching_up or self.checkpoints.saved != progress.step:
            return self.checkpoints.save(progress.step)
        stopped = evaluations.stopped
        if (progress.all_committed or stopped) and evaluations.is_evaluated:
            return self._finish("finished", stopped or "all steps are committed", ExitCode.OK)
        remark = ", before their evaluation" if progress.all_committed else ""
        reason = f"drained after {progress.step} steps{remark}"
        return self._finish("drained", reason, ExitCode.OK)

    def _drain(self, command: DrainRun) -> list[Action]:
        del command
        self._is_draining = True
        return self._drain_now()

    def _drain_now(self) -> list[Action]:
        """End as soon as that loses no work in progress."""
        match self.phase:
            case RunPhase.WAITING:
                return self._finish("drained", "drained before the start", ExitCode.OK)
            case RunPhase.HALTED:
                return self._finish("failed", f"halted: {self.reason}", ExitCode.FAILED)
            case RunPhase.OVER:
                return []
            case RunPhase.TRAINING | RunPhase.EVALUATING if self._computing:
                return []
        # No worker is left to finish the step in progress: the run ends with the committed ones.
        if self.evaluation is not None:
            self._parts.evaluations.current = None
            self._enter(RunPhase.TRAINING)
        self._parts.progress.leave_out()
        return self._advance()

    def _fail(self, command: FailRun) -> list[Action]:
        return self._finish("failed", command.reason, ExitCode.FAILED)

    def _finish(
        self, outcome: Outcome, reason: str, exit_code: int, *, is_resumable: bool = True
    ) -> list[Action]:
        self._enter(RunPhase.OVER, reason)
        self.outcome = outcome
        missed_evaluations = self.settled.evaluations.evaluators.run_ends() if self.settled else []
        return [*missed_evaluations, Finish(outcome, reason, exit_code, is_resumable)]

    def _not_written(self, result: ResultNotWritten) -> list[Action]:
        self._enter(RunPhase.TRAINING)  # the run continues, although it seemed over
        return self._halt(
            f"all steps are committed, but the result could not be written: {result.reason}"
        )

    # The table.

    _INPUTS: Final[Mapping[type, _Row]] = dict((
        # input, then its handler when WAITING, TRAINING, EVALUATING, HALTED, OVER
        _row(WorkerAvailable, _connect_early, _connect, _connect, _connect, _ignore),
        _row(WorkerGone, _lost_early, _on_lost, _on_lost, _on_lost, _lost_late),
        _row(Tick, _tick_waiting, _tick, _tick_evaluation, _ignore, _ignore),
        _row(Resume, _resume, _ignore, _ignore, _ignore, _ignore),
        _row(ReplicaLoaded, _loaded, _ignore, _ignore, _ignore, _ignore),
        _row(ReplicaApplied, _ignore, *[_replica_applied] * 4),
        _row(WorkerCaughtUp, _ignore, _caught_up, _caught_up, _caught_up, _ignore),
        _row(WorkerFellBehind, _ignore, _fell_behind, _fell_behind, _fell_behind, _ignore),
        _row(Summarized, _ignore, _summarized, _ignore, _ignore, _ignore),
        _row(CommitDurable, _ignore, _on_durable, _ignore, _durable_in_halt, _durable_too_late),
        _row(CheckpointDurable, _on_saved, _on_saved, _on_saved, _on_saved, _on_saved),
        _row(WriteFailed, _write_failed_early, *[_write_failed] * 4),
        _row(ResultNotWritten, _ignore, _ignore, _ignore, _ignore, _not_written),
        _row(HaltRun, _ignore, _halt_asked, _halt_asked, _ignore, _ignore),
        _row(ContinueRun, _ignore, _ignore, _ignore, _end_halt, _ignore),
        _row(SaveState, _save, _save, _save, _save, _save),
        _row(DrainRun, _drain, _drain, _drain, _drain, _drain),
        _row(FailRun, _fail, _fail, _fail, _fail, _ignore),
    ))  # fmt: skip
    _AFTERWARDS: Final = (_check_late, _check_late, _ignore)
    """Handlers of a step's messages in the phases without a step in progress."""
    _MESSAGES: Final[Mapping[type, _Row]] = dict((
        # message, then its handlers; when the run is OVER, only Drain is looked at
        _message(Ready, _ready_early, _on_ready, _on_ready, _on_ready, _ignore),
        _message(Unready, _unready_early, _unready, _unready, _unready, _ignore),
        _message(Drain, _release, _release_when_done, _release, _release, _release),
        _message(StateChunk, *[_state_chunk] * 4, _ignore),
        _message(DeviceNote, *[_on_note] * 4, _ignore),
        _message(StepApplied, _refuse_early, _applied, _applied, _applied, _ignore),
        _message(
            EvalResult, _refuse_early, _result_beside, _eval_result, _result_beside, _ignore
        ),
        # of a step
        _message(BlockGradientPayload, _refuse_early, _step(Progress.on_payload), *_AFTERWARDS),
        _message(NonBlockGradientPayload, _refuse_early, _step(Progress.on_payload), *_AFTERWARDS),
        _message(CapturedRows, _refuse_early, _step(Progress.on_captured_rows), *_AFTERWARDS),
        _message(InnerPhaseProgress, _refuse_early, _step(Progress.on_inner_phase), *_AFTERWARDS),
        _message(InnerCheckpointChunk, _refuse_early, _step(Progress.on_inner_phase), *_AFTERWARDS),
        _message(InnerStateRequest, _refuse_early, _step(Progress.on_inner_phase), *_AFTERWARDS),
        _message(SubtreeLoss, _refuse_early, _step(Progress.on_subtree_loss), *_AFTERWARDS),
        _message(NonFiniteSum, _refuse_early, _step(Progress.on_non_finite), *_AFTERWARDS),
        _message(
            AveragedBlockGradient, _refuse_early, _step(Progress.on_peer_average), *_AFTERWARDS
        ),
        _message(
            AveragedNonBlockGradient, _refuse_early, _step(Progress.on_peer_average), *_AFTERWARDS
        ),
        _message(ChunkReduced, _refuse_early, _step(Progress.on_peer_average), *_AFTERWARDS),
        _message(SumsArrived, _refuse_early, _step(Progress.on_sums_arrived), *_AFTERWARDS),
        # of the links between members, in any phase
        _message(PeerPort, *[_step(Progress.on_peer_listens)] * 4, _ignore),
        _message(Linked, *[_step(Progress.on_peer_linked)] * 4, _ignore),
        _message(LinkTraffic, *[_step(Progress.on_link_traffic)] * 4, _ignore),
        _message(Unlinked, *[_on_unlinked] * 4, _ignore),
        _message(AveragesRequest, _ignore, *[_step(Progress.on_averages_request)] * 3, _ignore),
        _message(AverageMismatch, _refuse_early, *[_average_mismatch] * 3, _ignore),
    ))  # fmt: skip
