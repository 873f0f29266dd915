"""Index algebra: the index of a tensor's element in another tensor, as WGSL.

A kernel computes one element per invocation. Its index in each dimension is a `Coordinate`: part of
a linear index, extracted by a division and a remainder. Views (reshape, permute, slice, expand) map
coordinates of their result to coordinates of their input, which are combined into an address.
Adjacent parts of one linear index merge, so a contiguous tensor is read at the plain linear index
regardless of views in between. All indices are u32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Coordinate:
    """`source / divisor % modulus`, below `size`.

    Attributes:
        source: A WGSL expression of type u32.
        divisor: At least 1.
        modulus: None if the quotient is always below `size`.
        size: Size of the dimension.
    """

    source: str
    divisor: int
    modulus: int | None
    size: int

    def __str__(self) -> str:
        text = self.source
        if self.divisor != 1:
            text = f"({text} / {self.divisor}u)"
        if self.modulus is not None:
            text = f"({text} % {self.modulus}u)"
        return text

    def with_size(self, size: int) -> Coordinate:
        """Return this index for a dimension of another size."""
        return Coordinate(self.source, self.divisor, self.modulus, size)


ZERO: Final = Coordinate("0u", 1, None, 1)


def as_coordinate(source: str, size: int) -> Coordinate:
    """Return a plain expression as a coordinate."""
    return Coordinate(source, 1, None, size)


def linear_index(coordinates: Sequence[Coordinate]) -> Coordinate:
    """Combine coordinates into a row-major linear index."""
    parts = [c for c in coordinates if c.size != 1]
    if not parts:
        return ZERO
    index = parts[0]
    for part in parts[1:]:
        size = index.size * part.size
        if (
            index.source == part.source
            and index.divisor == part.divisor * part.size
            and part.modulus == part.size
        ):
            modulus = None if index.modulus is None else index.modulus * part.size
            index = Coordinate(index.source, part.divisor, modulus, size)
        elif str(index) == "0u":
            index = as_coordinate(str(part), size)
        else:
            index = as_coordinate(f"({index} * {part.size}u + {part})", size)
    return index


def split_index(index: Coordinate, sizes: Sequence[int]) -> list[Coordinate]:
    """Split a row-major linear index over `sizes` into one coordinate per dimension."""
    # Any other modulus means that the index covers only a slice of the dimension.
    if index.modulus not in {None, math.prod(sizes)}:
        index = as_coordinate(str(index), index.size)
    parts, stride = [], 1
    first_dim = next((i for i, size in enumerate(sizes) if size != 1), 0)
    for position, size in reversed([*enumerate(sizes)]):
        modulus = None if position <= first_dim and index.modulus is None else size
        parts.append(Coordinate(index.source, index.divisor * stride, modulus, size))
        stride *= size
    return parts[::-1]


def reshape(
    coordinates: Sequence[Coordinate], old: Sequence[int], new: Sequence[int]
) -> list[Coordinate]:
    """Map coordinates in shape `old` to coordinates in shape `new`, which has as many elements.

    Dimensions are matched in the smallest groups of equal products, so that unchanged dimensions
    keep their coordinates.
    """
    old_parts = [(c, size) for c, size in zip(coordinates, old, strict=True) if size != 1]
    new_sizes = [size for size in new if size != 1]
    result: list[Coordinate] = []
    i = j = 0
    while j < len(new_sizes):
        first_i, first_j = i, j
        old_product, new_product = old_parts[i][1], new_sizes[j]
        i, j = i + 1, j + 1
        while old_product != new_product:
            if old_product < new_product:
                old_product *= old_parts[i][1]
                i += 1
            else:
                new_product *= new_sizes[j]
                j += 1
        group = [c.with_size(size) for c, size in old_parts[first_i:i]]
        sizes = new_sizes[first_j:j]
        if len(group) == len(sizes) == 1:
            result += group
        else:
            result += split_index(linear_index(group), sizes)
    remaining = iter(result)
    return [ZERO if size == 1 else next(remaining) for size in new]


def broadcast(coordinates: Sequence[Coordinate], shape: Sequence[int]) -> list[Coordinate]:
    """Map coordinates of a broadcast result to coordinates of an operand of this shape."""
    trailing = coordinates[len(coordinates) - len(shape) :] if shape else []
    return [
        ZERO if size == 1 else c.with_size(size) for c, size in zip(trailing, shape, strict=True)
    ]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides in elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()
