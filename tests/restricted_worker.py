"""A worker without some features of Linux: `python -m tests.restricted_worker NAMES ARGUMENTS...`.

NAMES are keys of `FEATURES`, separated by commas. Windows has none of these features; macOS lacks
procfs and fdatasync. Everything else is the product's worker, imported after they are hidden.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import sys
from collections.abc import Callable
from typing import Any


def _without_module(name: str) -> Callable[[], None]:
    def hide() -> None:
        sys.modules[name] = None  # type: ignore[assignment]

    return hide


def _without_functions(*names: str) -> Callable[[], None]:
    def hide() -> None:
        for name in names:
            delattr(os, name)

    return hide


def _without_local_sockets() -> None:
    del socket.SO_PEERCRED


def _without_procfs() -> None:
    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith("/proc"):
            raise FileNotFoundError(2, "hidden", arguments[0])

    sys.addaudithook(refuse)


def _without_loop_signals() -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError

    sys.modules["uvloop"] = None  # type: ignore[assignment]
    asyncio.SelectorEventLoop.add_signal_handler = refuse  # type: ignore[assignment]


def _without_process_symbols() -> None:
    load = ctypes.CDLL

    def refuse(name: Any, *arguments: Any, **keywords: Any) -> ctypes.CDLL:
        if name is None:
            raise TypeError("hidden")
        return load(name, *arguments, **keywords)

    ctypes.CDLL = refuse  # type: ignore[assignment, misc]


FEATURES: dict[str, Callable[[], None]] = {
    "uvloop": _without_module("uvloop"),
    "fcntl": _without_module("fcntl"),
    "resource": _without_module("resource"),
    "procfs": _without_procfs,
    "file_functions": _without_functions(
        "pread", "pwrite", "fchmod", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"
    ),
    "fdatasync": _without_functions("fdatasync", "sync", "posix_fadvise", "posix_fallocate"),
    "users": _without_functions("fchown", "geteuid", "getuid", "getegid", "getgid"),
    "loop_signals": _without_loop_signals,
    "process_symbols": _without_process_symbols,
    "local_sockets": _without_local_sockets,
}

if __name__ == "__main__":
    for feature in sys.argv.pop(1).split(","):
        FEATURES[feature]()
    from worker.cli import main

    main()
