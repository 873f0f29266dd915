"""A worker whose device waits, then returns the gradients of all blocks at once.

It isolates the exchange of a step: the previous step is over when the exchange starts, and nothing
is computed meanwhile. Everything except the device is the real worker. `benchmarks.sync` and
`benchmarks.shaped` start it.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvloop

from backends.base.interface import Batch, BlockGradient, Leaf, Loss, Program, Trainable
from backends.base.subtree_gradients import Microbatch, SubtreeGradients, sum_on_host
from backends.scripted import ScriptedBackend, ScriptedProgram
from protocol.base.errors import ExitCode
from protocol.machine.allocator import keep_freed_memory
from protocol.machine.trace import Tracer
from protocol.spec.run_spec import RunSpec
from worker.join.credentials import WorkerCredentials
from worker.shell.client import Client, Target
from worker.shell.device_processes import DeviceProcesses
from worker.shell.group_engine import DeviceSet
from worker.tasks.base.task import Task
from worker.tasks.small.scripted import Scripted


class ReadyProgram(ScriptedProgram):
    """Returns the same gradients, kept in memory, in every step."""

    def __init__(self, trainable: Trainable, quiet_ms: float) -> None:
        super().__init__(trainable, 0.0)
        self._quiet_s = quiet_ms / 1e3

    def gradients(self, leaves: Sequence[Leaf]) -> SubtreeGradients:
        """Return the gradients of all blocks, which are ready after the idle time."""
        closed = threading.Event()
        is_summed = len(leaves) > 1  # a subtree taken over from a late worker

        def begin(leaf: int, batch: Batch, seed: int) -> Microbatch:
            del leaf, seed
            return Microbatch(self._block_gradients(batch, closed, is_copied=is_summed), closed.set)

        if is_summed:
            return sum_on_host(leaves, begin, len(self._patterns))
        return SubtreeGradients(leaves, begin)

    def _block_gradients(
        self, batch: Batch, closed: threading.Event, *, is_copied: bool
    ) -> Iterator[BlockGradient | Loss]:
        if closed.wait(self._quiet_s):
            return
        for block in reversed(range(len(self._patterns))):
            pattern = self._patterns[block]
            yield BlockGradient(block, pattern.copy() if is_copied else pattern)
        yield Loss(0.0, batch.weight)


class ReadyBackend(ScriptedBackend):
    """A backend that compiles to `ReadyProgram`."""

    def compile(
        self,
        trainable: Trainable,
        example: Batch,
        other_batches: Sequence[Batch] = (),
        evaluations: Sequence[Batch] = (),
    ) -> Program:
        del example, other_batches, evaluations
        return ReadyProgram(trainable, self.microbatch_ms)


class ReadyDevice:
    """See `worker.shell.engine.BackendFactory`."""

    def __init__(self, quiet_ms: float) -> None:
        self._backend = ReadyBackend(quiet_ms)

    def backend(self) -> ReadyBackend:
        return self._backend

    def task(self, spec: RunSpec) -> Task:
        return Scripted(spec)


def create_device_set(devices: int, quiet_ms: float, trace: Path) -> DeviceSet:
    """Return several ready devices as one multi-device worker."""
    names: dict[str, int | str | None] = {f"device{number}": number for number in range(devices)}
    module = "benchmarks.ready_device"
    return DeviceSet([*names], DeviceProcesses(names, str(quiet_ms), print, trace, module))


async def serve(address: str, name: str, quiet_ms: float, trace: Path, devices: int) -> ExitCode:
    """Work for a coordinator until it ends the connection."""
    host, _, port = address.rpartition(":")
    target = Target(host, int(port), name, "scripted", 10.0)
    with Tracer(trace, name) as tracer:
        backend_factory = (
            create_device_set(devices, quiet_ms, trace) if devices > 1 else ReadyDevice(quiet_ms)
        )
        client = Client(target, backend_factory, WorkerCredentials(), lambda _: None, tracer)
        return await client.serve()


def main() -> None:
    """Run the command, which has the options of a worker that the benchmarks use."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--quiet-ms", type=float, required=True)
    parser.add_argument("--devices", type=int, default=1, help="number of devices")
    options = parser.parse_args()
    keep_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            serve(
                options.coordinator, options.name, options.quiet_ms, options.trace, options.devices
            )
        )


if __name__ == "__main__":
    main()
