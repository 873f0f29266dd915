"""The seeds that a test simulates, from the environment: a count, or FIRST-END."""

from __future__ import annotations

import os
from dataclasses import dataclass

_MAX_TESTS = 100


@dataclass(frozen=True, slots=True)
class Seeds:
    """The seeds of one environment variable, divided among tests.

    Args:
        variable: Environment variable: `1000` means seeds 0 to 999, `688-689` seed 688 alone.
        default: Value if the variable is not set.
    """

    variable: str
    default: str

    @property
    def all(self) -> range:
        first, dash, last = os.environ.get(self.variable, self.default).partition("-")
        return range(int(first), int(last)) if dash else range(int(first))

    @property
    def per_test(self) -> int:
        return -(-len(self.all) // _MAX_TESTS)

    @property
    def first_seeds(self) -> range:
        """Return the first seed of each test."""
        return self.all[:: self.per_test]

    def of(self, first: int) -> range:
        """Return the seeds of the test that starts with this one."""
        return range(first, min(first + self.per_test, self.all.stop))
