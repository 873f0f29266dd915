"""WGSL index expressions, evaluated and compared with NumPy."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.wgpu.graph.index import as_coordinate, broadcast, linear_index, reshape, split_index

FEW_EXAMPLES = settings(deadline=None, max_examples=50)
SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4)


def evaluate(expression: object, i: int) -> int:
    """Evaluate a WGSL index expression of `i` with integer division."""
    python = str(expression).replace("u", "").replace("/", "//")
    return int(eval(python, {"i": i}))


@FEW_EXAMPLES
@given(SHAPES)
def test_split_index_equals_unravel_index(shape):
    indices = split_index(as_coordinate("i", math.prod(shape)), shape)
    for i, coordinates in enumerate(np.ndindex(*shape)):
        assert tuple(evaluate(c, i) for c in indices) == coordinates


@FEW_EXAMPLES
@given(SHAPES)
def test_linear_inverts_split(shape):
    indices = split_index(as_coordinate("i", math.prod(shape)), shape)
    assert str(linear_index(indices)) in {"i", "0u"}


@st.composite
def equal_sized_shapes(draw):
    """Draw two shapes with the same number of elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), max_size=4))

    def group_factors() -> list[int]:
        sizes = [1]
        for factor in factors:
            if draw(st.booleans()):
                sizes.append(factor)
            else:
                sizes[-1] *= factor
        return sizes

    return group_factors(), group_factors()


@FEW_EXAMPLES
@given(equal_sized_shapes())
def test_a_reshape_reads_the_same_elements(shapes):
    old, new = shapes
    elements = math.prod(old)
    indices = reshape(split_index(as_coordinate("i", elements), old), old, new)
    reshaped = np.arange(elements).reshape(new)
    for i in range(elements):
        assert reshaped[tuple(evaluate(c, i) for c in indices)] == i


@FEW_EXAMPLES
@given(equal_sized_shapes(), st.randoms())
def test_a_reshaped_tensor_is_read_through_a_permutation(shapes, random):
    old, new = shapes
    elements = math.prod(old)
    order = list(range(len(old)))
    random.shuffle(order)
    permuted = np.arange(elements).reshape(old).transpose(order)
    indices = split_index(as_coordinate("i", elements), permuted.shape)
    original_indices = [indices[order.index(dim)] for dim in range(len(old))]
    address = linear_index(reshape(original_indices, old, new))
    assert [evaluate(address, i) for i in range(elements)] == permuted.reshape(-1).tolist()


def test_a_broadcast_dimension_has_index_zero():
    indices = split_index(as_coordinate("i", 24), [2, 3, 4])
    assert [str(c) for c in broadcast(indices, [3, 1])] == ["((i / 4u) % 3u)", "0u"]
    assert broadcast(indices, []) == []


@FEW_EXAMPLES
@given(equal_sized_shapes(), st.integers(1, 30))
def test_the_start_of_a_reshaped_tensor_may_be_broadcast(shapes, size):
    """The index is a remainder by `size`, which may be less than the size of the dimension."""
    old, _ = shapes
    elements = math.prod(old)
    size = min(size, elements)
    index = split_index(as_coordinate("i", 4 * size), [4, size])[1]
    indices = reshape([index.with_size(elements)], [elements], old)
    for i in range(4 * size):
        coordinates = np.unravel_index(i % size, old) if old else ()
        assert tuple(evaluate(c, i) for c in indices) == tuple(map(int, coordinates))
