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
        """Return the median wall time."""
        return statistics.median(self.wall_s) * 1e3

    @property
    def spread_ms(self) -> str:
        """Return the range of wall times as text."""
        return f"{min(self.wall_s) * 1e3:.1f}-{max(self.wall_s) * 1e3:.1f}"


def by_turns(sides: Sequence[Callable[[], None]], rounds: int) -> list[Timed]:
    """Run the sides alternately; the first round is left out."""
    times = [Timed([], []) for _ in sides]
    for number in range(rounds + 1):
        for side, into in zip(sides, times, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            side()
            if number:
                into.wall_s.append(time.perf_counter() - wall)
                into.cpu_s.append(time.process_time() - cpu)
    return times


def ratios(first_times: list[float], second_times: list[float]) -> str:
    """Return the median and range of the rounds' ratios as text."""
    ratios_by_round = sorted(
        first_time / second_time
        for first_time, second_time in zip(first_times, second_times, strict=True)
    )
    middle, lowest, highest = (
        statistics.median(ratios_by_round), ratios_by_round[0], ratios_by_round[-1]
    )  # fmt: skip
    return f"{middle:.2f} ({lowest:.2f}-{highest:.2f})"
