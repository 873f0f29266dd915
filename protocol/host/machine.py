"""What a daemon takes from its machine besides the event loop: the time, and threads.

`Machine` is the real one. Whoever plays whole clusters in virtual time gives the daemons another.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol

Job = Callable[[], Iterable[None]]
"""Work in pieces: between two of them time has passed, and others may have changed their mind."""


class DeviceThread(Protocol):
    """Does jobs one after the other; a process that ends does not wait for it."""

    def submit(self, job: Job) -> None:
        """Do it after those before it; it raises nothing."""

    def close(self, wait_s: float) -> None:
        """Let it end after the jobs that it has, and wait for that so long at most."""


class Machine:
    """The machine that this process runs on."""

    has_sockets = True
    """Whether other processes of this machine can be spoken to."""

    def now_s(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    def thread(self, name: str) -> Executor:
        """A thread that does jobs one after the other."""
        return ThreadPoolExecutor(1, name)

    def device_thread(self, name: str) -> DeviceThread:
        """One whose jobs may hang in a driver."""
        return _Daemon(name)


class _Daemon:
    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self, wait_s: float) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=wait_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            for _ in job():
                pass
