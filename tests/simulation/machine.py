"""The threads of a simulated process: jobs one after the other, with durations from the seed.

A job happens at one moment, at the end of its time; its result reaches the event loop later, in
order. A device's job consists of pieces, and time passes between them. A process that is
killed leaves the current jobs of its threads half done: some of their disk changes, and no more.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, Final

from protocol.machine.machine import DeviceThread, Job, Machine
from tests.simulation.disk import Disk, Killed
from tests.simulation.virtual_time import Clock, Process

_HOST_MS: Final = 1.0
"""Time to apply a step, to hash, to copy."""


class Answer(Future[Any]):
    """A future; a thread that waits for it lets its time pass."""

    def __init__(self, thread: Thread) -> None:
        super().__init__()
        self._thread = thread

    def result(self, timeout: float | None = None) -> Any:
        self._thread.until(self)
        return super().result(timeout)


class Thread(Executor):
    """Does its jobs one after the other."""

    def __init__(
        self, process: Process, most_ms: Callable[[], float], first_ms: float = 0.0
    ) -> None:
        self._process = process
        self._clock: Clock = process.clock
        self._most_ms = most_ms
        self._first_ms = first_ms
        self._jobs: deque[tuple[Answer, Callable[[], Any], float]] = deque()
        self._busy = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **_: Any) -> Answer:
        """Submit a short job that nobody waits for."""
        return self._put(lambda: fn(*args), 0.0 if self._clock.rng.random() < 0.9 else 1.0)

    def work(self, fn: Callable[..., Any], *args: Any) -> Answer:
        """Submit a job that takes time."""
        most_ms, self._first_ms = max(self._most_ms(), self._first_ms), 0.0
        return self._put(lambda: fn(*args), most_ms * self._clock.rng.random())

    def _put(self, job: Callable[[], Any], takes_ms: float) -> Answer:
        answer = Answer(self)
        self._jobs.append((answer, job, takes_ms))
        if not self._busy:
            self._begin()
        return answer

    def _begin(self) -> None:
        self._busy = bool(self._jobs)
        if self._busy:
            self._clock.after(self._jobs[0][2], self._next, self._process)

    def _next(self) -> None:
        if self._jobs:
            self._do()
        while self._jobs and not self._jobs[0][2]:
            self._do()
        self._begin()

    def _do(self) -> None:
        answer, job, _ = self._jobs.popleft()
        if not answer.set_running_or_notify_cancel():
            return
        try:
            result = job()
        except Killed as killed:
            killed.act()
        except Exception as error:  # noqa: BLE001 -- who waits for it gets it
            answer.set_exception(error)
        else:
            answer.set_result(result)

    def until(self, answer: Answer) -> None:
        """Do all jobs up to this one."""
        while not answer.done() and self._jobs:
            self._do()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 -- as an Executor's
        while cancel_futures and self._jobs:
            self._jobs.popleft()[0].cancel()
        while wait and self._jobs:
            self._do()

    def stop(self) -> None:
        """Drop all pending jobs."""
        self._jobs.clear()

    def die(self, disk: Disk) -> None:
        """Stop in the middle of the current job."""
        rng = self._clock.rng
        if self._busy and self._jobs and rng.random() < 0.7:
            _, job, _ = self._jobs.popleft()
            changes = rng.choice((0, 1, 1, 1, 2, 3, 5, 8))
            with contextlib.suppress(Exception, Killed), disk.dying_after(changes):
                job()
        self._jobs.clear()


class Device:
    """The thread of a device; a computed piece takes the time that it `charge`s."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._clock = process.clock
        self._jobs: deque[Job] = deque()
        self._working: Iterator[None] | None = None
        self._busy = False
        self._charged_ms = 0.0

    def charge(self, ms: float) -> None:
        """Let the current computation take this long."""
        self._charged_ms += ms

    def submit(self, job: Job) -> None:
        self._jobs.append(job)
        if not self._busy:
            self._busy = True
            self._clock.after(0.0, self._go_on, self._process)

    def _go_on(self) -> None:
        while True:
            if self._working is None:
                if not self._jobs:
                    self._busy = False
                    return
                self._working = iter(self._jobs.popleft()())
            if next(self._working, self) is self:
                self._working = None
            if self._charged_ms:
                taken_ms, self._charged_ms = self._charged_ms, 0.0
                self._clock.after(taken_ms, self._go_on, self._process)
                return

    def close(self, wait_s: float) -> bool:
        """End with the process."""
        del wait_s
        return True


class SimulatedMachine(Machine):
    """The machine interface of a simulated process.

    Attributes:
        device: The thread of its device, once it exists.
        pace_ms: Longest duration of a disk job.
        catch_up_ms: Longest time for a replica to apply earlier commits.
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
