"""A simulated worker that is a host: its devices are engines of their own, whose processes die.

Decisions, the engine of the host and those of the devices are the product's. Orders and reports
take their time, in order; what a device was about to report when it dies is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Final

import numpy as np

from backends.base.interface import Array
from protocol.exact.replica import Replica
from tests.simulation.device import SimulatedDevice
from tests.simulation.machine import Device, SimulatedMachine
from tests.simulation.virtual_time import Process
from worker.logic import actions as act
from worker.logic import events
from worker.logic.host import MOST_RESTARTS, as_reported
from worker.shell.engine import Engine, Taken
from worker.shell.host_engine import Lost, Told

_LATENCY_MS: Final = 0.2

MakeDevice = Callable[[Callable[[float], None], Callable[[], Replica | None]], SimulatedDevice]
"""Takes what lets time pass for the device, and what gives its replica."""


class SimulatedDevices:
    """See `worker.shell.host_engine.Devices`.

    Args:
        process: The host's.
        rng: Decides which device dies, and when.
        make: Makes the device of a process.
    """

    def __init__(self, process: Process, rng: Random, make: MakeDevice) -> None:
        self._process = process
        self._rng = rng
        self._make = make
        self.links: list[_Link] = []

    def allocate(self, elements: int) -> Array:
        return np.full(elements, np.nan, np.float32)

    def shared(self, values: Array, *, once: bool) -> Array:
        del once
        return values

    def begin(self, name: str, told: Told, lost: Lost) -> _Link:
        self.links.append(_Link(name, self._process, self._make, told, lost))
        if self._rng.random() < 0.3:
            after_ms = self._rng.choice((30.0, 300.0, 3000.0)) * self._rng.random()
            self._process.clock.after(after_ms, self.links[-1].die, self._process)
        return self.links[-1]

    def are_worn_out(self) -> bool:
        """Whether each process has died once more than it is begun again."""
        died = Counter(link.name for link in self.links if link.died)
        return min(died[link.name] for link in self.links) > MOST_RESTARTS

    def close(self) -> None:
        """They end with the process."""


class _Link:
    """One device and the way to it."""

    def __init__(
        self, name: str, process: Process, make: MakeDevice, told: Told, lost: Lost
    ) -> None:
        self.name = name
        self.died = False
        self._process = process
        self._told, self._lost = told, lost
        self._alive = True
        self._last_ms = 0.0
        self._taken: list[Taken] = []
        machine = SimulatedMachine(process, lambda: 2.0)
        self.machine = machine

        def charge(ms: float) -> None:
            assert isinstance(machine.device, Device)
            machine.device.charge(ms)

        self.engine = Engine(make(charge, self._replica), self._report, machine=machine)

    def _replica(self) -> Replica | None:
        return self.engine._job.replica if self.engine._job is not None else None

    def give(self, action: act.DeviceAction, done: Taken) -> None:
        if self._alive:
            if isinstance(action, act.Apply | act.LoadChunk):
                self._taken.append(done)
            else:
                done()
            self._later(lambda: self.engine.do(action, self._took))
        else:
            done()

    def end(self) -> None:
        self._alive = False

    def die(self) -> None:
        """SIGKILL: the host hears of it after what the device has said."""
        if not self._alive:
            return
        self._alive, self.died = False, True
        self.engine.cancel()
        for thread in self.machine.threads:
            thread.stop()
        self._later(self._gone, always=True)

    def _gone(self) -> None:
        for taken in self._taken:
            taken()
        self._lost("was ended by SIGKILL")

    def _later(self, do: Callable[[], None], *, always: bool = False) -> None:
        clock = self._process.clock
        self._last_ms = max(self._last_ms, clock.now_ms + _LATENCY_MS)

        def if_alive() -> None:
            if self._alive or always:
                do()

        clock.at(self._last_ms, if_alive, self._process)

    def _report(self, event: events.Event) -> None:
        if self._alive:
            reported = as_reported(event)
            # What was sent before a death is read after it.
            self._later(lambda: self._told(reported), always=True)

    def _took(self) -> None:
        if self._alive:
            self._later(self._taken.pop(0), always=True)
