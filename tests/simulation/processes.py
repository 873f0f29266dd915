"""The processes of a simulated cluster: the product's service and client, run as by `main`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

from coordinator.files.blob_index import index_blobs
from coordinator.run.outputs.events import Event
from coordinator.service.execution import Execution
from coordinator.service.service import Service, Settings
from protocol.base.errors import SamestepError, StorageFailed, UsageError
from protocol.base.fields import Duty
from protocol.exact.replica import Replica
from tests.simulation.device import DeviceEnvironment, Flaws, SimulatedDevice
from tests.simulation.device_group import DeviceFactory, SimulatedDevices
from tests.simulation.ledger import Ledger
from tests.simulation.machine import Device, SimulatedMachine
from tests.simulation.network import SimulatedAcceptor
from tests.simulation.peers import links_of
from tests.simulation.virtual_time import Process
from worker.join.credentials import WorkerCredentials
from worker.shell.client import Client, Target
from worker.shell.engine import Engine
from worker.shell.group_engine import DeviceSet

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

_PATIENCE_S: Final = 1e6
"""A worker never gives up."""
_CATCH_UP_MS: Final = (0.0, 0.0, 1000.0, 5000.0)


class CoordinatorProcess(Process):
    """One coordinator, from its start to its end.

    Attributes:
        service: The product's service.
        pace_ms: Longest duration of a job on disk or replica.
        at_commit: Action to run while the next commit is being written.
        at_sync: Action that kills the process between the next commit's write and its sync.
        trust: The run whose commits the replica cannot check yet, and the first such step.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.clock, f"10.1.0.{len(cluster.coordinators)}")
        self._cluster = cluster
        self.pace_ms = cluster.rng.choice((1.0, 10.0, 60.0))
        self.at_commit: Any = None
        self.at_sync: Any = None
        self.trust: tuple[Execution | None, int] = (None, 0)
        self.machine = SimulatedMachine(
            self, lambda: self.pace_ms * cluster.disk.slowness, cluster.rng.choice(_CATCH_UP_MS)
        )
        self.service: Service | None = None
        self.clock.after(0.0, lambda: self.loop.create_task(self._main()), self)

    def any_thread(self) -> Any:
        return self.machine.thread("any")

    @property
    def execution(self) -> Execution | None:
        """Return the run in progress."""
        return self.service.current if self.service is not None else None

    @property
    def ledger(self) -> Ledger:
        """Return the ledger of the run in progress."""
        assert self.execution is not None
        return self._ledger(self.execution)

    def _ledger(self, execution: Execution) -> Ledger:
        ledger = next(x for x in self._cluster.ledgers if x.directory.path == execution.directory)
        ledger.run_id = execution.run.run_id
        return ledger

    async def _main(self) -> None:
        """Run like `coordinator.main`."""
        cluster = self._cluster
        settings = Settings(
            (self.host, 9000), cluster.expect_workers, cluster.disk.root, once=False, plaintext=True
        )
        acceptor = partial(SimulatedAcceptor, cluster.network, self)
        self.service = service = Service(settings, self.machine, lambda greet, _: acceptor(greet))
        service.event_sinks.append(self)
        try:
            await service.start()
            for ledger in cluster.ledgers:
                if ledger.outcome is None:
                    self._queue(service, ledger)
            await service.should_end.wait()
        except (StorageFailed, UsageError) as error:
            if not cluster.is_disk_failure(str(error)):
                raise
        await service.stop()
        self.clock.after(0.0, self.leave, self)

    def _queue(self, service: Service, ledger: Ledger) -> None:
        path = ledger.directory.path
        if not ledger.run_id:
            spec = ledger.spec
            ledger.run_id = service.submit(spec, path, index_blobs(spec))
            return
        assert ledger.directory.run_file.exists(), "a run that was accepted is lost"
        if service.resume(path) is None:
            ledger.check_unreported_result()

    def leave(self) -> None:
        """End normally."""
        self.kill()

    def kill(self) -> None:
        """Kill the process: connections break, and disk operations may be half done."""
        self._die()
        for link in self._cluster.network.links:
            link.on_process_death(self)

    def vanish(self) -> None:
        """Turn off the machine: no peer is notified."""
        self._die()
        for link in self._cluster.network.links:
            if self in (link.client.process, link.server.process):
                link.set_blocked(is_blocked=True)

    def _die(self) -> None:
        if not self.alive:
            return
        disk = self._cluster.disk
        self.clock.current = self
        for thread in self.machine.threads:
            thread.abort(disk)
        # This runs `finally` clauses; the files that they open belong to this process too.
        self.end()
        self.clock.current = None
        disk.close(self.fds)
        self._cluster.network.stop_listening(self)

    # coordinator.service.events.EventSink

    def emit(self, event: Event, run_id: str = "") -> None:
        del run_id
        self._cluster.check_product(lambda: self._check_event(event.name, event.fields()))

    def _check_event(self, event: str, fields: Mapping[str, Any]) -> None:
        cluster, service = self._cluster, self.service
        assert service is not None
        cluster.events += 1
        assert event != "internal_error", f"{event}: {fields}"
        if event == "run_ended":
            self._run_ended(service)
        elif event == "run_resumed":
            instance = service._running
            assert instance is not None
            self.ledger.check_start(instance)
            assert instance.restart is not None
            for segment, limit in instance.restart.recovery.index._segments_from(0):
                count = min(limit, segment.next_step) - segment.header.base_step
                end = segment.ends[count - 1] if count else segment.start
                is_durable = cluster.disk.has_synced(segment.path, end)
                assert is_durable, "the run continues from a commit that was not synced"
        if service.current is None:
            return
        ledger = self.ledger
        ledger.counts[event] += 1
        if event == "halted":
            if cluster.coordinator is self:  # a successor may have truncated its file
                ledger.check_halt(str(fields["reason"]))
            cluster.on_halt(self, service.current)
        elif event in ("restarted", "continued"):
            ledger.restarts += 1
        elif event == "redone_otherwise":
            ledger.differing_step = fields["step"]
        elif event == "evaluated":
            step = fields["step"]
            assert fields["ratio"] == ledger.job.metric(ledger.expected(step).replica)
            ledger.evaluated_step = max(ledger.evaluated_step, step)
            ledger.counts["evaluated_late"] += step < service.current.run.steps_committed

    def _run_ended(self, service: Service) -> None:
        execution = service.finished
        assert execution is not None
        assert execution.outcome is not None
        drained = execution.outcome.outcome == "drained"
        if execution.is_superseded or (drained and self._cluster.coordinator is not self):
            return  # a successor may continue from the result before its writer reports it
        ledger = self._ledger(execution)
        coordinator_replica = execution._coordinator_replica
        has_final_state = execution.run.has_state and coordinator_replica is not None
        ledger.check_end(
            execution.outcome,
            coordinator_replica._replica if has_final_state and coordinator_replica else None,
            execution.run.losses,
        )


class WorkerProcess(Process):
    """One worker: it reconnects until it is drained.

    Attributes:
        has_flipped_bit: Whether a bit of the worker's replica has flipped.
        cache: Directory for fetched files, once the worker has started.
        draining_since_ms: Time of the drain request.
        only_dials: Whether no other worker can reach this one.
        is_on_coordinator_host: Whether the worker runs on the coordinator's machine.
        send_delay_ms: Additional delay of messages to other workers.
    """

    def __init__(self, cluster: Cluster, flaws: Flaws) -> None:
        self.instance = len(cluster.workers)
        super().__init__(cluster.clock, f"10.0.0.{self.instance}")
        self._cluster = cluster
        self.flaws = flaws
        self.has_flipped_bit = False
        self.draining_since_ms = math.inf
        self.only_dials = cluster.wiring.random() < 0.15
        self.is_on_coordinator_host = cluster.wiring.random() < 0.3
        self.send_delay_ms = 0.0
        self.client: Client | None = None
        self.cache: Path | None = None
        self.devices: SimulatedDevices | None = None
        self.canceled: set[Any] = set()
        self.newest: dict[str, int] = {}
        self.machine = SimulatedMachine(self, lambda: 2.0)
        self.loop.connect = partial(cluster.network.connect, self)
        self.clock.after(20 * cluster.rng.random(), self._begin, self)

    def any_thread(self) -> Any:
        return self.machine.thread("any")

    @property
    def draining(self) -> bool:
        """Return whether the worker was asked to leave."""
        return self.draining_since_ms < math.inf

    @property
    def replica(self) -> Replica | None:
        engine = self.client._engine if self.client is not None else None
        job = engine._job if isinstance(engine, Engine) else None
        return job.replica if job is not None else None

    def _begin(self) -> None:
        cluster = self._cluster

        def device(
            charge: Callable[[float], None],
            replica: Callable[[], Replica | None] = lambda: None,
        ) -> SimulatedDevice:
            environment = DeviceEnvironment(
                cluster.rng, cluster.job, cluster.poison, charge, replica, self._flip
            )
            return SimulatedDevice(self.flaws, environment)

        name = f"worker-{self.instance}"
        self.client = Client(
            Target("coordinator", 9000, name, "scripted", _PATIENCE_S, self._duty),
            self._device_set(device) or device(self._charge, lambda: self.replica),
            WorkerCredentials(plaintext=True, environment=dict(os.environ)),
            lambda _: None,
            cache=cluster.cache(self),
            machine=self.machine,
            links=links_of(cluster.peers, self),
        )
        self.loop.create_task(self._main(self.client))

    @property
    def _duty(self) -> Duty:
        return "evaluate" if self.flaws.evaluates else "train"

    def _device_set(self, device_factory: DeviceFactory) -> DeviceSet | None:
        """Return several devices for some workers, None for others; a device's process may die
        alone."""
        rng = Random(f"{self._cluster.seed} {self.instance}")
        if rng.random() < 0.7:
            return None
        self.devices = SimulatedDevices(self, rng, device_factory, self.flaws.flips, self._flip)
        names = [f"device{n}" for n in range(rng.choice((2, 2, 3)))]
        return DeviceSet(names, self.devices, lambda _: None)

    def _charge(self, ms: float) -> None:
        assert isinstance(self.machine.device, Device)
        self.machine.device.charge(ms)

    async def _main(self, client: Client) -> None:
        try:
            await client.serve()
        except SamestepError as error:
            self._cluster.check_product(partial(self._check_end, error))
        self.clock.after(0.0, self.kill, self)

    def _check_end(self, error: SamestepError) -> None:
        if self.flaws.evaluates and self.has_flipped_bit and "its state after" in str(error):
            return  # an evaluator with a wrong state is dismissed, and the run does not halt
        if self.devices is not None and self.devices.are_worn_out():
            return
        raise AssertionError(f"a worker ends without a cause: {error}")

    def _flip(self) -> int:
        self.has_flipped_bit = True
        self._cluster.on_flip(self)
        return 1 << (16 + self.instance % 7)

    def drain(self) -> None:
        """Send SIGTERM."""
        self.draining_since_ms = min(self.draining_since_ms, self.clock.now_ms)
        if self.client is None:
            self.kill()
        else:
            self.do(self.client.drain)

    def end(self) -> None:
        """End the process: close its files, as the system does, and remove the links to its
        inputs."""
        links = self.devices.links if self.devices is not None else []
        for machine in (self.machine, *(link.machine for link in links)):
            for thread in machine.threads:
                thread.stop()
        super().end()
        if self.client is not None:
            self.client._files._close_part()
            self.client._files._remove_inputs()

    def crash(self) -> None:
        """Crash the machine: partly fetched files may have wrong content."""
        if not self.alive:
            return
        self.kill()
        assert self.cache is not None
        for part in sorted(self.cache.rglob("*.part")):
            content = bytearray(part.read_bytes())
            if content:
                content[self._cluster.rng.randrange(len(content))] ^= 1
                part.write_bytes(content)

    def kill(self) -> None:
        """Send SIGKILL: data in transit may or may not arrive."""
        if self.alive:
            self.end()
            for link in self._cluster.network.links:
                link.on_process_death(self)
