"""Virtual time, and an event loop in it that runs the coroutines of both daemons unchanged.

Each simulated process has its own loop, and all loops share one clock. A loop runs ready callbacks
in the order of arrival, as asyncio does, and that takes no time; timers, threads and the network
schedule callbacks at times from the seed. A stalled process (SIGSTOP) runs its callbacks later;
those of a killed process (SIGKILL) never run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import Context
from heapq import heappop, heappush
from random import Random
from typing import Any

Action = Callable[[], Any]


class Clock:
    """Events by time; events of equal time in the order of scheduling.

    Attributes:
        now_ms: The current virtual time.
        current: The process that runs now; None outside of all processes.
        errors: Violations that probes and event loops found.
    """

    def __init__(self, rng: Random) -> None:
        self.now_ms = 0.0
        self.rng = rng
        self.current: Process | None = None
        self.errors: list[BaseException] = []
        self._heap: list[tuple[float, float, int, Process | None, Action]] = []
        self._number = 0

    def after(self, delay_ms: float, action: Action, process: Process | None = None) -> None:
        """Schedule an action, in a process or outside of all processes."""
        self.at(self.now_ms + delay_ms, action, process)

    def at(self, time_ms: float, action: Action, process: Process | None = None) -> None:
        self._number += 1
        heappush(self._heap, (time_ms, time_ms, self._number, process, action))

    def step(self) -> None:
        """Run the next event.

        Raises:
            BaseException: A violation, or an exception that the process did not handle.
        """
        time_ms, due_ms, number, process, action = heappop(self._heap)
        self.now_ms = max(self.now_ms, time_ms)
        if process is None:
            action()
        elif process.alive:
            if time_ms < process.stalled_until_ms:
                # In the order of due times, even if a stall is prolonged.
                heappush(self._heap, (process.stalled_until_ms, due_ms, number, process, action))
            else:
                process.do(action)
        if self.errors:
            raise self.errors[0]


class Process:
    """A simulated process, which can stall and die.

    Attributes:
        alive: Whether the process runs.
        stalled_until_ms: End of the current or last stall; until then actions are postponed.
        loop: The process's event loop.
        host: The process's address.
        side: The process's side of a split network.
        fds: The process's open files.
    """

    def __init__(self, clock: Clock, host: str) -> None:
        self.clock = clock
        self.host = host
        self.side = 0
        self.alive = True
        self.stalled_until_ms = 0.0
        self.fds: set[int] = set()
        self.loop = Loop(self)  # type: ignore[abstract]

    def do(self, action: Action) -> None:
        """Run an action in the process, and all callbacks that become ready."""
        clock = self.clock
        if not self.alive:
            return
        previous, clock.current = clock.current, self
        asyncio._set_running_loop(self.loop)
        try:
            action()
            self.loop.run_ready_callbacks()
        finally:
            clock.current = previous
            asyncio._set_running_loop(previous.loop if previous is not None else None)

    def any_thread(self) -> Executor:
        """Return one of the threads of the process."""
        raise NotImplementedError

    def end(self) -> None:
        """End the process and drop its pending callbacks."""
        self.alive = False
        self.loop.abandon()


class Loop(asyncio.AbstractEventLoop):
    """The part of an event loop that the daemons use."""

    def __init__(self, process: Process) -> None:
        self.connect: Callable[..., Any] | None = None
        self._process = process
        self._clock = process.clock
        self._ready: deque[asyncio.Handle] = deque()
        self._last_ms = 0.0

    def run_ready_callbacks(self) -> None:
        ready = self._ready
        while ready:
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def abandon(self) -> None:
        """Close the coroutines of a dead process at their current point, without effects."""
        previous = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            task: Any
            for task in asyncio.all_tasks(self):
                task._log_destroy_pending = False
                coroutine = task.get_coro()
                if not coroutine.cr_running:
                    coroutine.close()
        finally:
            asyncio._set_running_loop(previous)
        self._ready.clear()

    # asyncio.AbstractEventLoop

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return not self._process.alive

    def time(self) -> float:
        return self._clock.now_ms / 1000

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback from a thread; the loop runs such callbacks soon, in order."""
        handle = asyncio.Handle(callback, args, self, context)
        clock = self._clock
        self._last_ms = max(self._last_ms, clock.now_ms + 0.3 * clock.rng.random())
        clock.at(self._last_ms, handle._run, self._process)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)

        def action() -> None:
            if not timer._cancelled:
                timer._run()

        self._clock.at(when * 1000, action, self._process)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a canceled timer is skipped at its time."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run a job in a thread, where it takes time."""
        thread: Any = executor or self._process.any_thread()
        return asyncio.wrap_future(thread.work(func, *args), loop=self)

    async def create_connection(  # type: ignore[override]
        self, factory: Callable[[], Any], *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        assert self.connect is not None
        return await self.connect(factory)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception") or AssertionError(context["message"])
        if self._process.alive:
            self._clock.errors.append(error)
