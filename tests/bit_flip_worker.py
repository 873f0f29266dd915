"""A worker whose device flips one bit: `python -m tests.bit_flip_worker STEP ARGUMENTS...`.

It flips one bit of one element of the gradients of STEP before anything is hashed, so everything
that follows is consistent with it. Everything else is the product's worker.
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

    def begin_flipping(self: Engine, factory: Any, emit: Any, *others: Any, **options: Any) -> None:
        def flipped(event: Any) -> None:
            if isinstance(event, BlockSum) and event.step_id.step == at_step and event.block == 0:
                event.values.view(np.uint32)[ELEMENT] ^= 1 << 18
            emit(event)

        begin(self, factory, flipped, *others, **options)

    Engine.__init__ = begin_flipping  # type: ignore[method-assign]


if __name__ == "__main__":
    flip(int(sys.argv.pop(1)))
    main()
