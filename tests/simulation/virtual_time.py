"""Virtual time, and an event loop in it that runs the coroutines of both daemons unchanged.

Each simulated process has its own loop, and all loops share one clock. A loop runs ready callbacks
in the order of arrival, as asyncio does, and that takes no time; timers, threads and the network
add others at times from the seed. A stalled process (SIGSTOP) runs them later; the pending
callbacks of a dead one (SIGKILL) never run.
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

Act = Callable[[], Any]


class Clock:
    """Events by time; events of equal time in the order of scheduling.

    Attributes:
        now_ms: The time.
        current: The process that is acting now.
    """

    def __init__(self, rng: Random) -> None:
        self.now_ms = 0.0
        self.rng = rng
        self.current: Process | None = None
        self.trouble: list[BaseException] = []
        self._heap: list[tuple[float, float, int, Process | None, Act]] = []
        self._number = 0

    def after(self, delay_ms: float, act: Act, process: Process | None = None) -> None:
        """Schedule an action, in a process or outside of all."""
        self.at(self.now_ms + delay_ms, act, process)

    def at(self, time_ms: float, act: Act, process: Process | None = None) -> None:
        self._number += 1
        heappush(self._heap, (time_ms, time_ms, self._number, process, act))

    def step(self) -> None:
        """Run the next event.

        Raises:
            BaseException: An exception that no handler in the process took.
        """
        time_ms, due_ms, number, process, act = heappop(self._heap)
        self.now_ms = max(self.now_ms, time_ms)
        if process is None:
            act()
        elif process.alive:
            if time_ms < process.stalled_until_ms:
                # In the order of due times, even if a stall is prolonged.
                heappush(self._heap, (process.stalled_until_ms, due_ms, number, process, act))
            else:
                process.do(act)
        if self.trouble:
            raise self.trouble[0]


class Process:
    """Something that runs, stalls and dies; `do` lets it act.

    Attributes:
        alive: Whether it was not killed and has not ended.
        stalled_until_ms: Time until which a stalled process postpones its actions.
        loop: Its event loop.
        host: Its address.
        side: Its side of a split network.
        fds: Its open files.
    """

    def __init__(self, clock: Clock, host: str) -> None:
        self.clock = clock
        self.host = host
        self.side = 0
        self.alive = True
        self.stalled_until_ms = 0.0
        self.fds: set[int] = set()
        self.loop = Loop(self)  # type: ignore[abstract]

    def do(self, act: Act) -> None:
        """Act, and run all callbacks that become ready."""
        clock = self.clock
        if not self.alive:
            return
        before, clock.current = clock.current, self
        asyncio._set_running_loop(self.loop)
        try:
            act()
            self.loop.do_what_is_ready()
        finally:
            clock.current = before
            asyncio._set_running_loop(before.loop if before is not None else None)

    def any_thread(self) -> Executor:
        """Return one of the threads of the process."""
        raise NotImplementedError

    def end(self) -> None:
        """Drop all its pending events."""
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

    def do_what_is_ready(self) -> None:
        ready = self._ready
        while ready:
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def abandon(self) -> None:
        """The process is dead: its coroutines end at their current point, without effects."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            task: Any
            for task in asyncio.all_tasks(self):
                task._log_destroy_pending = False
                coroutine = task.get_coro()
                if not coroutine.cr_running:
                    coroutine.close()
        finally:
            asyncio._set_running_loop(before)
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
        """Called by threads: the loop runs it soon, in order."""
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

        def act() -> None:
            if not timer._cancelled:
                timer._run()

        self._clock.at(when * 1000, act, self._process)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A canceled timer is skipped at its time."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """A job that somebody waits for: it takes as long as its syncs or computations."""
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
            self._clock.trouble.append(error)
