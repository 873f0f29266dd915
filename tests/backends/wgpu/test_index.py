"""Addresses as text, evaluated and compared with what numpy finds there."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.wgpu.graph.index import broadcast, linear, plain, reshape, split

UNHURRIED = settings(deadline=None, max_examples=50)
SIZES = st.lists(st.integers(1, 6), min_size=0, max_size=4)


def value(text: object, i: int) -> int:
    """A WGSL expression over `i`, in whole numbers as u32 has them."""
    python = str(text).replace("u", "").replace("/", "//")
    return int(eval(python, {"i": i}))


@UNHURRIED
@given(SIZES)
def test_a_split_index_is_the_place_of_each_dimension(shape):
    at = split(plain("i", math.prod(shape)), shape)
    for i, place in enumerate(np.ndindex(*shape)):
        assert tuple(value(c, i) for c in at) == place


@UNHURRIED
@given(SIZES)
def test_split_and_joined_again_is_the_plain_index(shape):
    assert str(linear(split(plain("i", math.prod(shape)), shape))) in {"i", "0u"}


@st.composite
def regrouped(draw):
    """Two shapes of as many elements."""
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
    at = reshape(split(plain("i", total), old), old, new)
    numbers = np.arange(total).reshape(new)
    for i in range(total):
        assert numbers[tuple(value(c, i) for c in at)] == i


@UNHURRIED
@given(regrouped(), st.randoms())
def test_a_permuted_tensor_is_read_at_its_strides(shapes, random):
    old, new = shapes
    total = math.prod(old)
    order = list(range(len(old)))
    random.shuffle(order)
    base = np.arange(total).reshape(old)
    view = base.transpose(order).reshape(-1)
    permuted = [old[d] for d in order]
    at = split(plain("i", total), permuted)
    source = [at[order.index(d)] for d in range(len(old))]
    address = linear(reshape(source, old, new))
    assert [value(address, i) for i in range(total)] == view.tolist()


def test_what_is_broadcast_is_read_at_zero():
    at = split(plain("i", 24), [2, 3, 4])
    assert [str(c) for c in broadcast(at, [3, 1])] == ["((i / 4u) % 3u)", "0u"]
    assert broadcast(at, []) == []


@UNHURRIED
@given(regrouped(), st.integers(1, 30))
def test_a_part_of_a_reshaped_tensor_is_read_there_wherever_it_is_broadcast(shapes, size):
    """Its place is a remainder by less than the dimension that it was cut from."""
    old, _ = shapes
    total = math.prod(old)
    size = min(size, total)
    part = split(plain("i", 4 * size), [4, size])[1]
    at = reshape([part.sized(total)], [total], old)
    for i in range(4 * size):
        place = np.unravel_index(i % size, old) if old else ()
        assert tuple(value(c, i) for c in at) == tuple(map(int, place))
