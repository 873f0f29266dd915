"""Blocks assembled from chunks, in any order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.base import limits
from protocol.exact.reduction.chunk_grid import ChunkGrid
from protocol.spec.manifest import Block, TensorSpec
from worker.peers.gradient_exchange import Averages

BLOCKS = tuple(
    Block(name=f"b{size}", kind="block", tensors=(TensorSpec(name=f"w{size}", shape=(size,)),))
    for size in (3, 10, 0, 8)
)


@pytest.fixture(autouse=True, scope="module")
def _several_chunks():
    patch = pytest.MonkeyPatch()
    patch.setattr(limits, "CHUNK_ELEMENTS", 4)
    yield
    patch.undo()


def value(block, chunk):
    chunk_part = BLOCKS[block].chunk_slice(chunk)
    return np.arange(chunk_part.start, chunk_part.stop, dtype=np.float32) + 100 * block


@given(st.data())
def test_any_order_and_duplicates_give_whole_blocks(data):
    chunk_ids = [(b, c) for b, block in enumerate(BLOCKS) for c in range(block.chunks)]
    grid = ChunkGrid(BLOCKS)
    averages = Averages(grid)
    arrivals: set[tuple[int, int]] = set()
    for block, chunk in data.draw(st.permutations(chunk_ids + chunk_ids[:3])):
        assert averages.is_complete is (len(arrivals) == len(chunk_ids))
        is_duplicate = (block, chunk) in arrivals
        values = value(block, chunk) - (999 if is_duplicate else 0)
        averages.put(grid.number(block, chunk), "", values)
        arrivals.add((block, chunk))
    assert averages.is_complete
    for number, block in enumerate(BLOCKS):
        expected = np.arange(block.elements, dtype=np.float32) + 100 * number
        assert averages.arrays[number].tolist() == expected.tolist()


def test_a_block_of_one_chunk_is_not_copied():
    averages = Averages(ChunkGrid(BLOCKS[:1]))
    values = value(0, 0)
    averages.put(0, "", values)
    assert averages.arrays[0] is values
