"""The event loop of a daemon."""

from __future__ import annotations

import asyncio


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's; asyncio's own where there is none, as on Windows. No bit of a run depends on it."""
    try:
        import uvloop  # noqa: PLC0415 -- not for every system
    except ImportError:
        return asyncio.SelectorEventLoop()  # on Windows not the default, which watches no sockets
    return uvloop.new_event_loop()
