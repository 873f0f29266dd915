"""A worker whose memory flips one bit: `python -m tests.corrupted_worker STEP ARGUMENTS...`.

Before STEP is applied, one bit of one parameter flips, as in failing memory. This happens once, not
again when the worker returns and applies that step from the log. Everything else is the product's
worker.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from protocol.exact.reduction.average import Array
from protocol.exact.replica import Replica
from protocol.exact.update import StepScalars
from worker.cli import main


def flip_parameter_bit(step: int) -> None:
    apply = Replica.apply
    has_flipped = False

    def flip_and_apply(
        self: Replica, averages: Sequence[Array], scalars: StepScalars, *, should_hash: bool = False
    ) -> None:
        nonlocal has_flipped
        if self.step + 1 == step and not has_flipped:
            has_flipped = True
            self.parameters[0].view(np.uint32)[0] ^= 1 << 20
        apply(self, averages, scalars, should_hash=should_hash)

    Replica.apply = flip_and_apply  # type: ignore[method-assign]


if __name__ == "__main__":
    flip_parameter_bit(int(sys.argv.pop(1)))
    main()
