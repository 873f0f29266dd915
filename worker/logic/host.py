"""A host's decisions: several devices, each in a process of its own, are one member of a run.

Pure: what the session asks of its device comes in, and what came of it at each device; orders to
devices and the events of the one device that the session knows come out. Nodes are cut along the
tree and divided by measured speed; their sums are merged as everywhere else, so nobody can tell
from the bits how many devices there were. A device that is lost is begun again and gets the state
from a sibling; what it owed is computed by the others meanwhile.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import add
from statistics import median
from typing import Final

from backends.base.interface import Array, Loss
from protocol.base.errors import BackendUnavailable, DataError, DeviceError
from protocol.base.fields import cut_text
from protocol.exact.replica import part_slices
from protocol.exact.tree import Node, cover
from protocol.exact.tree_sum import ADDITIONS, TreeSum
from protocol.exact.update import is_finite
from protocol.spec.run_spec import Precision
from worker.logic import actions as act
from worker.logic import events
from worker.logic.events import StepAttempt

MOST_RESTARTS: Final = 3
"""How often a device's process is begun again: what ends it once more is there to stay."""
_MEASUREMENTS_KEPT: Final = 9
_STEPS_KEPT: Final = 4
_NAME_CHARACTERS: Final = 64


@dataclass(frozen=True, slots=True)
class ToDevice:
    """Have a device do this, after what it was given before."""

    device: str
    action: act.DeviceAction


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin a device's process; what it is given next waits for it."""

    device: str


@dataclass(frozen=True, slots=True)
class End:
    """End a device's process."""

    device: str


@dataclass(frozen=True, slots=True)
class Give:
    """Tell the session."""

    event: events.Event


@dataclass(frozen=True, slots=True)
class Remark:
    """Tell a person about a device; `wrong`: also one who hears only of that, and the session."""

    device: str
    text: str
    wrong: bool = True


Output = ToDevice | Begin | End | Give | Remark


class DeviceState(Enum):
    """PREPARING a run's task; ALIGNING its state with a sibling's; ACTIVE; LEFT_OUT of this run
    for what it computes is of another kind; GONE for good."""

    PREPARING = "preparing"
    ALIGNING = "aligning"
    ACTIVE = "active"
    LEFT_OUT = "left out"
    GONE = "gone"


@dataclass(slots=True)
class _Device:
    """One device of the host.

    Attributes:
        builds: How many it was asked for and has not answered.
        built: What came of the newest; None before.
        failed: Likewise.
        parts: What it is to compute, in order.
        waiting: Of these, what waits for files.
        evaluations: Step and part of what it is to evaluate.
        copies: For whom it copies its state, in order; None: for the session.
        held: What it gets once it has the state that is being copied for it; None if nothing.
        reason: Why it is left out.
    """

    name: str
    number: int
    state: DeviceState = DeviceState.PREPARING
    restarts: int = 0
    builds: int = 0
    built: events.Built | None = None
    failed: events.BuildFailed | None = None
    parts: list[tuple[StepAttempt, Node]] = field(default_factory=list)
    waiting: set[tuple[StepAttempt, Node]] = field(default_factory=set)
    evaluations: set[tuple[int, int]] = field(default_factory=set)
    copies: deque[str | None] = field(default_factory=deque)
    held: list[act.DeviceAction] | None = None
    answer: events.Applied | None = None
    reason: str = ""
    measured_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_MEASUREMENTS_KEPT))

    @property
    def here(self) -> bool:
        return self.state is not DeviceState.GONE

    @property
    def backlog(self) -> int:
        return sum(node.leaves for _, node in self.parts) + len(self.evaluations)

    def forget(self) -> None:
        """Its process is another, or it is another run."""
        self.parts, self.waiting, self.evaluations = [], set(), set()
        self.copies, self.held, self.answer = deque(), None, None
        self.built = self.failed = None


class _Work:
    """A node that the coordinator gave, and what has come of it."""

    def __init__(self, action: act.Compute, blocks: int, precision: Precision) -> None:
        self.place, self.microbatches, self.node = action.place, action.microbatches, action.node
        add_sums, leaves = ADDITIONS[precision], action.node.leaves
        self._sums: list[TreeSum[Array] | None] = [TreeSum(leaves, add_sums) for _ in range(blocks)]
        self._weights, self._losses = TreeSum[float](leaves, add), TreeSum[float](leaves, add)
        self.rows: set[int] = set()
        self.slowest_ms = 0.0

    def _within(self, part: Node) -> Node:
        """A node's subtree has the shape of a tree over its leaves alone."""
        return Node(part.lo - self.node.lo, part.hi - self.node.lo)

    def add_block(self, event: events.BlockSum) -> events.BlockSum | None:
        """Merge a part's sum of a block; gives the node's once that is there, and only once."""
        sums, part = self._sums[event.block], self._within(event.node)
        if sums is None:
            return None
        self._weights.put(part, event.weight)
        sums.put(part, event.values)
        total, weight = sums.total, self._weights.total
        if total is None:
            return None
        assert weight is not None, "it comes with every part of every block"
        self._sums[event.block] = None
        return events.BlockSum(self.place, self.node, event.block, total, weight)

    def add_loss(self, event: events.NodeDone) -> Loss | None:
        """Merge a part's loss; gives the node's once that is there."""
        part = self._within(event.node)
        self._weights.put(part, event.loss.weight)
        self._losses.put(part, event.loss.loss_sum)
        self.slowest_ms = max(self.slowest_ms, event.elapsed_ms)
        loss, weight = self._losses.total, self._weights.total
        return None if loss is None or weight is None else Loss(loss, weight)


def as_reported(event: events.Event) -> events.Event:
    """What a device's process reports: a sum that is not finite is told, not sent."""
    if isinstance(event, events.BlockSum) and not is_finite(event.values):
        return events.NotFinite(event.place, event.node, event.block)
    return event


class Host:
    """See the module's text.

    Args:
        names: Of the devices, as people read them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._devices = {name: _Device(name, number) for number, name in enumerate(names)}
        self._open = False
        self._build: act.Build | None = None
        self._reference: events.Built | None = None
        self._step = 0
        self._loading = False
        self._works: list[_Work] = []
        self._awaited: dict[int, dict[str, str | None]] = {}
        self._known: dict[int, str] = {}

    def begin(self) -> list[Output]:
        """The host begins, and so does every device."""
        return [Begin(name) for name in self._devices]

    # What the session asks for.

    def do(self, action: act.DeviceAction) -> list[Output]:
        """The session wants this of its device."""
        match action:
            case act.OpenDevice():
                self._open = True
                return self._to_all(action)
            case act.Build():
                return self._begin_build(action)
            case act.Compute():
                return self._compute(action)
            case act.GiveStretch():
                return self._give_stretch(action)
            case act.CancelWork():
                return self._cancel_all()
            case act.CancelNode():
                return self._cancel(action)
            case act.Apply():
                return self._await_answers(self._step + 1, action)
            case act.Restore():
                return self._await_answers(action.step, action)
            case act.LoadChunk():
                self._loading = True
                return self._to_replicas(action)
            case act.Evaluate():
                return self._evaluate(action)
            case act.CopyState():
                return self._copy_for(None)

    def _here(self) -> list[_Device]:
        return [device for device in self._devices.values() if device.here]

    def _active(self) -> list[_Device]:
        return [d for d in self._devices.values() if d.state is DeviceState.ACTIVE]

    def _to_all(self, action: act.DeviceAction) -> list[Output]:
        return [ToDevice(device.name, action) for device in self._here()]

    def _to_replicas(self, action: act.DeviceAction) -> list[Output]:
        """To all that have the run's state, or are getting it: these after that."""
        outputs: list[Output] = []
        for device in self._devices.values():
            if device.state is DeviceState.ALIGNING and device.held is not None:
                device.held.append(action)
            elif device.state in (DeviceState.ACTIVE, DeviceState.ALIGNING):
                outputs.append(ToDevice(device.name, action))
        return outputs

    # A run's task.

    def _begin_build(self, action: act.Build) -> list[Output]:
        self._build, self._reference, self._works = action, None, []
        self._awaited, self._known, self._loading = {}, {}, False
        for device in self._here():
            device.forget()
            device.state = DeviceState.PREPARING
            device.builds += 1
        return self._to_all(action)

    def _built(self, device: _Device, event: events.Built | events.BuildFailed) -> list[Output]:
        device.builds -= 1
        # A second one is asked for where a connection was lost while the first was at work.
        if device.builds or self._build is None or event.run_id != self._build.run_id:
            return []
        if isinstance(event, events.BuildFailed):
            device.failed = event
        else:
            device.built = event
        return self._settle()

    def _settle(self) -> list[Output]:
        """Every device has built the task, or cannot: see which go together."""
        if self._build is None:
            return []
        if self._reference is not None:
            late = [d for d in self._preparing() if d.built or d.failed]
            return [output for device in late for output in self._admit(device)]
        if any(not (device.built or device.failed) for device in self._preparing()):
            return []
        candidates = [device.built for device in self._preparing() if device.built is not None]
        if not candidates:
            return self._cannot_build()
        if fault := _unlike_tasks(candidates):
            return [Give(events.BuildFailed(self._build.run_id, DataError(fault)))]
        alike = [sum(map(one.__eq__, map(_kind, candidates))) for one in map(_kind, candidates)]
        most = max(zip(alike, candidates, strict=True), key=lambda pair: (pair[1].step, pair[0]))
        self._reference = reference = most[1]
        self._step, self._known = reference.step, {reference.step: reference.state_digest}
        outputs = [output for d in self._preparing() for output in self._admit(d)]
        return [*outputs, Give(self._as_one(reference))]

    def _preparing(self) -> list[_Device]:
        return [d for d in self._devices.values() if d.state is DeviceState.PREPARING]

    def _cannot_build(self) -> list[Output]:
        failed = [device.failed for device in self._preparing() if device.failed is not None]
        # What hinders all matters more than what is a device's own.
        return [Give(min(failed, key=lambda event: event.own))] if failed else []

    def _admit(self, device: _Device) -> list[Output]:
        """A device has answered: it takes part, gets a sibling's state first, or is left out."""
        assert self._reference is not None
        if device.built is None:
            assert device.failed is not None
            return self._leave_out(device, str(device.failed.error))
        if _kind(device.built) != _kind(self._reference):
            return self._leave_out(
                device,
                "its gradients would have other bits than its siblings' "
                f"({device.built.signature_text}); it can be a worker of its own",
            )
        known = self._known.get(self._step)
        # Of a state that is being loaded it has missed what its siblings have of it by now.
        alike = device.built.step == self._step and device.built.state_digest == known
        if alike and not self._loading:
            device.state = DeviceState.ACTIVE
            return []
        device.state, device.held = DeviceState.ALIGNING, []
        return self._copy_for(device.name)

    def _leave_out(self, device: _Device, reason: str) -> list[Output]:
        device.state, device.reason = DeviceState.LEFT_OUT, reason
        return [Remark(device.name, f"device {device.name!r} is left out of the run: {reason}")]

    def _as_one(self, built: events.Built) -> events.Built:
        count = len(self._active()) + sum(
            d.state is DeviceState.ALIGNING for d in self._devices.values()
        )
        name = cut_text(f"{count} x {built.device}", _NAME_CHARACTERS)
        left_out = "; ".join(
            f"device {device.name!r} is left out: {device.reason}"
            for device in self._devices.values()
            if device.state is DeviceState.LEFT_OUT
        )
        device = name if count > 1 else built.device
        return replace(built, device=device, devices=count, left_out=left_out)

    # The state of a sibling.

    def _copy_for(self, whom: str | None) -> list[Output]:
        sources = self._active()
        if not sources:  # what was asked for one that is not there any more comes to nothing
            return []
        sources[0].copies.append(whom)
        return [ToDevice(sources[0].name, act.CopyState())]

    def _copied(self, source: _Device, event: events.StateCopied) -> list[Output]:
        whom = source.copies.popleft() if source.copies else None
        if whom is None:
            return [Give(event)]
        device = self._devices[whom]
        if device.state is not DeviceState.ALIGNING or device.held is None or not self._reference:
            return []
        blocks = self._reference.manifest.blocks
        orders: list[act.DeviceAction] = [
            act.LoadChunk(part.kind, part.block, n, part.values[piece])
            for part in event.parts
            for n, piece in enumerate(part_slices(part.kind, blocks[part.block]))
        ]
        orders += [act.Restore(event.step, event.optimizer_step), *device.held]
        device.held = None
        return [ToDevice(whom, order) for order in orders]

    # Nodes.

    def _compute(self, action: act.Compute) -> list[Output]:
        known = self._work_of(action.place, action.node)
        if known is not None:  # files have come that parts of it were waiting for
            return self._compute_waiting(known)
        assert self._reference is not None, "the session plans after Built alone"
        manifest = self._reference.manifest
        work = _Work(action, len(manifest.blocks), self._precision)
        self._works.append(work)
        return self._divide(work, range(action.node.lo, action.node.hi))

    @property
    def _precision(self) -> Precision:
        assert self._build is not None
        return self._build.spec.exchange.precision

    def _work_of(self, place: StepAttempt, part: Node) -> _Work | None:
        found = (w for w in self._works if w.place == place and w.node.covers(part))
        return next(found, None)

    def _compute_waiting(self, work: _Work) -> list[Output]:
        outputs: list[Output] = []
        for device in self._active():
            for place, part in sorted(device.waiting, key=lambda key: key[1]):
                if self._work_of(place, part) is work:
                    device.waiting.discard((place, part))
                    compute = act.Compute(place, work.microbatches, part)
                    outputs.append(ToDevice(device.name, compute))
        return outputs

    def _divide(self, work: _Work, leaves: range) -> list[Output]:
        """Give microbatches of a node to the devices such that all are done as early as can be."""
        devices = self._active()
        known = [median(d.measured_ms) for d in devices if d.measured_ms]
        typical = median(known) if known else 1.0
        pace = {d.name: median(d.measured_ms) if d.measured_ms else typical for d in devices}
        counts = dict.fromkeys(pace, 0)
        heap = [(max(pace[d.name], 1e-3) * (d.backlog + 1), d.number, d.name) for d in devices]
        heapq.heapify(heap)
        for _ in leaves if heap else ():
            done_ms, number, name = heap[0]
            counts[name] += 1
            heapq.heapreplace(heap, (done_ms + max(pace[name], 1e-3), number, name))
        outputs: list[Output] = []
        at = 0
        # The largest share first, where the tree's largest nodes lie: few sums.
        for device in sorted(devices, key=lambda d: (-counts[d.name], d.number)):
            mine = leaves[at : at + counts[device.name]]
            at += len(mine)
            for part in cover(mine, work.microbatches):
                device.parts.append((work.place, part))
                compute = act.Compute(work.place, work.microbatches, part)
                outputs.append(ToDevice(device.name, compute))
        return outputs

    def _give_stretch(self, action: act.GiveStretch) -> list[Output]:
        """To the device whose part waits for it: a replica is a leaf, so one device's."""
        return [
            ToDevice(device.name, action)
            for device in self._active()
            for place, part in device.waiting
            if place == action.place and part.lo == action.replica
        ]

    def _cancel_all(self) -> list[Output]:
        self._works = []
        for device in self._here():
            device.parts, device.waiting, device.evaluations = [], set(), set()
        return self._to_all(act.CancelWork())

    def _cancel(self, action: act.CancelNode) -> list[Output]:
        self._works = [
            work for work in self._works if (work.place, work.node) != (action.place, action.node)
        ]
        outputs: list[Output] = []
        for device in self._active():
            gone = [k for k in device.parts if k[0] == action.place and action.node.covers(k[1])]
            device.parts = [key for key in device.parts if key not in gone]
            device.waiting.difference_update(gone)
            outputs += [ToDevice(device.name, act.CancelNode(*key)) for key in gone]
        return outputs

    def _evaluate(self, action: act.Evaluate) -> list[Output]:
        key = (action.step, action.part)
        for device in self._devices.values():
            device.evaluations.discard(key)
        idle = min(self._active(), key=lambda device: (device.backlog, device.number), default=None)
        if idle is None:
            return []
        idle.evaluations.add(key)
        return [ToDevice(idle.name, action)]

    # Steps.

    def _await_answers(self, step: int, action: act.Apply | act.Restore) -> list[Output]:
        self._step, self._loading = step, False
        self._awaited[step] = {device.name: None for device in self._active()}
        self._known.pop(step, None)
        for old in [s for s in (*self._awaited, *self._known) if s <= step - _STEPS_KEPT]:
            self._awaited.pop(old, None)
            self._known.pop(old, None)
        return self._to_replicas(action)

    def _applied(self, device: _Device, event: events.Applied) -> list[Output]:
        if device.state is DeviceState.ALIGNING:
            device.answer = event
            return self._judge_aligned(device)
        if device.name in self._awaited.get(event.step, {}):
            self._awaited[event.step][device.name] = event.state_digest
        return self._judge(event.step)

    def _judge(self, step: int) -> list[Output]:
        """One answer for all, once all have answered; which of them differ, if they do."""
        answers = self._awaited.get(step, {})
        if not answers or None in answers.values():
            return []
        del self._awaited[step]
        digests = {name: digest for name, digest in answers.items() if digest is not None}
        first = next(iter(digests.values()))
        self._known[step] = first
        differing = {name: digest for name, digest in digests.items() if digest != first}
        outputs: list[Output] = [Give(events.Applied(step, first, differing))]
        for device in self._devices.values():
            outputs += self._judge_aligned(device)
        return outputs

    def _judge_aligned(self, device: _Device) -> list[Output]:
        """A device has loaded a sibling's state: it takes part if it has that sibling's digest."""
        answer = device.answer
        if device.state is not DeviceState.ALIGNING or answer is None:
            return []
        known = self._known.get(answer.step)
        if known is None:
            return []
        device.answer = None
        if known != answer.state_digest:
            return self._leave_out(device, f"its state after {answer.step} steps differs")
        device.state = DeviceState.ACTIVE
        text = f"device {device.name!r} takes part from step {self._step} on"
        return [Remark(device.name, text, wrong=False)]

    # What devices say.

    def told(self, name: str, event: events.Event) -> list[Output]:
        """What came of a device's work."""
        device = self._devices[name]
        if not device.here:
            return []
        match event:
            case events.Built() | events.BuildFailed():
                return self._built(device, event)
            case events.TaskRefused():
                return [Give(event)]
            case events.BlockSum():
                return self._block_sum(device, event)
            case events.NodeDone():
                return self._node_done(device, event)
            case events.MicrobatchRows():
                return self._rows(device, event)
            case events.NotFinite():
                return [Give(replace(event, device=name))] if self._owes(device, event) else []
            case events.StretchStep() | events.BoundaryReached():
                return [Give(event)] if (event.place, event.node) in device.parts else []
            case events.StretchStateWanted():
                if (event.place, event.node) not in device.parts:
                    return []
                device.waiting.add((event.place, event.node))
                return [Give(event)]
            case events.FilesWanted():
                return self._files_wanted(device, event)
            case events.Applied():
                return self._applied(device, event)
            case events.PartEvaluated():
                return self._evaluated(device, event)
            case events.StateCopied():
                return self._copied(device, event)
            case events.DeviceFailed():
                return self._failed(device, event)
            case events.DevicesLost() | events.DeviceNoted() | events.SlicesAveraged():
                raise AssertionError("of a host, not of a device")

    def _owes(
        self,
        device: _Device,
        event: events.BlockSum | events.NodeDone | events.NotFinite | events.MicrobatchRows,
    ) -> _Work | None:
        """The work that a result belongs to, if it is still wanted of this device."""
        here = any(place == event.place and part.covers(event.node) for place, part in device.parts)
        return self._work_of(event.place, event.node) if here else None

    def _block_sum(self, device: _Device, event: events.BlockSum) -> list[Output]:
        work = self._owes(device, event)
        whole = work.add_block(event) if work is not None else None
        return [] if whole is None else [Give(whole)]

    def _node_done(self, device: _Device, event: events.NodeDone) -> list[Output]:
        work = self._owes(device, event)
        device.measured_ms.append(event.elapsed_ms / event.node.leaves)
        if work is None:
            return []
        if not is_finite_loss(event.loss):
            return [Give(events.NotFinite(event.place, event.node, None, device.name))]
        device.parts.remove((event.place, event.node))
        loss = work.add_loss(event)
        if loss is None:
            return []
        self._works.remove(work)
        return [Give(events.NodeDone(work.place, work.node, loss, self._elapsed_ms(work)))]

    def _elapsed_ms(self, work: _Work) -> float:
        """What the node took of the host's time, as if its devices had been evenly busy."""
        rates = [1 / max(median(d.measured_ms), 1e-3) for d in self._active() if d.measured_ms]
        return work.node.leaves / sum(rates) if rates else work.slowest_ms

    def _rows(self, device: _Device, event: events.MicrobatchRows) -> list[Output]:
        work = self._owes(device, event)
        if work is None or event.microbatch in work.rows:
            return []
        work.rows.add(event.microbatch)
        return [Give(replace(event, node=work.node))]

    def _files_wanted(self, device: _Device, event: events.FilesWanted) -> list[Output]:
        if event.for_node is None:
            return [Give(event)]
        place, microbatches, part = event.for_node
        work = self._work_of(place, part)
        if work is None or (place, part) not in device.parts:
            return []
        device.waiting.add((place, part))
        return [Give(replace(event, for_node=(place, microbatches, work.node)))]

    def _evaluated(self, device: _Device, event: events.PartEvaluated) -> list[Output]:
        if (event.step, event.part) not in device.evaluations:
            return []
        device.evaluations.discard((event.step, event.part))
        return [Give(event)]

    # Devices that are lost.

    def _failed(self, device: _Device, event: events.DeviceFailed) -> list[Output]:
        """It says itself that it is of no use: another process would fare no better."""
        if isinstance(event.error, BackendUnavailable):
            return [Give(event)]  # without it the host is not what was asked for
        words = " ".join(str(event.error).split())
        outputs: list[Output] = [End(device.name)]
        if len(self._here()) > 1:
            outputs.append(Remark(device.name, f"device {device.name!r} is left out: {words}"))
        return [*outputs, *self._without(device, event.error)]

    def lost(self, name: str, reason: str) -> list[Output]:
        """A device's process has ended, for a reason that it could not tell itself."""
        device = self._devices[name]
        if not device.here:
            return []
        what = f"the process of device {name!r} {reason}"
        if device.restarts >= MOST_RESTARTS:
            outputs: list[Output] = [Remark(name, f"{what}; it is left out")]
            return [*outputs, *self._without(device, DeviceError(name, f"its process {reason}"))]
        device.restarts += 1
        again = f"begun again, {device.restarts} of at most {MOST_RESTARTS} times"
        outputs = [Remark(name, f"{what}; {again}"), Begin(name)]
        was_active = device.state is DeviceState.ACTIVE
        orphans = self._orphans(device)
        device.state, device.builds = DeviceState.PREPARING, 0
        if self._open:
            outputs.append(ToDevice(name, act.OpenDevice()))
        if self._build is not None:
            device.builds = 1
            outputs.append(ToDevice(name, replace(self._build, keep=False)))
        return [*outputs, *self._after_loss(orphans, f"{what}", was_active=was_active)]

    def _without(self, device: _Device, error: Exception) -> list[Output]:
        was_active = device.state is DeviceState.ACTIVE
        orphans = self._orphans(device)
        device.state = DeviceState.GONE
        if not self._here():
            return [Give(events.DeviceFailed(error))]
        after = self._after_loss(orphans, str(error), was_active=was_active)
        return [*after, *self._settle()]

    def _orphans(self, device: _Device) -> tuple[list[act.DeviceAction], list[str | None]]:
        """What a device owed, as orders; it owes nothing any more."""
        computes: list[act.DeviceAction] = [
            act.Compute(place, work.microbatches, part)
            for place, part in device.parts
            if (work := self._work_of(place, part)) is not None
        ]
        evaluations = [act.Evaluate(step, part) for step, part in sorted(device.evaluations)]
        copies = list(device.copies)
        device.forget()
        return [*computes, *evaluations], copies

    def _after_loss(
        self,
        orphans: tuple[list[act.DeviceAction], list[str | None]],
        reason: str,
        *,
        was_active: bool,
    ) -> list[Output]:
        """The others go on with what a device owed."""
        if self._reference is None or not was_active:
            return []
        if not self._active():
            self._build = None
            return [Give(events.DevicesLost(reason))]
        outputs: list[Output] = []
        orders, copies = orphans
        for order in orders:
            if isinstance(order, act.Compute):
                work = self._work_of(order.place, order.node)
                assert work is not None
                outputs += self._divide(work, range(order.node.lo, order.node.hi))
            elif isinstance(order, act.Evaluate):
                outputs += self._evaluate(order)
        for whom in copies:
            if whom is None or self._devices[whom].state is DeviceState.ALIGNING:
                outputs += self._copy_again(whom)
        for step in list(self._awaited):
            for name in set(self._awaited[step]) - {d.name for d in self._active()}:
                del self._awaited[step][name]
            outputs += self._judge(step)
        return outputs

    def _copy_again(self, whom: str | None) -> list[Output]:
        """What was held since the first copy was asked for is in the state that is copied now."""
        if whom is not None:
            self._devices[whom].held = []
        return self._copy_for(whom)


def is_finite_loss(loss: Loss) -> bool:
    """Whether it can be added to others and still be told from what spoilt it."""
    return abs(loss.loss_sum) < float("inf")


def _unlike_tasks(built: Sequence[events.Built]) -> str:
    """Why the devices have built unlike tasks though they read the same run spec on one machine;
    empty if all are alike."""
    one = built[0]
    for other in built[1:]:
        ours, theirs = one.manifest.digests, other.manifest.digests
        unlike = [key for key in sorted(ours.keys() | theirs) if ours.get(key) != theirs.get(key)]
        if not unlike and one.manifest.digest() != other.manifest.digest():
            unlike = ["model shape, sample counts or metrics"]
        if one.initial_digest != other.initial_digest:
            unlike.append("initial weights")
        if unlike:
            return (
                f"expected the task to build the same {', '.join(unlike)} on each device of this "
                "machine, got others on each: draw from a generator that is seeded with the run "
                "spec's seed"
            )
    return ""


def _kind(built: events.Built) -> tuple[str, str]:
    """Devices of which this is equal give the same bits."""
    return built.manifest.digest(), built.signature
