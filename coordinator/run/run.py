"""One run: from the first ready worker to the last committed step.

Pure: every event is a method call that returns actions, in the order in which they are to be
done. No clock, socket, file or randomness. Completions (the replica has applied a step, a commit
is on disk) come back as events.

All that decides a run's phase is here. The table at the end of `Run` says for each event and each
phase what handles it, that it is ignored, or that it is an error of whoever sent it; `_NEXT` says
which phase may follow which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final

import numpy as np

from coordinator.run.exchange.double_check import Differing
from coordinator.run.exchange.mesh import Mesh
from coordinator.run.exchange.round import Allocate, NonFinite, new_array
from coordinator.run.exchange.sliced import WrongAverage
from coordinator.run.exchange.summary import Summary
from coordinator.run.held_out.evaluation import Evaluation
from coordinator.run.held_out.evaluators import Evaluators
from coordinator.run.held_out.stopping import Stopping
from coordinator.run.outputs.actions import (
    Action,
    Adopt,
    AnswerStretch,
    Broadcast,
    Dismiss,
    Finish,
    KeepBoundary,
    Remember,
    Replay,
    Report,
    Send,
)
from coordinator.run.outputs.facts import (
    CapturePlanned,
    Change,
    DeviceFault,
    HeldOutMeasured,
    ManifestAgreed,
    RunContinued,
    RunHalted,
    TrainingStarted,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerReady,
    WorkerUnready,
)
from coordinator.run.outputs.kept import Bytes
from coordinator.run.outputs.restart import Resumption
from coordinator.run.progress import OfRound, Progress, SliceMessage
from coordinator.run.saves import Saves
from coordinator.run.workers.admission import Admission, is_stale, refuse, seed
from coordinator.run.workers.failures import Failures
from coordinator.run.workers.membership import COMPUTING, Member, Membership, MemberState
from protocol.base.byte_size import byte_size
from protocol.base.errors import ExitCode, OutOfPlace
from protocol.base.fields import cut_text
from protocol.exact.slice_merge import parse_origin
from protocol.exact.slices import SliceGrid
from protocol.exact.update import Array
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec
from protocol.wire.messages import (
    BlockGradientPayload,
    Boundary,
    CapturedRows,
    Continue,
    DeviceNote,
    DoorOpen,
    Drain,
    EvalResult,
    GradientPayload,
    Halt,
    Linked,
    LinkTraffic,
    Message,
    NodeLoss,
    NonBlockGradientPayload,
    NonFiniteNode,
    Outcome,
    Ready,
    SliceAverage,
    SliceDone,
    SliceSum,
    SlicesWanted,
    StartRun,
    StateChunk,
    StepApplied,
    StretchProgress,
    StretchRequest,
    SumNotFinite,
    SumsArrived,
    Unlinked,
    Unready,
    WrongSlice,
)
from protocol.wire.peers import Traffic, parse

OTHERS_COME_WITHIN_MS: Final = 30_000
"""How long a run that goes on waits for another worker, after all that have come were refused."""
_BEHIND: Final = 2
"""A joiner whose state was right so many steps ago takes part: it gets every commit since."""


class RunPhase(Enum):
    """Where a run is.

    WAITING for workers to be ready; TRAINING; EVALUATING held-out data; HALTED until an
    operator's word; OVER.
    """

    WAITING = "waiting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    HALTED = "halted"
    OVER = "over"


class Event(Enum):
    """What can happen to a run. `_TABLE` says what follows."""

    # A worker is there, is gone, or says something.
    INVITE = auto()
    LOST = auto()
    READY = auto()
    UNREADY = auto()
    WORKER_DRAINS = auto()
    STATE_CHUNK = auto()
    PAYLOAD = auto()
    CAPTURED = auto()
    STRETCH = auto()
    NODE_LOSS = auto()
    NON_FINITE = auto()
    DEVICE_NOTE = auto()
    STEP_APPLIED = auto()
    EVAL_RESULT = auto()
    DOOR_OPEN = auto()
    LINKED = auto()
    LINK_TRAFFIC = auto()
    UNLINKED = auto()
    SLICE = auto()
    SLICES_WANTED = auto()
    WRONG_SLICE = auto()
    # The shell has done something, or could not.
    TICK = auto()
    RESUME = auto()
    REPLICA_LOADED = auto()
    REPLICA_APPLIED = auto()
    REPLAYED = auto()
    FELL_BEHIND = auto()
    SUMMARISED = auto()
    DURABLE = auto()
    CHECKPOINTED = auto()
    STORAGE_FAILED = auto()
    RESULT_REFUSED = auto()
    # An operator's word.
    HALT = auto()
    END_HALT = auto()
    SAVE = auto()
    DRAIN = auto()
    GIVE_UP = auto()
    # What other events lead to.
    ADVANCE = auto()
    REASSIGN = auto()


_NEXT: Final[dict[RunPhase, set[RunPhase]]] = {
    RunPhase.WAITING: {RunPhase.TRAINING, RunPhase.OVER},
    RunPhase.TRAINING: {
        RunPhase.TRAINING, RunPhase.EVALUATING, RunPhase.HALTED, RunPhase.OVER,
    },
    RunPhase.EVALUATING: {RunPhase.TRAINING, RunPhase.HALTED, RunPhase.OVER},
    RunPhase.HALTED: {RunPhase.TRAINING, RunPhase.EVALUATING, RunPhase.OVER},
    RunPhase.OVER: {RunPhase.TRAINING},
}  # fmt: skip
"""TRAINING follows itself with each step, and OVER where the disk refuses the result."""

_EVENT_OF: Final[dict[type[Message], Event]] = {
    Ready: Event.READY,
    Unready: Event.UNREADY,
    Drain: Event.WORKER_DRAINS,
    StateChunk: Event.STATE_CHUNK,
    BlockGradientPayload: Event.PAYLOAD,
    NonBlockGradientPayload: Event.PAYLOAD,
    CapturedRows: Event.CAPTURED,
    StretchProgress: Event.STRETCH,
    Boundary: Event.STRETCH,
    StretchRequest: Event.STRETCH,
    NodeLoss: Event.NODE_LOSS,
    NonFiniteNode: Event.NON_FINITE,
    DeviceNote: Event.DEVICE_NOTE,
    StepApplied: Event.STEP_APPLIED,
    EvalResult: Event.EVAL_RESULT,
    DoorOpen: Event.DOOR_OPEN,
    Linked: Event.LINKED,
    LinkTraffic: Event.LINK_TRAFFIC,
    Unlinked: Event.UNLINKED,
    SliceSum: Event.SLICE,
    SliceAverage: Event.SLICE,
    SliceDone: Event.SLICE,
    SumsArrived: Event.SLICE,
    SumNotFinite: Event.SLICE,
    SlicesWanted: Event.SLICES_WANTED,
    WrongSlice: Event.WRONG_SLICE,
}
_Handler = Callable[..., list[Action]]


def _rows(
    *table: tuple[Event, _Handler, _Handler, _Handler, _Handler, _Handler],
) -> dict[Event, dict[RunPhase, _Handler]]:
    """Handlers in the order of the phases, by event and phase."""
    return {event: dict(zip(RunPhase, handlers, strict=True)) for event, *handlers in table}


@dataclass(frozen=True, slots=True)
class Settled:
    """What there is once the first ready worker's manifest is the run's.

    Attributes:
        manifest: The run's.
        progress: The steps.
        admission: On what terms workers are admitted.
    """

    manifest: Manifest
    progress: Progress
    admission: Admission


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Why no worker that has come can take part, and what the run ends with if none comes that can.

    Attributes:
        all_alike: Whether what hinders one hinders all.
        since_ms: Since when nobody else is here; None before the next tick.
    """

    reason: str
    exit_code: int
    all_alike: bool
    since_ms: float | None = None


class Run:
    """The logic of one run: what workers, the shell and an operator say, and what follows.

    Attributes:
        phase: Where the run is.
        reason: Why, in words; empty while all goes well.
        members: Who takes part.
        settled: Manifest, steps and terms, once there are any.
        evaluation: The one in progress that training waits for, also while it is halted.
        evaluators: Workers that evaluate while the others train on.
        metrics: Figures of the newest evaluation.
        saves: The checkpoints.
        blobs: Digest of the list of files that workers may ask for, if there are any.
        unfit: Workers that cannot take part in this run, and why.
        outcome: Of a run that is over.

    Args:
        run_id: The run's.
        spec: What to do.
        epoch: The coordinator's.
        expect_workers: How many must be ready before the start.
        resumption: Where a restart goes on from; None for a new run.
        secret: For the keys of members that exchange slices; empty: they do not.
        allocate: Makes arrays for averages, of so many elements.
    """

    def __init__(
        self,
        run_id: str,
        spec: RunSpec,
        epoch: int,
        expect_workers: int,
        resumption: Resumption | None = None,
        *,
        secret: bytes = b"",
        allocate: Allocate = new_array,
    ) -> None:
        self.run_id = run_id
        self.spec = spec
        self.epoch = epoch
        self.expect_workers = expect_workers
        self.phase = RunPhase.WAITING
        self.reason = "waiting for workers"
        self.members = Membership()
        self.settled: Settled | None = None
        self.evaluation: Evaluation | None = None
        self.evaluators = Evaluators(self.members)
        self.metrics: dict[str, float] = {}
        self.saves = Saves(spec.checkpoint)
        self._stopping = Stopping(spec.stop, resumption.figures if resumption is not None else {})
        self._stopped = ""
        self.blobs: str | None = None
        self.unfit: dict[str, str] = {}
        self._unfit_devices: dict[str, int] = {}
        self._verdict: _Verdict | None = None
        self.outcome: Outcome | None = None
        self._secret = secret
        self._allocate = allocate
        self._odd: set[str] = set()
        self._skip_asked = False
        self._drain_asked = False
        self._evaluated_step = -1
        self._measured_step = -1
        self._next_owed = False
        self._failures = Failures()
        self._remembered: set[str] = set()
        if resumption is not None:
            self._take_from(resumption)

    def _take_from(self, resumption: Resumption) -> None:
        terms = resumption.terms
        settled = self._settle(resumption.manifest, resumption)
        settled.admission.resume(terms, None if resumption.step else resumption.state_digest)
        self.saves = Saves(self.spec.checkpoint, resumption.saved)
        self._remembered = set(terms.signatures) if terms is not None else set()

    def _settle(self, manifest: Manifest, resumption: Resumption | None = None) -> Settled:
        spec = self.spec
        mesh = Mesh(self.run_id, self.epoch, spec.exchange, manifest.blocks, self._secret)
        self.settled = Settled(
            manifest,
            Progress(
                spec,
                self.epoch,
                manifest,
                self.members,
                resumption,
                mesh=mesh,
                allocate=self._allocate,
            ),
            Admission(self.run_id, self.spec.exactness, self.members, manifest),
        )
        return self.settled

    @property
    def manifest(self) -> Manifest | None:
        """The run's, once it is settled."""
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
    def step(self) -> int:
        """Steps committed."""
        return self.settled.progress.step if self.settled is not None else 0

    @property
    def steps(self) -> int:
        """How many there are to be, as far as that is known."""
        return self.settled.progress.steps if self.settled is not None else self.spec.steps

    @property
    def known_steps(self) -> int | None:
        """The same; None as long as nobody can say."""
        return self.steps if self.settled is not None else self.spec.known_steps

    @property
    def epochs(self) -> str:
        """How far it is, where the run spec speaks of epochs and they are known; else empty."""
        if self.settled is None:
            return ""
        return self.spec.epochs_after(self.step, self.settled.manifest.train_samples)

    @property
    def losses(self) -> list[float]:
        """Mean loss of each committed step; NaN for a skipped one."""
        return self.settled.progress.losses if self.settled is not None else []

    # Events about workers.

    def invite(
        self,
        worker: str,
        admitted_by: str = "",
        host: str = "",
        *,
        devices: int = 1,
        evaluates: bool = False,
    ) -> list[Action]:
        """A worker is connected and free: ask it to build the task.

        Args:
            worker: Its name.
            admitted_by: What it proved itself with.
            host: Where it connects from; empty from the coordinator's machine.
            devices: How many it has.
            evaluates: Whether it is to evaluate, and to compute nothing.
        """
        if self.phase is RunPhase.OVER:
            return []
        member = self.members.add(worker, admitted_by, host, devices=devices, evaluates=evaluates)
        return self._on(Event.INVITE, member)

    def receive(
        self, worker: str, message: Message, body: Array | Bytes | bytes | None
    ) -> list[Action]:
        """A worker's message.

        Args:
            worker: Its name.
            message: What it sent.
            body: float32 values of a gradient or of state, bytes that are kept, or the document of
                `Ready`.

        Raises:
            RemoteProtocolError: The message does not fit the present; its connection is to end.
        """
        member = self.members.get(worker)
        if member is None:  # it has no part in the run: nothing keeps it from leaving
            leaves = isinstance(message, Drain)
            return [Dismiss(worker, "drained", ExitCode.OK)] if leaves else []
        over = self.phase is RunPhase.OVER and not isinstance(message, Drain)
        if over or is_stale(member, message, self.run_id):
            return []
        event = _EVENT_OF.get(type(message))
        if event is None or not self._may_come(event, member, message):
            raise OutOfPlace(f"{type(message).__name__} is out of place here")
        return self._on(event, member, message, body)

    def _may_come(self, event: Event, member: Member, message: Message) -> bool:
        """What answers the wish to build the task comes once; later a task may say it moved."""
        if event not in (Event.READY, Event.UNREADY) or member.state is MemberState.PREPARING:
            return True
        has_begun = self.phase is not RunPhase.WAITING
        return isinstance(message, Unready) and not message.own and has_begun

    def lost(self, worker: str, reason: str, *, exit_code: int = ExitCode.OK) -> list[Action]:
        """A worker's session is over; its unfinished nodes go to others within the step.

        Args:
            worker: Its name.
            reason: Why.
            exit_code: What the worker ends with, as it said: OK; MISMATCH, if it can have no part
                in this run; else its device failed, or cannot be used. When a second one fails at
                the same microbatches the run halts: the others would follow.
        """
        member = self.members.remove(worker)
        if member is None:
            return []
        told = self.settled.progress.mesh.lost(worker) if self.settled is not None else []
        return told + self._on(Event.LOST, member, reason, exit_code)

    # Events from the shell.

    def tick(self, now_ms: float) -> list[Action]:
        """Time goes on: nobody waits for those who are late, if others can do it."""
        if ended := self._end_if_nobody_came(now_ms):
            return ended
        return self._on(Event.TICK, now_ms)

    def resume(self) -> list[Action]:
        """After a restart: go on with the step that the disk says comes next."""
        return self._on(Event.RESUME)

    def replica_loaded(self, upload: int, digest: str) -> list[Action]:
        """All of an upload of state 0 is in the replica, which has this digest."""
        return self._on(Event.REPLICA_LOADED, upload, digest)

    def replica_applied(self, step: int, digest: str, not_finite: str = "") -> list[Action]:
        """The coordinator's own replica has taken `step` steps; it arbitrates.

        Args:
            step: So many.
            digest: Of its state.
            not_finite: Where that state has a value that is not finite; empty if nowhere.
        """
        return self._on(Event.REPLICA_APPLIED, step, digest, not_finite)

    def replayed(self, worker: str) -> list[Action]:
        """A worker was sent the state, or what it had missed, and hears broadcasts from now on."""
        return self._on(Event.REPLAYED, worker)

    def fell_behind(self, worker: str, step: int) -> list[Action]:
        """A worker that nobody waits for reads so slowly that it is sent nothing after `step` steps
        any more: from there on it gets all from the log."""
        return self._on(Event.FELL_BEHIND, worker, step)

    def summarised(self, step: int, attempt: int, summaries: Mapping[int, Summary]) -> list[Action]:
        """Norms and digests of some blocks' averages are there."""
        return self._on(Event.SUMMARISED, step, attempt, summaries)

    def durable(self, step: int, own_digest: str | None = None) -> list[Action]:
        """The commit of this step is on disk: now all may hear of it.

        Args:
            step: The step.
            own_digest: What the commit names of the replicas' own states.
        """
        return self._on(Event.DURABLE, step, own_digest)

    def checkpointed(self, step: int) -> list[Action]:
        """The state after so many steps is saved."""
        return self._on(Event.CHECKPOINTED, step)

    def storage_failed(self, reason: str, *, lost_commit: bool = False) -> list[Action]:
        """The disk refuses. Nothing is damaged.

        Args:
            reason: What the disk says.
            lost_commit: Whether it was the commit that did not get there: the step is done again.
                Else one that is on its way may get there all the same.
        """
        return self._on(Event.STORAGE_FAILED, reason, lost_commit=lost_commit)

    def result_refused(self, reason: str) -> list[Action]:
        """The run is done, but the disk refuses its result: it waits for room."""
        return self._on(Event.RESULT_REFUSED, reason)

    # An operator's word.

    def halt(self, reason: str, fault: NonFinite | None = None) -> list[Action]:
        """Stop now, apply nothing; `fault` says where a value was not finite.

        A commit that is on its way to the disk gets there: then it is the next step that waits.
        """
        return self._on(Event.HALT, reason, fault)

    def end_halt(self, *, skip_step: bool) -> list[Action]:
        """Another attempt at the step that was halted, or the next one."""
        return self._on(Event.END_HALT, skip_step=skip_step)

    def save(self) -> list[Action]:
        """Save the present state now."""
        return self._on(Event.SAVE)

    def drain(self) -> list[Action]:
        """Stop after the present step."""
        self._drain_asked = True
        return self._on(Event.DRAIN)

    def give_up(self, reason: str) -> list[Action]:
        """Nothing more can come: end as failed."""
        return self._on(Event.GIVE_UP, reason)

    # The machine.

    def _on(self, event: Event, *details: Any, **named: Any) -> list[Action]:
        return self._TABLE[event][self.phase](self, *details, **named)

    def _enter(self, phase: RunPhase, reason: str = "") -> None:
        assert phase in _NEXT[self.phase], f"{self.phase} is never followed by {phase}"
        self.phase, self.reason = phase, reason

    @property
    def _agreed(self) -> Settled:
        assert self.settled is not None, "no run gets beyond WAITING without a manifest"
        return self.settled

    def _ignore(self, *details: object, **named: object) -> list[Action]:
        del details, named
        return []

    def _refuse_early(self, member: Member, message: Message, body: object) -> list[Action]:
        del body
        raise OutOfPlace(f"{type(message).__name__} of {member.name!r} before the first step")

    def _check_late(
        self, member: Member, message: OfRound | SliceMessage, body: object
    ) -> list[Action]:
        """The step does not go on: what belongs to it is dropped, what never did is an error."""
        del member, body
        self._agreed.progress.present(message)
        return []

    # Workers come and go.

    def _early_invite(self, member: Member) -> list[Action]:
        """Evaluators wait: what all have to agree on is for those to settle that train."""
        return [] if member.evaluates else self._ask(member)

    def _ask(self, member: Member) -> list[Action]:
        if member.evaluates and not self._evaluates_beside:
            return []
        member.state = MemberState.PREPARING
        self.unfit.pop(member.name, None)
        message = StartRun(run_id=self.run_id, epoch=self.epoch, step=self.step, blobs=self.blobs)
        return [Send(member.name, message, self.spec.to_bytes())]

    @property
    def _evaluates_beside(self) -> bool:
        """Whether there is anything to evaluate while the run trains."""
        return bool(self._agreed.manifest.evaluation_parts and self.spec.evaluate_every)

    def _first_ready(self, member: Member, message: Ready, document: bytes) -> list[Action]:
        """Before the start: whoever is the first settles what all have to agree on."""
        manifest = Manifest.from_bytes(document)
        actions: list[Action] = []
        if self.settled is None:
            self._settle(manifest)
            actions += [Adopt(manifest), Report(ManifestAgreed(manifest)), *self._planned()]
            if missing := self._figure_missing(manifest):
                return actions + self._finish("failed", missing, ExitCode.USAGE)
        actions += self._check_ready(member, manifest, message)
        if member.name not in self.members:
            return actions
        return actions + self._agreed.admission.request_state() + self._start_if_enough()

    def _figure_missing(self, manifest: Manifest) -> str:
        """Why the run can neither stop by its figure nor keep its best; empty if it can."""
        stop, metric = self.spec.stop, self.spec.checkpoint.metric
        key, figure = ("stop.figure", stop.figure) if stop else ("checkpoint.metric", metric)
        names = [each.name for each in manifest.metrics]
        if figure is None or figure in names:
            return ""
        there = f"it measures {', '.join(names)}" if names else "it measures nothing"
        return f"{key}: expected a figure of this task, got {figure!r}; {there}"

    def _planned(self) -> list[Action]:
        """What a capture is going to be."""
        layout, progress = self._agreed.manifest.capture, self._agreed.progress
        if layout is None:
            return []
        samples = min(self._agreed.manifest.train_samples, progress.steps * self.spec.batch.samples)
        size = byte_size(samples * layout.sample_bytes)
        return [Report(CapturePlanned(samples, progress.steps, size, layout.logits_bytes))]

    def _later_ready(self, member: Member, message: Ready, document: bytes) -> list[Action]:
        """While the run goes on: the worker computes once it has the state."""
        settled = self._agreed
        actions = self._check_ready(member, Manifest.from_bytes(document), message)
        if member.name not in self.members:
            return actions
        actions += settled.admission.admit(member, self.step, settled.progress.agreement)
        if member.state is MemberState.FOLLOWING:
            return actions + self._evaluate_owed()
        return actions + (self._joined(member) if member.state is MemberState.ACTIVE else [])

    def _check_ready(self, member: Member, manifest: Manifest, message: Ready) -> list[Action]:
        admission = self._agreed.admission
        if not member.evaluates:
            admission.first_ready(message)
        if refusal := admission.refusal(manifest, message, evaluates=member.evaluates):
            self.members.remove(member.name)
            if not member.evaluates:
                self._note_unfit(member, refusal)
                self._judge_later(member, refusal, ExitCode.MISMATCH)
            return refuse(member.name, refusal)
        member.now_ready(message)
        told = WorkerReady(member.name, member.device, member.backend, member.signature_text)
        if member.evaluates:
            return [Report(told)]
        return [Report(told), *self._agreed.progress.mesh.joined(member.name, member.host)]

    def _unready(self, member: Member, message: Unready, body: None = None) -> list[Action]:
        del body
        self.members.remove(member.name)
        if not member.evaluates:
            self._note_unfit(member, message.reason)
            self._judge_later(member, message.reason, message.exit_code, all_alike=not message.own)
        return [Report(WorkerUnready(member.name, message.reason))]

    def _late_unready(self, member: Member, message: Unready, body: None) -> list[Action]:
        """One that took part says that its task moved: what it computed cannot be taken back."""
        was_preparing = member.state is MemberState.PREPARING
        actions = self._unready(member, message, body)
        if was_preparing:
            return actions
        reason = f"worker {member.name!r}: {message.reason}"
        return actions + self._finish("failed", reason, message.exit_code, is_resumable=False)

    def _early_unready(self, member: Member, message: Unready, body: None) -> list[Action]:
        """Before the start: what hinders one hinders all, unless it is the worker's own matter
        and others may still come."""
        actions = self._unready(member, message, body)
        verdict = self._verdict
        if verdict is None or (message.own and self._others_may_come(verdict)):
            return actions
        return actions + self._fail(verdict)

    def _judge_later(
        self, member: Member, reason: str, exit_code: int, *, all_alike: bool = False
    ) -> None:
        """A worker can have no part in the run: if nobody else comes soon, that ends it.

        Others may come: who is here and was not refused; who was here and is only away; who took
        part before a restart, for a while; and, unless what hinders this one hinders all, whoever
        is still missing of those that are expected.
        """
        reason = f"worker {member.name!r}: {reason}"
        self._verdict = _Verdict(reason, exit_code, all_alike=all_alike)

    def _others_may_come(self, verdict: _Verdict) -> bool:
        able = any(not member.evaluates for member in self.members)
        away = self.members.departed - self.unfit.keys()
        unfit = sum(self._unfit_devices[name] for name in self.unfit)
        return able or bool(away) or (unfit < self.expect_workers and not verdict.all_alike)

    def _end_if_nobody_came(self, now_ms: float) -> list[Action]:
        """The last worker that came can have no part in the run, and nobody has come since."""
        verdict = self._verdict
        if verdict is None or self.phase in (RunPhase.HALTED, RunPhase.OVER):
            return []
        if self._others_may_come(verdict):
            self._verdict = None
            return []
        if verdict.since_ms is None:
            self._verdict = replace(verdict, since_ms=now_ms)
            return []
        late = now_ms - verdict.since_ms >= OTHERS_COME_WITHIN_MS
        return self._fail(verdict) if late else []

    def _fail(self, verdict: _Verdict) -> list[Action]:
        return self._finish("failed", verdict.reason, verdict.exit_code)

    def _state_chunk(self, member: Member, message: StateChunk, values: Array) -> list[Action]:
        if self.settled is None:
            raise OutOfPlace("StateChunk was not asked for")
        return self.settled.admission.state_chunk(member.name, message, values)

    def _loaded(self, upload: int, digest: str) -> list[Action]:
        settled = self._agreed
        actions = settled.admission.state_loaded(upload, digest)
        if not settled.admission.state_known:
            return actions
        settled.progress.agreement.replica_answer(0, digest)
        return actions + self.saves.save(0) + self._start_if_enough()

    def _tick_waiting(self, now_ms: float) -> list[Action]:
        return self.settled.admission.tick(now_ms) if self.settled is not None else []

    def _start_if_enough(self) -> list[Action]:
        ready = [member for member in self.members if member.state is MemberState.READY]
        admission, progress = self._agreed.admission, self._agreed.progress
        expected = self.expect_workers
        if sum(member.devices for member in ready) < expected or not admission.state_known:
            return []
        progress.mixed = not all(admission.starts_alike(member) for member in ready)
        started = Report(TrainingStarted([member.name for member in ready]))
        admitted = admission.admit_ready()
        self._enter(RunPhase.TRAINING)
        view = self.members.view_begins(self.step, "started")
        evaluators = [member for member in self.members if member.evaluates]
        invited = [action for member in evaluators for action in self._ask(member)]
        return [started, *admitted, *view, *progress.begin(), *invited]

    def _early_lost(self, member: Member, reason: str, exit_code: int) -> list[Action]:
        actions: list[Action] = [self._gone(member, reason)]
        self._lost_unfit(member, reason, exit_code)
        return actions + (self.settled.admission.lost(member.name) if self.settled else [])

    def _lost(self, member: Member, reason: str, exit_code: int) -> list[Action]:
        progress, worker, failed = self._agreed.progress, member.name, exit_code != ExitCode.OK
        round_ = progress.round
        pattern = ""
        if failed and round_ is not None:
            pattern = self._failures.note(worker, round_.unfinished(worker))
        self._odd.discard(worker)
        actions: list[Action] = [self._gone(member, reason)]
        self._lost_unfit(member, reason, exit_code)
        change: Change = "drained" if member.released else "lost"
        actions += self.members.view_begins(self.step, change, worker, reason)
        proven = progress.lose(worker)
        if self.evaluation is not None:
            self.evaluation.lose(worker, proven=proven)
        missing = f"worker {worker!r} left before it was measured"
        actions += self.evaluators.lose(worker, self.step, missing) + self._evaluate_owed()
        if pattern:
            self._failures.clear()
            actions += self.halt(f"step {self.step}: {pattern}; the last said: {reason}")
        actions += self._recall_all() + self._on(Event.REASSIGN) + self._on(Event.ADVANCE)
        return actions + self.drain() if self._drain_asked else actions

    def _recall_all(self) -> list[Action]:
        """Nobody is left but those that were put aside: they get the state, and take part."""
        if self._computing:
            return []
        actions: list[Action] = []
        for member in self.members:
            if member.aside_until and member.state is MemberState.LOADING:
                member.aside_until = 0
                actions.append(seed(member))
        return actions

    def _gone(self, member: Member, reason: str) -> Report:
        kind = WorkerLeft if member.released else WorkerLost
        return Report(kind(member.name, reason, self.members.view))

    def _lost_unfit(self, member: Member, reason: str, exit_code: int) -> None:
        """It may have left before its task was built, because of what it is or has."""
        if member.evaluates or member.state is not MemberState.PREPARING:
            return
        if exit_code != ExitCode.OK:
            self._note_unfit(member, reason)
        if exit_code == ExitCode.MISMATCH:  # else it may come again, mended
            self._judge_later(member, reason, exit_code)

    def _note_unfit(self, member: Member, reason: str) -> None:
        self.unfit[member.name] = reason
        self._unfit_devices[member.name] = member.devices

    def _release(self, member: Member, message: Drain, body: None) -> list[Action]:
        """It wants to leave, and owes nothing that others wait for."""
        del message, body
        return [member.release()]

    def _release_when_done(self, member: Member, message: Drain, body: None) -> list[Action]:
        round_ = self._agreed.progress.round
        if round_ is None or not round_.unfinished(member.name):
            return self._release(member, message, body)
        member.state = MemberState.DRAINING
        return []

    # Steps.

    def _resume(self) -> list[Action]:
        self._enter(RunPhase.TRAINING)
        return self._after_commit() + self._on(Event.ADVANCE)

    def _begin_step(self) -> list[Action]:
        self._enter(RunPhase.TRAINING)
        return self._agreed.progress.begin()

    def _payload(self, member: Member, message: GradientPayload, values: Array) -> list[Action]:
        progress = self._agreed.progress
        round_ = progress.present(message)
        if round_ is None or member.state not in COMPUTING:
            return []
        progress.delivered(member.name)
        outcome = round_.payload(member.name, message, values)
        if isinstance(outcome, NonFinite):
            return self._not_finite(outcome)
        if isinstance(outcome, Differing):
            return self.halt(f"step {self.step}: {outcome}")
        credit = progress.credit(round_)  # before an average: it is short, and waited for
        averaged: list[Action] = []
        if outcome is not None:
            averaged = [outcome, *round_.summarise()]
        return credit + averaged + progress.release() + self._on(Event.ADVANCE)

    def _summarised(
        self, step: int, attempt: int, summaries: Mapping[int, Summary]
    ) -> list[Action]:
        round_ = self._agreed.progress.round
        here = {"step": step, "attempt": attempt}
        if round_ is None or not here.items() <= round_.place.items():
            return []
        round_.summarised(summaries)
        return self._on(Event.ADVANCE)

    def _captured(self, member: Member, message: CapturedRows, content: Bytes) -> list[Action]:
        progress = self._agreed.progress
        round_ = progress.present(message)
        if round_ is None or member.state not in COMPUTING:
            return []
        progress.delivered(member.name)
        differing = round_.captured(member.name, message, content)
        return self.halt(f"step {self.step}: {differing}") if differing is not None else []

    def _stretch(
        self,
        member: Member,
        message: StretchProgress | Boundary | StretchRequest,
        content: Bytes | None,
    ) -> list[Action]:
        """A worker on its way through a stretch."""
        if self.spec.replicas is None:
            raise OutOfPlace(f"{type(message).__name__} in a run without replicas")
        progress = self._agreed.progress
        round_ = progress.present(message)
        if round_ is None or member.state is MemberState.LOADING:
            return []
        progress.delivered(member.name)
        match message:
            case StretchProgress():
                round_.stretch(member.name, message.replica, message.inner)
                return []
            case Boundary():
                assert content is not None
                round_.boundary(member.name, message.replica)
                return [KeepBoundary(message, content)]
            case StretchRequest():
                round_.stretch(member.name, message.replica, 0)
                return [AnswerStretch(member.name, message)]

    def _node_loss(self, member: Member, message: NodeLoss, body: None) -> list[Action]:
        del body
        progress = self._agreed.progress
        round_ = progress.present(message)
        if round_ is None or member.state not in COMPUTING:
            return []
        fault = progress.node_loss(round_, member, message)
        actions = progress.release() + progress.cancel_surplus(round_)
        if isinstance(fault, Differing):
            return actions + self.halt(f"step {self.step}: {fault}")
        if isinstance(fault, NonFinite):
            return actions + self._not_finite(fault)
        return actions + self._on(Event.ADVANCE)

    def _non_finite(self, member: Member, message: NonFiniteNode, body: None) -> list[Action]:
        del body
        round_ = self._agreed.progress.present(message)
        if round_ is None or member.state is MemberState.LOADING:
            return []
        return self._not_finite(round_.non_finite(member.name, message))

    def _noted(self, member: Member, message: DeviceNote, body: None) -> list[Action]:
        del body
        return [Report(DeviceFault(member.name, message.device, message.text))]

    # Slices, which members average among themselves.

    def _door_open(self, member: Member, message: DoorOpen, body: None) -> list[Action]:
        del body
        return self._agreed.progress.mesh.opened(member.name, message)

    def _linked(self, member: Member, message: Linked, body: None) -> list[Action]:
        del body
        self._agreed.progress.mesh.linked(member.name, message.peer, message.mbit)
        return []

    def _link_traffic(self, member: Member, message: LinkTraffic, document: bytes) -> list[Action]:
        del message
        traffic = parse(Traffic, document)
        self._agreed.progress.mesh.traffic[member.name] = traffic.peers
        return []

    def _unlinked(self, member: Member, message: Unlinked, body: None) -> list[Action]:
        del body
        self._agreed.progress.mesh.unlinked(member.name, message.peer)
        return self._on(Event.REASSIGN) + self._on(Event.ADVANCE)

    def _slice(
        self, member: Member, message: SliceMessage, body: Array | bytes | None
    ) -> list[Action]:
        progress = self._agreed.progress
        round_ = progress.present(message)
        if round_ is None:
            return []
        progress.delivered(member.name)
        found: list[Broadcast] | WrongAverage = []
        match message:
            case SliceSum():
                assert isinstance(body, np.ndarray)
                return [*round_.slice_sum(member.name, message, body)]
            case SumNotFinite():
                return self._not_finite(round_.not_finite(member.name, message))
            case SumsArrived():
                round_.sums_arrived(member.name, message)
                if message.worker in round_.shares:
                    progress.delivered(message.worker)
                return progress.release() + progress.cancel_surplus(round_)
            case SliceDone():
                assert isinstance(body, bytes)
                found = round_.slice_done(member.name, message, parse_origin(body))
            case SliceAverage():
                assert isinstance(body, np.ndarray)
                found = round_.slice_average(member.name, message, body)
        if isinstance(found, WrongAverage):
            return self.halt(f"step {self.step}: {found}")
        return [*found, *round_.summarise(), *progress.release(), *self._on(Event.ADVANCE)]

    def _slices_wanted(self, member: Member, message: SlicesWanted, body: None) -> list[Action]:
        del body
        return self._agreed.progress.slices_wanted(member.name, message)

    def _wrong_slice(self, member: Member, message: WrongSlice, body: None) -> list[Action]:
        """The step is committed, with other averages than this worker got: it gets those here."""
        del body
        grid = SliceGrid(self._agreed.manifest.blocks)
        if message.slice >= grid.count or message.step >= self.step:
            raise OutOfPlace(f"WrongSlice: no slice {message.slice} of a committed step")
        if message.owner not in self.members:
            return []  # it has left, with whatever it had
        block = self._agreed.manifest.blocks[grid.place(message.slice)[0]].name
        wrong = WrongAverage(message.owner, block, f"to worker {member.name!r}")
        return self.halt(f"step {message.step}: {wrong}")

    def _not_finite(self, fault: NonFinite) -> list[Action]:
        """Gradients that a scale made overflow are computed again; a loss is never scaled."""
        again: list[Action] = []
        if fault.block is not None:
            again = self._agreed.progress.halve_loss_scale(str(fault))
        return again or self.halt(f"step {self.step}: {fault}", fault)

    def _reassign(self) -> list[Action]:
        return self._agreed.progress.reassign()

    def _tick(self, now_ms: float) -> list[Action]:
        return self._agreed.progress.tick(now_ms) + self._on(Event.ADVANCE)

    def _advance(self) -> list[Action]:
        """Commit if everything is there and everyone agrees on the step before."""
        progress = self._agreed.progress
        round_ = progress.round
        if not progress.agreement.reached:
            return []
        if round_ is None:
            return self._end_if_done()
        # The first commit waits for the checkpoint of step 0: without it a restart has no state.
        if progress.persisting or self.saves.saved is None:
            return []
        skip = self._skip_asked or progress.was_skipped
        if not (skip or round_.complete):
            return []
        self._skip_asked = False
        return self._remember() + progress.persist(round_, skip=skip)

    def _remember(self) -> list[Action]:
        """Whose bits may be in the step that is committed now."""
        progress, admission = self._agreed.progress, self._agreed.admission
        if self._remembered == progress.signatures:
            return []
        self._remembered = set(progress.signatures)
        return [Remember(admission.terms(progress.signatures, mixed=progress.mixed))]

    def _durable(self, step: int, own_digest: str | None) -> list[Action]:
        actions = self._commit(step, own_digest)
        return actions and actions + self._after_commit() + self._on(Event.ADVANCE)

    def _durable_in_halt(self, step: int, own_digest: str | None) -> list[Action]:
        actions = self._commit(step, own_digest)
        self._next_owed = self._next_owed or bool(actions)
        return actions

    def _durable_too_late(self, step: int, own_digest: str | None) -> list[Action]:
        """The step counts, though the run has ended without it: nobody is told."""
        self._agreed.progress.durable(step, own_digest)
        return []

    def _commit(self, step: int, own_digest: str | None) -> list[Action]:
        actions = self._agreed.progress.durable(step, own_digest)
        if actions:
            self._failures.clear()
            actions += self.evaluators.committed(self.step) + self.saves.committed(self.step)
        return actions

    def _after_commit(self) -> list[Action]:
        progress = self._agreed.progress
        if self._drain_asked and not self._computing:
            return []
        every = self.spec.evaluate_every
        due = progress.all_committed or (progress.step and every and progress.step % every == 0)
        able = self.evaluators.able
        due = due or (self.evaluators.owed and not able)
        beside: list[Action] = []
        if self._agreed.manifest.evaluation_parts and due:
            # At the end nobody has anything else to do, and a figure must not be missing; and
            # whether there is a next step may depend on it.
            waits = progress.all_committed or self.spec.stop is not None
            if waits or not able:
                return self._begin_evaluation()
            beside = self._evaluate_beside()
        if progress.all_committed or self._drain_asked:
            return beside
        return beside + self._begin_step()

    # Agreement.

    def _applied(self, member: Member, message: StepApplied, body: None) -> list[Action]:
        del body
        progress = self._agreed.progress
        progress.applied(member.name, message)
        agreement = progress.agreement
        if member.evaluates:
            self.evaluators.applied(member, message)
            return self._judge(message.step) + self._advance_beside()
        if agreement.catching_up and agreement.digest(message.step) is None:
            # On trust: compared with the others now, with the replica once that is there.
            return self._is_right(member, message.step) + self._on(Event.ADVANCE)
        return self._judge(message.step)

    def _replica(self, step: int, digest: str, not_finite: str) -> list[Action]:
        self._agreed.progress.agreement.replica_answer(step, digest)
        self.evaluators.replica_answer(step, digest)
        halted: list[Action] = []
        if not_finite:
            halted = self.halt(
                f"the update of step {step - 1} left a value that is not finite: {not_finite}; "
                "go on from an earlier checkpoint, with a lower learning rate"
            )
        return halted + self._judge(step) + self._advance_beside()

    def _judge(self, step: int) -> list[Action]:
        """Compare the answers to a step once the replica's own is known."""
        agreement = self._agreed.progress.agreement
        agreed, found = agreement.judge(step)
        actions: list[Action] = []
        odd = []
        for name in found:
            member = self.members.get(name)
            if member is not None and member.evaluates:
                actions += self._refuse_evaluator(name, step)
            else:
                odd.append(name)
        if odd:
            self._odd.update(odd)
            names = ", ".join(repr(name) + agreement.odd_devices(name) for name in odd)
            actions += self.halt(
                f"the state of worker {names} after {step} steps differs from the coordinator's"
            )
        for name in agreed:
            actions += self._is_right(self.members.get(name), step)
        return actions + self._on(Event.ADVANCE)

    def _is_right(self, member: Member | None, step: int) -> list[Action]:
        """A worker's state after so many steps is the run's, or is taken for it: it takes part, if
        it had to load it and hears broadcasts."""
        if member is None or member.state is not MemberState.LOADING or member.evaluates:
            return []
        if member.replaying:
            member.right_at = step
            return []
        agreement, behind = self._agreed.progress.agreement, self.step - step
        trusted = agreement.digest(step) is None
        if behind > (0 if trusted else _BEHIND):
            return []
        if self.step < member.aside_until and self.members.names(MemberState.ACTIVE):
            return []
        if behind or trusted:
            agreement.owe(member.name)  # it says what came of the steps in between, too
        self.members.activate(member)
        return self._joined(member)

    def _joined(self, member: Member) -> list[Action]:
        told = Report(WorkerJoined(member.name, self.step, self.members.view))
        view = self.members.view_begins(self.step, "joined", member.name)
        return [told, *view, *self._on(Event.REASSIGN)]

    def _fell_behind(self, worker: str, step: int) -> list[Action]:
        member = self.members.get(worker)
        if member is None or member.state not in (MemberState.LOADING, MemberState.FOLLOWING):
            return []
        member.state, member.caught_up = MemberState.LOADING, False
        member.gets_state()
        return [Replay(worker, step, None)]

    def _replayed(self, worker: str) -> list[Action]:
        member = self.members.get(worker)
        if member is None or not member.replaying:
            return []
        member.replaying = False
        if member.evaluates:
            member.follows()
            return self._evaluate_owed()
        if member.right_at is None:
            return []
        return self._is_right(member, member.right_at) + self._on(Event.ADVANCE)

    # Evaluation.

    def _begin_evaluation(self) -> list[Action]:
        self._enter(RunPhase.EVALUATING)
        self.evaluators.taken_over()
        self.evaluation = Evaluation(self.step, self._agreed.manifest.evaluation_parts)
        return self._plan_evaluation()

    @property
    def _evaluating(self) -> Evaluation:
        assert self.evaluation is not None, "the phase begins with it"
        return self.evaluation

    def _plan_evaluation(self) -> list[Action]:
        busy, active = self._evaluating.waiting_for(), self.members.names(MemberState.ACTIVE)
        idle = [name for name in active if name not in busy]
        return self._evaluating.plan(self.epoch, idle or active)

    def _eval_result(self, member: Member, message: EvalResult, body: None) -> list[Action]:
        if member.evaluates:
            return self._beside(member, message, body)
        self._evaluating.result(member.name, message)
        return self._on(Event.ADVANCE)

    def _tick_evaluation(self, now_ms: float) -> list[Action]:
        """Who does not say that it has the state that is evaluated is passed over here too."""
        before = set(self.members.names(MemberState.ACTIVE))
        actions = self._agreed.progress.tick(now_ms)
        passed = before.difference(self.members.names(MemberState.ACTIVE))
        for worker in passed:
            self._evaluating.lose(worker, proven=False)
        self._evaluating.tick(now_ms)
        if self._evaluating.disown_late() or passed:
            actions += self._plan_evaluation()
        return actions + self._on(Event.ADVANCE)

    def _advance_evaluation(self) -> list[Action]:
        """End it when all parts are there and everyone agrees on the state that was evaluated."""
        progress = self._agreed.progress
        # After a restart workers agree among themselves before the replica is back. Figures wait
        # for its digest: else they may be of a state that is not the run's.
        if not (progress.agreement.reached and self._evaluating.complete):
            return []
        if progress.agreement.catching_up:
            return []
        digest = progress.agreement.digest(self.step)
        told = self._measured(self._evaluating, digest)
        self.evaluation, self._evaluated_step = None, self.step
        self._stopped = self._stopping.measured(self.step, self.metrics)
        if self._stopping.is_best(self.step):
            told += self.saves.save(self.step)
        self._enter(RunPhase.TRAINING)
        return told + (self._end_if_done() if self._ends else self._begin_step())

    def _measured(self, evaluation: Evaluation, state_digest: str | None) -> list[Action]:
        """Figures carry the step that they are of; those of an older one replace no newer ones."""
        figures = evaluation.metrics(self._agreed.manifest.metrics)
        if evaluation.step > self._measured_step:
            self.metrics, self._measured_step = figures, evaluation.step
        return [Report(HeldOutMeasured(evaluation.step, figures, state_digest))]

    # Evaluation beside training.

    def _evaluate_beside(self) -> list[Action]:
        parts = self._agreed.manifest.evaluation_parts
        known = self._agreed.progress.agreement.digest(self.step)
        return self.evaluators.begin(self.epoch, self.step, parts, known)

    def _evaluate_owed(self) -> list[Action]:
        """What was due before, now, if it can be; at the end all evaluate."""
        may = self.evaluators.can_begin_owed and not self._agreed.progress.all_committed
        return self._evaluate_beside() if may else []

    def _beside(self, member: Member, message: EvalResult, body: None) -> list[Action]:
        del body
        return self.evaluators.result(member, message) + self._advance_beside()

    def _advance_beside(self) -> list[Action]:
        """All parts are there, and whoever has computed them is known to have the run's state."""
        evaluation = self.evaluators.evaluation
        if evaluation is None or not self.evaluators.complete:
            return []
        if odd := self.evaluators.odd:
            return [a for name in odd for a in self._refuse_evaluator(name, evaluation.step)]
        self.evaluators.evaluation = None
        told = self._measured(evaluation, self.evaluators.state_digest)
        return told + self._evaluate_owed()

    def _refuse_evaluator(self, worker: str, step: int) -> list[Action]:
        """Its figures would be of another state: it is sent away, and nothing else stops."""
        self.members.remove(worker)
        self._agreed.progress.agreement.lose(worker)
        reason = f"its state after {step} steps differs from the coordinator's"
        missing = f"the state of worker {worker!r} after {step} steps is not the run's"
        return [*self.evaluators.lose(worker, self.step, missing), *refuse(worker, reason)]

    # Halts.

    def _halt(self, reason: str, fault: NonFinite | None) -> list[Action]:
        self._enter(RunPhase.HALTED, reason)
        place = self._agreed.progress.next_place()
        told = RunHalted(place["epoch"], place["step"], place["attempt"], reason)
        if fault is not None:
            where = (fault.node.lo, fault.node.hi)
            told = replace(told, microbatches=where, worker=fault.worker, block=fault.block)
        actions: list[Action] = [Broadcast(Halt(**place, reason=cut_text(reason))), Report(told)]
        return actions + self.drain() if self._drain_asked else actions

    def _end_halt(self, *, skip_step: bool) -> list[Action]:
        progress = self._agreed.progress
        passing = progress.persisting or self._next_owed
        if not passing:
            progress.attempt += 1
        place = progress.next_place()
        told = RunContinued(**place, skip_step=skip_step)
        actions = [Broadcast(Continue(**place)), Report(told), *progress.release()]
        actions += self.saves.again(self.step)
        actions += self._seed_odd()
        if self.evaluation is not None:
            return actions + self._begin_evaluation()
        if progress.round is not None and not progress.persisting:
            self._skip_asked = skip_step
            return actions + self._begin_step() + self._on(Event.ADVANCE)
        # The step that was halted got to the disk: what was asked for is about the next one.
        self._enter(RunPhase.TRAINING)
        self._skip_asked = skip_step and passing
        owed, self._next_owed = self._next_owed, False
        actions += self._after_commit() if owed else []
        return actions + self._on(Event.ADVANCE)

    def _seed_odd(self) -> list[Action]:
        """Workers whose state differs get the replica's."""
        actions: list[Action] = []
        for name in sorted(self._odd.difference(self.members.names(MemberState.DRAINING))):
            self._agreed.progress.agreement.lose(name)
            if (member := self.members.get(name)) is not None:
                self.members.deactivate(member)
                actions.append(seed(member))
        self._odd.clear()
        return actions + self.members.view_begins(self.step, "reseeded")

    def _refused(self, reason: str, *, lost_commit: bool) -> list[Action]:
        self.saves.failed()
        if lost_commit:
            self._agreed.progress.abandon_commit()
        return self.halt(reason)

    def _early_refused(self, reason: str, *, lost_commit: bool) -> list[Action]:
        del lost_commit
        self.saves.failed()
        return self.give_up(reason)

    # The end.

    @property
    def _computing(self) -> list[str]:
        return self.members.names(*COMPUTING)

    def _save(self) -> list[Action]:
        return self.saves.save(self.step) if self.has_state else []

    def _saved(self, step: int) -> list[Action]:
        self.saves.done(step)
        return self._on(Event.ADVANCE)

    @property
    def _ends(self) -> bool:
        """Whether no other step is to come."""
        return self._agreed.progress.all_committed or self._drain_asked or bool(self._stopped)

    def _end_if_done(self) -> list[Action]:
        """Everyone agrees, and no step is in progress: end when no other is to come."""
        progress = self._agreed.progress
        if progress.persisting or not self._ends:
            return []
        if progress.agreement.catching_up or self.saves.saved != progress.step:
            return self.saves.save(progress.step)
        evaluated = (
            self._evaluated_step == progress.step or not self._agreed.manifest.evaluation_parts
        )
        if (progress.all_committed or self._stopped) and evaluated:
            reason = self._stopped or "all steps are committed"
            return self._finish("finished", reason, ExitCode.OK)
        before = ", before their evaluation" if progress.all_committed else ""
        reason = f"drained after {progress.step} steps{before}"
        return self._finish("drained", reason, ExitCode.OK)

    def _drain_before_start(self) -> list[Action]:
        return self._finish("drained", "drained before the start", ExitCode.OK)

    def _drain_step(self) -> list[Action]:
        """If nobody is left to end the step in progress, the run ends after those committed."""
        if self._computing:
            return []
        if self.evaluation is not None:
            self.evaluation = None
            self._enter(RunPhase.TRAINING)
        self._agreed.progress.leave_out()
        return self._on(Event.ADVANCE)

    def _drain_halted(self) -> list[Action]:
        return self._finish("failed", f"halted: {self.reason}", ExitCode.FAILED)

    def _give_up(self, reason: str) -> list[Action]:
        return self._finish("failed", reason, ExitCode.FAILED)

    def _finish(
        self, outcome: Outcome, reason: str, exit_code: int, *, is_resumable: bool = True
    ) -> list[Action]:
        self._enter(RunPhase.OVER, reason)
        self.outcome = outcome
        return [*self.evaluators.run_ends(), Finish(outcome, reason, exit_code, is_resumable)]

    def _result_refused(self, reason: str) -> list[Action]:
        self._enter(RunPhase.TRAINING)  # it was not over after all
        return self.halt(f"all is committed, but the result is not written: {reason}")

    # What handles which event in which phase.

    _TABLE: Final = _rows(
        # event, then what handles it when WAITING, TRAINING, EVALUATING, HALTED, OVER
        (Event.INVITE, _early_invite, _ask, _ask, _ask, _ignore),
        (Event.LOST, _early_lost, _lost, _lost, _lost, _ignore),
        (Event.READY, _first_ready, _later_ready, _later_ready, _later_ready, _ignore),
        (Event.UNREADY, _early_unready, _late_unready, _late_unready, _late_unready, _ignore),
        (Event.WORKER_DRAINS, _release, _release_when_done, _release, _release, _release),
        (Event.STATE_CHUNK, _state_chunk, _state_chunk, _state_chunk, _state_chunk, _ignore),
        (Event.PAYLOAD, _refuse_early, _payload, _check_late, _check_late, _ignore),
        (Event.CAPTURED, _refuse_early, _captured, _check_late, _check_late, _ignore),
        (Event.STRETCH, _refuse_early, _stretch, _check_late, _check_late, _ignore),
        (Event.NODE_LOSS, _refuse_early, _node_loss, _check_late, _check_late, _ignore),
        (Event.NON_FINITE, _refuse_early, _non_finite, _check_late, _check_late, _ignore),
        (Event.DEVICE_NOTE, _noted, _noted, _noted, _noted, _ignore),
        (Event.STEP_APPLIED, _refuse_early, _applied, _applied, _applied, _ignore),
        (Event.EVAL_RESULT, _refuse_early, _beside, _eval_result, _beside, _ignore),
        (Event.DOOR_OPEN, _door_open, _door_open, _door_open, _door_open, _ignore),
        (Event.LINKED, _linked, _linked, _linked, _linked, _ignore),
        (Event.LINK_TRAFFIC, _link_traffic, _link_traffic, _link_traffic, _link_traffic, _ignore),
        (Event.UNLINKED, _unlinked, _unlinked, _unlinked, _unlinked, _ignore),
        (Event.SLICE, _refuse_early, _slice, _check_late, _check_late, _ignore),
        (Event.SLICES_WANTED, _ignore, _slices_wanted, _slices_wanted, _slices_wanted, _ignore),
        (Event.WRONG_SLICE, _refuse_early, _wrong_slice, _wrong_slice, _wrong_slice, _ignore),
        (Event.TICK, _tick_waiting, _tick, _tick_evaluation, _ignore, _ignore),
        (Event.RESUME, _resume, _ignore, _ignore, _ignore, _ignore),
        (Event.REPLICA_LOADED, _loaded, _ignore, _ignore, _ignore, _ignore),
        (Event.REPLICA_APPLIED, _ignore, _replica, _replica, _replica, _replica),
        (Event.REPLAYED, _ignore, _replayed, _replayed, _replayed, _ignore),
        (Event.FELL_BEHIND, _ignore, _fell_behind, _fell_behind, _fell_behind, _ignore),
        (Event.SUMMARISED, _ignore, _summarised, _ignore, _ignore, _ignore),
        (Event.DURABLE, _ignore, _durable, _ignore, _durable_in_halt, _durable_too_late),
        (Event.CHECKPOINTED, _saved, _saved, _saved, _saved, _saved),
        (Event.STORAGE_FAILED, _early_refused, _refused, _refused, _refused, _refused),
        (Event.RESULT_REFUSED, _ignore, _ignore, _ignore, _ignore, _result_refused),
        (Event.HALT, _ignore, _halt, _halt, _ignore, _ignore),
        (Event.END_HALT, _ignore, _ignore, _ignore, _end_halt, _ignore),
        (Event.SAVE, _save, _save, _save, _save, _save),
        (Event.DRAIN, _drain_before_start, _drain_step, _drain_step, _drain_halted, _ignore),
        (Event.GIVE_UP, _give_up, _give_up, _give_up, _give_up, _ignore),
        (Event.ADVANCE, _ignore, _advance, _advance_evaluation, _ignore, _ignore),
        (Event.REASSIGN, _ignore, _reassign, _plan_evaluation, _ignore, _ignore),
    )
