"""Which shapes of batch a run begins with: a device may have to be made ready for each.

Done in the middle of a step it would be taken for lateness.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from backends.base.interface import Batch
from protocol.exact.samples import SampleOrder
from worker.tasks.base import ReadsFiles, Task

_STEPS: Final = 8
"""Looked at; a shape that comes first after them is rare."""
_PARTS: Final = 16
"""Of the held-out set; the last one is looked at too, for it may be smaller."""


def microbatch_of_each_shape(task: Task, order: SampleOrder) -> list[Batch]:
    """One microbatch of each shape in the first steps; first the run's very first one."""
    steps = range(min(_STEPS, order.steps_per_epoch))
    if isinstance(task, ReadsFiles):
        sizes = {size: None for step in steps for size in order.microbatch_sizes(step)}
        return _of_each_shape(task.blank(size) for size in sizes)
    return _of_each_shape(
        task.batch(samples) for step in steps for samples in order.microbatches(step)
    )


def evaluation_of_each_shape(task: Task) -> list[Batch]:
    """One held-out part of each shape among the first ones and the last."""
    parts = range(task.manifest.evaluation_parts)
    return _of_each_shape(_held_out(task, part) for part in {*parts[:_PARTS], *parts[-1:]})


def _held_out(task: Task, part: int) -> Batch:
    return task.blank_part(part) if isinstance(task, ReadsFiles) else task.evaluation_batch(part)


def _of_each_shape(batches: Iterable[Batch]) -> list[Batch]:
    found: dict[object, Batch] = {}
    for batch in batches:
        shapes = tuple((name, array.shape) for name, array in sorted(batch.arrays.items()))
        found.setdefault(shapes, batch)
    return list(found.values())
