"""What TLS costs: gradient-sized frames through our transport on loopback, with it and without.

`python -m benchmarks.tls [--megabytes N]`. Two processes, one connection, chunks of 4 MiB, every
frame checked; turn by turn. "A core each" is what the busier of the two processes does in a
second of processor time: the rate where each has a core, also when this machine has other work.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import ssl
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop

from benchmarks.machine import describe, print_table
from coordinator.credentials import Credentials
from protocol import limits, tls
from protocol.allocator import keep_freed_memory
from protocol.connection import Connection, Phase, Received, encode
from protocol.errors import ProtocolError
from protocol.messages import BlobChunk
from protocol.transport import Channel

_TURNS: Final = 5


class _End:
    """Counts what comes; `done` is set when all is there."""

    def __init__(self, expected_bytes: int) -> None:
        self.done = asyncio.Event()
        self._left = expected_bytes

    def on_message(self, channel: Channel, received: Received) -> None:
        del channel
        assert received.body is not None
        self._left -= len(received.body)
        if self._left <= 0:
            self.done.set()

    def on_lost(self, channel: Channel, reason: str, error: ProtocolError | None) -> None:
        del channel, reason, error


def _channel(role: Any, owner: _End) -> Channel:
    connection = Connection(role)
    connection.phase = Phase.OPEN
    return Channel(connection, owner, time.monotonic)


async def _receive(port: int, megabytes: int, *, encrypted: bool) -> tuple[float, float]:
    """Connect and take everything; seconds by the clock and of the processor."""
    loop = asyncio.get_running_loop()
    end = _End(megabytes * limits.MIB)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    _, channel = await loop.create_connection(
        lambda: _channel("worker", end),
        "127.0.0.1", port, ssl=tls.client_context() if encrypted else None,
    )  # fmt: skip
    await end.done.wait()
    channel.abort("done")
    return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s


def _receiver(pipe: Any, megabytes: int) -> None:
    """The other process: (port, encrypted) in, seconds out."""
    keep_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while (order := pipe.recv()) is not None:
            port, encrypted = order
            pipe.send(runner.run(_receive(port, megabytes, encrypted=encrypted)))


async def _send(pipe: Any, megabytes: int, context: ssl.SSLContext | None) -> tuple[float, float]:
    """Bytes by second: by the clock, and by second of the busier process."""
    loop = asyncio.get_running_loop()
    body = np.random.default_rng(1).integers(0, 255, limits.BODY_BYTES, np.uint8)
    chunks = megabytes * limits.MIB // limits.BODY_BYTES

    def accepted() -> Channel:
        channel = _channel("coordinator", _End(1))
        for number in range(chunks):
            place = {"digest": "0" * 64, "offset": number * limits.BODY_BYTES}
            channel.send(encode(BlobChunk(**place, run_id="r"), body))
        return channel

    server = await loop.create_server(accepted, "127.0.0.1", 0, ssl=context)
    async with server:
        begin_cpu_s = time.process_time()
        pipe.send((server.sockets[0].getsockname()[1], context is not None))
        elapsed_s, receiver_s = await loop.run_in_executor(None, pipe.recv)
        sender_s = time.process_time() - begin_cpu_s
    sent_mb = megabytes * limits.MIB / 1e6
    return sent_mb / elapsed_s, sent_mb / max(receiver_s, sender_s)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024)
    megabytes = parser.parse_args().megabytes
    keep_freed_memory()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_receiver, args=(theirs, megabytes)
    )
    process.start()
    rates: dict[str, list[tuple[float, float]]] = {"TLS 1.3": [], "--plaintext": []}
    with tempfile.TemporaryDirectory() as home:
        context = Credentials.open(Path(home)).server_context()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            for _ in range(_TURNS):
                for name, used in (("TLS 1.3", context), ("--plaintext", None)):
                    rates[name].append(runner.run(_send(ours, megabytes, used)))
    ours.send(None)
    process.join()
    print(describe())
    rows = []
    for name, turns in rates.items():
        clock, core = (sorted(each) for each in zip(*turns, strict=True))
        rows.append([name, *(f"{each:.0f}" for each in (clock[-1], clock[2], core[-1], core[2]))])
    print_table(["way", "best MB/s", "median", "a core each: best", "median"], rows)


if __name__ == "__main__":
    main()
