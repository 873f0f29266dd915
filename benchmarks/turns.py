"""Measure two sides alternately, so that other load affects both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timed:
    """Rounds of one side: seconds on the clock and of the process's CPU."""

    wall_s: list[float]
    cpu_s: list[float]

    @property
    def median_ms(self) -> float:
        """On the clock."""
        return statistics.median(self.wall_s) * 1e3

    @property
    def spread_ms(self) -> str:
        """From the quickest to the slowest."""
        return f"{min(self.wall_s) * 1e3:.1f}-{max(self.wall_s) * 1e3:.1f}"


def by_turns(sides: Sequence[Callable[[], None]], rounds: int) -> list[Timed]:
    """Run the sides one after the other, so many times; the first round is left out."""
    timed = [Timed([], []) for _ in sides]
    for number in range(rounds + 1):
        for side, into in zip(sides, timed, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            side()
            if number:
                into.wall_s.append(time.perf_counter() - wall)
                into.cpu_s.append(time.process_time() - cpu)
    return timed


def ratios(ours: list[float], theirs: list[float]) -> str:
    """The median of the rounds' ratios, and its spread."""
    each = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    return f"{statistics.median(each):.2f} ({each[0]:.2f}-{each[-1]:.2f})"
