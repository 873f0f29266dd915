"""A worker's side of one connection: messages and results in, actions out.

Pure: no clock, socket, file, thread or randomness. It decides what the engine does next and what
is sent; it never waits. The two tables at the end say for each message and each result of the
engine what handles it in which phase; all state that exists only in a run is in one object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np
from xxhash import xxh3_128

from backends.base.interface import Array
from protocol.base import limits
from protocol.base.errors import (
    BackendUnavailable,
    DataError,
    DeviceError,
    ExitCode,
    OutOfOrder,
    ScriptDiffers,
)
from protocol.base.fields import cut_text
from protocol.exact.reduction.float32 import is_finite
from protocol.exact.reduction.tree import Subtree, is_subtree
from protocol.exact.replica import MISSED, are_counts
from protocol.spec.manifest import Block
from protocol.spec.run_spec import RunSpec, parse_run_spec_bytes
from protocol.spec.unit import unit_text
from protocol.wire.connection import Body
from protocol.wire.messages import (
    Assign,
    AveragedBlockGradient,
    AveragedGradient,
    AverageDigests,
    AveragedNonBlockGradient,
    BlobChunk,
    BlockGradientPayload,
    Cancel,
    CapturedRows,
    Commit,
    Continue,
    Credit,
    DeviceNote,
    Drain,
    EndRun,
    EvalPlan,
    EvalResult,
    Goodbye,
    Halt,
    Heartbeat,
    InnerCheckpointChunk,
    InnerPhaseProgress,
    InnerStateChunk,
    InnerStateRequest,
    ListenForPeers,
    Message,
    NonBlockGradientPayload,
    NonFiniteSum,
    Owners,
    Peers,
    Ready,
    StartRun,
    StateChunk,
    StateRequest,
    StepApplied,
    StepEmbeddings,
    StepPlan,
    SubtreeLoss,
    Unready,
    Welcome,
)
from worker.logic import events
from worker.logic.actions import (
    AbandonAttempt,
    Action,
    Apply,
    CancelSubtree,
    CancelWork,
    Compute,
    Contribute,
    CopyState,
    Evaluate,
    Expect,
    ForwardToExchange,
    Leave,
    LoadChunk,
    LoadEmbeddings,
    LoadInnerState,
    OpenDevice,
    Restore,
    Tell,
    Transmit,
)
from worker.logic.events import StepId
from worker.logic.file_fetch import FileEvent, RunFiles, give_up

_OF_THE_TERM: Final = (
    StepPlan, Assign, Cancel, Credit, AveragedBlockGradient, AveragedNonBlockGradient, Commit,
    EvalPlan, InnerStateChunk, Owners, AverageDigests, StepEmbeddings,
)  # fmt: skip
_AFTER_A_COMMIT: Final = (
    StepPlan, Assign, Cancel, Credit, Commit, EvalPlan, StateChunk, StateRequest, AverageDigests,
    Owners, StepEmbeddings,
)  # fmt: skip
"""A coordinator's of another term must not go on with the run."""


class SessionPhase(Enum):
    """Where a session is: without a run, getting one's files and task ready, taking part."""

    IDLE = "idle"
    PREPARING = "preparing"
    READY = "ready"


@dataclass(slots=True)
class _StepRows:
    """The embeddings of a step, as far as they have come.

    Attributes:
        step_id: The attempt of the plan that follows.
        pieces: In order.
        is_whole: Whether the last piece is there.
    """

    step_id: StepId
    pieces: list[Body] = field(default_factory=list)
    is_whole: bool = False


@dataclass(slots=True)
class _Task:
    """What there is of a run once its task is built.

    Attributes:
        blocks: The manifest's.
        parts: Held-out parts.
        step: Steps this replica has taken, or is about to have taken.
        sharded: Whether workers average in the attempt in progress.
        checksums: Of what was sent of a subtree then; None: not all of it is finite.
        committed: A commit whose averages are not all here.
        waiting: What the coordinator has said since.
        step_id: The attempt in progress; None between a commit and the next plan.
        microbatches: Of its step.
        subtrees: What this worker is to compute of it.
        asked: By replica, what has come of the state of a stretch that waits for it.
        is_coupled: Whether the loss couples all samples of a step.
        rows: The step's embeddings, until the plan for its gradients.
    """

    blocks: tuple[Block, ...]
    parts: int
    step: int
    sharded: bool = False
    checksums: dict[Subtree, xxh3_128 | None] = field(default_factory=dict)
    committed: Commit | None = None
    waiting: list[tuple[Message, Body | None]] = field(default_factory=list)
    step_id: StepId | None = None
    microbatches: int = 0
    subtrees: set[Subtree] = field(default_factory=set)
    asked: dict[int, list[Body]] = field(default_factory=dict)
    is_coupled: bool = False
    rows: _StepRows | None = None

    def drop_subtrees(self) -> None:
        """Nothing that was to be computed is wanted any more."""
        self.subtrees.clear()
        self.asked.clear()

    def has(self, step_id: StepId, subtree: Subtree) -> bool:
        """Whether a result is wanted: of the present attempt, and of a subtree that is ours."""
        return step_id == self.step_id and subtree in self.subtrees


@dataclass(slots=True)
class _Run:
    """The run that a session is in; `task`, and the number of steps, once it is built."""

    run_id: str
    spec: RunSpec
    steps: int = 0
    task: _Task | None = None


_Handler = Callable[..., list[Action]]


def _rows(
    *table: tuple[Any, _Handler, _Handler, _Handler],
) -> dict[Any, dict[SessionPhase, _Handler]]:
    """Handlers in the order of the phases, by kind and phase."""
    return {kind: dict(zip(SessionPhase, handlers, strict=True)) for kind, *handlers in table}


class WorkerSession:
    """See the module's text.

    Attributes:
        name: The name the coordinator gave.
        term: The coordinator's term.
        files: Of the run.

    Args:
        terms: The newest term seen of each run, kept from one connection to the next.
    """

    def __init__(self, terms: dict[str, int] | None = None) -> None:
        self.name = ""
        self.term = 0
        self.files = RunFiles()
        self._terms = {} if terms is None else terms
        self._run: _Run | None = None
        self._draining = False

    @property
    def phase(self) -> SessionPhase:
        if self._run is None:
            return SessionPhase.IDLE
        return SessionPhase.PREPARING if self._run.task is None else SessionPhase.READY

    @property
    def run_id(self) -> str:
        """The run's; empty without one."""
        return "" if self._run is None else self._run.run_id

    @property
    def step(self) -> int:
        """Steps this replica has taken, or is about to have taken."""
        return 0 if self._run is None or self._run.task is None else self._run.task.step

    @property
    def owes(self) -> bool:
        """Whether it is getting ready for a run, or has a part of a step to do."""
        if self._run is None:
            return False
        return self._run.task is None or self._run.task.step_id is not None

    @property
    def _task(self) -> _Task:
        assert self._run is not None
        assert self._run.task is not None, "handled in phase READY alone"
        return self._run.task

    def welcome(self, message: Welcome) -> list[Action]:
        """The handshake is done."""
        self.name, self.term = message.worker, message.term
        return [Tell(f"joined as {self.name!r}; waiting for a run"), OpenDevice()]

    def receive(self, message: Message, body: Body | None) -> list[Action]:
        """A message from the coordinator.

        Raises:
            RemoteProtocolError: It does not fit; the connection is to end.
        """
        row = self._MESSAGES.get(type(message))
        if row is None:
            raise OutOfOrder(f"{type(message).__name__} is not for a worker")
        if isinstance(message, _OF_THE_TERM) and message.term != self.term:
            raise OutOfOrder(f"expected term {self.term}, got {message.term}")
        if self._must_wait(message):
            self._task.waiting.append((message, body))
            return []
        return row[self.phase](self, message, body)

    def _must_wait(self, message: Message) -> bool:
        """What follows a commit waits until all averages of it have come."""
        if self._run is None or self._run.task is None or self._run.task.committed is None:
            return False
        return isinstance(message, _AFTER_A_COMMIT)

    def result(self, event: events.Event) -> list[Action]:
        """A result of the engine.

        What an earlier run or connection left to do comes out before the present run's `Built`,
        and is dropped.
        """
        return self._RESULTS[type(event)][self.phase](self, event)

    def drain(self) -> list[Action]:
        """An operator wants this worker to leave: finish what it has, take no more."""
        if self._draining:
            return []
        self._draining = True
        return [Transmit(Drain()), Tell("draining")]

    def status(self) -> str:
        """What this worker is doing, in one line."""
        if self._run is None:
            now = "waiting for a run"
        elif self._run.task is None:
            now = f"run {self.run_id}: not ready yet"
        else:
            now = f"run {self.run_id}: step {self.step} of {self._run.steps}"
        return f"{self.name}: {now}{', draining' if self._draining else ''}"

    # In any phase.

    def _ignore(self, *unused: object) -> list[Action]:
        del unused
        return []

    def _refuse(self, message: Message, body: Body | None) -> list[Action]:
        del body
        raise OutOfOrder(f"{type(message).__name__} for a run that is not built here")

    def _goodbye(self, message: Goodbye, body: None) -> list[Action]:
        del body
        return [CancelWork(), Leave(message.reason, message.retry, message.exit_code)]

    def _devices_lost(self, event: events.DevicesLost) -> list[Action]:
        """What there was of the run's state is gone: come back, and get it from the coordinator."""
        goodbye = Goodbye(reason=cut_text(event.reason), retry=True, exit_code=ExitCode.OK)
        leave = Leave(event.reason, retry=True, exit_code=ExitCode.OK, failed=True)
        return [CancelWork(), Transmit(goodbye), leave]

    def _device_noted(self, event: events.DeviceWarning) -> list[Action]:
        if not self.name:
            return []
        return [Transmit(DeviceNote(device=event.device, text=cut_text(event.text)))]

    def _device_failed(self, event: events.DeviceFailed) -> list[Action]:
        words = " ".join(str(event.error).split())
        if isinstance(event.error, BackendUnavailable | DeviceError | DataError):
            return give_up(words, event.error.exit_code)
        return give_up(f"the device failed: {words}", ExitCode.FAILED)

    # A run's start and end.

    def _start_run(self, message: StartRun, body: Body) -> list[Action]:
        newest = self._terms.get(message.run_id, 0)
        if message.term < newest:
            raise OutOfOrder(
                f"expected a coordinator of term {newest} or later for run {message.run_id}, got "
                f"{message.term}: an older coordinator must not continue it"
            )
        self.term = self._terms[message.run_id] = message.term
        spec = parse_run_spec_bytes(body.tobytes())
        self._run = _Run(message.run_id, spec)
        return [CancelWork(), *self.files.begin(message, spec)]

    def _blob_chunk(self, message: BlobChunk, body: Body) -> list[Action]:
        return self.files.chunk(message, body)

    def _task_built(self, event: events.Built) -> list[Action]:
        assert self._run is not None
        if event.run_id != self.run_id:
            return []
        manifest = event.manifest
        self._run.steps = self._run.spec.steps_with(manifest.epoch_samples)
        coupled = manifest.embeddings is not None
        parts = manifest.evaluation_parts
        self._run.task = _Task(manifest.blocks, parts, event.step, is_coupled=coupled)
        ready = Ready(
            run_id=self.run_id,
            backend=event.backend,
            device=event.device,
            initial_digest=event.initial_digest,
            step=event.step,
            state_digest=event.state_digest,
            signature=event.numerics_profile,
            signature_text=event.numerics_text,
            devices=event.devices,
            left_out=cut_text(event.left_out),
        )
        memory = f"; memory: {event.memory}" if event.memory else ""
        parity = f"; {event.parity}" if event.parity else ""
        batch = self._run.spec.batch
        unit = f"; unit: {unit_text(batch, manifest)}" if batch.unit != "sample" else ""
        return [
            Expect(manifest.blocks, self._run.spec.codecs),
            Transmit(ready, manifest.to_bytes()),
            Tell(f"run {self.run_id}: ready on {event.device}{memory}{parity}{unit}"),
        ]

    def _build_failed(self, event: events.BuildFailed) -> list[Action]:
        if event.run_id != self.run_id:
            return []
        reason = self.files.with_source_names(str(event.error))
        exit_code = event.error.exit_code
        if isinstance(event.error, BackendUnavailable | DeviceError | ScriptDiffers):
            # This machine's matter, not the run's: leave, and let the run wait for another.
            return give_up(reason, exit_code)
        unready = Unready(
            run_id=self.run_id, reason=cut_text(reason), own=event.is_local, exit_code=exit_code
        )
        return [Transmit(unready), Tell(f"cannot take part in {self.run_id}: {reason}")]

    def _task_refused(self, event: events.TaskRefused) -> list[Action]:
        """The run cannot be right any more, whoever goes on with it: the coordinator ends it."""
        if event.run_id != self.run_id:
            return []
        reason = self.files.with_source_names(str(event.error))
        unready = Unready(
            run_id=self.run_id,
            reason=cut_text(reason),
            own=False,
            exit_code=event.error.exit_code,
        )
        return [CancelWork(), Transmit(unready), Tell(f"run {self.run_id}: {reason}")]

    def _end_run(self, message: EndRun, body: None) -> list[Action]:
        del body
        self._run = None
        line = Tell(f"run {message.run_id} is over: {message.reason}")
        return [CancelWork(), *self.files.drop(), line]

    # A state that comes or goes.

    def _check_run(self, message: StateChunk | StateRequest) -> None:
        if message.run_id != self.run_id:
            self._refuse(message, None)

    def _state_request(self, message: StateRequest, body: None) -> list[Action]:
        del body
        self._check_run(message)
        return [CopyState()]

    def _upload(self, event: events.StateCopied) -> list[Action]:
        if event.step:
            return []
        # Moments are zeros at step 0: the parameters are the whole state.
        blocks = self._task.blocks
        pieces = [
            (part, chunk)
            for part in event.parts
            if part.kind == "parameters"
            for chunk in range(blocks[part.block].chunks)
        ]
        return [
            Transmit(
                StateChunk(
                    run_id=self.run_id, kind=part.kind, block=part.block, chunk=chunk,
                    step=event.step, optimizer_step=event.optimizer_step,
                    last=index == len(pieces) - 1,
                ),
                part.values[blocks[part.block].chunk_slice(chunk)],
            )
            for index, (part, chunk) in enumerate(pieces)
        ]  # fmt: skip

    def _state_chunk(self, message: StateChunk, body: Body) -> list[Action]:
        self._check_run(message)
        if message.optimizer_step > message.step:
            raise OutOfOrder("StateChunk: more updates than steps")
        task = self._task
        values = body.view("<f4")
        if message.kind == MISSED and not are_counts(values, message.optimizer_step):
            raise OutOfOrder(
                f"StateChunk: expected missed updates, whole numbers up to {message.optimizer_step}"
            )
        actions: list[Action] = [LoadChunk(message.kind, message.block, message.chunk, values)]
        if message.last:
            task.step = message.step
            actions += [AbandonAttempt(), Restore(message.step, message.optimizer_step)]
        return actions

    # Steps.

    def _step_embeddings(self, message: StepEmbeddings, body: Body) -> list[Action]:
        task, step_id = self._task, StepId(message.step, message.attempt)
        if message.step != task.step or not task.is_coupled:
            raise OutOfOrder(f"StepEmbeddings: expected none of step {message.step}")
        if not message.chunk:
            task.rows = _StepRows(step_id)
        rows = task.rows
        if rows is None or (rows.step_id, len(rows.pieces)) != (step_id, message.chunk):
            raise OutOfOrder(f"StepEmbeddings: chunk {message.chunk} does not follow what has come")
        rows.pieces.append(body)
        rows.is_whole = message.last
        if sum(map(len, rows.pieces)) > limits.STEP_EMBEDDINGS_BYTES:
            raise OutOfOrder(f"StepEmbeddings: more than {limits.STEP_EMBEDDINGS_BYTES} bytes")
        return []

    def _load_rows(self, task: _Task, step_id: StepId) -> list[LoadEmbeddings]:
        """Give the engine the step's embeddings, if gradients rest on them."""
        rows, task.rows = task.rows, None
        if step_id.phase == "embeddings":
            if not task.is_coupled:
                raise OutOfOrder("StepPlan for embeddings in a run without them")
            return []
        if not task.is_coupled:
            return []
        if rows is None or rows.step_id != step_id or not rows.is_whole:
            raise OutOfOrder("StepPlan for gradients before all embeddings of the step")
        return [LoadEmbeddings(step_id, np.concatenate(rows.pieces))]

    def _step_plan(self, message: StepPlan, body: None) -> list[Action]:
        del body
        task = self._task
        if message.step != task.step:
            raise OutOfOrder(f"StepPlan: expected step {task.step}, got {message.step}")
        step_id = StepId(message.step, message.attempt, message.loss_scale, message.phase)
        loaded = self._load_rows(task, step_id)
        task.step_id = step_id
        task.microbatches = message.microbatches
        task.sharded = message.owners > 0
        task.subtrees.clear()
        task.asked.clear()
        task.checksums.clear()
        actions = self._take(task, task.step_id, message.subtrees)
        return [CancelWork(), ForwardToExchange(message), *loaded, *actions]

    def _exchange(self, message: Message, body: Body | None) -> list[Action]:
        return [ForwardToExchange(message, body)]

    def _assign(self, message: Assign, body: None) -> list[Action]:
        del body
        step_id = StepId(message.step, message.attempt)
        if step_id != self._task.step_id:
            return []
        return self._take(self._task, self._task.step_id, message.subtrees)

    def _cancel(self, message: Cancel, body: None) -> list[Action]:
        del body
        step_id = StepId(message.step, message.attempt)
        if step_id != self._task.step_id:  # it has overtaken the plan, or comes after the commit
            return []
        subtrees = {Subtree(lo, hi) for lo, hi in message.subtrees} & self._task.subtrees
        self._task.subtrees -= subtrees
        cancelled = [CancelSubtree(step_id, subtree) for subtree in sorted(subtrees)]
        return [ForwardToExchange(message), *cancelled]

    def _take(
        self, task: _Task, step_id: StepId, subtrees: tuple[tuple[int, int], ...]
    ) -> list[Action]:
        actions: list[Action] = []
        for lo, hi in subtrees:
            subtree = Subtree(lo, hi)
            if not is_subtree(subtree, task.microbatches):
                raise OutOfOrder(f"{subtree} is no subtree over {task.microbatches} microbatches")
            if subtree not in task.subtrees:
                task.subtrees.add(subtree)
                actions.append(Compute(step_id, task.microbatches, subtree))
        return actions

    def _block_sum(self, event: events.BlockSum) -> list[Action]:
        if not self._task.has(event.step_id, event.subtree):
            return []
        if self._task.sharded:
            checksum = self._task.checksums.setdefault(event.subtree, xxh3_128())
            if not is_finite(event.values):  # its owner says so, and unlike sums would hide it
                self._task.checksums[event.subtree] = None
            elif checksum is not None:
                checksum.update(event.values.data)
        return [Contribute(event.subtree, event.block, event.weight, event.values)]

    def _non_finite(self, event: events.NonFiniteSum) -> list[Action]:
        if event.step_id != self._task.step_id:
            return []
        message = NonFiniteSum(
            term=self.term, step=event.step_id.step, attempt=event.step_id.attempt,
            lo=event.subtree.lo, hi=event.subtree.hi, worker=self.name, block=event.found.block,
            device=event.found.device,
        )  # fmt: skip
        return [Transmit(message)]

    def _captured(self, event: events.MicrobatchRows) -> list[Action]:
        if not self._task.has(event.step_id, event.subtree):
            return []
        content = event.rows.reshape(-1)
        chunks = range(max(1, -(-len(content) // limits.BODY_BYTES)))
        return [
            Transmit(
                CapturedRows(
                    term=self.term, step=event.step_id.step, attempt=event.step_id.attempt,
                    lo=event.subtree.lo, hi=event.subtree.hi, microbatch=event.microbatch,
                    chunk=chunk,
                ),
                content[chunk * limits.BODY_BYTES :][: limits.BODY_BYTES],
            )
            for chunk in chunks
        ]  # fmt: skip

    def _subtree_done(self, event: events.SubtreeDone) -> list[Action]:
        if not self._task.has(event.step_id, event.subtree):
            return []
        message = SubtreeLoss(
            term=self.term, step=event.step_id.step, attempt=event.step_id.attempt,
            lo=event.subtree.lo, hi=event.subtree.hi, loss_sum=event.loss.loss_sum,
            weight=event.loss.weight, elapsed_ms=event.elapsed_ms, sums=self._checksum(event),
            unlike=event.unlike[: limits.UNLIKE_MICROBATCHES],
        )  # fmt: skip
        return [Transmit(message)]

    # Stretches.

    def _stretch_step(self, event: events.InnerPhaseStep) -> list[Action]:
        if not self._task.has(event.step_id, event.subtree):
            return []
        ids = self._of_replica(event.step_id, event.subtree)
        return [Transmit(InnerPhaseProgress(**ids, inner=event.inner))]

    def _boundary(self, event: events.InnerCheckpoint) -> list[Action]:
        if not self._task.has(event.step_id, event.subtree):
            return []
        ids, count = (
            self._of_replica(event.step_id, event.subtree),
            -(-len(event.content) // limits.BODY_BYTES),
        )
        return [
            Transmit(
                InnerCheckpointChunk(
                    **ids, inner=event.inner, chunk=chunk, last=chunk == count - 1
                ),
                event.content[chunk * limits.BODY_BYTES :][: limits.BODY_BYTES],
            )
            for chunk in range(count)
        ]

    def _stretch_wanted(self, event: events.InnerStateNeeded) -> list[Action]:
        if not self._task.has(event.step_id, event.subtree):
            return []
        if event.subtree.lo in self._task.asked:  # the answer to it is on its way
            return []
        self._task.asked[event.subtree.lo] = []
        ids = self._of_replica(event.step_id, event.subtree)
        return [Transmit(InnerStateRequest(**ids, own=event.carried))]

    def _stretch_state(self, message: InnerStateChunk, body: Body) -> list[Action]:
        task, step_id = self._task, StepId(message.step, message.attempt)
        subtree = Subtree(message.replica, message.replica + 1)
        pieces = task.asked.get(message.replica)
        if pieces is None or step_id != task.step_id:  # of an attempt that was given up
            return []
        pieces.append(body)
        if not message.last:
            return []
        del task.asked[message.replica]
        if subtree not in task.subtrees:  # it is not wanted any more
            return []
        content = np.concatenate(pieces)
        give = LoadInnerState(step_id, message.replica, message.inner, content, message.own)
        return [give, Compute(step_id, task.microbatches, subtree)]

    def _of_replica(self, step_id: StepId, subtree: Subtree) -> dict[str, int]:
        return {
            "term": self.term, "step": step_id.step, "attempt": step_id.attempt,
            "replica": subtree.lo,
        }  # fmt: skip

    def _checksum(self, event: events.SubtreeDone) -> bytes:
        """Of the sums that went to owners: the coordinator compares those of two workers."""
        checksum = self._task.checksums.pop(event.subtree, None)
        return b"" if checksum is None else checksum.digest()

    def _averaged(self, message: AveragedGradient, body: Body) -> list[Action]:
        return [] if message.step < self._task.step else [ForwardToExchange(message, body)]

    def _commit(self, message: Commit, body: None) -> list[Action]:
        del body
        task = self._task
        if message.step < task.step:
            return []
        if message.step > task.step:
            raise OutOfOrder(f"Commit: expected step {task.step}, got {message.step}")
        task.committed = message
        task.drop_subtrees()
        skipped = self._take_step(task, message, []) if message.scalars is None else []
        return [CancelWork(), ForwardToExchange(message), *skipped]

    def _averages_ready(self, event: events.AveragesReady) -> list[Action]:
        commit = self._task.committed
        if commit is None or event.step_id != StepId(commit.step, commit.attempt):
            return []
        return self._take_step(self._task, commit, event.averages)

    def _take_step(self, task: _Task, commit: Commit, averages: list[Array]) -> list[Action]:
        """Take the committed step, then handle what has waited for it.

        Raises:
            RemoteProtocolError: What has waited does not fit.
        """
        # Counted at once: what comes next is about the step after, while the engine takes this.
        task.step += 1
        task.step_id = task.committed = None
        actions: list[Action] = [Apply(averages, commit.scalars, commit.attempt)]
        waiting, task.waiting = task.waiting, []
        for message, body in waiting:
            actions += self.receive(message, body)
        return actions

    def _applied(self, event: events.Applied) -> list[Action]:
        step, digest = event.step, event.state_digest
        return [Transmit(StepApplied(term=self.term, step=step, state_digest=digest))]

    def _halted(self, message: Halt, body: None) -> list[Action]:
        del body
        if self._run is not None and self._run.task is not None:
            self._run.task.drop_subtrees()
        return [CancelWork(), Tell(f"halted: {message.reason}")]

    # Evaluation.

    def _eval_plan(self, message: EvalPlan, body: None) -> list[Action]:
        del body
        task = self._task
        if message.step != task.step:
            raise OutOfOrder(f"EvalPlan: expected step {task.step}, got {message.step}")
        if message.hi > task.parts:
            raise OutOfOrder(f"EvalPlan: expected parts below {task.parts}, got {message.hi}")
        return [Evaluate(message.step, part) for part in range(message.lo, message.hi)]

    def _evaluated(self, event: events.PartEvaluated) -> list[Action]:
        step, part, sums = event.step, event.part, dict(event.sums)
        return [Transmit(EvalResult(term=self.term, step=step, part=part, sums=sums))]

    # Files that are fetched when they are needed.

    def obtained(self, event: FileEvent) -> list[Action]:
        """What came of a file action; what has waited for a file goes on, if it is wanted still."""
        return self._still_wanted(self.files.event(event))

    def _files_wanted(self, event: events.FilesNeeded) -> list[Action]:
        waiting: Compute | Evaluate | None = None
        if event.for_subtree is not None:
            waiting = Compute(*event.for_subtree)
        elif event.for_part is not None:
            waiting = Evaluate(*event.for_part)
        return self._still_wanted(self.files.want(event.names, waiting))

    def _still_wanted(self, actions: list[Action]) -> list[Action]:
        def wanted(action: Action) -> bool:
            match action:
                case Compute():
                    return self._task.has(action.step_id, action.subtree)
                case Evaluate():
                    return action.step == self._task.step
                case _:
                    return True

        return [action for action in actions if wanted(action)]

    # What follows what.

    _MESSAGES: Final = _rows(
        # message                  IDLE         PREPARING    READY
        (StartRun,                 _start_run,  _start_run,  _start_run),
        (BlobChunk,                _blob_chunk, _blob_chunk, _blob_chunk),
        (StateRequest,             _refuse,     _refuse,     _state_request),
        (StateChunk,               _refuse,     _refuse,     _state_chunk),
        (StepEmbeddings,           _refuse,     _refuse,     _step_embeddings),
        (StepPlan,                 _refuse,     _refuse,     _step_plan),
        (Assign,                   _ignore,     _ignore,     _assign),
        (Cancel,                   _ignore,     _ignore,     _cancel),
        (Credit,                   _ignore,     _ignore,     _exchange),
        (InnerStateChunk,             _ignore,     _ignore,     _stretch_state),
        (ListenForPeers,                 _refuse,     _refuse,     _exchange),
        (Peers,                    _refuse,     _refuse,     _exchange),
        (Owners,                   _refuse,     _refuse,     _exchange),
        (BlockGradientPayload,     _refuse,     _refuse,     _exchange),
        (NonBlockGradientPayload,  _refuse,     _refuse,     _exchange),
        (AverageDigests,             _refuse,     _refuse,     _exchange),
        (AveragedBlockGradient,    _ignore,     _ignore,     _averaged),
        (AveragedNonBlockGradient, _ignore,     _ignore,     _averaged),
        (Commit,                   _refuse,     _refuse,     _commit),
        (EvalPlan,                 _refuse,     _refuse,     _eval_plan),
        (Halt,                     _halted,     _halted,     _halted),
        (Continue,                 _ignore,     _ignore,     _ignore),
        (Heartbeat,                _ignore,     _ignore,     _ignore),
        (EndRun,                   _end_run,    _end_run,    _end_run),
        (Goodbye,                  _goodbye,    _goodbye,    _goodbye),
    )  # fmt: skip
    _RESULTS: Final = _rows(
        # result of the engine     IDLE            PREPARING       READY
        # A second Built comes where a connection was lost while its task was being built.
        (events.Built,             _ignore,        _task_built,    _ignore),
        (events.BuildFailed,       _ignore,        _build_failed,  _build_failed),
        (events.TaskRefused,        _ignore,        _ignore,        _task_refused),
        (events.BlockSum,          _ignore,        _ignore,        _block_sum),
        (events.NonFiniteSum,      _ignore,        _ignore,        _non_finite),
        (events.MicrobatchRows,    _ignore,        _ignore,        _captured),
        (events.SubtreeDone,          _ignore,        _ignore,        _subtree_done),
        (events.InnerPhaseStep,       _ignore,        _ignore,        _stretch_step),
        (events.InnerCheckpoint,   _ignore,        _ignore,        _boundary),
        (events.InnerStateNeeded, _ignore,       _ignore,        _stretch_wanted),
        (events.AveragesReady, _ignore,       _ignore,        _averages_ready),
        (events.Applied,           _ignore,        _ignore,        _applied),
        (events.FilesNeeded,       _ignore,        _ignore,        _files_wanted),
        (events.PartEvaluated,         _ignore,        _ignore,        _evaluated),
        (events.StateCopied,       _ignore,        _ignore,        _upload),
        (events.DeviceFailed,      _device_failed, _device_failed, _device_failed),
        (events.DeviceWarning,       _ignore,        _device_noted,  _device_noted),
        (events.DevicesLost,       _ignore,        _devices_lost,  _devices_lost),
    )  # fmt: skip
