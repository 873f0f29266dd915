"""The worker of this process: a client in a thread of its own, which the caller of `fit` is not."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from backends.base.interface import Backend
from backends.registry import choose
from protocol.base.errors import ExitCode, text_of
from protocol.host.event_loop import new_event_loop
from protocol.spec.run_spec import RunSpec
from protocol.wire.connection import Received
from protocol.wire.messages import Commit, EndRun, Halt
from protocol.wire.transport import Channel
from samestep.own_coordinator import Happened
from worker.joining.credentials import WorkerCredentials
from worker.shell.client import Client, FindAgain, Target
from worker.tasks.base import Task
from worker.tasks.registry import build

_END_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """This process takes part no more.

    Attributes:
        error: Why; None if it was told goodbye.
    """

    error: Exception | None


@dataclass(frozen=True, slots=True)
class StandsStill:
    """The run stands still until an operator says how it goes on.

    Attributes:
        reason: What was not finite, or asked for it.
    """

    reason: str


class _Devices:
    """The engine's toolbox: see `worker.shell.engine.Toolbox`."""

    def __init__(self, name: str, wanted: int | str | None) -> None:
        self._name, self._wanted = name, wanted
        self._backend: Backend | None = None

    def backend(self) -> Backend:
        if self._backend is None:
            self._backend = choose(self._name, self._wanted).backend
        return self._backend

    def task(self, spec: RunSpec) -> Task:
        return build(spec)


class _OneRunClient(Client):
    """Leaves when the run that it took part in is over."""

    rows: dict[int, dict[str, float]]
    halted: Callable[[str], None]
    ended: EndRun | None = None

    def on_message(self, channel: Channel, received: Received) -> None:
        """See `Client`; a commit is noted, and the end."""
        super().on_message(channel, received)
        message, _ = received
        if isinstance(message, Commit):
            step = message.step + 1
            self.rows[step] = {"step": step, "loss": message.loss}
            if message.scalars is not None:
                self.rows[step]["learning_rate"] = message.scalars.learning_rate
        elif isinstance(message, EndRun):
            self.ended = message
            self.drain()
        elif isinstance(message, Halt):
            self.halted(message.reason)


class OwnWorker:
    """Takes part in one run.

    Attributes:
        rows: Loss and learning rate of the steps that were committed while this worker took part,
            from 1.
        ended: That the run is over, how and why, as the coordinator said; None before.

    Args:
        target: Whom to serve.
        device: Which of its kind, by number or name; None for the first.
        credentials: What it joins with.
        tell: Where its lines go.
        happened: Where its end goes.
        find_again: Looks for the coordinator once more, where it was found on the network.
    """

    def __init__(
        self,
        target: Target,
        device: int | str | None,
        credentials: WorkerCredentials,
        tell: Callable[[str], None],
        happened: Happened,
        *,
        find_again: FindAgain | None = None,
    ) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self._target, self._credentials, self._tell = target, credentials, tell
        self._devices = _Devices(target.backend, device)
        self._happened, self._find_again = happened, find_again
        self._client: _OneRunClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samestep worker", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> EndRun | None:
        return self._client.ended if self._client is not None else None

    def drain(self) -> None:
        """Finish what there is, and leave."""
        self._begun.wait()
        if self._loop is not None and self._client is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has left
                self._loop.call_soon_threadsafe(self._client.drain)

    def end(self) -> None:
        """Leave, and wait for the thread: afterwards the module is nobody's but the caller's."""
        self.drain()
        self._thread.join(_END_TIMEOUT_S)

    def _run(self) -> None:
        error: Exception | None = None
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._serve())
        except Exception as raised:  # noqa: BLE001 -- the caller of fit must hear of it
            error = raised
        finally:
            self._begun.set()
            self._happened.put(WorkerEnded(error))

    async def _serve(self) -> ExitCode:
        client = _OneRunClient(
            self._target, self._devices, self._credentials, self._tell, find_again=self._find_again
        )
        client.rows = self.rows
        client.halted = lambda reason: self._happened.put(StandsStill(reason))
        self._client, self._loop = client, asyncio.get_running_loop()
        self._begun.set()
        return await client.serve()


def told(error: Exception) -> str:
    """In one line."""
    return " ".join(text_of(error).split())
