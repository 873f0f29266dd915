"""Which seeds a test plays, as the environment says: a number, or from-to."""

from __future__ import annotations

import os
from dataclasses import dataclass

_MOST_TESTS = 100


@dataclass(frozen=True, slots=True)
class Seeds:
    """Those of one variable, divided among tests.

    Args:
        variable: Of the environment: `1000` are those below, `688-689` is one.
        default: Without it.
    """

    variable: str
    default: str

    @property
    def all(self) -> range:
        first, dash, last = os.environ.get(self.variable, self.default).partition("-")
        return range(int(first), int(last)) if dash else range(int(first))

    @property
    def per_test(self) -> int:
        return -(-len(self.all) // _MOST_TESTS)

    @property
    def firsts(self) -> range:
        """Of each test."""
        return self.all[:: self.per_test]

    def of(self, first: int) -> range:
        """What the test plays that begins with this one."""
        return range(first, min(first + self.per_test, self.all.stop))
