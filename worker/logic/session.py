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
    OutOfPlace,
    ScriptDiffers,
)
from protocol.base.fields import cut_text
from protocol.exact.codecs import packed, unpacked
from protocol.exact.replica import MISSED, are_counts
from protocol.exact.tree import Node, is_node
from protocol.exact.update import is_finite
from protocol.exact.upload_order import UploadOrder
from protocol.spec.manifest import Block
from protocol.spec.replicas_spec import Codecs
from protocol.spec.run_spec import RunSpec, parse_run_spec_bytes
from protocol.wire.connection import Body
from protocol.wire.messages import (
    Assign,
    AveragedBlockGradient,
    AveragedGradient,
    AveragedNonBlockGradient,
    BlobChunk,
    BlockGradientPayload,
    Boundary,
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
    Message,
    NodeLoss,
    NonBlockGradientPayload,
    NonFiniteNode,
    OpenDoor,
    Owners,
    Peers,
    Ready,
    SliceDigests,
    SliceSum,
    StartRun,
    StateChunk,
    StateRequest,
    StepApplied,
    StepPlan,
    StretchProgress,
    StretchRequest,
    StretchState,
    Unready,
    Welcome,
)
from worker.logic import events
from worker.logic.actions import (
    Action,
    Apply,
    BeginSlices,
    CancelNode,
    CancelWork,
    Compute,
    Contribute,
    CopyState,
    DropSlices,
    Evaluate,
    Expect,
    GiveAverages,
    GiveStretch,
    Leave,
    LoadChunk,
    OpenDevice,
    Restore,
    Tell,
    TellPeers,
    Transmit,
)
from worker.logic.events import StepAttempt
from worker.logic.fetching import FileEvent, RunFiles, give_up
from worker.logic.uploads import Uploads

_OF_THE_EPOCH: Final = (
    StepPlan, Assign, Cancel, Credit, AveragedBlockGradient, AveragedNonBlockGradient, Commit,
    EvalPlan, StretchState, Owners, SliceDigests,
)  # fmt: skip
_AFTER_A_COMMIT: Final = (
    StepPlan, Assign, Cancel, Commit, EvalPlan, StateChunk, StateRequest, SliceDigests, Owners,
)  # fmt: skip
"""A coordinator's of another epoch must not go on with the run."""


class SessionPhase(Enum):
    """Where a session is: without a run, getting one's files and task ready, taking part."""

    IDLE = "idle"
    PREPARING = "preparing"
    READY = "ready"


class Averages:
    """The averaged blocks of one attempt, one flat array each; whole once `complete`.

    Args:
        blocks: The manifest's.
        allocate: Makes the arrays, of so many elements; None: where chunks are is good enough.
    """

    def __init__(
        self, blocks: tuple[Block, ...], allocate: Callable[[int], Array] | None = None
    ) -> None:
        self._blocks = blocks
        self._allocate = allocate
        self._missing = {(b, c) for b, block in enumerate(blocks) for c in range(block.chunks)}
        self.arrays: list[Array] = [np.empty(0, np.float32)] * len(blocks)

    def put(self, block: int, chunk: int, values: Array) -> None:
        """Take a chunk; one that is there already changes nothing."""
        if (block, chunk) not in self._missing:
            return
        self._missing.discard((block, chunk))
        if self._blocks[block].chunks == 1 and self._allocate is None:
            self.arrays[block] = values
            return
        if not len(self.arrays[block]):
            new = self._allocate or _new_array
            self.arrays[block] = new(self._blocks[block].elements)
        self.arrays[block][self._blocks[block].chunk_slice(chunk)] = values

    @property
    def complete(self) -> bool:
        return not self._missing


def _new_array(elements: int) -> Array:
    return np.empty(elements, np.float32)


@dataclass(slots=True)
class _Task:
    """What there is of a run once its task is built.

    Attributes:
        blocks: The manifest's.
        parts: Held-out parts.
        step: Steps this replica has taken, or is about to have taken.
        averages: By step and attempt, as far as they have come.
        sliced: The attempt in progress, if its slices have owners.
        checksums: Of what was sent of a node then; None: not all of it is finite.
        averaged: What owners have sent, once all is here.
        committed: Its commit, as long as averages are still to come from owners.
        waiting: What the coordinator has said since.
        place: The attempt in progress; None between a commit and the next plan.
        microbatches: Of its step.
        nodes: What this worker is to compute of it.
        asked: By replica, what has come of the state of a stretch that waits for it.
        order: In which its gradients are sent.
        uploads: What of them is to be sent, and may.
    """

    blocks: tuple[Block, ...]
    parts: int
    step: int
    averages: dict[tuple[int, int], Averages] = field(default_factory=dict)
    sliced: StepAttempt | None = None
    checksums: dict[Node, xxh3_128 | None] = field(default_factory=dict)
    averaged: events.SlicesAveraged | None = None
    committed: Commit | None = None
    waiting: list[tuple[Message, Body | None]] = field(default_factory=list)
    place: StepAttempt | None = None
    microbatches: int = 0
    nodes: set[Node] = field(default_factory=set)
    asked: dict[int, list[Body]] = field(default_factory=dict)
    order: UploadOrder = field(init=False)
    uploads: Uploads = field(init=False)

    def __post_init__(self) -> None:
        self.order = UploadOrder(self.blocks)
        self.uploads = Uploads(self.order, 0)

    def drop_nodes(self) -> None:
        """Nothing that was to be computed is wanted any more."""
        self.nodes.clear()
        self.asked.clear()
        self.uploads = Uploads(self.order, 0)

    def has(self, place: StepAttempt, node: Node) -> bool:
        """Whether a result is wanted: of the present attempt, and of a node that is ours."""
        return place == self.place and node in self.nodes


@dataclass(slots=True)
class _Run:
    """The run that a session is in; `task`, and the number of steps, once it is built."""

    run_id: str
    spec: RunSpec
    steps: int = 0
    task: _Task | None = None


def _place_of(message: StepPlan) -> dict[str, int]:
    """Epoch, step and attempt, as messages carry them."""
    return {"epoch": message.epoch, "step": message.step, "attempt": message.attempt}


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
        epoch: The coordinator's epoch.
        files: Of the run.

    Args:
        epochs: The newest epoch seen of each run, kept from one connection to the next.
        allocate: Makes the arrays that averages are put into; see `Averages`.
    """

    def __init__(
        self,
        epochs: dict[str, int] | None = None,
        allocate: Callable[[int], Array] | None = None,
    ) -> None:
        self._allocate = allocate
        self.name = ""
        self.epoch = 0
        self.files = RunFiles()
        self._epochs = {} if epochs is None else epochs
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
        return self._run.task is None or self._run.task.place is not None

    @property
    def _task(self) -> _Task:
        assert self._run is not None
        assert self._run.task is not None, "handled in phase READY alone"
        return self._run.task

    @property
    def _exchange(self) -> Codecs:
        assert self._run is not None
        return self._run.spec.codecs

    def welcome(self, message: Welcome) -> list[Action]:
        """The handshake is done."""
        self.name, self.epoch = message.worker, message.epoch
        return [Tell(f"joined as {self.name!r}; waiting for a run"), OpenDevice()]

    def receive(self, message: Message, body: Body | None) -> list[Action]:
        """A message from the coordinator.

        Raises:
            RemoteProtocolError: It does not fit; the connection is to end.
        """
        row = self._MESSAGES.get(type(message))
        if row is None:
            raise OutOfPlace(f"{type(message).__name__} is not for a worker")
        if isinstance(message, _OF_THE_EPOCH) and message.epoch != self.epoch:
            raise OutOfPlace(f"expected epoch {self.epoch}, got {message.epoch}")
        if self._must_wait(message):
            self._task.waiting.append((message, body))
            return []
        return row[self.phase](self, message, body)

    def _must_wait(self, message: Message) -> bool:
        """What follows a commit waits until all averages of it have come."""
        if self._run is None or self._run.task is None or self._run.task.committed is None:
            return False
        if isinstance(message, AveragedBlockGradient | AveragedNonBlockGradient):
            return message.step > self._run.task.step
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

    def _ignore(self, *given: object) -> list[Action]:
        del given
        return []

    def _refuse(self, message: Message, body: Body | None) -> list[Action]:
        del body
        raise OutOfPlace(f"{type(message).__name__} for a run that is not built here")

    def _goodbye(self, message: Goodbye, body: None) -> list[Action]:
        del body
        return [CancelWork(), Leave(message.reason, message.retry, message.exit_code)]

    def _devices_lost(self, event: events.DevicesLost) -> list[Action]:
        """What there was of the run's state is gone: come back, and get it from the coordinator."""
        goodbye = Goodbye(reason=cut_text(event.reason), retry=True, exit_code=ExitCode.OK)
        leave = Leave(event.reason, retry=True, exit_code=ExitCode.OK, failed=True)
        return [CancelWork(), Transmit(goodbye), leave]

    def _device_noted(self, event: events.DeviceNoted) -> list[Action]:
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
        newest = self._epochs.get(message.run_id, 0)
        if message.epoch < newest:
            raise OutOfPlace(
                f"expected a coordinator of epoch {newest} or later for run {message.run_id}, got "
                f"{message.epoch}: an older coordinator must not go on with it"
            )
        self.epoch = self._epochs[message.run_id] = message.epoch
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
        self._run.steps = self._run.spec.steps_with(manifest.train_samples)
        self._run.task = _Task(manifest.blocks, manifest.evaluation_parts, event.step)
        ready = Ready(
            run_id=self.run_id,
            backend=event.backend,
            device=event.device,
            initial_digest=event.initial_digest,
            step=event.step,
            state_digest=event.state_digest,
            signature=event.signature,
            signature_text=event.signature_text,
            devices=event.devices,
            left_out=cut_text(event.left_out),
        )
        memory = f"; memory: {event.memory}" if event.memory else ""
        parity = f"; {event.parity}" if event.parity else ""
        return [
            Expect(manifest.blocks, self._run.spec.codecs),
            Transmit(ready, manifest.to_bytes()),
            Tell(f"run {self.run_id}: ready on {event.device}{memory}{parity}"),
        ]

    def _build_failed(self, event: events.BuildFailed) -> list[Action]:
        if event.run_id != self.run_id:
            return []
        reason = self.files.in_the_users_words(str(event.error))
        exit_code = event.error.exit_code
        if isinstance(event.error, BackendUnavailable | DeviceError | ScriptDiffers):
            # This machine's matter, not the run's: leave, and let the run wait for another.
            return give_up(reason, exit_code)
        unready = Unready(
            run_id=self.run_id, reason=cut_text(reason), own=event.own, exit_code=exit_code
        )
        return [Transmit(unready), Tell(f"cannot take part in {self.run_id}: {reason}")]

    def _task_refused(self, event: events.TaskRefused) -> list[Action]:
        """The run cannot be right any more, whoever goes on with it: the coordinator ends it."""
        if event.run_id != self.run_id:
            return []
        reason = self.files.in_the_users_words(str(event.error))
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
        told = Tell(f"run {message.run_id} is over: {message.reason}")
        return [CancelWork(), *self.files.drop(), told]

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
            raise OutOfPlace("StateChunk: more updates than steps")
        task = self._task
        task.sliced = None
        values = body.view("<f4")
        if message.kind == MISSED and not are_counts(values, message.optimizer_step):
            raise OutOfPlace(
                f"StateChunk: expected missed updates, whole numbers up to {message.optimizer_step}"
            )
        actions: list[Action] = [LoadChunk(message.kind, message.block, message.chunk, values)]
        if message.last:
            self._task.step = message.step
            actions.append(Restore(message.step, message.optimizer_step))
        return actions

    # Steps.

    def _step_plan(self, message: StepPlan, body: None) -> list[Action]:
        del body
        task = self._task
        if message.step != task.step:
            raise OutOfPlace(f"StepPlan: expected step {task.step}, got {message.step}")
        task.place = StepAttempt(message.step, message.attempt, message.loss_scale)
        task.microbatches = message.microbatches
        task.uploads = Uploads(task.order, message.uploads)
        task.nodes.clear()
        task.asked.clear()
        task.checksums.clear()
        begun: list[Action] = [] if task.sliced is None else [DropSlices()]
        task.sliced = task.place if message.owners else None
        if task.sliced is not None:
            begun = [BeginSlices(_place_of(message), message.microbatches)]
        return [CancelWork(), *begun, *self._take(task, task.place, message.nodes)]

    def _slices(self, message: Message, body: Body | None) -> list[Action]:
        return [TellPeers(message, body)]

    def _assign(self, message: Assign, body: None) -> list[Action]:
        del body
        place = StepAttempt(message.step, message.attempt)
        if place != self._task.place:
            return []
        return self._take(self._task, self._task.place, message.nodes)

    def _cancel(self, message: Cancel, body: None) -> list[Action]:
        del body
        place = StepAttempt(message.step, message.attempt)
        if place != self._task.place:  # it has overtaken the plan, or comes after the commit
            return []
        nodes = {Node(lo, hi) for lo, hi in message.nodes} & self._task.nodes
        self._task.nodes -= nodes
        self._task.uploads.drop(nodes)
        return [CancelNode(place, node) for node in sorted(nodes)]

    def _take(
        self, task: _Task, place: StepAttempt, nodes: tuple[tuple[int, int], ...]
    ) -> list[Action]:
        actions: list[Action] = []
        for lo, hi in nodes:
            node = Node(lo, hi)
            if not is_node(node, task.microbatches):
                raise OutOfPlace(f"{node} is no node over {task.microbatches} microbatches")
            if node not in task.nodes:
                task.nodes.add(node)
                actions.append(Compute(place, task.microbatches, node))
        return actions

    def _block_sum(self, event: events.BlockSum) -> list[Action]:
        if not self._task.has(event.place, event.node):
            return []
        if self._task.sliced == event.place:
            checksum = self._task.checksums.setdefault(event.node, xxh3_128())
            if not is_finite(event.values):  # its owner says so, and unlike sums would hide it
                self._task.checksums[event.node] = None
            elif checksum is not None:
                checksum.update(event.values.data)
            return [Contribute(event.node, event.block, event.weight, event.values)]
        block = self._task.blocks[event.block]
        kind = BlockGradientPayload if block.kind == "block" else NonBlockGradientPayload
        chunks = [
            Transmit(
                kind(
                    epoch=self.epoch, step=event.place.step, attempt=event.place.attempt,
                    block=event.block, chunk=chunk, lo=event.node.lo, hi=event.node.hi,
                    weight=event.weight,
                ),
                packed(event.values[block.chunk_slice(chunk)], self._exchange.precision),
            )
            for chunk in range(block.chunks)
        ]  # fmt: skip
        return [*self._task.uploads.offer(event.node, event.block, chunks)]

    def _credit(self, message: Credit, body: None) -> list[Action]:
        del body
        place = StepAttempt(message.step, message.attempt)
        return [*self._task.uploads.allow(message.uploads)] if place == self._task.place else []

    def _not_finite(self, event: events.NotFinite) -> list[Action]:
        if event.place != self._task.place:
            return []
        message = NonFiniteNode(
            epoch=self.epoch, step=event.place.step, attempt=event.place.attempt,
            lo=event.node.lo, hi=event.node.hi, block=event.block, device=event.device,
        )  # fmt: skip
        return [Transmit(message)]

    def _captured(self, event: events.MicrobatchRows) -> list[Action]:
        if not self._task.has(event.place, event.node):
            return []
        content = event.rows.reshape(-1)
        chunks = range(max(1, -(-len(content) // limits.BODY_BYTES)))
        return [
            Transmit(
                CapturedRows(
                    epoch=self.epoch, step=event.place.step, attempt=event.place.attempt,
                    lo=event.node.lo, hi=event.node.hi, microbatch=event.microbatch, chunk=chunk,
                ),
                content[chunk * limits.BODY_BYTES :][: limits.BODY_BYTES],
            )
            for chunk in chunks
        ]  # fmt: skip

    def _node_done(self, event: events.NodeDone) -> list[Action]:
        if not self._task.has(event.place, event.node):
            return []
        message = NodeLoss(
            epoch=self.epoch, step=event.place.step, attempt=event.place.attempt,
            lo=event.node.lo, hi=event.node.hi, loss_sum=event.loss.loss_sum,
            weight=event.loss.weight, elapsed_ms=event.elapsed_ms, sums=self._checksum(event),
        )  # fmt: skip
        return [Transmit(message)]

    # Stretches.

    def _stretch_step(self, event: events.StretchStep) -> list[Action]:
        if not self._task.has(event.place, event.node):
            return []
        place = self._of_replica(event.place, event.node)
        return [Transmit(StretchProgress(**place, inner=event.inner))]

    def _boundary(self, event: events.BoundaryReached) -> list[Action]:
        if not self._task.has(event.place, event.node):
            return []
        place, count = (
            self._of_replica(event.place, event.node),
            -(-len(event.content) // limits.BODY_BYTES),
        )
        return [
            Transmit(
                Boundary(**place, inner=event.inner, chunk=chunk, last=chunk == count - 1),
                event.content[chunk * limits.BODY_BYTES :][: limits.BODY_BYTES],
            )
            for chunk in range(count)
        ]

    def _stretch_wanted(self, event: events.StretchStateWanted) -> list[Action]:
        if not self._task.has(event.place, event.node):
            return []
        if event.node.lo in self._task.asked:  # the answer to it is on its way
            return []
        self._task.asked[event.node.lo] = []
        place = self._of_replica(event.place, event.node)
        return [Transmit(StretchRequest(**place, own=event.own))]

    def _stretch_state(self, message: StretchState, body: Body) -> list[Action]:
        task, place = self._task, StepAttempt(message.step, message.attempt)
        node = Node(message.replica, message.replica + 1)
        pieces = task.asked.get(message.replica)
        if pieces is None or place != task.place:  # of an attempt that was given up
            return []
        pieces.append(body)
        if not message.last:
            return []
        del task.asked[message.replica]
        if node not in task.nodes:  # it is not wanted any more
            return []
        content = np.concatenate(pieces)
        give = GiveStretch(place, message.replica, message.inner, content, message.own)
        return [give, Compute(place, task.microbatches, node)]

    def _of_replica(self, place: StepAttempt, node: Node) -> dict[str, int]:
        return {
            "epoch": self.epoch, "step": place.step, "attempt": place.attempt, "replica": node.lo,
        }  # fmt: skip

    def _checksum(self, event: events.NodeDone) -> bytes:
        """Of the sums that went to owners: the coordinator compares those of two workers."""
        checksum = self._task.checksums.pop(event.node, None)
        return b"" if checksum is None else checksum.digest()

    def _averaged(self, message: AveragedGradient, body: Body) -> list[Action]:
        task, key = self._task, (message.step, message.attempt)
        if task.sliced == StepAttempt(*key):
            piece = task.blocks[message.block].chunk_slice(message.chunk)
            elements = piece.stop - piece.start
            return [GiveAverages(message, unpacked(body, self._exchange.averages, elements))]
        # By attempt: a block of one that was given up must not be taken for the next one's.
        if message.step >= task.step:
            if key not in task.averages:
                task.averages[key] = Averages(task.blocks, self._allocate)
            piece = task.blocks[message.block].chunk_slice(message.chunk)
            values = unpacked(body, self._exchange.averages, piece.stop - piece.start)
            task.averages[key].put(message.block, message.chunk, values)
        return []

    def _commit(self, message: Commit, body: None) -> list[Action]:
        del body
        task = self._task
        if message.step < task.step:
            return []
        if message.step > task.step:
            raise OutOfPlace(f"Commit: expected step {task.step}, got {message.step}")
        place = StepAttempt(message.step, message.attempt)
        if task.sliced == place and message.scalars is not None:
            task.committed = message
            task.drop_nodes()
            return [CancelWork(), *self._take_if_averaged(task)]
        averages = task.averages.get((message.step, message.attempt))
        if message.scalars is not None and (averages is None or not averages.complete):
            raise OutOfPlace(f"Commit of step {message.step} before all of its averaged blocks")
        return self._take_step(averages.arrays if averages else [], message)

    def _take_step(self, averages: list[Array], commit: Commit) -> list[Action]:
        # Counted at once: what comes next is about the step after, while the engine takes this.
        task = self._task
        task.step += 1
        task.place = task.sliced = task.averaged = task.committed = None
        task.drop_nodes()
        task.averages = {key: kept for key, kept in task.averages.items() if key[0] >= task.step}
        return [CancelWork(), Apply(averages, commit.scalars, commit.attempt)]

    def _slices_averaged(self, event: events.SlicesAveraged) -> list[Action]:
        """All of a step is here, maybe before its commit."""
        task = self._task
        task.averaged = event
        return self._take_if_averaged(task)

    def _take_if_averaged(self, task: _Task) -> list[Action]:
        """Take a committed step of which all is here, then what the coordinator has said since.

        Raises:
            RemoteProtocolError: That does not fit.
        """
        commit, found = task.committed, task.averaged
        if commit is None or found is None:
            return []
        if found.place != StepAttempt(commit.step, commit.attempt):
            return []
        actions = self._take_step(found.averages, commit)
        waiting, task.waiting = task.waiting, []
        for message, body in waiting:
            actions += self.receive(message, body)
        return actions

    def _applied(self, event: events.Applied) -> list[Action]:
        step, digest = event.step, event.state_digest
        differing = dict(event.differing)
        message = StepApplied(epoch=self.epoch, step=step, state_digest=digest, differing=differing)
        return [Transmit(message)]

    def _halted(self, message: Halt, body: None) -> list[Action]:
        del body
        if self._run is not None and self._run.task is not None:
            self._run.task.drop_nodes()
        return [CancelWork(), Tell(f"halted: {message.reason}")]

    # Evaluation.

    def _eval_plan(self, message: EvalPlan, body: None) -> list[Action]:
        del body
        task = self._task
        if message.step != task.step:
            raise OutOfPlace(f"EvalPlan: expected step {task.step}, got {message.step}")
        if message.hi > task.parts:
            raise OutOfPlace(f"EvalPlan: expected parts below {task.parts}, got {message.hi}")
        return [Evaluate(message.step, part) for part in range(message.lo, message.hi)]

    def _evaluated(self, event: events.PartEvaluated) -> list[Action]:
        step, part, sums = event.step, event.part, dict(event.sums)
        return [Transmit(EvalResult(epoch=self.epoch, step=step, part=part, sums=sums))]

    # Files that are fetched when they are needed.

    def obtained(self, event: FileEvent) -> list[Action]:
        """What came of a file action; what has waited for a file goes on, if it is wanted still."""
        return self._still_wanted(self.files.event(event))

    def _files_wanted(self, event: events.FilesWanted) -> list[Action]:
        waiting: Compute | Evaluate | None = None
        if event.for_node is not None:
            waiting = Compute(*event.for_node)
        elif event.for_part is not None:
            waiting = Evaluate(*event.for_part)
        return self._still_wanted(self.files.want(event.names, waiting))

    def _still_wanted(self, actions: list[Action]) -> list[Action]:
        def wanted(action: Action) -> bool:
            match action:
                case Compute():
                    return self._task.has(action.place, action.node)
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
        (StepPlan,                 _refuse,     _refuse,     _step_plan),
        (Assign,                   _ignore,     _ignore,     _assign),
        (Cancel,                   _ignore,     _ignore,     _cancel),
        (Credit,                   _ignore,     _ignore,     _credit),
        (StretchState,             _ignore,     _ignore,     _stretch_state),
        (OpenDoor,                 _refuse,     _refuse,     _slices),
        (Peers,                    _refuse,     _refuse,     _slices),
        (Owners,                   _refuse,     _refuse,     _slices),
        (SliceSum,                 _refuse,     _refuse,     _slices),
        (SliceDigests,             _refuse,     _refuse,     _slices),
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
        (events.NotFinite,         _ignore,        _ignore,        _not_finite),
        (events.MicrobatchRows,    _ignore,        _ignore,        _captured),
        (events.NodeDone,          _ignore,        _ignore,        _node_done),
        (events.StretchStep,       _ignore,        _ignore,        _stretch_step),
        (events.BoundaryReached,   _ignore,        _ignore,        _boundary),
        (events.StretchStateWanted, _ignore,       _ignore,        _stretch_wanted),
        (events.SlicesAveraged, _ignore,       _ignore,        _slices_averaged),
        (events.Applied,           _ignore,        _ignore,        _applied),
        (events.FilesWanted,       _ignore,        _ignore,        _files_wanted),
        (events.PartEvaluated,         _ignore,        _ignore,        _evaluated),
        (events.StateCopied,       _ignore,        _ignore,        _upload),
        (events.DeviceFailed,      _device_failed, _device_failed, _device_failed),
        (events.DeviceNoted,       _ignore,        _device_noted,  _device_noted),
        (events.DevicesLost,       _ignore,        _devices_lost,  _devices_lost),
    )  # fmt: skip
