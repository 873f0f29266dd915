"""Report an error when wgpu's library aborts the process.

wgpu-native reports most errors, but panics if the driver loses the device or runs out of memory
during a submission or a wait. A panic raises SIGABRT and does not return to the caller. A Python
signal handler would run too late: abort() ends the process when the C handler returns.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Final

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_handlers: Final[list[object]] = []
"""Callbacks to keep alive: ctypes would free them."""


def install_abort_handler(report: Callable[[], None], exit_code: int) -> None:
    """Report and exit with `exit_code` on SIGABRT.

    Args:
        report: Runs in the failed thread, while other threads continue.
        exit_code: Exit code instead of termination by the signal.
    """
    if os.name != "posix":
        return

    def handle(_number: int) -> None:
        try:
            report()
        finally:
            os._exit(exit_code)

    handler = _Handler(handle)
    _handlers.append(handler)
    install = ctypes.CDLL(None).signal
    install.argtypes, install.restype = (ctypes.c_int, _Handler), ctypes.c_void_p
    install(signal.SIGABRT, handler)
