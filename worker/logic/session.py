"""A worker's side of one connection: messages and results in, actions out.

Pure: no clock, socket, file, thread or randomness. It decides what the engine does next and which
messages are sent; it never waits. Two tables at the end list the handler of each message and of
each engine result in each phase. State that exists only during a run is in `_Run` and `_Task`.
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
from protocol.exact.reduction.average import is_finite
from protocol.exact.reduction.tree import Subtree, is_subtree
from protocol.exact.replica import MISSED_UPDATES, are_counts
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
    PrintLine,
    Restore,
    Transmit,
)
from worker.logic.events import StepId
from worker.logic.file_fetch import FileEvent, RunFiles, give_up

_CARRY_TERM: Final = (
    StepPlan, Assign, Cancel, Credit, AveragedBlockGradient, AveragedNonBlockGradient, Commit,
    EvalPlan, InnerStateChunk, Owners, AverageDigests, StepEmbeddings,
)  # fmt: skip
"""Messages with the coordinator's term; a coordinator of another term must not continue the run."""
_DEFERRED: Final = (
    StepPlan, Assign, Cancel, Credit, Commit, EvalPlan, StateChunk, StateRequest, AverageDigests,
    Owners, StepEmbeddings,
)  # fmt: skip
"""Messages that wait, after a commit, until all of its averages have arrived."""


class SessionPhase(Enum):
    """A session's phase: no run, preparing a run's files and task, or computing."""

    IDLE = "idle"
    PREPARING = "preparing"
    READY = "ready"


@dataclass(slots=True)
class _StepRows:
    """The embeddings of a step that have arrived so far.

    Attributes:
        step_id: The attempt of the plan that follows.
        chunks: Chunks in order, flat uint8.
        is_complete: Whether the last chunk has arrived.
    """

    step_id: StepId
    chunks: list[Body] = field(default_factory=list)
    is_complete: bool = False


@dataclass(slots=True)
class _Task:
    """State of a run whose task is built.

    Attributes:
        blocks: The manifest's blocks.
        parts: Number of evaluation parts.
        step: Steps that this replica has taken, including one that the engine is applying.
        is_sharded: Whether workers average in the current attempt.
        checksums: By subtree, the checksum of the sums sent in a sharded attempt; None if a sum is
            not finite.
        commit: A commit whose averages have not all arrived.
        deferred_messages: Messages that arrived after that commit.
        step_id: The current attempt; None between a commit and the next plan.
        microbatches: Number of microbatches of the current attempt's step.
        subtrees: Subtrees of the current attempt that this worker must compute.
        inner_state_chunks: By replica, chunks of a requested inner state that have arrived.
        is_coupled: Whether the loss couples all samples of a step.
        rows: The step's embeddings, kept until the plan for the step's gradients arrives.
    """

    blocks: tuple[Block, ...]
    parts: int
    step: int
    is_sharded: bool = False
    checksums: dict[Subtree, xxh3_128 | None] = field(default_factory=dict)
    commit: Commit | None = None
    deferred_messages: list[tuple[Message, Body | None]] = field(default_factory=list)
    step_id: StepId | None = None
    microbatches: int = 0
    subtrees: set[Subtree] = field(default_factory=set)
    inner_state_chunks: dict[int, list[Body]] = field(default_factory=dict)
    is_coupled: bool = False
    rows: _StepRows | None = None

    def drop_subtrees(self) -> None:
        """Forget all assigned subtrees."""
        self.subtrees.clear()
        self.inner_state_chunks.clear()

    def is_assigned(self, step_id: StepId, subtree: Subtree) -> bool:
        """Return whether this subtree is assigned to this worker in the current attempt."""
        return step_id == self.step_id and subtree in self.subtrees


@dataclass(slots=True)
class _Run:
    """The session's current run; `task` and the number of steps are set once the task is built."""

    run_id: str
    spec: RunSpec
    steps: int = 0
    task: _Task | None = None


_Handler = Callable[..., list[Action]]


def _handler_table(
    *table: tuple[Any, _Handler, _Handler, _Handler],
) -> dict[Any, dict[SessionPhase, _Handler]]:
    """Return handlers by message or result class and phase; a row lists them in phase order."""
    return {
        input_class: dict(zip(SessionPhase, handlers, strict=True))
        for input_class, *handlers in table
    }


class WorkerSession:
    """State and decisions of one connection; see the module's docstring.

    Attributes:
        name: The name that the coordinator assigned.
        term: The coordinator's term.
        files: The run's files.

    Args:
        terms: The newest term of each run that this worker has joined, shared by all connections.
    """

    def __init__(self, terms: dict[str, int] | None = None) -> None:
        self.name = ""
        self.term = 0
        self.files = RunFiles()
        self._terms = {} if terms is None else terms
        self._run: _Run | None = None
        self._is_draining = False

    @property
    def phase(self) -> SessionPhase:
        if self._run is None:
            return SessionPhase.IDLE
        return SessionPhase.PREPARING if self._run.task is None else SessionPhase.READY

    @property
    def run_id(self) -> str:
        """ID of the current run; empty without one."""
        return "" if self._run is None else self._run.run_id

    @property
    def step(self) -> int:
        """Steps that this replica has taken, including one that the engine is applying."""
        return 0 if self._run is None or self._run.task is None else self._run.task.step

    @property
    def is_busy(self) -> bool:
        """Whether this worker is preparing a run or takes part in an attempt."""
        if self._run is None:
            return False
        return self._run.task is None or self._run.task.step_id is not None

    @property
    def _task(self) -> _Task:
        assert self._run is not None
        assert self._run.task is not None, "handled only in phase READY"
        return self._run.task

    def welcome(self, message: Welcome) -> list[Action]:
        """Handle the end of the handshake."""
        self.name, self.term = message.worker, message.term
        return [PrintLine(f"joined as {self.name!r}; waiting for a run"), OpenDevice()]

    def receive(self, message: Message, body: Body | None) -> list[Action]:
        """Handle a message from the coordinator.

        Raises:
            RemoteProtocolError: The message does not fit; the connection must be closed.
        """
        row = self._MESSAGES.get(type(message))
        if row is None:
            raise OutOfOrder(f"expected a message for a worker, got {type(message).__name__}")
        if isinstance(message, _CARRY_TERM) and message.term != self.term:
            raise OutOfOrder(f"expected term {self.term}, got {message.term}")
        if self._must_defer(message):
            self._task.deferred_messages.append((message, body))
            return []
        return row[self.phase](self, message, body)

    def _must_defer(self, message: Message) -> bool:
        """Return whether a message must wait for averages of the committed step."""
        if self._run is None or self._run.task is None or self._run.task.commit is None:
            return False
        return isinstance(message, _DEFERRED)

    def result(self, event: events.Event) -> list[Action]:
        """Handle a result of the engine.

        Results of an earlier run or connection arrive before the current run's `Built`, and are
        dropped.
        """
        return self._RESULTS[type(event)][self.phase](self, event)

    def drain(self) -> list[Action]:
        """Ask the coordinator for no new work, and leave once assigned work is finished."""
        if self._is_draining:
            return []
        self._is_draining = True
        return [Transmit(Drain()), PrintLine("draining")]

    def status(self) -> str:
        """Describe this worker's activity in one line."""
        if self._run is None:
            activity = "waiting for a run"
        elif self._run.task is None:
            activity = f"run {self.run_id}: not ready yet"
        else:
            activity = f"run {self.run_id}: step {self.step} of {self._run.steps}"
        return f"{self.name}: {activity}{', draining' if self._is_draining else ''}"

    # In any phase.

    def _ignore(self, *arguments: object) -> list[Action]:
        del arguments
        return []

    def _refuse(self, message: Message, body: Body | None) -> list[Action]:
        del body
        raise OutOfOrder(f"expected no {type(message).__name__} before the task is built, got one")

    def _goodbye(self, message: Goodbye, body: None) -> list[Action]:
        del body
        return [CancelWork(), Leave(message.reason, message.retry, message.exit_code)]

    def _devices_lost(self, event: events.DevicesLost) -> list[Action]:
        """Leave and join again, so that the task is built anew on the restarted devices."""
        goodbye = Goodbye(reason=cut_text(event.reason), retry=True, exit_code=ExitCode.OK)
        leave = Leave(event.reason, retry=True, exit_code=ExitCode.OK, is_failure=True)
        return [CancelWork(), Transmit(goodbye), leave]

    def _device_warning(self, event: events.DeviceWarning) -> list[Action]:
        if not self.name:
            return []
        return [Transmit(DeviceNote(device=event.device, text=cut_text(event.text)))]

    def _device_failed(self, event: events.DeviceFailed) -> list[Action]:
        description = " ".join(str(event.error).split())
        if isinstance(event.error, BackendUnavailable | DeviceError | DataError):
            return give_up(description, event.error.exit_code)
        return give_up(f"the device failed: {description}", ExitCode.FAILED)

    # A run's start and end.

    def _start_run(self, message: StartRun, body: Body) -> list[Action]:
        newest_term = self._terms.get(message.run_id, 0)
        if message.term < newest_term:
            raise OutOfOrder(
                f"expected a coordinator of term {newest_term} or later for run {message.run_id}, "
                f"got {message.term}: an older coordinator must not continue it"
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
        is_coupled = manifest.embeddings is not None
        parts = manifest.evaluation_parts
        self._run.task = _Task(manifest.blocks, parts, event.step, is_coupled=is_coupled)
        ready_message = Ready(
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
            Transmit(ready_message, manifest.to_bytes()),
            PrintLine(f"run {self.run_id}: ready on {event.device}{memory}{parity}{unit}"),
        ]

    def _build_failed(self, event: events.BuildFailed) -> list[Action]:
        if event.run_id != self.run_id:
            return []
        reason = self.files.with_source_names(str(event.error))
        exit_code = event.error.exit_code
        if isinstance(event.error, BackendUnavailable | DeviceError | ScriptDiffers):
            # A fault of this machine, not of the run: leave, so that the run waits for another.
            return give_up(reason, exit_code)
        unready = Unready(
            run_id=self.run_id, reason=cut_text(reason), own=event.is_local, exit_code=exit_code
        )
        return [Transmit(unready), PrintLine(f"cannot take part in {self.run_id}: {reason}")]

    def _task_refused(self, event: events.TaskRefused) -> list[Action]:
        """Report that training is inexact, so that the coordinator ends the run."""
        if event.run_id != self.run_id:
            return []
        reason = self.files.with_source_names(str(event.error))
        unready = Unready(
            run_id=self.run_id,
            reason=cut_text(reason),
            own=False,
            exit_code=event.error.exit_code,
        )
        return [CancelWork(), Transmit(unready), PrintLine(f"run {self.run_id}: {reason}")]

    def _end_run(self, message: EndRun, body: None) -> list[Action]:
        del body
        self._run = None
        line = PrintLine(f"run {message.run_id} is over: {message.reason}")
        return [CancelWork(), *self.files.drop(), line]

    # Transfer of a replica's state.

    def _check_run(self, message: StateChunk | StateRequest) -> None:
        if message.run_id != self.run_id:
            raise OutOfOrder(
                f"{type(message).__name__}: expected run {self.run_id!r}, got {message.run_id!r}"
            )

    def _state_request(self, message: StateRequest, body: None) -> list[Action]:
        del body
        self._check_run(message)
        return [CopyState()]

    def _state_copied(self, event: events.StateCopied) -> list[Action]:
        # Only the initial state is requested. Its moments are zeros, so its parameters suffice.
        if event.step:
            return []
        blocks = self._task.blocks
        part_chunks = [
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
                    last=index == len(part_chunks) - 1,
                ),
                part.values[blocks[part.block].chunk_slice(chunk)],
            )
            for index, (part, chunk) in enumerate(part_chunks)
        ]  # fmt: skip

    def _state_chunk(self, message: StateChunk, body: Body) -> list[Action]:
        self._check_run(message)
        if message.optimizer_step > message.step:
            raise OutOfOrder(
                f"StateChunk: expected at most {message.step} updates after as many steps, got "
                f"{message.optimizer_step}"
            )
        task = self._task
        values = body.view("<f4")
        if message.kind == MISSED_UPDATES and not are_counts(values, message.optimizer_step):
            raise OutOfOrder(
                "StateChunk: expected counts of missed updates, whole numbers up to "
                f"{message.optimizer_step}, got others"
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
            raise OutOfOrder(f"StepEmbeddings: expected none for step {message.step}, got some")
        if not message.chunk:
            task.rows = _StepRows(step_id)
        rows = task.rows
        if rows is None or (rows.step_id, len(rows.chunks)) != (step_id, message.chunk):
            raise OutOfOrder(f"StepEmbeddings: expected the next chunk, got chunk {message.chunk}")
        rows.chunks.append(body)
        rows.is_complete = message.last
        if sum(map(len, rows.chunks)) > limits.STEP_EMBEDDINGS_BYTES:
            raise OutOfOrder(
                f"StepEmbeddings: expected at most {limits.STEP_EMBEDDINGS_BYTES} bytes, got more"
            )
        return []

    def _load_rows(self, task: _Task, step_id: StepId) -> list[LoadEmbeddings]:
        """Return the action that loads the step's embeddings, if its gradients need them."""
        rows, task.rows = task.rows, None
        if step_id.phase == "embeddings":
            if not task.is_coupled:
                raise OutOfOrder("StepPlan: expected a plan for gradients, got one for embeddings")
            return []
        if not task.is_coupled:
            return []
        if rows is None or rows.step_id != step_id or not rows.is_complete:
            raise OutOfOrder("StepPlan: expected all embeddings of the step first, got only some")
        return [LoadEmbeddings(step_id, np.concatenate(rows.chunks))]

    def _step_plan(self, message: StepPlan, body: None) -> list[Action]:
        del body
        task = self._task
        if message.step != task.step:
            raise OutOfOrder(f"StepPlan: expected step {task.step}, got {message.step}")
        step_id = StepId(message.step, message.attempt, message.loss_scale, message.phase)
        load_rows = self._load_rows(task, step_id)
        task.step_id = step_id
        task.microbatches = message.microbatches
        task.is_sharded = message.owners > 0
        task.subtrees.clear()
        task.inner_state_chunks.clear()
        task.checksums.clear()
        actions = self._assign_subtrees(task, task.step_id, message.subtrees)
        return [CancelWork(), ForwardToExchange(message), *load_rows, *actions]

    def _forward(self, message: Message, body: Body | None) -> list[Action]:
        return [ForwardToExchange(message, body)]

    def _assign(self, message: Assign, body: None) -> list[Action]:
        del body
        step_id = StepId(message.step, message.attempt)
        if step_id != self._task.step_id:
            return []
        return self._assign_subtrees(self._task, self._task.step_id, message.subtrees)

    def _cancel(self, message: Cancel, body: None) -> list[Action]:
        del body
        step_id = StepId(message.step, message.attempt)
        if step_id != self._task.step_id:  # Cancel overtook the plan or arrives after the commit
            return []
        subtrees = {Subtree(lo, hi) for lo, hi in message.subtrees} & self._task.subtrees
        self._task.subtrees -= subtrees
        cancelled = [CancelSubtree(step_id, subtree) for subtree in sorted(subtrees)]
        return [ForwardToExchange(message), *cancelled]

    def _assign_subtrees(
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
        if not self._task.is_assigned(event.step_id, event.subtree):
            return []
        if self._task.is_sharded:
            checksum = self._task.checksums.setdefault(event.subtree, xxh3_128())
            # The chunk's owner reports a value that is not finite; NaN has many bit patterns.
            if not is_finite(event.values):
                self._task.checksums[event.subtree] = None
            elif checksum is not None:
                checksum.update(event.values.data)
        return [Contribute(event.subtree, event.block, event.weight, event.values)]

    def _non_finite_sum(self, event: events.NonFiniteSum) -> list[Action]:
        if event.step_id != self._task.step_id:
            return []
        message = NonFiniteSum(
            term=self.term, step=event.step_id.step, attempt=event.step_id.attempt,
            lo=event.subtree.lo, hi=event.subtree.hi, worker=self.name, block=event.location.block,
            device=event.location.device,
        )  # fmt: skip
        return [Transmit(message)]

    def _microbatch_rows(self, event: events.MicrobatchRows) -> list[Action]:
        if not self._task.is_assigned(event.step_id, event.subtree):
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
        if not self._task.is_assigned(event.step_id, event.subtree):
            return []
        message = SubtreeLoss(
            term=self.term, step=event.step_id.step, attempt=event.step_id.attempt,
            lo=event.subtree.lo, hi=event.subtree.hi, loss_sum=event.loss.loss_sum,
            weight=event.loss.weight, elapsed_ms=event.elapsed_ms, sums=self._checksum(event),
            unlike=event.unlike_microbatches[: limits.UNLIKE_MICROBATCHES],
        )  # fmt: skip
        return [Transmit(message)]

    # Inner phases.

    def _inner_phase_step(self, event: events.InnerPhaseStep) -> list[Action]:
        if not self._task.is_assigned(event.step_id, event.subtree):
            return []
        ids = self._replica_fields(event.step_id, event.subtree)
        return [Transmit(InnerPhaseProgress(**ids, inner=event.inner))]

    def _inner_checkpoint(self, event: events.InnerCheckpoint) -> list[Action]:
        if not self._task.is_assigned(event.step_id, event.subtree):
            return []
        ids = self._replica_fields(event.step_id, event.subtree)
        count = -(-len(event.content) // limits.BODY_BYTES)
        return [
            Transmit(
                InnerCheckpointChunk(
                    **ids, inner=event.inner, chunk=chunk, last=chunk == count - 1
                ),
                event.content[chunk * limits.BODY_BYTES :][: limits.BODY_BYTES],
            )
            for chunk in range(count)
        ]

    def _inner_state_needed(self, event: events.InnerStateNeeded) -> list[Action]:
        if not self._task.is_assigned(event.step_id, event.subtree):
            return []
        if event.subtree.lo in self._task.inner_state_chunks:  # already requested
            return []
        self._task.inner_state_chunks[event.subtree.lo] = []
        ids = self._replica_fields(event.step_id, event.subtree)
        return [Transmit(InnerStateRequest(**ids, own=event.with_carried))]

    def _inner_state_chunk(self, message: InnerStateChunk, body: Body) -> list[Action]:
        task, step_id = self._task, StepId(message.step, message.attempt)
        subtree = Subtree(message.replica, message.replica + 1)
        chunks = task.inner_state_chunks.get(message.replica)
        if chunks is None or step_id != task.step_id:  # of an abandoned attempt
            return []
        chunks.append(body)
        if not message.last:
            return []
        del task.inner_state_chunks[message.replica]
        if subtree not in task.subtrees:  # the subtree was cancelled
            return []
        content = np.concatenate(chunks)
        load = LoadInnerState(step_id, message.replica, message.inner, content, message.own)
        return [load, Compute(step_id, task.microbatches, subtree)]

    def _replica_fields(self, step_id: StepId, subtree: Subtree) -> dict[str, int]:
        return {
            "term": self.term, "step": step_id.step, "attempt": step_id.attempt,
            "replica": subtree.lo,
        }  # fmt: skip

    def _checksum(self, event: events.SubtreeDone) -> bytes:
        """Return the checksum of a subtree's sums; the coordinator compares two workers' sums."""
        checksum = self._task.checksums.pop(event.subtree, None)
        return b"" if checksum is None else checksum.digest()

    def _averaged_gradient(self, message: AveragedGradient, body: Body) -> list[Action]:
        return [] if message.step < self._task.step else [ForwardToExchange(message, body)]

    def _commit(self, message: Commit, body: None) -> list[Action]:
        del body
        task = self._task
        if message.step < task.step:
            return []
        if message.step > task.step:
            raise OutOfOrder(f"Commit: expected step {task.step}, got {message.step}")
        task.commit = message
        task.drop_subtrees()
        skip = self._take_step(task, message, []) if message.scalars is None else []
        return [CancelWork(), ForwardToExchange(message), *skip]

    def _averages_ready(self, event: events.AveragesReady) -> list[Action]:
        commit = self._task.commit
        if commit is None or event.step_id != StepId(commit.step, commit.attempt):
            return []
        return self._take_step(self._task, commit, event.averages)

    def _take_step(self, task: _Task, commit: Commit, averages: list[Array]) -> list[Action]:
        """Take the committed step, then handle the messages that were deferred until then.

        Raises:
            RemoteProtocolError: A deferred message does not fit.
        """
        # Counted before the engine applies the step: later messages are about the next step.
        task.step += 1
        task.step_id = task.commit = None
        actions: list[Action] = [Apply(list(averages), commit.scalars, commit.attempt)]
        deferred_messages, task.deferred_messages = task.deferred_messages, []
        for message, body in deferred_messages:
            actions += self.receive(message, body)
        return actions

    def _step_applied(self, event: events.Applied) -> list[Action]:
        step, digest = event.step, event.state_digest
        return [Transmit(StepApplied(term=self.term, step=step, state_digest=digest))]

    def _halt(self, message: Halt, body: None) -> list[Action]:
        del body
        if self._run is not None and self._run.task is not None:
            self._run.task.drop_subtrees()
        return [CancelWork(), PrintLine(f"halted: {message.reason}")]

    # Evaluation.

    def _eval_plan(self, message: EvalPlan, body: None) -> list[Action]:
        del body
        task = self._task
        if message.step != task.step:
            raise OutOfOrder(f"EvalPlan: expected step {task.step}, got {message.step}")
        if message.hi > task.parts:
            raise OutOfOrder(f"EvalPlan: expected parts below {task.parts}, got {message.hi}")
        return [Evaluate(message.step, part) for part in range(message.lo, message.hi)]

    def _part_evaluated(self, event: events.PartEvaluated) -> list[Action]:
        step, part, sums = event.step, event.part, dict(event.sums)
        return [Transmit(EvalResult(term=self.term, step=step, part=part, sums=sums))]

    # Files that are fetched when they are needed.

    def file_result(self, event: FileEvent) -> list[Action]:
        """Handle the result of a file action; work that waited for the file continues."""
        return self._drop_stale(self.files.event(event))

    def _files_needed(self, event: events.FilesNeeded) -> list[Action]:
        work: Compute | Evaluate | None = None
        if event.for_subtree is not None:
            work = Compute(*event.for_subtree)
        elif event.for_part is not None:
            work = Evaluate(*event.for_part)
        return self._drop_stale(self.files.request(event.names, work))

    def _drop_stale(self, actions: list[Action]) -> list[Action]:
        def is_current(action: Action) -> bool:
            match action:
                case Compute():
                    return self._task.is_assigned(action.step_id, action.subtree)
                case Evaluate():
                    return action.step == self._task.step
                case _:
                    return True

        return [action for action in actions if is_current(action)]

    # The handler of each message and engine result, by phase.

    _MESSAGES: Final = _handler_table(
        # message                   IDLE            PREPARING       READY
        (StartRun,                  _start_run,     _start_run,     _start_run),
        (BlobChunk,                 _blob_chunk,    _blob_chunk,    _blob_chunk),
        (StateRequest,              _refuse,        _refuse,        _state_request),
        (StateChunk,                _refuse,        _refuse,        _state_chunk),
        (StepEmbeddings,            _refuse,        _refuse,        _step_embeddings),
        (StepPlan,                  _refuse,        _refuse,        _step_plan),
        (Assign,                    _ignore,        _ignore,        _assign),
        (Cancel,                    _ignore,        _ignore,        _cancel),
        (Credit,                    _ignore,        _ignore,        _forward),
        (InnerStateChunk,           _ignore,        _ignore,        _inner_state_chunk),
        (ListenForPeers,            _refuse,        _refuse,        _forward),
        (Peers,                     _refuse,        _refuse,        _forward),
        (Owners,                    _refuse,        _refuse,        _forward),
        (BlockGradientPayload,      _refuse,        _refuse,        _forward),
        (NonBlockGradientPayload,   _refuse,        _refuse,        _forward),
        (AverageDigests,            _refuse,        _refuse,        _forward),
        (AveragedBlockGradient,     _ignore,        _ignore,        _averaged_gradient),
        (AveragedNonBlockGradient,  _ignore,        _ignore,        _averaged_gradient),
        (Commit,                    _refuse,        _refuse,        _commit),
        (EvalPlan,                  _refuse,        _refuse,        _eval_plan),
        (Halt,                      _halt,          _halt,          _halt),
        (Continue,                  _ignore,        _ignore,        _ignore),
        (Heartbeat,                 _ignore,        _ignore,        _ignore),
        (EndRun,                    _end_run,       _end_run,       _end_run),
        (Goodbye,                   _goodbye,       _goodbye,       _goodbye),
    )  # fmt: skip
    _RESULTS: Final = _handler_table(
        # engine result             IDLE            PREPARING       READY
        # A second Built arrives if a connection was lost while the task was being built.
        (events.Built,              _ignore,        _task_built,    _ignore),
        (events.BuildFailed,        _ignore,        _build_failed,  _build_failed),
        (events.TaskRefused,        _ignore,        _ignore,        _task_refused),
        (events.BlockSum,           _ignore,        _ignore,        _block_sum),
        (events.NonFiniteSum,       _ignore,        _ignore,        _non_finite_sum),
        (events.MicrobatchRows,     _ignore,        _ignore,        _microbatch_rows),
        (events.SubtreeDone,        _ignore,        _ignore,        _subtree_done),
        (events.InnerPhaseStep,     _ignore,        _ignore,        _inner_phase_step),
        (events.InnerCheckpoint,    _ignore,        _ignore,        _inner_checkpoint),
        (events.InnerStateNeeded,   _ignore,        _ignore,        _inner_state_needed),
        (events.AveragesReady,      _ignore,        _ignore,        _averages_ready),
        (events.Applied,            _ignore,        _ignore,        _step_applied),
        (events.FilesNeeded,        _ignore,        _ignore,        _files_needed),
        (events.PartEvaluated,      _ignore,        _ignore,        _part_evaluated),
        (events.StateCopied,        _ignore,        _ignore,        _state_copied),
        (events.DeviceFailed,       _device_failed, _device_failed, _device_failed),
        (events.DeviceWarning,      _ignore,        _device_warning,_device_warning),
        (events.DevicesLost,        _ignore,        _devices_lost,  _devices_lost),
    )  # fmt: skip
