"""The worker of this process, which runs in a thread beside the caller of `fit`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from backends.base.interface import Backend
from backends.registry import choose
from protocol.base.errors import ExitCode, text_of
from protocol.machine.event_loop import new_event_loop
from protocol.spec.run_spec import RunSpec
from protocol.wire.connection import ReceivedMessage
from protocol.wire.messages import Commit, EndRun, Halt, StartRun, Welcome
from protocol.wire.transport import Channel
from samestep.coordinator_subprocess import EventQueue, NewRow
from worker.join.credentials import WorkerCredentials
from worker.shell.client import Client, CoordinatorSearch, Target
from worker.shell.group_engine import DeviceSet
from worker.tasks.base.task import Task
from worker.tasks.registry import build

_END_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """The worker has left the run.

    Attributes:
        error: Why the worker left; None if it left normally.
    """

    error: Exception | None


@dataclass(frozen=True, slots=True)
class Stalled:
    """The run has halted and waits for an operator.

    Attributes:
        reason: Why the run halted.
    """

    reason: str


class _LocalBackend:
    """A `BackendFactory` with one backend, created when first needed."""

    def __init__(self, name: str, device: int | str | None) -> None:
        self._name, self._device = name, device
        self._backend: Backend | None = None

    def backend(self) -> Backend:
        if self._backend is None:
            self._backend = choose(self._name, self._device).backend
        return self._backend

    def task(self, spec: RunSpec) -> Task:
        return build(spec)


class _OneRunClient(Client):
    """A client that leaves when its run is over."""

    rows: dict[int, dict[str, float]]
    on_halt: Callable[[str], None]
    on_commit: Callable[[dict[str, float]], None]
    end_message: EndRun | None = None
    idle_since_s: float | None = None
    """Time at which the coordinator welcomed this worker, if it has offered no run since."""

    def on_message(self, channel: Channel, received: ReceivedMessage) -> None:
        """See `Client`; also records commits and the end of the run."""
        super().on_message(channel, received)
        message, _ = received
        if isinstance(message, Commit):
            step = message.step + 1
            is_new = step not in self.rows  # after a reconnection a commit may come again
            self.rows[step] = {"step": step, "loss": message.loss}
            if message.scalars is not None:
                self.rows[step]["learning_rate"] = message.scalars.learning_rate
            if is_new:
                self.on_commit(self.rows[step])
        elif isinstance(message, Welcome):
            self.idle_since_s = time.monotonic()
        elif isinstance(message, StartRun):
            self.idle_since_s = None
        elif isinstance(message, EndRun):
            self.end_message = message
            self.drain()
        elif isinstance(message, Halt):
            self.on_halt(message.reason)


class WorkerThread:
    """A worker in a thread, which takes part in one run.

    Attributes:
        rows: Loss and learning rate by step, counted from 1, of the steps that were committed
            while this worker took part.
        end_message: The coordinator's message that the run is over; None before.

    Args:
        target: The coordinator, and the worker's name and backend.
        device: Device of the backend, by number or part of its name; None: the first.
        credentials: Join token or key.
        print_line: Prints a line.
        event_queue: Receives `WorkerEnded` and `Stalled`, and with `reports_rows` also `NewRow`.
        search_again: Searches again for a coordinator that was found on the network.
        devices: Several devices, each in a process of its own, instead of `device`.
        reports_rows: Whether to report the row of each committed step.
    """

    def __init__(
        self,
        target: Target,
        device: int | str | None,
        credentials: WorkerCredentials,
        print_line: Callable[[str], None],
        event_queue: EventQueue,
        *,
        search_again: CoordinatorSearch | None = None,
        devices: DeviceSet | None = None,
        reports_rows: bool = False,
    ) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self._target, self._credentials, self._print_line = target, credentials, print_line
        self._backend_factory = devices or _LocalBackend(target.backend, device)
        self._event_queue, self._search_again = event_queue, search_again
        self._reports_rows = reports_rows
        self._client: _OneRunClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samestep worker", daemon=True)
        self._thread.start()

    @property
    def end_message(self) -> EndRun | None:
        return self._client.end_message if self._client is not None else None

    @property
    def idle_s(self) -> float:
        """Time for which this worker has been connected without a run; 0 during a run."""
        since_s = self._client.idle_since_s if self._client is not None else None
        return 0.0 if since_s is None else time.monotonic() - since_s

    @property
    def address(self) -> str:
        """The coordinator's address."""
        return self._target.address

    def drain(self) -> None:
        """Finish the work in progress and leave."""
        self._started.wait()
        if self._loop is not None and self._client is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has left
                self._loop.call_soon_threadsafe(self._client.drain)

    def end(self) -> None:
        """Leave and wait for the thread; afterwards only the caller uses the module."""
        self.drain()
        self._thread.join(_END_TIMEOUT_S)

    def _report_row(self, row: dict[str, float]) -> None:
        if self._reports_rows:
            self._event_queue.put(NewRow(dict(row)))

    def _run(self) -> None:
        error: Exception | None = None
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._serve())
        except Exception as exception:  # noqa: BLE001 -- reported to the caller of fit
            error = exception
        finally:
            self._started.set()
            self._event_queue.put(WorkerEnded(error))

    async def _serve(self) -> ExitCode:
        client = _OneRunClient(
            self._target,
            self._backend_factory,
            self._credentials,
            self._print_line,
            search_again=self._search_again,
        )
        client.rows = self.rows
        client.on_halt = lambda reason: self._event_queue.put(Stalled(reason))
        client.on_commit = self._report_row
        self._client, self._loop = client, asyncio.get_running_loop()
        self._started.set()
        return await client.serve()


def one_line(error: Exception) -> str:
    """Return the error's text in one line."""
    return " ".join(text_of(error).split())
