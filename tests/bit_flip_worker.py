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


def flip_bit(step: int) -> None:
    original_init = Engine.__init__

    def init_with_flip(
        self: Engine, factory: Any, emit: Any, *arguments: Any, **options: Any
    ) -> None:
        def emit_flipped(event: Any) -> None:
            if isinstance(event, BlockSum) and event.step_id.step == step and event.block == 0:
                event.values.view(np.uint32)[ELEMENT] ^= 1 << 18
            emit(event)

        original_init(self, factory, emit_flipped, *arguments, **options)

    Engine.__init__ = init_with_flip  # type: ignore[method-assign]


if __name__ == "__main__":
    flip_bit(int(sys.argv.pop(1)))
    main()
