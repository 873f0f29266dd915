"""The parts of a step's time, from the start of one update to the start of the next."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from benchmarks.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of one process; milliseconds.

    Attributes:
        step: Number of the step, from 0.
        total_ms: Time from the start of the previous update to the start of this step's update.
        compute_ms: Time of forward and backward, including batches and the summation of gradients.
        update_ms: Time of the previous update.
    """

    step: int
    total_ms: float
    compute_ms: float
    update_ms: float

    @property
    def rest_ms(self) -> float:
        """Return the remaining time: exposed exchange, commit and plan."""
        return self.total_ms - self.compute_ms - self.update_ms


def step_times(timeline: Timeline, start_us: float, end_us: float) -> list[StepTime]:
    """Return one worker's steps between two instants, in order, without the first step."""
    updates: dict[int, tuple[float, float]] = {}
    compute_us: dict[int, float] = {}
    for event in timeline.events:
        if not start_us <= event["ts"] <= end_us:
            continue
        if event["name"] in ("apply step", "take weights"):  # the trace numbers steps from 1
            updates[event["args"]["step"] - 1] = event["ts"], event["dur"]
        elif event["name"].startswith("subtree "):
            step = event["args"]["step"]
            compute_us[step] = compute_us.get(step, 0.0) + event["dur"]
    return [
        StepTime(
            step,
            (updates[step][0] - updates[previous_step][0]) / 1e3,
            compute_us[step] / 1e3,
            updates[previous_step][1] / 1e3,
        )
        for previous_step, step in pairwise(sorted(updates))
    ]
