"""A worker's side of one connection: messages and results in, actions out.

Pure: no clock, socket, file, thread or randomness. It decides what the engine does next and what
is sent; it never waits.
"""

from __future__ import annotations

from backends.base.interface import Array
from protocol.base.errors import BackendUnavailable, DeviceError, ExitCode, OutOfPlace
from protocol.base.fields import cut_text
from protocol.exact.tree import Node, is_node
from protocol.spec.manifest import Block
from protocol.spec.run_spec import parse_run_spec_bytes
from protocol.wire.connection import Body
from protocol.wire.messages import (
    Assign,
    AveragedBlockGradient,
    AveragedGradient,
    AveragedNonBlockGradient,
    BlobChunk,
    BlockGradientPayload,
    Cancel,
    Commit,
    Continue,
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
    Ready,
    StartRun,
    StateChunk,
    StateRequest,
    StepApplied,
    StepPlan,
    Unready,
    Welcome,
)
from worker.logic import events
from worker.logic.actions import (
    Action,
    Apply,
    CancelNode,
    CancelWork,
    Compute,
    CopyState,
    Evaluate,
    Expect,
    Leave,
    LoadChunk,
    OpenDevice,
    Restore,
    Tell,
    Transmit,
)
from worker.logic.averages import Averages
from worker.logic.events import StepAttempt
from worker.logic.fetching import RunFiles


class WorkerSession:
    """See the module's text.

    Attributes:
        name: The name the coordinator gave.
        epoch: The coordinator's epoch.
        step: Steps this replica has taken, or is about to have taken.
        files: Of the run.

    Args:
        epochs: The newest epoch seen of each run, kept from one connection to the next.
    """

    def __init__(self, epochs: dict[str, int] | None = None) -> None:
        self.name = ""
        self.epoch = 0
        self._epochs = {} if epochs is None else epochs
        self.step = 0
        self.run_id = ""
        self._steps = 0
        self._place: StepAttempt | None = None
        self._microbatches = 0
        self._blocks: tuple[Block, ...] = ()
        self._parts = 0
        self._averages: dict[tuple[int, int], Averages] = {}
        self._nodes: set[Node] = set()
        self._built = False
        self._draining = False
        self.files = RunFiles()

    def welcome(self, message: Welcome) -> list[Action]:
        """The handshake is done."""
        self.name, self.epoch = message.worker, message.epoch
        return [Tell(f"joined as {self.name!r}; waiting for a run"), OpenDevice()]

    def receive(self, message: Message, body: Body | None) -> list[Action]:
        """A message from the coordinator.

        Raises:
            RemoteProtocolError: It does not fit; the connection is to end.
        """
        match message:
            case Heartbeat() | Continue():
                return []
            case StartRun():
                assert body is not None
                return self._start_run(message, body)
            case BlobChunk():
                assert body is not None
                return self.files.chunk(message, body)
            case StateRequest():
                self._check_built(message)
                return [CopyState()]
            case StateChunk():
                assert body is not None
                return self._state_chunk(message, body.view("<f4"))
            case StepPlan():
                return self._step_plan(message)
            case Assign():
                return self._assign(message)
            case Cancel():
                return self._cancel(message)
            case AveragedBlockGradient() | AveragedNonBlockGradient():
                assert body is not None
                self._averaged(message, body.view("<f4"))
                return []
            case Commit():
                return self._commit(message)
            case EvalPlan():
                return self._eval_plan(message)
            case Halt():
                self._nodes.clear()
                return [CancelWork(), Tell(f"halted: {message.reason}")]
            case EndRun():
                self.run_id, self._built, self._place = "", False, None
                self._nodes.clear()
                told = Tell(f"run {message.run_id} is over: {message.reason}")
                return [CancelWork(), *self.files.drop(), told]
            case Goodbye():
                return [CancelWork(), Leave(message.reason, message.retry, message.exit_code)]
            case _:
                raise OutOfPlace(f"{type(message).__name__} is not for a worker")

    def result(self, event: events.Event) -> list[Action]:
        """A result of the engine.

        What an earlier run or connection left to do comes out before the present run's `Built`,
        and is nobody's.
        """
        match event:
            case events.Built():
                return self._task_built(event)
            case events.BuildFailed():
                return self._build_failed(event)
            case events.BlockSum():
                return self._block_sum(event)
            case events.NodeDone():
                return self._node_done(event)
            case events.Applied():
                step, digest = event.step, event.state_digest
                applied = StepApplied(epoch=self.epoch, step=step, state_digest=digest)
                return [Transmit(applied)] if self._built else []
            case events.PartEvaluated():
                step, part, sums = event.step, event.part, dict(event.sums)
                result = EvalResult(epoch=self.epoch, step=step, part=part, sums=sums)
                return [Transmit(result)] if self._built else []
            case events.StateCopied():
                return self._upload(event)
            case events.DeviceFailed():
                words = " ".join(str(event.error).split())
                if isinstance(event.error, BackendUnavailable | DeviceError):
                    return self._fail(words, event.error.exit_code)
                return self._fail(f"the device failed: {words}", ExitCode.FAILED)

    def drain(self) -> list[Action]:
        """An operator wants this worker to leave: finish what it has, take no more."""
        if self._draining:
            return []
        self._draining = True
        return [Transmit(Drain()), Tell("draining")]

    def status(self) -> str:
        """What this worker is doing, in one line."""
        if not self.run_id:
            now = "waiting for a run"
        elif not self._built:
            now = f"run {self.run_id}: not ready yet"
        else:
            now = f"run {self.run_id}: step {self.step} of {self._steps}"
        return f"{self.name}: {now}{', draining' if self._draining else ''}"

    # A run's start.

    def _start_run(self, message: StartRun, body: Body) -> list[Action]:
        newest = self._epochs.get(message.run_id, 0)
        if message.epoch < newest:
            raise OutOfPlace(
                f"expected a coordinator of epoch {newest} or later for run {message.run_id}, got "
                f"{message.epoch}: an older coordinator must not go on with it"
            )
        self.epoch = self._epochs[message.run_id] = message.epoch
        spec = parse_run_spec_bytes(body.tobytes())
        self.run_id, self._built, self.step = message.run_id, False, 0
        self._steps = spec.steps
        self._place = None
        self._averages.clear()
        self._nodes.clear()
        return [CancelWork(), *self.files.begin(message, spec)]

    def _task_built(self, event: events.Built) -> list[Action]:
        if event.run_id != self.run_id or self._built:
            # The second comes where a connection was lost while its task was being built.
            return []
        manifest = event.manifest
        self._blocks, self._parts = manifest.blocks, manifest.evaluation_parts
        self._built, self.step = True, event.step
        ready = Ready(
            run_id=self.run_id,
            backend=event.backend,
            device=event.device,
            initial_digest=event.initial_digest,
            step=event.step,
            state_digest=event.state_digest,
            signature=event.signature,
            signature_text=event.signature_text,
        )
        memory = f"; memory: {event.memory}" if event.memory else ""
        parity = f"; {event.parity}" if event.parity else ""
        return [
            Expect(manifest.blocks),
            Transmit(ready, manifest.to_bytes()),
            Tell(f"run {self.run_id}: ready on {event.device}{memory}{parity}"),
        ]

    def _build_failed(self, event: events.BuildFailed) -> list[Action]:
        if event.run_id != self.run_id:
            return []
        reason = self.files.in_the_users_words(str(event.error))
        exit_code = event.error.exit_code
        if isinstance(event.error, BackendUnavailable | DeviceError):
            # This machine's matter, not the run's: leave, and let the run wait for another.
            return self._fail(reason, exit_code)
        unready = Unready(
            run_id=self.run_id, reason=cut_text(reason), own=event.own, exit_code=exit_code
        )
        return [Transmit(unready), Tell(f"cannot take part in {self.run_id}: {reason}")]

    def _fail(self, reason: str, exit_code: int) -> list[Action]:
        """The device is of no use: others go on without it."""
        goodbye = Goodbye(reason=cut_text(reason), retry=False, exit_code=exit_code)
        return [Transmit(goodbye), Leave(reason, retry=False, exit_code=exit_code, failed=True)]

    def _upload(self, event: events.StateCopied) -> list[Action]:
        if not self._built or event.step:
            return []
        # Moments are zeros at step 0: the parameters are the whole state.
        pieces = [
            (part, chunk)
            for part in event.parts
            if part.kind == "parameters"
            for chunk in range(self._blocks[part.block].chunks)
        ]
        return [
            Transmit(
                StateChunk(
                    run_id=self.run_id, kind=part.kind, block=part.block, chunk=chunk,
                    step=event.step, optimizer_step=event.optimizer_step,
                    last=index == len(pieces) - 1,
                ),
                part.values[self._blocks[part.block].chunk_slice(chunk)],
            )
            for index, (part, chunk) in enumerate(pieces)
        ]  # fmt: skip

    def _state_chunk(self, message: StateChunk, values: Array) -> list[Action]:
        self._check_built(message)
        if message.optimizer_step > message.step:
            raise OutOfPlace("StateChunk: more updates than steps")
        actions: list[Action] = [LoadChunk(message.kind, message.block, message.chunk, values)]
        if message.last:
            self.step = message.step
            actions.append(Restore(message.step, message.optimizer_step))
        return actions

    # Steps.

    def _step_plan(self, message: StepPlan) -> list[Action]:
        self._check_epoch(message.epoch)
        if not self._built or message.step != self.step:
            raise OutOfPlace(f"StepPlan: expected step {self.step}, got {message.step}")
        self._place = StepAttempt(message.step, message.attempt)
        self._microbatches = message.microbatches
        self._nodes.clear()
        return [CancelWork(), *self._take(message.nodes)]

    def _assign(self, message: Assign) -> list[Action]:
        self._check_epoch(message.epoch)
        if StepAttempt(message.step, message.attempt) != self._place:
            return []
        return self._take(message.nodes)

    def _cancel(self, message: Cancel) -> list[Action]:
        self._check_epoch(message.epoch)
        place = StepAttempt(message.step, message.attempt)
        if place != self._place:
            return []
        nodes = {Node(lo, hi) for lo, hi in message.nodes} & self._nodes
        self._nodes -= nodes
        return [CancelNode(place, node) for node in sorted(nodes)]

    def _take(self, nodes: tuple[tuple[int, int], ...]) -> list[Action]:
        assert self._place is not None
        actions: list[Action] = []
        for lo, hi in nodes:
            node = Node(lo, hi)
            if not is_node(node, self._microbatches):
                raise OutOfPlace(f"{node} is no node over {self._microbatches} microbatches")
            if node not in self._nodes:
                self._nodes.add(node)
                actions.append(Compute(self._place, self._microbatches, node))
        return actions

    def _block_sum(self, event: events.BlockSum) -> list[Action]:
        if event.place != self._place or event.node not in self._nodes:
            return []
        block = self._blocks[event.block]
        kind = BlockGradientPayload if block.kind == "block" else NonBlockGradientPayload
        return [
            Transmit(
                kind(
                    epoch=self.epoch, step=event.place.step, attempt=event.place.attempt,
                    block=event.block, chunk=chunk, lo=event.node.lo, hi=event.node.hi,
                    weight=event.weight,
                ),
                event.values[block.chunk_slice(chunk)],
            )
            for chunk in range(block.chunks)
        ]  # fmt: skip

    def _node_done(self, event: events.NodeDone) -> list[Action]:
        if event.place != self._place or event.node not in self._nodes:
            return []
        message = NodeLoss(
            epoch=self.epoch, step=event.place.step, attempt=event.place.attempt,
            lo=event.node.lo, hi=event.node.hi, loss_sum=event.loss.loss_sum,
            weight=event.loss.weight, elapsed_ms=event.elapsed_ms,
        )  # fmt: skip
        return [Transmit(message)]

    def _averaged(self, message: AveragedGradient, values: Array) -> None:
        self._check_epoch(message.epoch)
        if message.step < self.step or not self._blocks:
            return
        key = (message.step, message.attempt)
        if key not in self._averages:
            self._averages[key] = Averages(self._blocks)
        self._averages[key].put(message.block, message.chunk, values)

    def _commit(self, message: Commit) -> list[Action]:
        self._check_epoch(message.epoch)
        if message.step < self.step:
            return []
        if message.step > self.step:
            raise OutOfPlace(f"Commit: expected step {self.step}, got {message.step}")
        averages = self._averages.get((message.step, message.attempt))
        if message.scalars is not None and (averages is None or not averages.complete):
            raise OutOfPlace(f"Commit of step {message.step} before all of its averaged blocks")
        self.step += 1
        self._place = None
        self._nodes.clear()
        for key in [key for key in self._averages if key[0] < self.step]:
            del self._averages[key]
        arrays = averages.arrays if averages is not None else []
        return [CancelWork(), Apply(arrays, message.scalars)]

    def _eval_plan(self, message: EvalPlan) -> list[Action]:
        self._check_epoch(message.epoch)
        if not self._built or message.step != self.step:
            raise OutOfPlace(f"EvalPlan: expected step {self.step}, got {message.step}")
        if message.hi > self._parts:
            raise OutOfPlace(f"EvalPlan: expected parts below {self._parts}, got {message.hi}")
        return [Evaluate(message.step, part) for part in range(message.lo, message.hi)]

    def _check_built(self, message: StateChunk | StateRequest) -> None:
        if message.run_id != self.run_id or not self._built:
            raise OutOfPlace(f"{type(message).__name__} for a run that is not built here")

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise OutOfPlace(f"expected epoch {self.epoch}, got {epoch}")
