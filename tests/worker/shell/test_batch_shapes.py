"""A microbatch of each shape that a run begins with."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from backends.base.interface import Batch
from protocol.exact.samples import SampleOrder
from protocol.spec.run_spec import BatchSpec
from worker.shell.batch_shapes import evaluation_of_each_shape, microbatch_of_each_shape


class Texts:
    """Sample n has 16 or 32 tokens, as has held-out part n; the last one is short."""

    manifest = SimpleNamespace(evaluation_parts=21)

    def batch(self, samples):
        width = max(16 if sample % 4 else 32 for sample in samples)
        return Batch({"ids": np.zeros((len(samples), width), np.int64)}, float(len(samples)))

    def evaluation_batch(self, part):
        return self.batch([part] * (1 if part == 20 else 3))


def test_each_shape_comes_once_and_the_first_microbatch_first():
    order = SampleOrder(3, 21, BatchSpec(samples=5, microbatch=2))
    task = Texts()
    found = microbatch_of_each_shape(task, order)  # type: ignore[arg-type]
    shapes = [batch.arrays["ids"].shape for batch in found]
    assert shapes[0] == task.batch(order.microbatches(0)[0]).arrays["ids"].shape
    assert len(shapes) == len({*shapes})
    steps = range(order.steps_per_epoch)
    every = (samples for step in steps for samples in order.microbatches(step))
    assert {*shapes} == {task.batch(samples).arrays["ids"].shape for samples in every}


def test_each_shape_of_a_held_out_part_comes_once():
    found = evaluation_of_each_shape(Texts())  # type: ignore[arg-type]
    assert {batch.arrays["ids"].shape for batch in found} == {(3, 16), (3, 32), (1, 32)}
    assert len(found) == 3
    none = SimpleNamespace(manifest=SimpleNamespace(evaluation_parts=0))
    assert evaluation_of_each_shape(none) == []
