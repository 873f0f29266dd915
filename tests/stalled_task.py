"""A task whose construction blocks every thread of its process, as loading a library may."""

from __future__ import annotations

import ctypes

from protocol.spec.run_spec import RunSpec
from worker.tasks.small.scripted import Scripted

STALL_S = 4
NAME = "tests.stalled_task:StalledTask"


class StalledTask(Scripted):
    """Blocks the interpreter: PyDLL holds its lock during the call."""

    def __init__(self, spec: RunSpec) -> None:
        ctypes.PyDLL(None).sleep(STALL_S)
        super().__init__(spec)
