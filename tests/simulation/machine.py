"""The threads of a simulated process: they run jobs in order, with durations from the seed.

A job takes effect at one moment, at the end of its duration; its result reaches the event loop
later, in order. A device's job consists of pieces, and time passes between them. When a process is
killed, the current jobs of its threads are half done: only some of their disk changes happen.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, Final

from protocol.machine.machine import DeviceThread, Job, Machine
from tests.simulation.disk import Disk, ProcessKilled
from tests.simulation.virtual_time import Clock, Process

_HOST_MS: Final = 1.0
"""Time to apply a step, to hash or to copy."""


class JobFuture(Future[Any]):
    """The future of a job; waiting for it runs the thread's jobs up to this one."""

    def __init__(self, thread: Thread) -> None:
        super().__init__()
        self._thread = thread

    def result(self, timeout: float | None = None) -> Any:
        self._thread.run_until(self)
        return super().result(timeout)


class Thread(Executor):
    """A thread that runs jobs in order."""

    def __init__(
        self, process: Process, max_ms: Callable[[], float], first_max_ms: float = 0.0
    ) -> None:
        self._process = process
        self._clock: Clock = process.clock
        self._max_ms = max_ms
        self._first_max_ms = first_max_ms
        self._jobs: deque[tuple[JobFuture, Callable[[], Any], float]] = deque()
        self._is_busy = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **_: Any) -> JobFuture:
        """Submit a short job whose result is not needed."""
        return self._enqueue(lambda: fn(*args), 0.0 if self._clock.rng.random() < 0.9 else 1.0)

    def work(self, fn: Callable[..., Any], *args: Any) -> JobFuture:
        """Submit a job that takes time."""
        max_ms, self._first_max_ms = max(self._max_ms(), self._first_max_ms), 0.0
        return self._enqueue(lambda: fn(*args), max_ms * self._clock.rng.random())

    def _enqueue(self, job: Callable[[], Any], duration_ms: float) -> JobFuture:
        future = JobFuture(self)
        self._jobs.append((future, job, duration_ms))
        if not self._is_busy:
            self._begin()
        return future

    def _begin(self) -> None:
        self._is_busy = bool(self._jobs)
        if self._is_busy:
            self._clock.after(self._jobs[0][2], self._run_due_jobs, self._process)

    def _run_due_jobs(self) -> None:
        if self._jobs:
            self._run_job()
        while self._jobs and not self._jobs[0][2]:
            self._run_job()
        self._begin()

    def _run_job(self) -> None:
        future, job, _ = self._jobs.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = job()
        except ProcessKilled as kill:
            kill.act()
        except Exception as error:  # noqa: BLE001 -- the future carries the exception
            future.set_exception(error)
        else:
            future.set_result(result)

    def run_until(self, future: JobFuture) -> None:
        """Run all jobs up to that of the future."""
        while not future.done() and self._jobs:
            self._run_job()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 -- the signature of Executor
        while cancel_futures and self._jobs:
            self._jobs.popleft()[0].cancel()
        while wait and self._jobs:
            self._run_job()

    def stop(self) -> None:
        """Drop all pending jobs."""
        self._jobs.clear()

    def abort(self, disk: Disk) -> None:
        """Drop all jobs; the current one may be half done."""
        rng = self._clock.rng
        if self._is_busy and self._jobs and rng.random() < 0.7:
            _, job, _ = self._jobs.popleft()
            changes = rng.choice((0, 1, 1, 1, 2, 3, 5, 8))
            with contextlib.suppress(Exception, ProcessKilled), disk.killing_after(changes):
                job()
        self._jobs.clear()


class Device:
    """The thread of a device; a piece of a job takes the time that it passes to `charge`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._clock = process.clock
        self._jobs: deque[Job] = deque()
        self._pieces: Iterator[None] | None = None
        self._is_busy = False
        self._charged_ms = 0.0

    def charge(self, ms: float) -> None:
        """Let the current computation take this long."""
        self._charged_ms += ms

    def submit(self, job: Job) -> None:
        self._jobs.append(job)
        if not self._is_busy:
            self._is_busy = True
            self._clock.after(0.0, self._run_pieces, self._process)

    def _run_pieces(self) -> None:
        while True:
            if self._pieces is None:
                if not self._jobs:
                    self._is_busy = False
                    return
                self._pieces = iter(self._jobs.popleft()())
            if next(self._pieces, self) is self:
                self._pieces = None
            if self._charged_ms:
                duration_ms, self._charged_ms = self._charged_ms, 0.0
                self._clock.after(duration_ms, self._run_pieces, self._process)
                return

    def close(self, wait_s: float) -> bool:
        """Do nothing: the thread ends with its process."""
        del wait_s
        return True


class SimulatedMachine(Machine):
    """The machine interface of a simulated process.

    Attributes:
        device: The thread of the process's device, once it exists.
        threads: All other threads of the process.
    """

    has_sockets = False

    def __init__(
        self, process: Process, pace_ms: Callable[[], float], catch_up_ms: float = 0.0
    ) -> None:
        self.device: Device | None = None
        self.threads: list[Thread] = []
        self._process = process
        self._pace_ms = pace_ms
        self._catch_up_ms = catch_up_ms

    def now_s(self) -> float:
        return self._process.clock.now_ms / 1000

    def thread(self, name: str) -> Thread:
        if name in ("digest", "files"):
            new_thread = Thread(self._process, lambda: 2 * _HOST_MS)
        elif name == "checkpoint":
            new_thread = Thread(self._process, lambda: 4 * self._pace_ms())
        elif name == "replica":
            new_thread = Thread(self._process, self._pace_ms, self._catch_up_ms)
        else:
            new_thread = Thread(self._process, self._pace_ms)
        self.threads.append(new_thread)
        return new_thread

    def device_thread(self, name: str) -> DeviceThread:
        assert name == "engine"
        self.device = Device(self._process)
        return self.device
