"""The scripted backend: distinct gradients, bits that do not depend on speed, and its schedule."""

from __future__ import annotations

import time

import numpy as np

from backends.base.interface import Batch, BlockGradient, Trainable
from backends.scripted import FORWARD_SHARE, ScriptedBackend
from protocol.spec.manifest import Block, TensorSpec

BLOCKS = tuple(
    Block(name=f"b{n}", kind="block", tensors=(TensorSpec(name=f"t{n}", shape=(100 + n,)),))
    for n in range(4)
)
BATCH = Batch({}, 3.0)


def test_gradients_differ_between_seeds_blocks_and_elements():
    program = ScriptedBackend().compile(Trainable(BLOCKS), BATCH)
    gradients = set()
    for seed in range(3):
        for item in program.gradients([(BATCH, seed)]):
            if isinstance(item, BlockGradient):
                # A block has at least 100 elements; few may be equal by chance.
                assert len(np.unique(item.values)) > 90
                gradients.add(item.values[:100].tobytes())
    assert len(gradients) == 3 * len(BLOCKS)


def test_bits_do_not_depend_on_the_duration_of_a_microbatch():
    without_delay, with_delay = (
        [
            item.values.tobytes() if isinstance(item, BlockGradient) else item
            for item in ScriptedBackend(microbatch_ms)
            .compile(Trainable(BLOCKS), BATCH)
            .gradients([(BATCH, 4)])
        ]
        for microbatch_ms in (0.0, 1.0)
    )
    assert without_delay == with_delay


def test_blocks_arrive_no_earlier_than_scheduled():
    program = ScriptedBackend(40.0).compile(Trainable(BLOCKS), BATCH)
    start_s = time.perf_counter()
    # The last item is the loss, which follows the last block at once.
    for item_count, _ in enumerate(program.gradients([(BATCH, 0)]), start=1):
        blocks_fraction = min(item_count, len(BLOCKS)) / len(BLOCKS)
        elapsed_fraction = FORWARD_SHARE + (1 - FORWARD_SHARE) * blocks_fraction
        assert time.perf_counter() - start_s >= elapsed_fraction * 0.040


def test_load_copies_the_parameters():
    program = ScriptedBackend().compile(Trainable(BLOCKS), BATCH)
    values = [np.ones(block.elements, np.float32) for block in BLOCKS]
    program.load(values)
    values[0].fill(2.0)
    assert program.parameters[0][0] == 1.0  # type: ignore[attr-defined]
