"""Which samples of the run it was that a model, its loss or a device's program cannot compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from backends.base.interface import Batch, LossRaised
from protocol.base.errors import DataError


@contextmanager
def samples_named(
    step: int, batches: Sequence[Batch], samples: Sequence[Sequence[int]]
) -> Iterator[None]:
    """While it is entered: if one of the batches cannot be computed, the error says of which
    samples, and in which step.

    Args:
        step: Of the run; its round, where it has replicas.
        batches: Microbatches.
        samples: The numbers of each one's samples in the data.

    Raises:
        DataError: Likewise.
    """
    try:
        yield
    except LossRaised as error:
        found = (s for s, batch in zip(samples, batches, strict=True) if batch is error.batch)
        shown = _shown(next(found, ()), error)
        raise DataError(f"{error}, step {step}{shown}") from error


def _shown(samples: Sequence[int], error: LossRaised) -> str:
    """One sample, if the error knows it and the batch's arrays have one row for each."""
    if not samples:
        return ""
    lengths = {len(array) for array in error.batch.arrays.values() if array.ndim}
    if error.row is not None and lengths == {len(samples)}:
        return f", sample {samples[error.row]}"
    return f", samples {', '.join(map(str, samples))}"
