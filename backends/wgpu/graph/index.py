"""Index algebra: where an element of one tensor lies in another, as text of WGSL.

A kernel computes one element per invocation. Its index in each dimension is a `Coordinate`: a
part of a linear index, cut out by a division and a remainder. Views (reshape, permute, slice,
expand) turn coordinates of their result into coordinates of their input; merged again they give an
address. Parts that lie beside each other in the same linear index melt into one, so a contiguous
tensor is read at the plain linear index whatever views lie between. All are u32.
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
        modulus: None where the quotient is below `size` by itself.
        size: The dimension's.
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

    def sized(self, size: int) -> Coordinate:
        """The same index into a dimension of another size."""
        return Coordinate(self.source, self.divisor, self.modulus, size)


ZERO: Final = Coordinate("0u", 1, None, 1)


def plain(source: str, size: int) -> Coordinate:
    """An expression that is the index itself."""
    return Coordinate(source, 1, None, size)


def linear(coordinates: Sequence[Coordinate]) -> Coordinate:
    """The row-major linear index over dimensions of these sizes."""
    parts = [c for c in coordinates if c.size != 1]
    if not parts:
        return ZERO
    whole = parts[0]
    for part in parts[1:]:
        size = whole.size * part.size
        if (
            whole.source == part.source
            and whole.divisor == part.divisor * part.size
            and part.modulus == part.size
        ):
            modulus = None if whole.modulus is None else whole.modulus * part.size
            whole = Coordinate(whole.source, part.divisor, modulus, size)
        elif str(whole) == "0u":
            whole = plain(str(part), size)
        else:
            whole = plain(f"({whole} * {part.size}u + {part})", size)
    return whole


def split(index: Coordinate, sizes: Sequence[int]) -> list[Coordinate]:
    """A linear index over `sizes`, row-major, as one coordinate per dimension."""
    if index.modulus not in {None, math.prod(sizes)}:  # it is one of a cut part of the dimension
        index = plain(str(index), index.size)
    parts, stride = [], 1
    first = next((i for i, size in enumerate(sizes) if size != 1), 0)
    for position, size in reversed([*enumerate(sizes)]):
        modulus = None if position <= first and index.modulus is None else size
        parts.append(Coordinate(index.source, index.divisor * stride, modulus, size))
        stride *= size
    return parts[::-1]


def reshape(
    coordinates: Sequence[Coordinate], old: Sequence[int], new: Sequence[int]
) -> list[Coordinate]:
    """Coordinates in `old` as coordinates in `new`, a shape of as many elements.

    Dimensions are matched in the smallest groups of equal products, so that what a reshape leaves
    alone keeps its coordinate.
    """
    have = [(c, size) for c, size in zip(coordinates, old, strict=True) if size != 1]
    want = [size for size in new if size != 1]
    found: list[Coordinate] = []
    i = j = 0
    while j < len(want):
        first_i, first_j = i, j
        product_have, product_want = have[i][1], want[j]
        i, j = i + 1, j + 1
        while product_have != product_want:
            if product_have < product_want:
                product_have *= have[i][1]
                i += 1
            else:
                product_want *= want[j]
                j += 1
        group = [c.sized(size) for c, size in have[first_i:i]]
        sizes = want[first_j:j]
        if len(group) == len(sizes) == 1:
            found += group
        else:
            found += split(linear(group), sizes)
    rest = iter(found)
    return [ZERO if size == 1 else next(rest) for size in new]


def broadcast(coordinates: Sequence[Coordinate], shape: Sequence[int]) -> list[Coordinate]:
    """Coordinates into an operand of this shape, whose broadcast result has `coordinates`."""
    last = coordinates[len(coordinates) - len(shape) :] if shape else []
    return [ZERO if size == 1 else c.sized(size) for c, size in zip(last, shape, strict=True)]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()
