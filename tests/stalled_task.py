"""A task whose constructor blocks every thread of its process, as loading a library can."""

from __future__ import annotations

import ctypes

from protocol.spec.run_spec import RunSpec
from worker.tasks.small.scripted import Scripted

STALL_S = 4
NAME = "tests.stalled_task:StalledTask"


class StalledTask(Scripted):
    """A scripted task that first blocks the interpreter: PyDLL holds the GIL during a call."""

    def __init__(self, spec: RunSpec) -> None:
        ctypes.PyDLL(None).sleep(STALL_S)
        super().__init__(spec)
