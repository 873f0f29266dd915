"""What a process says when wgpu's library ends it.

wgpu-native reports most errors, but panics when the driver itself loses the device, or has no
memory left, in a submission or a wait for one. A panic ends in SIGABRT and nothing of it comes
back to the caller. A handler of Python's would be too late: abort() ends the process when the C
handler returns.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Final

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_kept: Final[list[object]] = []
"""ctypes frees a callback that nobody holds."""


def on_abort(say: Callable[[], None], exit_code: int) -> None:
    """Have SIGABRT say this and end the process with this exit code.

    Args:
        say: Runs in the thread that failed, while the others go on.
        exit_code: In place of death by the signal.
    """
    if os.name != "posix":
        return

    def handle(_number: int) -> None:
        try:
            say()
        finally:
            os._exit(exit_code)

    handler = _Handler(handle)
    _kept.append(handler)
    install = ctypes.CDLL(None).signal
    install.argtypes, install.restype = (ctypes.c_int, _Handler), ctypes.c_void_p
    install(signal.SIGABRT, handler)
