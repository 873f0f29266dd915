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
"""Needed because pytest-timeout's signal may be lost in a waiting event loop. The timeouts within a
scenario are shorter, and name the missing event."""


def on_uvloop(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a synchronous test that runs `scenario`, with the same fixtures and parameters."""
    return on_uvloop_for(_PATIENCE_S)(scenario)


def on_uvloop_for(
    patience_s: float,
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Return a decorator like `on_uvloop`, with this time limit."""
    return lambda scenario: _on_uvloop(scenario, patience_s)


def _on_uvloop(scenario: Callable[..., Awaitable[None]], patience_s: float) -> Callable[..., None]:

    @functools.wraps(scenario)
    def test(*args: Any, **kwargs: Any) -> None:
        unhandled: list[dict[str, Any]] = []

        async def run() -> None:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: unhandled.append(context))
            async with asyncio.timeout(patience_s):
                await scenario(*args, **kwargs)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
        assert not unhandled, unhandled

    return test
