"""A worker whose memory flips one bit: `python -m tests.corrupted_worker STEP ARGUMENTS...`.

After STEP steps, one bit of one parameter flips, as in failing memory: once, not again when the
worker returns and applies that step from the log. Everything else is the product's worker.
"""

from __future__ import annotations

import sys

import numpy as np

from protocol.exact.replica import Replica
from worker.cli import main


def break_replica(at_step: int) -> None:
    apply = Replica.apply
    flipped = False

    def apply_and_flip(self: Replica, averages, scalars) -> None:
        nonlocal flipped
        apply(self, averages, scalars)
        if self.step == at_step and not flipped:
            flipped = True
            self.parameters[0].view(np.uint32)[0] ^= 1

    Replica.apply = apply_and_flip  # type: ignore[method-assign]


if __name__ == "__main__":
    break_replica(int(sys.argv.pop(1)))
    main()
