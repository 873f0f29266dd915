"""Decisions of a multi-device worker: several device processes act as one member of a run.

Pure: inputs are the session's actions and the devices' reports; outputs are orders to devices,
changes of the group's replica and events for the session. Subtrees are divided by measured speed,
and sums of sibling subtrees are merged along the tree before they leave the machine, so the result
does not depend on the number of devices. There is one replica, in shared memory: devices load its
parameters after every change. A device that keeps reading the replica releases it before the next
change. A process that dies is restarted and loads the replica; the other devices take over its
work.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import add
from statistics import median
from typing import Final

from backends.base.interface import Array, Loss
from protocol.base.errors import BackendUnavailable, DataError, DeviceError
from protocol.base.fields import cut_text
from protocol.exact.reduction.reducer import NonFinite, Reducer, ReductionResult
from protocol.exact.reduction.tree import Subtree, cover
from protocol.exact.reduction.tree_sum import TreeSum
from protocol.spec.manifest import Block
from protocol.spec.run_spec import RunSpec
from protocol.spec.sections.exchange import Codecs
from worker.logic import actions as act
from worker.logic import events
from worker.logic.events import StepId

MOST_RESTARTS: Final = 3
"""After this many restarts of its process, a device is left out."""
_RECENT_MEASUREMENTS: Final = 9
_NAME_CHARACTERS: Final = 64
_WORK: Final = (act.Compute, act.LoadInnerState, act.LoadEmbeddings, act.Evaluate)


@dataclass(frozen=True, slots=True)
class ToDevice:
    """Send an order to a device."""

    device: str
    order: act.GroupOrder


@dataclass(frozen=True, slots=True)
class Attach:
    """Have a device read the group's replica from now on; see `act.AttachReplica`."""

    device: str
    was_reset: bool


@dataclass(frozen=True, slots=True)
class Start:
    """Start a device's process; orders sent before it is up are queued."""

    device: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop a device's process."""

    device: str


@dataclass(frozen=True, slots=True)
class ResetReplica:
    """Reset the group's replica to these initial parameters."""

    spec: RunSpec
    blocks: tuple[Block, ...]
    parameters: list[Array]


@dataclass(frozen=True, slots=True)
class ChangeReplica:
    """Change the group's replica, which no device is reading.

    After a step and after a restored state, pass its digest to `DeviceGroup.replica_digest`.
    """

    action: act.ReplicaAction


@dataclass(frozen=True, slots=True)
class CopyReplica:
    """Send the session a copy of the group's replica."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Pass an event to the session; for `Built`, fill in the replica's step and digest first."""

    event: events.Event


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line about a device for the operator; a warning also goes to the coordinator."""

    device: str
    text: str
    is_warning: bool = True


Output = (
    ToDevice | Attach | Start | Stop | ResetReplica | ChangeReplica | CopyReplica | Emit | LogLine
)  # fmt: skip


class DeviceState(Enum):
    """A device's part in the run.

    PREPARING builds the task. WAITING is ready and waits for the group's replica, which is being
    loaded or changed. ACTIVE computes. LEFT_OUT does not compute in this run: its gradients would
    differ, or it could not build the task. GONE has failed for good.
    """

    PREPARING = "preparing"
    WAITING = "waiting"
    ACTIVE = "active"
    LEFT_OUT = "left out"
    GONE = "gone"


class ReplicaUse(Enum):
    """A device's use of the group's replica, which may change only while no device uses it.

    LOADING copies its parameters to the device. READING may read it at any time. RELEASING has
    been ordered to stop reading.
    """

    NONE = "none"
    LOADING = "loading"
    READING = "reading"
    RELEASING = "releasing"


@dataclass(slots=True)
class _Device:
    """One device of the group.

    Attributes:
        builds: Unanswered `Build` orders.
        build: The answer to the newest `Build`, if it succeeded.
        build_failure: The answer to the newest `Build`, if it failed.
        parts: Assigned subtrees that are not finished, in order.
        blocked_parts: Unfinished subtrees that wait for files or for state.
        evaluations: Step and part of assigned evaluations that are not finished.
        replica_use: How the device uses the group's replica.
        reason: Why the device is left out.
    """

    name: str
    number: int
    state: DeviceState = DeviceState.PREPARING
    restarts: int = 0
    builds: int = 0
    build: events.Built | None = None
    build_failure: events.BuildFailed | None = None
    parts: list[tuple[StepId, Subtree]] = field(default_factory=list)
    blocked_parts: set[tuple[StepId, Subtree]] = field(default_factory=set)
    evaluations: set[tuple[int, int]] = field(default_factory=set)
    replica_use: ReplicaUse = ReplicaUse.NONE
    reason: str = ""
    measured_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_MEASUREMENTS))

    @property
    def is_present(self) -> bool:
        return self.state is not DeviceState.GONE

    @property
    def backlog(self) -> int:
        """Number of assigned microbatches and evaluations that are not finished."""
        return sum(subtree.leaves for _, subtree in self.parts) + len(self.evaluations)

    def forget(self) -> None:
        """Drop the device's work and its answer to `Build`, for a new process or another run."""
        self.parts, self.blocked_parts, self.evaluations = [], set(), set()
        self.build = self.build_failure = None


@dataclass(slots=True)
class _Answer:
    """The group's answer to a change of the replica: its digest, once all devices loaded it."""

    pending_devices: set[str]
    digest: str | None = None


class _Work:
    """A subtree that the coordinator assigned, with its partial sums."""

    def __init__(self, action: act.Compute, blocks: int, exchange: Codecs) -> None:
        self.step_id = action.step_id
        self.microbatches = action.microbatches
        self.subtree = action.subtree
        leaves = action.subtree.leaves
        self._reducer = Reducer[int](leaves, exchange, range(blocks), None)
        self._weights, self._losses = TreeSum[float](leaves, add), TreeSum[float](leaves, add)
        self.rows: set[int] = set()
        self.slowest_ms = 0.0
        self.unlike_microbatches: set[int] = set()

    def _shift(self, part: Subtree) -> Subtree:
        """Number a part's leaves from the subtree's first leaf."""
        return Subtree(part.lo - self.subtree.lo, part.hi - self.subtree.lo)

    def add_block(self, event: events.BlockSum) -> events.BlockSum | None:
        """Merge a part's sum of a block; return the subtree's sum when it is complete."""
        part = self._shift(event.subtree)
        total = self._reducer.put(event.block, "", part, event.weight, event.values)
        if total is None:
            return None
        assert isinstance(total, ReductionResult), "a pre-reducer leaves NaN to the coordinator"
        return events.BlockSum(self.step_id, self.subtree, event.block, total.values, total.weight)

    def add_loss(self, event: events.SubtreeDone) -> Loss | None:
        """Merge a part's loss; return the subtree's loss when it is complete."""
        part = self._shift(event.subtree)
        self._weights.put(part, event.loss.weight)
        self._losses.put(part, event.loss.loss_sum)
        self.slowest_ms = max(self.slowest_ms, event.elapsed_ms)
        self.unlike_microbatches.update(event.unlike_microbatches)
        loss, weight = self._losses.total, self._weights.total
        return None if loss is None or weight is None else Loss(loss, weight)


def replace_non_finite(
    event: events.GroupReport, copy_finite: Callable[[Array], Array | None]
) -> events.GroupReport:
    """Replace a non-finite sum by a report of it.

    Args:
        event: A device's report.
        copy_finite: Copies a sum to where the group reads it, or returns None for a sum with a
            value that is not finite.
    """
    if not isinstance(event, events.BlockSum):
        return event
    values = copy_finite(event.values)
    if values is None:
        return events.NonFiniteSum(event.step_id, NonFinite(event.subtree, block=event.block))
    return replace(event, values=values)


class DeviceGroup:
    """State and decisions of the group; see the module's docstring.

    Args:
        names: Device names, as shown to the operator.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._devices = {name: _Device(name, number) for number, name in enumerate(names)}
        self._is_open = False
        self._build: act.Build | None = None
        self._reference: events.Built | None = None
        self._initial_device = ""
        self._queue: deque[act.DeviceAction] = deque()
        self._replica_run_id = ""
        self._step = self._optimizer_step = 0
        self._is_loading = False
        self._was_reset = False
        self._works: list[_Work] = []
        self._embeddings: act.LoadEmbeddings | None = None
        self._answers: dict[int, _Answer] = {}

    def begin(self) -> list[Output]:
        """Start all devices."""
        return [Start(name) for name in self._devices]

    # Actions of the session.

    def do(self, action: act.DeviceAction) -> list[Output]:
        """Handle an action of the session."""
        match action:
            case act.OpenDevice():
                self._is_open = True
                return self._order_all(action)
            case act.Build():
                return self._begin_build(action)
            case act.CancelWork():
                self._queue = deque(item for item in self._queue if not isinstance(item, _WORK))
                return self._cancel_all()
            case act.CancelSubtree():
                self._queue = deque(item for item in self._queue if not _computes(item, action))
                return self._cancel(action)
            case _:
                self._queue.append(action)
                return self._advance()

    def _advance(self) -> list[Output]:
        """Process the queue; a change of the replica waits until no device reads it."""
        outputs: list[Output] = []
        while self._queue:
            if isinstance(self._queue[0], act.ReplicaAction) and self._is_replica_in_use():
                return outputs + self._request_release()
            action = self._queue.popleft()
            match action:
                case act.Compute():
                    outputs += self._compute(action)
                case act.LoadInnerState():
                    outputs += self._load_inner_state(action)
                case act.LoadEmbeddings():
                    self._embeddings = action
                    outputs += [ToDevice(device.name, action) for device in self._active_devices()]
                case act.Evaluate():
                    outputs += self._evaluate(action)
                case act.CopyState():
                    outputs.append(CopyReplica())
                case act.Apply() | act.LoadChunk() | act.Restore():
                    outputs += self._change(action)
                case _:
                    raise AssertionError(action)
        if not self._is_loading:
            for device in self._devices.values():
                if device.state is DeviceState.WAITING:
                    outputs += self._attach(device)
        return outputs

    def _is_replica_in_use(self) -> bool:
        return any(d.replica_use is not ReplicaUse.NONE for d in self._devices.values())

    def _request_release(self) -> list[Output]:
        outputs: list[Output] = []
        for device in self._devices.values():
            if device.replica_use is ReplicaUse.READING:
                device.replica_use = ReplicaUse.RELEASING
                outputs.append(ToDevice(device.name, act.ReleaseReplica()))
        return outputs

    def _attach(self, device: _Device) -> list[Output]:
        device.state, device.replica_use = DeviceState.ACTIVE, ReplicaUse.LOADING
        rows = [] if self._embeddings is None else [ToDevice(device.name, self._embeddings)]
        return [Attach(device.name, self._was_reset), *rows]

    # The group's replica.

    def _change(self, action: act.ReplicaAction) -> list[Output]:
        self._embeddings = None
        outputs: list[Output] = [ChangeReplica(action)]
        committed_attempt: int | None = None
        match action:
            case act.LoadChunk():
                self._is_loading = True
                return outputs
            case act.Restore():
                self._step, self._optimizer_step = action.step, action.optimizer_step
                self._is_loading = False
            case act.Apply():
                self._step += 1
                self._optimizer_step += action.scalars is not None
                committed_attempt = -1 if action.scalars is None else action.attempt
        order = act.TakeWeights(self._step, self._optimizer_step, committed_attempt)
        active = self._active_devices()
        for device in active:
            device.replica_use = ReplicaUse.LOADING
        self._answers[self._step] = _Answer({device.name for device in active})
        return outputs + [ToDevice(device.name, order) for device in active]

    def replica_digest(self, step: int, digest: str) -> list[Output]:
        """Handle the digest of the group's replica after this step."""
        if step in self._answers:
            self._answers[step].digest = digest
        return self._answer_if_complete(step)

    def _weights_taken(self, device: _Device, event: events.WeightsTaken) -> list[Output]:
        device.replica_use = ReplicaUse.READING if event.keeps_reading else ReplicaUse.NONE
        if event.step in self._answers:
            self._answers[event.step].pending_devices.discard(device.name)
        return self._answer_if_complete(event.step) + self._advance()

    def _replica_released(self, device: _Device) -> list[Output]:
        device.replica_use = ReplicaUse.NONE
        return self._advance()

    def _answer_if_complete(self, step: int) -> list[Output]:
        answer = self._answers.get(step)
        if answer is None or answer.pending_devices or answer.digest is None:
            return []
        del self._answers[step]
        return [Emit(events.Applied(step, answer.digest))]

    def _present_devices(self) -> list[_Device]:
        return [device for device in self._devices.values() if device.is_present]

    def _active_devices(self) -> list[_Device]:
        return [d for d in self._devices.values() if d.state is DeviceState.ACTIVE]

    def _order_all(self, order: act.GroupOrder) -> list[Output]:
        return [ToDevice(device.name, order) for device in self._present_devices()]

    # A run's task.

    def _begin_build(self, action: act.Build) -> list[Output]:
        self._build, self._reference, self._works = action, None, []
        self._initial_device = ""
        for device in self._present_devices():
            device.forget()
            device.state = DeviceState.PREPARING
            device.builds += 1
        return self._order_all(action)

    def _build_answered(
        self, device: _Device, event: events.Built | events.BuildFailed
    ) -> list[Output]:
        device.builds -= 1
        # A lost connection during a build leads to a second `Build`: only the newest answer counts.
        if device.builds or self._build is None or event.run_id != self._build.run_id:
            return []
        if isinstance(event, events.BuildFailed):
            device.build_failure = event
        else:
            device.build = event
        device.replica_use = ReplicaUse.NONE  # the build detached the device; `_attach` follows
        return self._advance() + self._choose_devices()

    def _choose_devices(self) -> list[Output]:
        """Once every device has answered `Build`, choose the devices that give the same bits.

        Devices that answer later, after a restart, are admitted or left out one by one.
        """
        if self._build is None or self._initial_device:
            return []
        if self._reference is not None:
            latecomers = [d for d in self._preparing_devices() if d.build or d.build_failure]
            return [output for device in latecomers for output in self._admit(device)]
        if any(not (device.build or device.build_failure) for device in self._preparing_devices()):
            return []
        candidates = [(d.name, d.build) for d in self._preparing_devices() if d.build is not None]
        if not candidates:
            return self._report_build_failure()
        if fault := _task_mismatch([build for _, build in candidates]):
            return [Emit(events.BuildFailed(self._build.run_id, DataError(fault)))]
        keys = [_bits_key(build) for _, build in candidates]
        name, self._reference = max(candidates, key=lambda item: keys.count(_bits_key(item[1])))
        has_state = self._replica_run_id == self._build.run_id and not self._is_loading
        if self._build.keep_state and has_state:
            return self._admit_all()
        self._initial_device = name
        return [ToDevice(name, act.ReadInitial())]

    def _initial_parameters(self, device: _Device, event: events.InitialParameters) -> list[Output]:
        if device.name != self._initial_device:
            return []
        assert self._build is not None
        assert self._reference is not None
        self._initial_device, self._replica_run_id = "", self._build.run_id
        self._step = self._optimizer_step = 0
        self._is_loading, self._was_reset = False, True
        blocks = self._reference.manifest.blocks
        reset = ResetReplica(self._build.spec, blocks, event.values)
        return [reset, *self._admit_all()]

    def _admit_all(self) -> list[Output]:
        assert self._reference is not None
        outputs = [output for d in self._preparing_devices() for output in self._admit(d)]
        self._was_reset = False  # a device that is attached later has no old state
        self._answers = {}
        return [*outputs, Emit(self._group_built(self._reference))]

    def _preparing_devices(self) -> list[_Device]:
        return [d for d in self._devices.values() if d.state is DeviceState.PREPARING]

    def _report_build_failure(self) -> list[Output]:
        failures = [
            d.build_failure for d in self._preparing_devices() if d.build_failure is not None
        ]
        # A reason that applies to every device is more useful than one of a single device.
        return [Emit(min(failures, key=lambda event: event.is_local))] if failures else []

    def _admit(self, device: _Device) -> list[Output]:
        """Admit a device that has answered `Build`, or leave it out."""
        assert self._reference is not None
        if device.build is None:
            if device.build_failure is None:
                return []
            return self._leave_out(device, str(device.build_failure.error))
        if _bits_key(device.build) != _bits_key(self._reference):
            return self._leave_out(
                device,
                "expected the numerics profile of its siblings, got another "
                f"({device.build.numerics_text}); start a separate worker for it",
            )
        device.state = DeviceState.WAITING
        text = f"device {device.name!r} takes part from step {self._step} on"
        lines = [LogLine(device.name, text, is_warning=False)] if device.restarts else []
        return [*lines, *self._advance()]

    def _leave_out(self, device: _Device, reason: str) -> list[Output]:
        device.state, device.reason = DeviceState.LEFT_OUT, reason
        return [LogLine(device.name, f"device {device.name!r} is left out of the run: {reason}")]

    def _group_built(self, build: events.Built) -> events.Built:
        count = len(self._active_devices()) + sum(
            d.state is DeviceState.WAITING for d in self._devices.values()
        )
        name = cut_text(f"{count} x {build.device}", _NAME_CHARACTERS)
        left_out = "; ".join(
            f"device {device.name!r} is left out: {device.reason}"
            for device in self._devices.values()
            if device.state is DeviceState.LEFT_OUT
        )
        device = name if count > 1 else build.device
        return replace(build, device=device, devices=count, left_out=left_out)

    # Subtrees.

    def _compute(self, action: act.Compute) -> list[Output]:
        existing_work = self._work_of(action.step_id, action.subtree)
        if existing_work is not None:  # the files or state that its parts waited for have arrived
            return self._compute_blocked(existing_work)
        assert self._reference is not None, "the session requests work only after Built"
        manifest = self._reference.manifest
        work = _Work(action, len(manifest.blocks), self._exchange)
        self._works.append(work)
        return self._divide(work, range(action.subtree.lo, action.subtree.hi))

    @property
    def _exchange(self) -> Codecs:
        assert self._build is not None
        return self._build.spec.exchange.codecs

    def _work_of(self, step_id: StepId, part: Subtree) -> _Work | None:
        works = (w for w in self._works if w.step_id == step_id and w.subtree.covers(part))
        return next(works, None)

    def _compute_blocked(self, work: _Work) -> list[Output]:
        outputs: list[Output] = []
        for device in self._active_devices():
            for step_id, part in sorted(device.blocked_parts, key=lambda key: key[1]):
                if self._work_of(step_id, part) is work:
                    device.blocked_parts.discard((step_id, part))
                    compute = act.Compute(step_id, work.microbatches, part)
                    outputs.append(ToDevice(device.name, compute))
        return outputs

    def _divide(self, work: _Work, leaves: range) -> list[Output]:
        """Divide a subtree's microbatches so that the last device finishes as early as possible."""
        devices = self._active_devices()
        times_ms = [median(d.measured_ms) for d in devices if d.measured_ms]
        typical_ms = median(times_ms) if times_ms else 1.0
        pace_ms = {d.name: median(d.measured_ms) if d.measured_ms else typical_ms for d in devices}
        counts = dict.fromkeys(pace_ms, 0)
        heap = [(max(pace_ms[d.name], 1e-3) * (d.backlog + 1), d.number, d.name) for d in devices]
        heapq.heapify(heap)
        for _ in leaves if heap else ():
            done_ms, number, name = heap[0]
            counts[name] += 1
            heapq.heapreplace(heap, (done_ms + max(pace_ms[name], 1e-3), number, name))
        outputs: list[Output] = []
        offset = 0
        # The longest range first: few subtrees cover a range that starts at the subtree's start.
        for device in sorted(devices, key=lambda d: (-counts[d.name], d.number)):
            device_leaves = leaves[offset : offset + counts[device.name]]
            offset += len(device_leaves)
            for part in cover(device_leaves, work.microbatches):
                device.parts.append((work.step_id, part))
                compute = act.Compute(work.step_id, work.microbatches, part)
                outputs.append(ToDevice(device.name, compute))
        return outputs

    def _load_inner_state(self, action: act.LoadInnerState) -> list[Output]:
        """Pass the state to the device that waits for it: one device computes a replica."""
        return [
            ToDevice(device.name, action)
            for device in self._active_devices()
            for step_id, part in device.blocked_parts
            if step_id == action.step_id and part.lo == action.replica
        ]

    def _cancel_all(self) -> list[Output]:
        self._works = []
        self._embeddings = None
        for device in self._present_devices():
            device.parts, device.blocked_parts, device.evaluations = [], set(), set()
        return self._order_all(act.CancelWork())

    def _cancel(self, action: act.CancelSubtree) -> list[Output]:
        self._works = [
            work
            for work in self._works
            if (work.step_id, work.subtree) != (action.step_id, action.subtree)
        ]
        outputs: list[Output] = []
        for device in self._active_devices():
            cancelled = [
                key for key in device.parts
                if key[0] == action.step_id and action.subtree.covers(key[1])
            ]  # fmt: skip
            device.parts = [key for key in device.parts if key not in cancelled]
            device.blocked_parts.difference_update(cancelled)
            outputs += [ToDevice(device.name, act.CancelSubtree(*key)) for key in cancelled]
        return outputs

    def _evaluate(self, action: act.Evaluate) -> list[Output]:
        key = (action.step, action.part)
        for device in self._devices.values():
            device.evaluations.discard(key)
        idle = min(
            self._active_devices(), key=lambda device: (device.backlog, device.number), default=None
        )
        if idle is None:
            return []
        idle.evaluations.add(key)
        return [ToDevice(idle.name, action)]

    # Reports of devices.

    def report(self, name: str, event: events.GroupReport) -> list[Output]:
        """Handle a device's report."""
        device = self._devices[name]
        if not device.is_present:
            return []
        match event:
            case events.Built() | events.BuildFailed():
                return self._build_answered(device, event)
            case events.TaskRefused():
                return [Emit(event)]
            case events.BlockSum():
                return self._block_sum(device, event)
            case events.SubtreeDone():
                return self._subtree_done(device, event)
            case events.MicrobatchRows():
                return self._microbatch_rows(device, event)
            case events.NonFiniteSum():
                return self._non_finite(device, event.step_id, event.location)
            case events.InnerPhaseStep() | events.InnerCheckpoint():
                return [Emit(event)] if (event.step_id, event.subtree) in device.parts else []
            case events.InnerStateNeeded():
                if (event.step_id, event.subtree) not in device.parts:
                    return []
                device.blocked_parts.add((event.step_id, event.subtree))
                return [Emit(event)]
            case events.FilesNeeded():
                return self._files_needed(device, event)
            case events.WeightsTaken():
                return self._weights_taken(device, event)
            case events.ReplicaReleased():
                return self._replica_released(device)
            case events.InitialParameters():
                return self._initial_parameters(device, event)
            case events.PartEvaluated():
                return self._part_evaluated(device, event)
            case events.DeviceFailed():
                return self._device_failed(device, event)

    def _work_for(
        self,
        device: _Device,
        event: events.BlockSum | events.SubtreeDone | events.NonFiniteSum | events.MicrobatchRows,
    ) -> _Work | None:
        """Return the work that a result belongs to; None if it is no longer this device's."""
        is_assigned = any(
            step_id == event.step_id and part.covers(event.subtree)
            for step_id, part in device.parts
        )
        return self._work_of(event.step_id, event.subtree) if is_assigned else None

    def _block_sum(self, device: _Device, event: events.BlockSum) -> list[Output]:
        work = self._work_for(device, event)
        total = work.add_block(event) if work is not None else None
        return [] if total is None else [Emit(total)]

    def _subtree_done(self, device: _Device, event: events.SubtreeDone) -> list[Output]:
        work = self._work_for(device, event)
        device.measured_ms.append(event.elapsed_ms / event.subtree.leaves)
        if work is None:
            return []
        if not is_finite_loss(event.loss):
            return self._non_finite(device, event.step_id, NonFinite(event.subtree))
        device.parts.remove((event.step_id, event.subtree))
        loss = work.add_loss(event)
        if loss is None:
            return []
        self._works.remove(work)
        elapsed_ms = self._elapsed_ms(work)
        unlike = tuple(sorted(work.unlike_microbatches))
        return [Emit(events.SubtreeDone(work.step_id, work.subtree, loss, elapsed_ms, unlike))]

    def _non_finite(
        self, device: _Device, step_id: events.StepId, location: NonFinite
    ) -> list[Output]:
        report = events.NonFiniteSum(step_id, replace(location, device=device.name))
        return [Emit(report)] if self._work_for(device, report) else []

    def _elapsed_ms(self, work: _Work) -> float:
        """Estimate the subtree's time from the devices' measured speeds, all of them busy."""
        rates = [
            1 / max(median(d.measured_ms), 1e-3) for d in self._active_devices() if d.measured_ms
        ]
        return work.subtree.leaves / sum(rates) if rates else work.slowest_ms

    def _microbatch_rows(self, device: _Device, event: events.MicrobatchRows) -> list[Output]:
        work = self._work_for(device, event)
        if work is None or event.microbatch in work.rows:
            return []
        work.rows.add(event.microbatch)
        return [Emit(replace(event, subtree=work.subtree))]

    def _files_needed(self, device: _Device, event: events.FilesNeeded) -> list[Output]:
        if event.for_subtree is None:
            return [Emit(event)]
        step_id, microbatches, part = event.for_subtree
        work = self._work_of(step_id, part)
        if work is None or (step_id, part) not in device.parts:
            return []
        device.blocked_parts.add((step_id, part))
        return [Emit(replace(event, for_subtree=(step_id, microbatches, work.subtree)))]

    def _part_evaluated(self, device: _Device, event: events.PartEvaluated) -> list[Output]:
        if (event.step, event.part) not in device.evaluations:
            return []
        device.evaluations.discard((event.step, event.part))
        return [Emit(event)]

    # Loss of devices.

    def _device_failed(self, device: _Device, event: events.DeviceFailed) -> list[Output]:
        """Remove a device that reported a failure: a new process would fail as well."""
        if isinstance(event.error, BackendUnavailable):
            return [Emit(event)]  # the user chose this device
        error = " ".join(str(event.error).split())
        outputs: list[Output] = [Stop(device.name)]
        if len(self._present_devices()) > 1:
            outputs.append(LogLine(device.name, f"device {device.name!r} is left out: {error}"))
        return [*outputs, *self._remove(device, event.error)]

    def handle_loss(self, name: str, reason: str) -> list[Output]:
        """Restart a device's process that ended without a report, or leave the device out."""
        device = self._devices[name]
        if not device.is_present:
            return []
        description = f"the process of device {name!r} {reason}"
        if device.restarts >= MOST_RESTARTS:
            outputs: list[Output] = [LogLine(name, f"{description}; the device is left out")]
            return [*outputs, *self._remove(device, DeviceError(name, f"its process {reason}"))]
        device.restarts += 1
        restart = f"restarted, {device.restarts} of at most {MOST_RESTARTS} times"
        outputs = [LogLine(name, f"{description}; {restart}"), Start(name)]
        was_active = device.state is DeviceState.ACTIVE
        orphans = self._take_back_work(device)
        device.state, device.builds = DeviceState.PREPARING, 0
        if name == self._initial_device:
            self._initial_device, self._reference = "", None
        if self._is_open:
            outputs.append(ToDevice(name, act.OpenDevice()))
        if self._build is not None:
            device.builds = 1
            outputs.append(ToDevice(name, replace(self._build, keep_state=False)))
        return [*outputs, *self._reassign(orphans, description, was_active=was_active)]

    def _remove(self, device: _Device, error: Exception) -> list[Output]:
        was_active = device.state is DeviceState.ACTIVE
        orphans = self._take_back_work(device)
        device.state = DeviceState.GONE
        if device.name == self._initial_device:
            self._initial_device, self._reference = "", None
        if not self._present_devices():
            return [Emit(events.DeviceFailed(error))]
        outputs = self._reassign(orphans, str(error), was_active=was_active)
        return [*outputs, *self._choose_devices()]

    def _take_back_work(self, device: _Device) -> list[act.Compute | act.Evaluate]:
        """Remove and return all work that a device has not finished."""
        computes: list[act.Compute | act.Evaluate] = [
            act.Compute(step_id, work.microbatches, part)
            for step_id, part in device.parts
            if (work := self._work_of(step_id, part)) is not None
        ]
        evaluations = [act.Evaluate(step, part) for step, part in sorted(device.evaluations)]
        device.forget()
        device.replica_use = ReplicaUse.NONE
        return [*computes, *evaluations]

    def _reassign(
        self, orphans: list[act.Compute | act.Evaluate], reason: str, *, was_active: bool
    ) -> list[Output]:
        """Give a lost device's work to other devices, and stop waiting for its answers."""
        if self._reference is None or not was_active:
            return self._advance()
        if not self._active_devices():
            self._build = None
            return [Emit(events.DevicesLost(reason)), *self._advance()]
        outputs: list[Output] = []
        for order in orphans:
            if isinstance(order, act.Compute):
                work = self._work_of(order.step_id, order.subtree)
                assert work is not None
                outputs += self._divide(work, range(order.subtree.lo, order.subtree.hi))
            else:
                outputs += self._evaluate(order)
        names = {device.name for device in self._active_devices()}
        for step in list(self._answers):
            self._answers[step].pending_devices &= names
            outputs += self._answer_if_complete(step)
        return outputs + self._advance()


def is_finite_loss(loss: Loss) -> bool:
    """Return whether a loss is finite, so that it may be added to others."""
    return abs(loss.loss_sum) < float("inf")


def _task_mismatch(builds: Sequence[events.Built]) -> str:
    """Describe how the devices' tasks for one run spec differ; empty if they are the same."""
    first_build = builds[0]
    for second_build in builds[1:]:
        differences = first_build.manifest.differences(second_build.manifest)
        if first_build.initial_digest != second_build.initial_digest:
            differences.append("initial weights")
        if differences:
            return (
                f"expected the task to build the same {', '.join(differences)} on every device of "
                "this machine, got different ones: draw from a generator seeded with the run "
                "spec's seed"
            )
        cross_check = first_build.manifest.cross_check
        if cross_check is not None and (
            difference := cross_check.describe_difference(
                second_build.manifest.cross_check, "on this machine's first device"
            )
        ):
            return difference
    return ""


def _bits_key(build: events.Built) -> tuple[str, str]:
    """Return a key that is equal for devices that give the same bits."""
    return build.manifest.digest(), build.numerics_profile


def _computes(action: act.DeviceAction, cancellation: act.CancelSubtree) -> bool:
    if not isinstance(action, act.Compute):
        return False
    return (action.step_id, action.subtree) == (cancellation.step_id, cancellation.subtree)
