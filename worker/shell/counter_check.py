"""Check that a step commits the counter changes of this worker's microbatches.

All microbatches of a step must change a counter of the model (`Block` of kind `counters`) by the
same amount. A device compares its own microbatches. The step commits the rounded mean over all of
them, which every worker compares with its own change. If two microbatches differ, at least one of
them differs from the mean, and the worker that computed it reports the error.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backends.base.interface import Array
from protocol.base.errors import DataError
from protocol.exact.replica import Replica
from protocol.spec.manifest import Block


class CounterCheck:
    """The counters that this worker expects after the newest step.

    Args:
        blocks: The manifest's blocks.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._counters = {n: block for n, block in enumerate(blocks) if block.kind == "counters"}
        self._initial_counters: dict[int, Array] = {}
        self._changes: dict[int, Array] = {}
        self._step = -1

    def begin_step(self, replica: Replica) -> None:
        """Record the counters from which the next step starts."""
        if replica.step != self._step or not self._changes:
            self._step, self._changes = replica.step, {}
            self._initial_counters = {n: replica.parameters[n].copy() for n in self._counters}

    def record_changes(self, step: int, block: int, changes: Array, weight: float) -> None:
        """Record a subtree's sum of changes in a step."""
        if block in self._counters and step == self._step and weight:
            self._changes[block] = np.rint(changes / np.float32(weight))

    def check(self, replica: Replica) -> None:
        """Compare with the committed counters, after the replica has taken a step.

        Raises:
            DataError: A counter differs; the error names it.
        """
        if self._step != replica.step - 1:
            return
        for number, changes in self._changes.items():
            committed = replica.parameters[number]
            expected_values = self._initial_counters[number] + changes
            for tensor, part in self._counters[number].slices():
                if (committed[part] != expected_values[part]).any():
                    raise DataError(
                        f"expected all microbatches of step {self._step} to change the counter "
                        f"{tensor.name!r} equally, got {expected_values[part].max():g} here and "
                        f"{committed[part].max():g} on average; count microbatches, not samples, "
                        "or keep it out of the module"
                    )
