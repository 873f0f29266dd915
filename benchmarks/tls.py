"""The cost of TLS: gradient-sized frames through the transport on loopback, and whole steps.

`python -m benchmarks.tls [--megabytes N] [--rounds N]` measures alternately with and without TLS.
First it sends chunks of 4 MiB over one connection between two processes, which verify every frame.
"A core each" is the throughput per second of CPU time of the busier process: the rate if each
process had a core, even on a busy machine. "Loop" is the CPU time of the busier event loop's
thread, which blocks all other connections. Then it measures steps of a coordinator and two workers
whose devices sleep.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import ssl
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import uvloop

from benchmarks.cluster import Cluster, Interval, scripted_worker
from benchmarks.machine import print_heading, print_table
from benchmarks.timeline import intervals_us, step_times
from coordinator.members.credentials import CoordinatorCredentials
from protocol.base import limits
from protocol.base.errors import ProtocolError
from protocol.machine.allocator import keep_freed_memory
from protocol.wire import tls, tls_transport
from protocol.wire.acceptor import Acceptor
from protocol.wire.connection import Connection, Phase, ReceivedMessage, encode
from protocol.wire.messages import BlobChunk
from protocol.wire.transport import Channel

_TURNS: Final = 5
_SIZES: Final = (883_332, 5_555_556)
_MICROBATCH_MS: Final = 50.0
_PATIENCE_S: Final = 60.0
_WARMUP_STEPS: Final = 3
"""Steps that are not counted: the planner measures speeds and moves work in them."""


class _ByteCounter:
    """Counts received bytes; `all_received` is set when all expected bytes have arrived."""

    def __init__(self, expected_bytes: int) -> None:
        self.all_received = asyncio.Event()
        self._missing_bytes = expected_bytes

    def on_message(self, channel: Channel, received: ReceivedMessage) -> None:
        del channel
        assert received.body is not None
        self._missing_bytes -= len(received.body)
        if self._missing_bytes <= 0:
            self.all_received.set()

    def on_lost(self, channel: Channel, reason: str, error: ProtocolError | None) -> None:
        del channel, reason, error


def _channel(role: Any, owner: _ByteCounter) -> Channel:
    connection = Connection(role)
    connection.phase = Phase.OPEN
    return Channel(connection, owner, time.monotonic)


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds by the clock, of the processor, and of the event loop's thread."""

    clock_s: float
    process_s: float
    loop_s: float

    @staticmethod
    def now() -> _Times:
        return _Times(time.perf_counter(), time.process_time(), time.thread_time())

    def since(self, start: _Times) -> _Times:
        return _Times(
            self.clock_s - start.clock_s,
            self.process_s - start.process_s,
            self.loop_s - start.loop_s,
        )


async def _receive(port: int, megabytes: int, *, encrypted: bool) -> _Times:
    """Connect and receive all bytes."""
    loop = asyncio.get_running_loop()
    counter = _ByteCounter(megabytes * limits.MIB)
    start = _Times.now()
    channel = _channel("worker", counter)
    if encrypted:
        context = tls.client_context()
        await tls_transport.connect("127.0.0.1", port, context, channel, timeout_s=_PATIENCE_S)
    else:
        await loop.create_connection(lambda: channel, "127.0.0.1", port)
    await counter.all_received.wait()
    channel.abort("done")
    return _Times.now().since(start)


def _receiver(pipe: Any, megabytes: int) -> None:
    """Run the receiving process, which reads (port, encrypted) and answers with its times."""
    keep_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while (request := pipe.recv()) is not None:
            port, encrypted = request
            pipe.send(runner.run(_receive(port, megabytes, encrypted=encrypted)))


async def _measure_sending(pipe: Any, megabytes: int, context: ssl.SSLContext | None) -> _Times:
    """Measure sending; return the times of the busier process."""
    loop = asyncio.get_running_loop()
    body = np.random.default_rng(1).integers(0, 255, limits.BODY_BYTES, np.uint8)
    chunks = megabytes * limits.MIB // limits.BODY_BYTES

    send_tasks: list[asyncio.Task[None]] = []

    async def send_all(channel: Channel) -> None:
        for number in range(chunks):
            await channel.wait_for_room()
            metadata = {"digest": "0" * 64, "offset": number * limits.BODY_BYTES}
            channel.send(encode(BlobChunk(**metadata, run_id="r"), body))

    def accept_channel() -> Channel:
        channel = _channel("coordinator", _ByteCounter(1))
        send_tasks.append(loop.create_task(send_all(channel)))
        return channel

    acceptor = Acceptor(lambda _: accept_channel(), context)
    await acceptor.listen("127.0.0.1", 0)
    start = _Times.now()
    pipe.send((acceptor.address[1], context is not None))
    receiver_times: _Times = await loop.run_in_executor(None, pipe.recv)
    sender_times = _Times.now().since(start)
    acceptor.close()
    busier_s = (
        max(sender_times.process_s, receiver_times.process_s),
        max(sender_times.loop_s, receiver_times.loop_s),
    )
    return _Times(receiver_times.clock_s, *busier_s)


@dataclass(slots=True)
class Steps:
    """Times of one side's steps over all turns.

    Attributes:
        elapsed_ms: Duration of each step.
        processor_ms: Processor time of coordinator and workers together per step.
    """

    elapsed_ms: list[float] = field(default_factory=list)
    processor_ms: list[float] = field(default_factory=list)


def measure_steps(block_bytes: int, rounds: int, turns: int = 2) -> dict[str, Steps]:
    """Measure one job alternately with and without TLS; it has six blocks of `block_bytes`."""
    document: dict[str, Any] = {
        "name": "tls", "task": "scripted", "steps": rounds + _WARMUP_STEPS,
        "scripted": {"blocks": 6, "block_bytes": block_bytes},
        "batch": {"samples": 8, "microbatch": 1}, "optimizer": {"name": "sgd", "lr": 1e-3},
    }  # fmt: skip
    options_by_side = {"TLS 1.3": (), "--plaintext": ("--plaintext",)}
    steps_by_side = {side: Steps() for side in options_by_side}
    runs: dict[str, list[Interval]] = {side: [] for side in options_by_side}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        clusters = {}
        for side, options in options_by_side.items():
            worker = [*scripted_worker(_MICROBATCH_MS), *options]
            cluster = Cluster([worker] * 2, Path(name) / side, ("coordinator", *options))
            clusters[side] = stack.enter_context(cluster)
        for _ in range(turns):
            for side, cluster in clusters.items():
                begin_s = sum(cluster.cpu_s())
                runs[side].append(cluster.run(document))
                spent_ms = (sum(cluster.cpu_s()) - begin_s) * 1e3
                steps_by_side[side].processor_ms.append(spent_ms / document["steps"])
        stack.close()
        for side, cluster in clusters.items():
            timelines = cluster.timelines()
            for run in runs[side]:
                step_list = step_times(timelines, run.start_us, run.end_us)[_WARMUP_STEPS:]
                steps_by_side[side].elapsed_ms += [
                    span_us / 1e3 for span_us in intervals_us(step_list)
                ]
    return steps_by_side


def step_rows(block_bytes: int, steps_by_side: dict[str, Steps]) -> list[list[str]]:
    """Return the rows of the table for one size."""
    size = f"{6 * block_bytes / 1e6:.1f} MB"
    return [
        [f"{size}: {side}", f"{median(side_steps.elapsed_ms):.1f}",
         f"{min(side_steps.elapsed_ms):.1f}", f"{min(side_steps.processor_ms):.1f}"]
        for side, side_steps in steps_by_side.items()
    ]  # fmt: skip


def measure_throughput(megabytes: int) -> None:
    """Measure the throughput of one connection, and print a table."""
    pipe, receiver_pipe = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_receiver, args=(receiver_pipe, megabytes)
    )
    process.start()
    times_by_side: dict[str, list[_Times]] = {"TLS 1.3": [], "--plaintext": []}
    with tempfile.TemporaryDirectory() as home:
        context = CoordinatorCredentials.open(Path(home)).server_context()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            for _ in range(_TURNS):
                for name, ssl_context in (("TLS 1.3", context), ("--plaintext", None)):
                    times_by_side[name].append(
                        runner.run(_measure_sending(pipe, megabytes, ssl_context))
                    )
    pipe.send(None)
    process.join()
    sent_mb = megabytes * limits.MIB / 1e6
    rows = []
    for name, turns in times_by_side.items():
        clock = sorted(sent_mb / turn.clock_s for turn in turns)
        core = sorted(sent_mb / turn.process_s for turn in turns)
        loop_ms = median(turn.loop_s for turn in turns) * 1e3 / (sent_mb / 100)
        rates = (clock[-1], median(clock), core[-1], median(core), loop_ms)
        rows.append([name, *(f"{rate:.0f}" for rate in rates)])
    header = ["side", "max MB/s", "median", "a core each: max", "median", "loop ms for 100 MB"]
    print_table(header, rows)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024, help="in each turn; 0: skip")
    parser.add_argument("--rounds", type=int, default=12, help="steps in each turn; 0: skip")
    options = parser.parse_args()
    keep_freed_memory()
    print_heading("The cost of TLS")
    if options.megabytes:
        measure_throughput(options.megabytes)
    if options.rounds:
        rows = [
            row for size in _SIZES for row in step_rows(size, measure_steps(size, options.rounds))
        ]
        print_table(["steps", "median ms", "min ms", "processor ms"], rows)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
