"""A worker whose device flips one bit: `python -m tests.flipping_worker STEP ARGUMENTS...`.

In what it sends of STEP one bit of one element is turned over, before anything is hashed: whatever
follows from it is as it would be. Everything else is the product's own worker.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from worker.cli import main
from worker.logic.events import BlockSum
from worker.shell.engine import Engine

ELEMENT = 3


def flip(at_step: int) -> None:
    begin = Engine.__init__

    def begin_flipping(self: Engine, toolbox: Any, emit: Any, *others: Any) -> None:
        def flipped(event: Any) -> None:
            if isinstance(event, BlockSum) and event.place.step == at_step and event.block == 0:
                event.values.view(np.uint32)[ELEMENT] ^= 1 << 18
            emit(event)

        begin(self, toolbox, flipped, *others)

    Engine.__init__ = begin_flipping  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    flip(int(sys.argv.pop(1)))
    main()
