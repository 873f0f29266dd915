"""What a run's exactness is about, in words."""

from __future__ import annotations

from protocol.spec.manifest import Block, Manifest, TensorSpec
from protocol.spec.sections.tasks import BatchSpec
from protocol.spec.unit import unit_text


def test_the_unit_and_what_forward_changes_are_said():
    weight, mean = (TensorSpec(name=name, shape=(2,)) for name in ("weight", "mean"))
    trained = Block(name="a", kind="block", tensors=(weight,))
    moved = Block(name="b", kind="buffers", tensors=(mean,))
    whole = BatchSpec(samples=8, microbatch=4, unit="microbatch")
    assert unit_text(BatchSpec(samples=8, microbatch=4), None) == "sample, computed 4 at a time"
    assert unit_text(whole, Manifest(blocks=(trained,), train_samples=9)) == (
        "microbatch of 4 samples: its size is part of the result"
    )
    text = unit_text(whole, Manifest(blocks=(moved, trained), train_samples=9))
    assert text.endswith("; 1 tensor that forward changes, averaged in each step")
