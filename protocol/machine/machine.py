"""The interface to the clock and threads of a daemon.

`Machine` is the real one; the simulator replaces it to run whole clusters in virtual time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol

Job = Callable[[], Iterable[None]]
"""Returns an iterator whose steps do the work; the job can be canceled between two steps."""


class DeviceThread(Protocol):
    """A daemon thread that runs jobs in order."""

    def submit(self, job: Job) -> None:
        """Queue a job, which must not raise."""

    def close(self, wait_s: float) -> bool:
        """End the thread after its queued jobs, and wait for it at most `wait_s` seconds.

        Returns:
            Whether it has ended.
        """


class Machine:
    """The machine that this process runs on."""

    has_sockets = True
    """Whether processes can connect to each other over sockets."""

    def now_s(self) -> float:
        """Return the monotonic time in seconds."""
        return time.monotonic()

    def thread(self, name: str) -> Executor:
        """Start a thread that runs jobs in order."""
        return ThreadPoolExecutor(1, name)

    def device_thread(self, name: str) -> DeviceThread:
        """Start a daemon thread, whose jobs may hang in a driver."""
        return _DaemonThread(name)


class _DaemonThread:
    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self, wait_s: float) -> bool:
        self._jobs.put(None)
        self._thread.join(timeout=wait_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            for _ in job():
                pass
