"""A simulated worker with several devices: separate engines, whose processes may die.

The group's logic and engine and the devices' engines are the product's. Orders and reports take
time and stay in order; a device that dies loses the report that it was about to send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

import numpy as np

from backends.base.interface import Array
from protocol.exact.reduction.average import is_finite
from protocol.exact.replica import Replica
from protocol.exact.update import StepScalars
from protocol.spec.manifest import Block
from protocol.spec.sections.optimizer import OptimizerSpec
from tests.simulation.device import SimulatedDevice
from tests.simulation.machine import Device, SimulatedMachine
from tests.simulation.virtual_time import Process
from worker.logic import actions as act
from worker.logic import events
from worker.logic.device_group import MOST_RESTARTS, replace_non_finite
from worker.shell.engine import Engine
from worker.shell.group_engine import LossHandler, ReportHandler

_LATENCY_MS: Final = 0.2

DeviceFactory = Callable[[Callable[[float], None]], SimulatedDevice]
"""Builds a device; its argument is the function that lets time pass for the device."""


class SimulatedDevices:
    """See `worker.shell.group_engine.Devices`.

    Args:
        process: The worker's process.
        rng: Decides which device dies, and when.
        make: Builds the device of a process.
        flips: Steps after which a bit of the group's replica flips.
        flip: Chooses the bit that flips now, and records the flip.
    """

    preparing = ""

    def __init__(
        self,
        process: Process,
        rng: Random,
        device_factory: DeviceFactory,
        flips: set[int],
        flip: Callable[[], int],
    ) -> None:
        self._process = process
        self._rng = rng
        self._device_factory = device_factory
        self._flips, self._flip = flips, flip
        self.links: list[_Link] = []

    def replica(self, blocks: tuple[Block, ...], optimizer: OptimizerSpec) -> Replica:
        return _FlippingReplica(blocks, optimizer, self._flips, self._flip)

    def start(self, name: str, reported: ReportHandler, lost: LossHandler) -> _Link:
        self.links.append(_Link(name, self._process, self._device_factory, reported, lost))
        if self._rng.random() < 0.3:
            after_ms = self._rng.choice((30.0, 300.0, 3000.0)) * self._rng.random()
            self._process.clock.after(after_ms, self.links[-1].die, self._process)
        return self.links[-1]

    def are_worn_out(self) -> bool:
        """Return whether each process has died once more than it may be restarted."""
        death_counts = Counter(link.name for link in self.links if link.has_died)
        return min(death_counts[link.name] for link in self.links) > MOST_RESTARTS

    def close(self) -> None:
        """Do nothing: the devices end with the process."""


class _FlippingReplica(Replica):
    """A replica in whose memory a bit flips after some steps."""

    def __init__(
        self,
        blocks: tuple[Block, ...],
        optimizer: OptimizerSpec,
        flips: set[int],
        flip: Callable[[], int],
    ) -> None:
        super().__init__(blocks, optimizer)
        self._flips, self._flip = flips, flip

    def apply(
        self, averages: Sequence[Array], scalars: StepScalars, *, should_hash: bool = False
    ) -> None:
        if self.step + 1 in self._flips:
            self._flips.discard(self.step + 1)
            self.parameters[1].view(np.uint32)[0] ^= self._flip()
        super().apply(averages, scalars, should_hash=should_hash)


class _Link:
    """One device and its connection."""

    def __init__(
        self,
        name: str,
        process: Process,
        device_factory: DeviceFactory,
        reported: ReportHandler,
        lost: LossHandler,
    ) -> None:
        self.name = name
        self.has_died = False
        self._process = process
        self._reported, self._lost = reported, lost
        self._is_alive = True
        self._last_ms = 0.0
        machine = SimulatedMachine(process, lambda: 2.0)
        self.machine = machine

        def charge(ms: float) -> None:
            assert isinstance(machine.device, Device)
            machine.device.charge(ms)

        self.engine = Engine(device_factory(charge), self._report, machine=machine, in_group=True)

    def send(self, order: act.GroupOrder) -> None:
        self._later(lambda: self.engine.do(order))

    def end(self) -> None:
        self._is_alive = False

    def die(self) -> None:
        """Kill the device's process; the worker learns of this after the device's earlier
        reports."""
        if not self._is_alive:
            return
        self._is_alive, self.has_died = False, True
        self.engine.do(act.CancelWork())
        for thread in self.machine.threads:
            thread.stop()
        self._later(self._report_loss, always=True)

    def _report_loss(self) -> None:
        self._lost("was ended by SIGKILL")

    def _later(self, action: Callable[[], None], *, always: bool = False) -> None:
        clock = self._process.clock
        self._last_ms = max(self._last_ms, clock.now_ms + _LATENCY_MS)

        def run_if_alive() -> None:
            if self._is_alive or always:
                action()

        clock.at(self._last_ms, run_if_alive, self._process)

    def _report(self, event: events.GroupReport) -> None:
        if self._is_alive:
            reported = replace_non_finite(event, lambda sums: sums if is_finite(sums) else None)
            # Reports sent before the death are read after it.
            self._later(lambda: self._reported(reported), always=True)
