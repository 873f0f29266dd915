"""The description of the unit of a run's exactness."""

from __future__ import annotations

from protocol.spec.manifest import Block, Manifest, TensorSpec
from protocol.spec.sections.tasks import BatchSpec
from protocol.spec.unit import unit_text


def test_unit_and_changed_buffers_are_described():
    weight, mean = (TensorSpec(name=name, shape=(2,)) for name in ("weight", "mean"))
    weight_block = Block(name="a", kind="block", tensors=(weight,))
    buffer_block = Block(name="b", kind="buffers", tensors=(mean,))
    batch = BatchSpec(samples=8, microbatch=4, unit="microbatch")
    assert unit_text(BatchSpec(samples=8, microbatch=4), None) == "sample, computed 4 at a time"
    assert unit_text(batch, Manifest(blocks=(weight_block,), train_samples=9)) == (
        "microbatch of 4 samples: its size is part of the result"
    )
    text = unit_text(batch, Manifest(blocks=(buffer_block, weight_block), train_samples=9))
    assert text.endswith("; 1 tensor that forward changes, averaged in each step")
