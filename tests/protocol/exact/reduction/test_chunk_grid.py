"""Positions of chunks: each occurs once, the last block first, up to the size limit."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from protocol.exact.reduction.chunk_grid import ChunkGrid
from protocol.spec.manifest import Block, TensorSpec

_BLOCKS = st.lists(st.integers(0, 40_000), min_size=1, max_size=6).map(
    lambda sizes: tuple(
        Block(name=str(n), kind="block", tensors=(TensorSpec(name=f"w{n}", shape=(size,)),))
        for n, size in enumerate(sizes)
    )
)


def nbytes(block: Block, chunk: int) -> int:
    part = block.chunk_slice(chunk)
    return int(part.stop - part.start) * 4


@given(_BLOCKS)
def test_every_chunk_has_its_position_and_later_blocks_come_first(blocks):
    grid = ChunkGrid(blocks)
    chunk_ids = [grid.chunk(position) for position in range(grid.count)]
    assert [grid.number(*chunk_id) for chunk_id in chunk_ids] == list(range(grid.count))
    assert sorted(chunk_ids) == [
        (b, c) for b, block in enumerate(blocks) for c in range(block.chunks)
    ]
    assert all(first[0] > second[0] or first < second for first, second in pairwise(chunk_ids))
    assert grid.total_bytes == sum(block.elements * 4 for block in blocks)


@given(_BLOCKS, st.integers(0, 10**6), st.data())
def test_send_window_always_admits_one_chunk(blocks, length_bytes, data):
    grid = ChunkGrid(blocks)
    start = data.draw(st.integers(0, grid.count - 1))
    end = grid.end(start, length_bytes)
    sizes = [nbytes(blocks[b], c) for b, c in map(grid.chunk, range(grid.count))]
    assert start < end <= grid.count
    assert end == start + 1 or sum(sizes[start:end]) <= length_bytes
    assert end == grid.count or sum(sizes[start : end + 1]) > length_bytes
