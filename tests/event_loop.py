"""Run an async test on uvloop, the loop of both daemons, and fail it for swallowed exceptions.

An exception in a transport's callback never reaches the test: the loop passes it to its exception
handler and continues. Here every such report is a failure.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

_PATIENCE_S = 250.0
"""pytest-timeout's signal may be lost in a loop that waits; the timeouts within a story are
shorter, and name the missing event."""


def on_uvloop(story: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a synchronous test that runs `story`, with the same fixtures and parameters."""
    return on_uvloop_for(_PATIENCE_S)(story)


def on_uvloop_for(
    patience_s: float,
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """`on_uvloop` for stories with another time limit."""
    return lambda story: _on_uvloop(story, patience_s)


def _on_uvloop(story: Callable[..., Awaitable[None]], patience_s: float) -> Callable[..., None]:

    @functools.wraps(story)
    def test(*args: Any, **kwargs: Any) -> None:
        swallowed: list[dict[str, Any]] = []

        async def run() -> None:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: swallowed.append(context))
            async with asyncio.timeout(patience_s):
                await story(*args, **kwargs)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
        assert not swallowed, swallowed

    return test
