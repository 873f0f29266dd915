"""Measure two sides alternately, so that other load affects both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SideTimes:
    """Wall time and CPU time of one side's rounds, in seconds."""

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


def measure_alternately(sides: Sequence[Callable[[], None]], rounds: int) -> list[SideTimes]:
    """Run the sides alternately and return their times, without the first round."""
    times = [SideTimes([], []) for _ in sides]
    for number in range(rounds + 1):
        for side, side_times in zip(sides, times, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            side()
            if number:
                side_times.wall_s.append(time.perf_counter() - wall)
                side_times.cpu_s.append(time.process_time() - cpu)
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
