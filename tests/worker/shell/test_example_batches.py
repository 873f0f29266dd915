"""One batch of each shape; an error in a batch names its step and samples."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from backends.base.interface import Batch, LossFailed
from protocol.base.errors import DataError
from protocol.exact.samples import SampleOrder
from protocol.spec.sections.tasks import BatchSpec
from worker.shell.example_batches import (
    evaluation_per_shape,
    microbatch_per_shape,
    report_samples,
)

TWO_BATCHES = [Batch({"x": np.zeros((3, 2)), "t": np.array(1.0)}, 3.0) for _ in range(2)]


class TextTask:
    """A task whose samples and evaluation parts have 16 or 32 tokens; the last part is short."""

    manifest = SimpleNamespace(evaluation_parts=21)

    def batch(self, samples):
        width = max(16 if sample % 4 else 32 for sample in samples)
        return Batch({"ids": np.zeros((len(samples), width), np.int64)}, float(len(samples)))

    def evaluation_batch(self, part):
        return self.batch([part] * (1 if part == 20 else 3))


def test_each_shape_occurs_once_with_the_first_microbatch_first():
    order = SampleOrder(3, 21, BatchSpec(samples=5, microbatch=2))
    task = TextTask()
    microbatches = microbatch_per_shape(task, order)  # type: ignore[arg-type]
    shapes = [batch.arrays["ids"].shape for batch in microbatches]
    assert shapes[0] == task.batch(order.microbatches(0)[0]).arrays["ids"].shape
    assert len(shapes) == len({*shapes})
    steps = range(order.steps_per_epoch)
    every = (samples for step in steps for samples in order.microbatches(step))
    assert {*shapes} == {task.batch(samples).arrays["ids"].shape for samples in every}


def test_each_shape_of_an_evaluation_part_occurs_once():
    evaluation_batches = evaluation_per_shape(TextTask())  # type: ignore[arg-type]
    assert {batch.arrays["ids"].shape for batch in evaluation_batches} == {
        (3, 16),
        (3, 32),
        (1, 32),
    }
    assert len(evaluation_batches) == 3
    none = SimpleNamespace(manifest=SimpleNamespace(evaluation_parts=0))
    assert evaluation_per_shape(none) == []


SAMPLES = [[8, 1, 5], [3, 9, 4]]
PACKED = [Batch({"x": np.zeros((2, 4))}, 3.0)]


@pytest.mark.parametrize(
    ("batches", "batch_index", "row", "message"),
    [
        (TWO_BATCHES, TWO_BATCHES[1], None, "it raised, step 7, samples 3, 9, 4"),
        (TWO_BATCHES, TWO_BATCHES[0], 2, "it raised, step 7, sample 5"),
        (PACKED, PACKED[0], 1, "it raised, step 7, samples 8, 1, 5"),
        (TWO_BATCHES, PACKED[0], 1, "it raised, step 7"),
    ],
    ids=["samples", "one", "rows that are no samples", "another batch"],
)
def test_known_samples_are_named(batches, batch_index, row, message):
    samples = SAMPLES[: len(batches)]
    with pytest.raises(DataError) as error, report_samples(7, batches, samples):
        raise LossFailed("it raised", batch_index, row)
    assert str(error.value) == message


def test_other_errors_are_unchanged():
    error = ValueError("x")
    with pytest.raises(ValueError, match="x") as same, report_samples(7, TWO_BATCHES, SAMPLES):
        raise error
    assert same.value is error
