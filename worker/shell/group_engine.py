"""The engine of a multi-device worker; `engine.Engine` is the engine of one device.

`worker.logic.device_group` decides; this thread executes its outputs. It owns the group's
replica and applies the exact update once for all devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from protocol.exact.kernels.library import use_threads
from protocol.exact.replica import Replica
from protocol.machine.machine import Machine
from protocol.machine.processor import usable_cores
from protocol.machine.trace import Tracer, now_us
from protocol.spec.manifest import Block
from protocol.spec.sections.optimizer import OptimizerSpec
from worker.logic import actions as act
from worker.logic import device_group as outputs
from worker.logic import events
from worker.logic.device_group import DeviceGroup
from worker.shell.engine import Release
from worker.shell.hashed_replica import HashedReplica, copy_state

_END_TIMEOUT_S: Final = 10.0

ReportHandler = Callable[[events.GroupReport], None]
LossHandler = Callable[[str], None]


class Link(Protocol):
    """The connection to one device."""

    def send(self, order: act.GroupOrder) -> None:
        """Send an order; the device executes orders in sequence."""

    def end(self) -> None:
        """End the device's process; its handlers are no longer called."""


class Devices(Protocol):
    """Starts the devices of a group, and allocates memory that they share."""

    def replica(self, blocks: tuple[Block, ...], optimizer: OptimizerSpec) -> Replica:
        """Allocate a replica in memory that all devices can read.

        Raises:
            SharedMemoryFull: The shared memory is full.
        """

    def start(self, name: str, on_report: ReportHandler, on_loss: LossHandler) -> Link:
        """Start a device.

        Args:
            name: The device's name.
            on_report: Called with each report of the device.
            on_loss: Called once with a description ("was ended by SIGKILL") if the device's process
                ends by itself.
        """

    @property
    def preparing(self) -> str:
        """Progress of the preparation of a task; empty while no task is prepared."""

    def close(self) -> None:
        """Wait until all processes have ended; the caller has ended all links."""


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """The devices of a group.

    Attributes:
        names: The devices' names.
        devices: Starts the devices.
    """

    names: Sequence[str]
    devices: Devices
    warn: Callable[[str], None] = print
    """Prints a warning, also with `--quiet`; any thread may call it."""


def _release_nothing() -> None:
    pass


class GroupEngine:
    """Drives the devices of a group, with the methods and threading rules of `engine.Engine`.

    Args:
        device_set: The devices.
        emit: Receives each event; called in this object's thread.
        print_line: Prints a line; any thread may call it.
        tracer: Records when each update ran.
        machine: Threads and clock.
    """

    def __init__(
        self,
        device_set: DeviceSet,
        emit: Callable[[events.Event], None],
        print_line: Callable[[str], None],
        tracer: Tracer | None,
        machine: Machine,
    ) -> None:
        self._tracer = tracer
        self._group = DeviceGroup(device_set.names)
        self._count = len(device_set.names)
        self._devices = device_set.devices
        self._emit = emit
        self._print_line, self._warn = print_line, device_set.warn
        self._links: dict[str, Link] = {}
        self._replica: Replica | None = None
        self._releases: deque[Release] = deque()
        """The `release` of each queued change of the replica."""
        self._thread = machine.device_thread("engine")
        self._hashed_replica = HashedReplica(
            machine,
            lambda step, digest: self._decide(lambda: self._group.replica_digest(step, digest)),
            lambda error: emit(events.DeviceFailed(error)),
        )
        self._decide(self._group.begin)

    @property
    def preparing(self) -> str:
        """See `Devices.preparing`."""
        return self._devices.preparing

    @property
    def is_hanging(self) -> bool:
        """Always False: a process whose device hangs is ended, and the others continue."""
        return False

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self._count

    def do(self, action: act.DeviceAction, release: Release = _release_nothing) -> None:
        """See `Engine.do`."""

        def decide() -> list[outputs.Output]:
            if isinstance(action, act.ReplicaAction):
                self._releases.append(release)
            return self._group.do(action)

        self._decide(decide)

    def close(self) -> bool:
        """End all devices and wait for them; see `Engine.close`."""
        self._decide(lambda: [outputs.Stop(name) for name in self._links])
        has_ended = self._thread.close(_END_TIMEOUT_S)
        self._hashed_replica.close()
        self._devices.close()
        return has_ended

    # In the engine's thread.

    def _decide(self, decide: Callable[[], list[outputs.Output]]) -> None:
        def job() -> Iterator[None]:
            try:
                for output in decide():
                    self._perform(output)
            except Exception as error:  # noqa: BLE001 -- the session must learn of every failure
                self._emit(events.DeviceFailed(error))
            yield from ()

        self._thread.submit(job)

    def _perform(self, output: outputs.Output) -> None:
        match output:
            case outputs.ToDevice():
                self._links[output.device].send(output.order)
            case outputs.Start():
                self._links[output.device] = self._start(output.device)
            case outputs.Stop():
                self._links.pop(output.device).end()
            case outputs.ResetReplica():
                self._reset(output)
            case outputs.ChangeReplica():
                self._change(output.action)
            case outputs.Attach():
                self._attach(output)
            case outputs.CopyReplica():
                self._emit(copy_state(self._built_replica))
            case outputs.Emit(events.Built() as event):
                self._hashed_replica.await_digest()
                step, digest = self._built_replica.step, self._built_replica.state_digest()
                self._emit(replace(event, step=step, state_digest=digest))
            case outputs.Emit():
                self._emit(output.event)
            case outputs.LogLine():
                self._log(output)

    @property
    def _built_replica(self) -> Replica:
        assert self._replica is not None, "the session requests work only after Built"
        return self._replica

    def _reset(self, output: outputs.ResetReplica) -> None:
        self._hashed_replica.await_digest()
        # The devices are idle during an update, so it may use all their threads.
        use_threads(min(output.spec.threads * self._count, usable_cores()))
        self._replica = None  # frees its memory before the next replica is allocated
        self._replica = self._devices.replica(output.blocks, output.spec.step_optimizer)
        self._replica.reset(output.parameters)

    def _change(self, action: act.ReplicaAction) -> None:
        start_us = now_us()
        try:
            self._hashed_replica.change(self._built_replica, action)
        finally:
            self._releases.popleft()()
        if self._tracer is not None and isinstance(action, act.Apply):
            self._tracer.span("apply step", "replica", start_us, step=self._built_replica.step)
        if not isinstance(action, act.LoadChunk):
            self._hashed_replica.start_hashing(self._built_replica)

    def _attach(self, output: outputs.Attach) -> None:
        replica = self._built_replica
        arrays = {str(kind): replica.arrays(kind) for kind in replica.kinds}
        order = act.AttachReplica(arrays, replica.step, replica.optimizer_step, output.was_reset)
        self._links[output.device].send(order)

    def _log(self, output: outputs.LogLine) -> None:
        if not output.is_warning:
            self._print_line(output.text)
            return
        self._warn(output.text)
        self._emit(events.DeviceWarning(output.device, output.text))

    def _start(self, name: str) -> Link:
        def on_report(event: events.GroupReport) -> None:
            self._decide(lambda: self._group.report(name, event) if is_current() else [])

        def on_loss(reason: str) -> None:
            self._decide(lambda: self._group.handle_loss(name, reason) if is_current() else [])

        def is_current() -> bool:
            return self._links.get(name) is link

        link = self._devices.start(name, on_report, on_loss)
        return link
