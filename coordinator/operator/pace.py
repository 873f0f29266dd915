"""How fast a run goes, since this coordinator took it on: what was done before is not counted."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.service.execution import Execution


@dataclass(frozen=True, slots=True)
class Pace:
    """`left_s` is None as long as no step shows how long one takes."""

    elapsed_s: float
    samples_per_s: float
    left_s: float | None

    def __str__(self) -> str:
        left = f", about {in_words(self.left_s)} left" if self.left_s is not None else ""
        rate = f"{self.samples_per_s:.{0 if self.samples_per_s >= 100 else 1}f}"
        return f"{rate} samples/s, {in_words(self.elapsed_s)} elapsed{left}"


def pace_of(execution: Execution, now_s: float) -> Pace | None:
    """None before training begins, and when the run is over."""
    if execution.started_s is None or execution.outcome is not None:
        return None
    run = execution.run
    elapsed_s = max(now_s - execution.started_s, 1e-9)
    steps = run.step - execution.started_step
    left_s = elapsed_s * (run.steps - run.step) / steps if steps > 0 else None
    return Pace(elapsed_s, max(steps, 0) * run.spec.step_samples / elapsed_s, left_s)


def in_words(seconds: float) -> str:
    """As 41 s, 12:05 or 3:12:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
