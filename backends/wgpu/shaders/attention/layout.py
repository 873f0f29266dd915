"""What of attention lies in workgroup memory, and where: chosen by how much of it an adapter has.

A tile is some rows of vectors, or the weights of a block; an array of workgroup memory holds one at
a time. Where there is room each tile has an array of its own: the rows' vectors then stay there for
the whole walk, and few barriers are needed. Else tiles take turns in two arrays, in parts of their
vectors if need be.

Workgroup memory has 32 banks of 4 bytes, and serves the vec4 of eight neighbours at once if all lie
in different ones. Vectors of rows are read by all neighbours across alike. Column c of a block lies
in place c % 4 * 8 + c / 4, so that neighbours, who have four columns each, read eight places that
follow each other; and what would be vec4 d of it is d ^ (c / 4), which puts these into different
banks without padding. `benchmarks.vulkan_counts` counts what is served twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from backends.wgpu.shaders.attention.mask import ACROSS, BLOCK
from backends.wgpu.shaders.attention.problem import AttentionSizes, Part

WORKGROUP_BYTES: Final = 16_384
"""Of workgroup memory: what every adapter has."""

_MOST_BYTES: Final = 32_768
"""More would leave room for one workgroup of a processor only."""
_ROWS: Final = 64
_VECTOR_BYTES: Final = 16

TILES: Final[Mapping[Part, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "forward": (("query",), ("key", "value")),
    "queries": (("query", "tangent"), ("key", "value")),
    "keys": (("key", "value"), ("query", "tangent")),
}
"""Vectors of a workgroup's rows, and of a block's columns."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Tiles in workgroup memory.

    Attributes:
        part: Which kernel.
        size: Elements of a vector.
        rows: Of a workgroup.
        width: Vec4 of a vector that are there at a time; a multiple of 8.
        kept: Whether each tile has an array of its own.
    """

    part: Part
    size: int
    rows: int
    width: int
    kept: bool

    @property
    def invocations(self) -> int:
        """Of a workgroup: each has 4 x 4 scores of a block."""
        return self.rows // 4 * ACROSS

    @property
    def parts(self) -> range:
        """Numbers of the parts that a vector is cut into."""
        return range(-(-self.size // 4 // self.width))

    def fours(self, part: int) -> int:
        """Vec4 of a part."""
        return min(self.width, self.size // 4 - part * self.width)

    def stride(self, part: int) -> int:
        """Vec4 from a row to the next."""
        return -(-self.fours(part) // ACROSS) * ACROSS

    def array(self, tile: str) -> str:
        """Which holds it."""
        rows, columns = TILES[self.part]
        if tile in columns:
            return ("right", "other")[columns.index(tile) if self.kept else 0]
        if tile in rows:
            return ("left", "beside")[rows.index(tile) if self.kept else 0]
        return "weights" if self.kept else "left"

    @property
    def arrays(self) -> dict[str, int]:
        """Vec4 of each."""
        held: dict[str, int] = {}
        rows, columns = TILES[self.part]
        for tile in rows:
            held[self.array(tile)] = self.rows * self.width
        for tile in columns:
            held[self.array(tile)] = BLOCK * self.width
        held.setdefault(self.array("weights"), self.rows * ACROSS)
        if self.part == "forward":
            held["folds"] = self.invocations
        return held

    @property
    def nbytes(self) -> int:
        """Of workgroup memory."""
        return _VECTOR_BYTES * sum(self.arrays.values())


def layout_of(part: Part, sizes: AttentionSizes, workgroup_bytes: int) -> Layout:
    """The best one that an adapter with so much workgroup memory has room for."""
    extent = sizes.keys if part == "keys" else sizes.queries
    rows = _ROWS if extent > BLOCK else BLOCK
    whole = -(-sizes.size // BLOCK) * ACROSS
    found = [Layout(part, sizes.size, rows, whole, kept=True)]
    found += [
        Layout(part, sizes.size, rows, min(width, whole), kept=False)
        for width in (2 * ACROSS, ACROSS)
    ]
    room = min(workgroup_bytes, _MOST_BYTES)
    return next((each for each in found if each.nbytes <= room), found[-1])
