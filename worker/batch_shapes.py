"""Which shapes of microbatch a run begins with: a device may have to be made ready for each.

Done in the middle of a step it would be taken for lateness.
"""

from __future__ import annotations

from typing import Final

from backends.interface import Batch
from protocol.samples import SampleOrder
from worker.tasks.base import Task

_STEPS: Final = 8
"""Looked at; a shape that comes first after them is rare."""


def microbatch_of_each_shape(task: Task, order: SampleOrder) -> list[Batch]:
    """One microbatch of each shape in the first steps; first the run's very first one."""
    found: dict[object, Batch] = {}
    for step in range(min(_STEPS, order.steps_per_epoch)):
        for samples in order.microbatches(step):
            batch = task.batch(samples)
            shapes = tuple((name, array.shape) for name, array in sorted(batch.arrays.items()))
            found.setdefault(shapes, batch)
    return list(found.values())
