"""Open hostile connections from one address, as many at a time as requested.

`python -m benchmarks.attack PORT` reads the commands `attack`, `rest` and `count` from standard
input, one per line. Its answer to each is the number of connections by attack since the last
answer. A connection that the server closes is opened again a moment later.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import ssl
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import uvloop

from protocol.wire import tls

SOURCE_ADDRESS: Final = "127.0.0.2"
"""The address of the attacker; workers use other addresses of this machine."""
PAUSE_S: Final = 1.0
"""Mean pause before a closed connection is opened again."""
_SLOW_S: Final = 0.25
_context: Final = tls.client_context()

OpenConnection = Callable[[int], Awaitable[None]]
"""An attack: opens one connection to a port and returns when it has ended."""


async def send_nothing(port: int) -> None:
    """Connect and send nothing."""
    async with _connection(port) as endpoint:
        await _read_until_closed(endpoint)


async def send_slowly(port: int) -> None:
    """Send a TLS handshake byte by byte."""
    async with _connection(port) as endpoint:
        for byte in client_hello():
            await asyncio.get_running_loop().sock_sendall(endpoint, bytes([byte]))
            await asyncio.sleep(_SLOW_S)


async def send_garbage(port: int) -> None:
    """Send random bytes."""
    async with _connection(port) as endpoint:
        await asyncio.get_running_loop().sock_sendall(endpoint, random.randbytes(2_000))
        await _read_until_closed(endpoint)


async def send_client_hello(port: int) -> None:
    """Begin a TLS handshake, which costs the server computation, and then send nothing."""
    async with _connection(port) as endpoint:
        await asyncio.get_running_loop().sock_sendall(endpoint, client_hello())
        await _read_until_closed(endpoint)


async def send_garbage_after_handshake(port: int) -> None:
    """Complete a TLS handshake, then send garbage."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=_context, local_addr=(SOURCE_ADDRESS, 0)
    )
    try:
        writer.write(random.randbytes(200))
        while await reader.read(65_536):
            pass
    finally:
        writer.transport.abort()


ATTACKS: Final[tuple[OpenConnection, ...]] = (
    send_nothing,
    send_slowly,
    send_garbage,
    send_client_hello,
    send_garbage_after_handshake,
)


def client_hello() -> bytes:
    """Return the first flight of a TLS 1.3 client."""
    outgoing_bytes = ssl.MemoryBIO()
    handshake = _context.wrap_bio(ssl.MemoryBIO(), outgoing_bytes)
    with contextlib.suppress(ssl.SSLWantReadError):
        handshake.do_handshake()
    return outgoing_bytes.read()


@contextlib.asynccontextmanager
async def _connection(port: int) -> AsyncIterator[socket.socket]:
    with socket.socket() as endpoint:
        endpoint.setblocking(False)
        endpoint.bind((SOURCE_ADDRESS, 0))
        await asyncio.get_running_loop().sock_connect(endpoint, ("127.0.0.1", port))
        yield endpoint


async def _read_until_closed(endpoint: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(endpoint, 65_536):
        pass


class Attack:
    """Keeps a number of connections open, divided among all attacks, until it is cancelled."""

    def __init__(self, port: int, connections: int) -> None:
        self.attempts: Counter[str] = Counter()
        self._port = port
        self._connections = connections

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self._connections):
                group.create_task(self._reconnect_forever(ATTACKS[number % len(ATTACKS)]))

    async def _reconnect_forever(self, open_connection: OpenConnection) -> None:
        await asyncio.sleep(random.uniform(0, PAUSE_S))
        while True:
            self.attempts[open_connection.__name__] += 1
            with contextlib.suppress(OSError, EOFError):
                await open_connection(self._port)
            await asyncio.sleep(random.uniform(0.5, 1.5) * PAUSE_S)


async def serve_commands(port: int, connections: int) -> None:
    """Begin and end the attack by commands from standard input."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)  # connections may end with any error
    attack, task = Attack(port, connections), None
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        word = line.strip()
        if word != "count" and task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            task = None
        if word == "attack":
            task = loop.create_task(attack.run())
        print(json.dumps(attack.attempts), flush=True)
        attack.attempts.clear()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--connections", type=int, default=1_000)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_commands(options.port, options.connections))


if __name__ == "__main__":
    main()
