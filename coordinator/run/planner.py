"""Which worker computes which nodes: by measured speed, in few uploads.

Pure: values in, values out.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from statistics import median
from typing import Final

from protocol.exact.tree import Node, cover

_STICKY_GAIN: Final = 0.1
"""A new division must promise this much less time: noise alone must not move nodes about."""

Shares = dict[str, int]


def shares(microbatches: int, ms_per_microbatch: Mapping[str, float]) -> Shares:
    """Microbatches for each worker such that the slowest is done as early as can be.

    Giving each microbatch to the worker that would finish it first is optimal for equal
    microbatches (Graham 1969).

    Args:
        microbatches: How many the step has.
        ms_per_microbatch: Measured time of one, by worker.
    """
    given = dict.fromkeys(ms_per_microbatch, 0)
    heap = [(ms, name) for name, ms in sorted(ms_per_microbatch.items())]
    heapq.heapify(heap)
    for _ in range(microbatches):
        _, name = heap[0]
        given[name] += 1
        heapq.heapreplace(heap, ((given[name] + 1) * ms_per_microbatch[name], name))
    return given


def makespan_ms(division: Shares, ms_per_microbatch: Mapping[str, float]) -> float:
    """When the last worker is done."""
    return max(count * ms_per_microbatch[name] for name, count in division.items())


def divide(
    microbatches: int, speeds: Mapping[str, float | None], previous: Shares | None = None
) -> Shares:
    """Microbatches for each worker, keeping to the previous division while it is good enough.

    Args:
        microbatches: How many the step has.
        speeds: Milliseconds per microbatch, None where not measured yet (taken as the median).
        previous: The last step's division.
    """
    known = [ms for ms in speeds.values() if ms is not None]
    typical = median(known) if known else 1.0
    times = {name: max(ms if ms is not None else typical, 1e-3) for name, ms in speeds.items()}
    best = shares(microbatches, times)
    if previous is None or previous.keys() != best.keys():
        previous = shares(microbatches, dict.fromkeys(times, 1.0))
    if sum(previous.values()) != microbatches:
        return best
    kept, new = makespan_ms(previous, times), makespan_ms(best, times)
    return best if new < kept * (1 - _STICKY_GAIN) else previous


def nodes_for(division: Shares) -> dict[str, tuple[Node, ...]]:
    """Neighbouring microbatches for each worker as nodes, the largest share first.

    The largest share starts at 0, where the tree's largest nodes lie: few nodes, few uploads.
    """
    microbatches = sum(division.values())
    at = 0
    planned: dict[str, tuple[Node, ...]] = {}
    for name, count in sorted(division.items(), key=lambda item: (-item[1], item[0])):
        planned[name] = cover(range(at, at + count), microbatches)
        at += count
    return planned


def spread(
    nodes: tuple[Node, ...], microbatches: int, speeds: Mapping[str, float | None]
) -> dict[str, tuple[Node, ...]]:
    """Divide the unfinished nodes of a lost worker among others, by speed."""
    leaves = [leaf for node in nodes for leaf in range(node.lo, node.hi)]
    planned: dict[str, tuple[Node, ...]] = {}
    at = 0
    for name, count in divide(len(leaves), speeds).items():
        if count:
            planned[name] = cover(leaves[at : at + count], microbatches)
            at += count
    return planned


def balance(division: Shares, ms_per_microbatch: Mapping[str, float | None]) -> float:
    """Share of all workers' time that is spent computing while the slowest works, 0 to 1."""
    times = {name: ms if ms is not None else 1.0 for name, ms in ms_per_microbatch.items()}
    slowest = makespan_ms(division, times)
    busy = sum(count * times[name] for name, count in division.items())
    return busy / (slowest * len(division)) if slowest else 1.0
