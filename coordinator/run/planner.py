"""Assign subtrees to workers: by measured speed, in few uploads.

Pure: values in, values out.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from statistics import median
from typing import Final

from protocol.exact.reduction.tree import Subtree, cover

_LEAST_GAIN: Final = 0.1
"""A new division must save at least this fraction of a step's time: noise must not move work."""

Shares = dict[str, int]


def fastest_division(microbatches: int, ms_per_microbatch: Mapping[str, float]) -> Shares:
    """Divide microbatches so that the slowest worker finishes as early as possible.

    Giving each microbatch to the worker that would finish it first is optimal for equal
    microbatches (Graham 1969).

    Args:
        microbatches: Number of microbatches in the step.
        ms_per_microbatch: Measured time of a microbatch, by worker.
    """
    counts = dict.fromkeys(ms_per_microbatch, 0)
    heap = [(ms, name) for name, ms in sorted(ms_per_microbatch.items())]
    heapq.heapify(heap)
    for _ in range(microbatches):
        _, name = heap[0]
        counts[name] += 1
        heapq.heapreplace(heap, ((counts[name] + 1) * ms_per_microbatch[name], name))
    return counts


def makespan_ms(division: Shares, ms_per_microbatch: Mapping[str, float]) -> float:
    """Return the time at which the last worker finishes, in milliseconds."""
    return max(count * ms_per_microbatch[name] for name, count in division.items())


def divide(
    microbatches: int, speeds: Mapping[str, float | None], previous: Shares | None = None
) -> Shares:
    """Divide microbatches among workers; keep the previous division while it is good enough.

    Args:
        microbatches: Number of microbatches in the step.
        speeds: Milliseconds per microbatch, by worker; None if not measured yet (the median is
            assumed).
        previous: The division of the previous step. If it is None or of other workers, an even
            division takes its place.
    """
    speeds_ms = [ms for ms in speeds.values() if ms is not None]
    typical = median(speeds_ms) if speeds_ms else 1.0
    times = {name: max(ms if ms is not None else typical, 1e-3) for name, ms in speeds.items()}
    best = fastest_division(microbatches, times)
    if previous is None or previous.keys() != best.keys():
        previous = fastest_division(microbatches, dict.fromkeys(times, 1.0))
    if sum(previous.values()) != microbatches:
        return best
    previous_ms, best_ms = makespan_ms(previous, times), makespan_ms(best, times)
    return best if best_ms < previous_ms * (1 - _LEAST_GAIN) else previous


def subtrees_for(division: Shares) -> dict[str, tuple[Subtree, ...]]:
    """Return adjacent microbatches for each worker as subtrees, the largest share first.

    The largest share starts at 0, where the tree's largest subtrees lie: few subtrees, few uploads.
    """
    microbatches = sum(division.values())
    start = 0
    subtrees_by_worker: dict[str, tuple[Subtree, ...]] = {}
    for name, count in sorted(division.items(), key=lambda item: (-item[1], item[0])):
        subtrees_by_worker[name] = cover(range(start, start + count), microbatches)
        start += count
    return subtrees_by_worker


def spread_subtrees(
    subtrees: tuple[Subtree, ...], microbatches: int, speeds: Mapping[str, float | None]
) -> dict[str, tuple[Subtree, ...]]:
    """Divide the unfinished subtrees of a lost or late worker among others, by speed."""
    leaves = [leaf for subtree in subtrees for leaf in range(subtree.lo, subtree.hi)]
    subtrees_by_worker: dict[str, tuple[Subtree, ...]] = {}
    start = 0
    for name, count in divide(len(leaves), speeds).items():
        if count:
            subtrees_by_worker[name] = cover(leaves[start : start + count], microbatches)
            start += count
    return subtrees_by_worker


def busy_share(division: Shares, ms_per_microbatch: Mapping[str, float | None]) -> float:
    """Return the fraction, 0 to 1, of all workers' time that is spent computing until the slowest
    worker finishes."""
    times = {name: ms if ms is not None else 1.0 for name, ms in ms_per_microbatch.items()}
    slowest_ms = makespan_ms(division, times)
    busy_ms = sum(count * times[name] for name, count in division.items())
    return busy_ms / (slowest_ms * len(division)) if slowest_ms else 1.0
