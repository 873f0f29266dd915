"""Where a step's time goes, from the start of one update to the start of the next."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from benchmarks.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of one process; milliseconds.

    Attributes:
        step: Whose microbatches these are, from 0.
        total_ms: From the start of the update before them to the start of the update after them.
        compute_ms: Forward and backward, with making the batches and summing the gradients.
        update_ms: The update before them.
    """

    step: int
    total_ms: float
    compute_ms: float
    update_ms: float

    @property
    def rest_ms(self) -> float:
        """Neither: exchange, commit and plan, as far as nothing hides them."""
        return self.total_ms - self.compute_ms - self.update_ms


def step_times(timeline: Timeline, start_us: float, end_us: float) -> list[StepTime]:
    """One worker's steps of the one run between two instants, all but the first, in order."""
    updates: dict[int, tuple[float, float]] = {}
    compute_us: dict[int, float] = {}
    for event in timeline.events:
        if not start_us <= event["ts"] <= end_us:
            continue
        if event["name"] in ("apply step", "take weights"):  # the trace counts steps taken
            updates[event["args"]["step"] - 1] = event["ts"], event["dur"]
        elif event["name"].startswith("subtree "):
            step = event["args"]["step"]
            compute_us[step] = compute_us.get(step, 0.0) + event["dur"]
    return [
        StepTime(
            step,
            (updates[step][0] - updates[before][0]) / 1e3,
            compute_us[step] / 1e3,
            updates[before][1] / 1e3,
        )
        for before, step in pairwise(sorted(updates))
    ]
