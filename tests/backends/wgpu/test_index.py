"""Index expressions as text, evaluated and compared with numpy."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.wgpu.graph.index import as_coordinate, broadcast, linear_index, reshape, split_index

UNHURRIED = settings(deadline=None, max_examples=50)
SIZES = st.lists(st.integers(1, 6), min_size=0, max_size=4)


def value(text: object, i: int) -> int:
    """Evaluate a WGSL expression over `i`, in u32 arithmetic."""
    python = str(text).replace("u", "").replace("/", "//")
    return int(eval(python, {"i": i}))


@UNHURRIED
@given(SIZES)
def test_split_index_equals_unravel_index(shape):
    indices = split_index(as_coordinate("i", math.prod(shape)), shape)
    for i, coordinates in enumerate(np.ndindex(*shape)):
        assert tuple(value(c, i) for c in indices) == coordinates


@UNHURRIED
@given(SIZES)
def test_split_and_join_is_the_identity(shape):
    assert str(linear_index(split_index(as_coordinate("i", math.prod(shape)), shape))) in {
        "i",
        "0u",
    }


@st.composite
def regrouped(draw):
    """Draw two shapes with the same number of elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), max_size=4))

    def grouped() -> list[int]:
        sizes = [1]
        for factor in factors:
            if draw(st.booleans()):
                sizes.append(factor)
            else:
                sizes[-1] *= factor
        return sizes

    return grouped(), grouped()


@UNHURRIED
@given(regrouped())
def test_a_reshape_reads_the_same_elements(shapes):
    old, new = shapes
    total = math.prod(old)
    indices = reshape(split_index(as_coordinate("i", total), old), old, new)
    numbers = np.arange(total).reshape(new)
    for i in range(total):
        assert numbers[tuple(value(c, i) for c in indices)] == i


@UNHURRIED
@given(regrouped(), st.randoms())
def test_permuted_tensor_uses_its_strides(shapes, random):
    old, new = shapes
    total = math.prod(old)
    order = list(range(len(old)))
    random.shuffle(order)
    base = np.arange(total).reshape(old)
    view = base.transpose(order).reshape(-1)
    permuted = [old[d] for d in order]
    indices = split_index(as_coordinate("i", total), permuted)
    source = [indices[order.index(d)] for d in range(len(old))]
    address = linear_index(reshape(source, old, new))
    assert [value(address, i) for i in range(total)] == view.tolist()


def test_broadcast_dimension_has_index_zero():
    indices = split_index(as_coordinate("i", 24), [2, 3, 4])
    assert [str(c) for c in broadcast(indices, [3, 1])] == ["((i / 4u) % 3u)", "0u"]
    assert broadcast(indices, []) == []


@UNHURRIED
@given(regrouped(), st.integers(1, 30))
def test_slice_of_reshaped_tensor_under_broadcasting(shapes, size):
    """The index is a remainder by less than the dimension that it was cut from."""
    old, _ = shapes
    total = math.prod(old)
    size = min(size, total)
    part = split_index(as_coordinate("i", 4 * size), [4, size])[1]
    indices = reshape([part.with_size(total)], [total], old)
    for i in range(4 * size):
        coordinates = np.unravel_index(i % size, old) if old else ()
        assert tuple(value(c, i) for c in indices) == tuple(map(int, coordinates))
