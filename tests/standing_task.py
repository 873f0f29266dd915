"""A task whose making stops every thread of its process, as a library that loads a model may."""

from __future__ import annotations

import ctypes

from protocol.spec.run_spec import RunSpec
from worker.tasks.scripted import Scripted

STANDS_S = 4
NAME = "tests.standing_task:Stands"


class Stands(Scripted):
    """PyDLL keeps the interpreter's lock for as long as what it calls takes."""

    def __init__(self, spec: RunSpec) -> None:
        ctypes.PyDLL(None).sleep(STANDS_S)
        super().__init__(spec)
