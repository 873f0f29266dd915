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


def test_gradients_vary_over_seed_block_and_element():
    program = ScriptedBackend().compile(Trainable(BLOCKS), BATCH)
    values = set()
    for seed in range(3):
        for item in program.gradients([(BATCH, seed)]):
            if isinstance(item, BlockGradient):
                assert len(np.unique(item.values)) > 90
                values.add(item.values[:100].tobytes())
    assert len(values) == 12


def test_two_programs_give_the_same_bits():
    first, second = (
        [
            item.values.tobytes() if isinstance(item, BlockGradient) else item
            for item in ScriptedBackend(ms)
            .compile(Trainable(BLOCKS), BATCH)
            .gradients([(BATCH, 4)])
        ]
        for ms in (0.0, 1.0)
    )
    assert first == second


def test_blocks_arrive_no_earlier_than_scheduled():
    program = ScriptedBackend(40.0).compile(Trainable(BLOCKS), BATCH)
    start_s = time.perf_counter()
    for block_count, _ in enumerate(program.gradients([(BATCH, 0)]), start=1):
        share = FORWARD_SHARE + (1 - FORWARD_SHARE) * min(block_count, 4) / 4
        assert time.perf_counter() - start_s >= share * 0.040


def test_load_keeps_a_copy():
    program = ScriptedBackend().compile(Trainable(BLOCKS), BATCH)
    values = [np.ones(block.elements, np.float32) for block in BLOCKS]
    program.load(values)
    values[0].fill(2.0)
    assert program.parameters[0][0] == 1.0  # type: ignore[attr-defined]
