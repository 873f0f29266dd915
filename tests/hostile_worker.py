"""A worker that behaves correctly until a test makes it misbehave.

It uses `protocol.wire.connection` only to read; nothing checks what it writes. Its `Ready` is real:
the product's engine builds the task.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from coordinator.members.credentials import CoordinatorCredentials
from protocol import __version__
from protocol.base.errors import LocalProtocolError
from protocol.machine import local_socket
from protocol.spec.run_spec import RunSpec, parse_run_spec_bytes
from protocol.wire import tls
from protocol.wire.authentication import answer_challenge, local_fingerprint, new_nonce
from protocol.wire.connection import Connection, ReceivedMessage, encode
from protocol.wire.messages import (
    BlockGradientPayload,
    Challenge,
    Goodbye,
    Hello,
    Message,
    Proof,
    Ready,
    StartRun,
    StateChunk,
    StateRequest,
    StepPlan,
    Welcome,
)
from tests.live_service import PATIENCE_S, ScriptedFactory
from worker.logic import actions as act
from worker.logic.events import Built, Event
from worker.shell.engine import Engine

M = TypeVar("M", bound=Message)


class HostileWorker:
    """One connection, from any address of loopback; use it as an async context manager.

    Args:
        port: The coordinator's port.
        name: The worker's name.
        host: Local address of the connection.
        is_local: Whether to connect to the Unix socket that belongs to the port.

    Attributes:
        run_id: Id of the run whose task the worker has built.
        parameters: Initial parameters of that task, one array per block.
    """

    def __init__(
        self, port: int, name: str = "hostile", host: str = "127.0.0.1", *, is_local: bool = False
    ) -> None:
        self.name = name
        self._is_local = is_local
        self._host = host
        self.run_id = ""
        self.term = 0
        self.parameters: list[Any] = []
        self._port = port
        self._connection = Connection("worker")
        self._received: deque[ReceivedMessage] = deque()

    async def __aenter__(self) -> Self:
        if self._is_local:
            connection = await local_socket.dial("127.0.0.1", self._port)
            assert connection is not None
            self._reader, self._writer = await asyncio.open_unix_connection(
                sock=connection.endpoint
            )
            return self
        self._reader, self._writer = await asyncio.open_connection(
            "127.0.0.1", self._port, ssl=tls.client_context(), local_addr=(self._host, 0)
        )
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    def abort(self) -> None:
        """Reset the connection, without a goodbye."""
        self._writer.transport.abort()

    def send(self, message: Message, body: Any = None) -> None:
        """Write a frame, legal or not."""
        encoded = encode(message, body)
        if isinstance(message, Hello | Proof):
            with contextlib.suppress(
                LocalProtocolError
            ):  # reading depends on the handshake's state
                self._connection.send(encoded)
        for buffer in encoded.buffers:
            self._writer.write(bytes(buffer))

    def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    async def receive(self) -> ReceivedMessage | None:
        """Return the next message, or None at the end of the connection."""
        async with asyncio.timeout(PATIENCE_S):
            while not self._received:
                with contextlib.suppress(ConnectionResetError):
                    if data := await self._reader.read(65_536):
                        self._received += self._connection.receive_data(data)
                        continue
                return None
        return self._received.popleft()

    async def wait_for_message(self, message_type: type[M]) -> M:
        """Return the next message of this type; skip others, but upload state if requested."""
        while (received := await self.receive()) is not None:
            message = received.message
            if isinstance(message, message_type):
                return message
            if isinstance(message, StateRequest):
                self._upload()
            assert not isinstance(message, Goodbye), message
        raise AssertionError(f"the connection ended before {message_type.__name__}")

    async def wait_for_goodbye(self) -> Goodbye | None:
        """Read until the connection ends; return the goodbye if that was the last message."""
        last_message = None
        while (received := await self.receive()) is not None:
            last_message = received.message
        return last_message if isinstance(last_message, Goodbye) else None

    # Behavior of an honest worker.

    def send_hello(self, **changes: Any) -> None:
        hello = {
            "release": __version__, "name": self.name, "instance": "f" * 32, "backend": "x",
            "duty": "train", "nonce": new_nonce(), "enrolled": False,
        }  # fmt: skip
        self.hello = Hello(**{**hello, **changes})
        self.send(self.hello)

    async def join(self, **changes: Any) -> Welcome:
        """Complete the handshake."""
        self.send_hello(**changes)
        token = CoordinatorCredentials.open().join_token()
        challenge = await self.wait_for_message(Challenge)
        fingerprint = local_fingerprint(token.fingerprint) if self._is_local else token.fingerprint
        self.send(answer_challenge(self.hello, challenge, fingerprint, token.secret))
        welcome = await self.wait_for_message(Welcome)
        self.name, self.term = welcome.worker, welcome.term
        return welcome

    async def prepare(self) -> Built:
        """Wait for a run and build its task."""
        while (received := await self.receive()) is not None:
            if isinstance(received.message, StartRun):
                assert received.body is not None
                self.run_id = received.message.run_id
                return await self._build(parse_run_spec_bytes(received.body.tobytes()))
        raise AssertionError("the connection ended before StartRun")

    async def plan(self) -> StepPlan:
        """Join, build the task, and wait for the first plan."""
        await self.join()
        built = await self.prepare()
        self.send(self.ready(built), built.manifest.to_bytes())
        return await self.wait_for_message(StepPlan)

    def ready(self, built: Built, **changes: Any) -> Ready:
        fields = {
            "run_id": self.run_id, "backend": built.backend, "device": built.device,
            "initial_digest": built.initial_digest, "step": built.step,
            "state_digest": built.state_digest, "signature": built.numerics_profile,
            "signature_text": built.numerics_text,
        }  # fmt: skip
        return Ready(**{**fields, **changes})

    async def _build(self, spec: RunSpec) -> Built:
        loop = asyncio.get_running_loop()
        built: asyncio.Future[Any] = loop.create_future()

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(built.set_result, event)

        engine = Engine(ScriptedFactory(), emit)
        engine.do(act.Build(self.run_id, spec, keep_state=False))
        event = await built
        await loop.run_in_executor(None, engine.close)
        assert isinstance(event, Built)
        self._connection.blocks = event.manifest.blocks
        self.parameters = ScriptedFactory().task(spec).initial_parameters()
        return event

    def _upload(self) -> None:
        assert self._connection.blocks is not None
        chunks = [
            (number, chunk, block.chunk_slice(chunk))
            for number, block in enumerate(self._connection.blocks)
            for chunk in range(block.chunks)
        ]
        for number, chunk, part in chunks:
            is_last = (number, chunk, part) == chunks[-1]
            message = self.state_chunk(number, chunk=chunk, last=is_last)
            self.send(message, self.parameters[number][part])

    def state_chunk(self, block: int, **changes: Any) -> StateChunk:
        fields = {
            "run_id": self.run_id, "kind": "parameters", "block": block, "chunk": 0, "step": 0,
            "optimizer_step": 0, "last": False,
        }  # fmt: skip
        return StateChunk(**{**fields, **changes})


def payload(plan: StepPlan, **changes: Any) -> BlockGradientPayload:
    """Return a payload that fits the plan, with these changes."""
    lo, hi = plan.subtrees[0]
    fields = {
        "term": plan.term, "step": plan.step, "attempt": plan.attempt, "block": 2, "chunk": 0,
        "lo": lo, "hi": hi, "weight": float(hi - lo),
    }  # fmt: skip
    return BlockGradientPayload(**{**fields, **changes})


def zeros(elements: int = 16) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.zeros(elements, np.float32)
