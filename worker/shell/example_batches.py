"""Select a batch of each shape to prepare a device, and name the samples of a batch that fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from backends.base.interface import Batch, LossFailed
from protocol.base.errors import DataError
from protocol.exact.samples import SampleOrder
from worker.tasks.base.task import ReadsFiles, Task

_STEPS: Final = 8
"""Number of first steps that are searched for shapes; later ones rarely have new shapes."""
_PARTS: Final = 16
"""Number of evaluation parts that are searched, beside the last, which may be smaller."""


def microbatch_per_shape(task: Task, order: SampleOrder) -> list[Batch]:
    """Return one microbatch of each shape in the first steps, starting with the run's first."""
    steps = range(min(_STEPS, order.steps_per_epoch))
    if isinstance(task, ReadsFiles):
        sizes = {size: None for step in steps for size in order.microbatch_sizes(step)}
        return _one_per_shape(task.blank(size) for size in sizes)
    return _one_per_shape(
        task.batch(samples) for step in steps for samples in order.microbatches(step)
    )


def evaluation_per_shape(task: Task) -> list[Batch]:
    """Return one evaluation batch of each shape among the first parts and the last."""
    parts = range(task.manifest.evaluation_parts)
    return _one_per_shape(_evaluation_batch(task, part) for part in {*parts[:_PARTS], *parts[-1:]})


def _evaluation_batch(task: Task, part: int) -> Batch:
    return task.blank_part(part) if isinstance(task, ReadsFiles) else task.evaluation_batch(part)


def _one_per_shape(batches: Iterable[Batch]) -> list[Batch]:
    by_shape: dict[object, Batch] = {}
    for batch in batches:
        shapes = tuple((name, array.shape) for name, array in sorted(batch.arrays.items()))
        by_shape.setdefault(shapes, batch)
    return list(by_shape.values())


@contextmanager
def report_samples(
    step: int, batches: Sequence[Batch], samples: Sequence[Sequence[int]]
) -> Iterator[None]:
    """Add step and samples to the error of a batch that fails inside this context.

    Args:
        step: The run's step, or its round in a run with replicas.
        batches: The microbatches that are computed in the context.
        samples: Sample numbers of each microbatch.

    Raises:
        DataError: The user's loss raised; names step and samples.
    """
    try:
        yield
    except LossFailed as error:
        failed_samples = (
            s for s, batch in zip(samples, batches, strict=True) if batch is error.batch
        )
        suffix = _sample_suffix(next(failed_samples, ()), error)
        raise DataError(f"{error}, step {step}{suffix}") from error


def _sample_suffix(samples: Sequence[int], error: LossFailed) -> str:
    """Name the one failing sample if the batch's arrays have a row for each, else all samples."""
    if not samples:
        return ""
    lengths = {len(array) for array in error.batch.arrays.values() if array.ndim}
    if error.row is not None and lengths == {len(samples)}:
        return f", sample {samples[error.row]}"
    return f", samples {', '.join(map(str, samples))}"
