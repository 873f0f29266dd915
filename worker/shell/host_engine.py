"""Several devices that do a worker's work together: what `engine.Engine` is for one.

All decisions are in `worker.logic.host`; this thread plays them. Sums are merged in it as well,
away from the network. Where the devices are, and how they are reached, is for others to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from backends.base.interface import Array
from protocol.host.machine import Machine
from worker.logic import actions as act
from worker.logic import events
from worker.logic import host as outputs
from worker.logic.host import Host
from worker.shell.engine import Taken

Told = Callable[[events.Event], None]
Lost = Callable[[str], None]


class Link(Protocol):
    """The way to one device. What is said about a device that is lost comes before that."""

    def give(self, action: act.DeviceAction, done: Taken) -> None:
        """Have it do this; then `done` is called, also if it never does."""

    def end(self) -> None:
        """End it. Nothing is heard of it any more."""


class Devices(Protocol):
    """Where the devices of a host are."""

    def allocate(self, elements: int) -> Array:
        """Flat float32 that all devices can read."""

    def shared(self, values: Array, *, once: bool) -> Array:
        """The values where all devices can read them; `once`: no more of that size will come."""

    def begin(self, name: str, told: Told, lost: Lost) -> Link:
        """Begin with a device.

        Args:
            name: Of the device.
            told: To be called with what comes of its work.
            lost: To be called once if it ends before it is to, with how: "was ended by SIGKILL".
        """

    def close(self) -> None:
        """All are ended: wait until they are gone."""


def _nobody_waits() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Several:
    """What a host's engine works with.

    Attributes:
        names: Of the devices.
        devices: Where they are.
    """

    names: Sequence[str]
    devices: Devices
    warn: Callable[[str], None] = print
    """Takes what a person is to know in any case; any thread may call it."""


class HostEngine:
    """Call its methods from one other thread; see `engine.Engine` for what they are for.

    Args:
        several: The devices.
        emit: Called in this object's thread.
        tell: Takes what a person wants to know; any thread may call it.
        machine: That this process runs on.
    """

    def __init__(
        self,
        several: Several,
        emit: Callable[[events.Event], None],
        tell: Callable[[str], None],
        machine: Machine,
    ) -> None:
        self._host = Host(several.names)
        self._count = len(several.names)
        self._devices = several.devices
        self._emit = emit
        self._tell, self._warn = tell, several.warn
        self._links: dict[str, Link] = {}
        self._thread = machine.device_thread("engine")
        self._decide(self._host.begin)

    @property
    def devices(self) -> int:
        """How many there are."""
        return self._count

    def allocate(self, elements: int) -> Array:
        """Memory for averages, where the devices read them. Any thread may ask for it.

        Raises:
            SharedMemoryFull: There is none; DeviceFailed follows.
        """
        return self._devices.allocate(elements)

    def do(self, action: act.DeviceAction, taken: Taken | None = None) -> None:
        """See `Engine.do`."""
        self._decide(lambda: self._host.do(self._shared(action)), taken)

    def close(self) -> None:
        """End all devices, and wait for them."""
        self._decide(self._end_all)
        self._thread.close(10)
        self._devices.close()

    # In its own thread.

    def _decide(
        self, decide: Callable[[], list[outputs.Output]], taken: Taken | None = None
    ) -> None:
        def job() -> Iterator[None]:
            try:
                self._play(decide(), taken)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the session must hear of it
                self._emit(events.DeviceFailed(error))
            yield from ()

        self._thread.submit(job)

    def _shared(self, action: act.DeviceAction) -> act.DeviceAction:
        match action:
            case act.Apply():
                shared = [self._devices.shared(each, once=False) for each in action.averages]
                return replace(action, averages=shared)
            case act.LoadChunk():
                return replace(action, values=self._devices.shared(action.values, once=True))
            case _:
                return action

    def _play(self, decided: list[outputs.Output], taken: Taken | None) -> None:
        left = sum(isinstance(output, outputs.ToDevice) for output in decided)

        def done() -> None:
            nonlocal left
            left -= 1
            if left == 0 and taken is not None:
                taken()

        if not left and taken is not None:
            taken()
        for output in decided:
            match output:
                case outputs.ToDevice():
                    later = _nobody_waits if taken is None else lambda: self._later(done)
                    # A sibling's state lies in that device's memory, which no other reads.
                    action = self._shared(output.action)
                    self._links[output.device].give(action, later)
                case outputs.Begin():
                    self._links[output.device] = self._begin(output.device)
                case outputs.End():
                    self._links.pop(output.device).end()
                case outputs.Give():
                    self._emit(output.event)
                case outputs.Remark():
                    self._told(output)

    def _told(self, output: outputs.Remark) -> None:
        if not output.wrong:
            self._tell(output.text)
            return
        self._warn(output.text)
        self._emit(events.DeviceNoted(output.device, output.text))

    def _later(self, done: Taken) -> None:
        """Counting is for one thread."""

        def job() -> Iterator[None]:
            done()
            yield from ()

        self._thread.submit(job)

    def _begin(self, name: str) -> Link:
        def told(event: events.Event) -> None:
            self._decide(lambda: self._host.told(name, event) if is_current() else [])

        def lost(reason: str) -> None:
            self._decide(lambda: self._host.lost(name, reason) if is_current() else [])

        def is_current() -> bool:
            return self._links.get(name) is link

        link = self._devices.begin(name, told, lost)
        return link

    def _end_all(self) -> list[outputs.Output]:
        return [outputs.End(name) for name in self._links]
