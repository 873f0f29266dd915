"""Choose the layout of attention tiles in workgroup memory, by the adapter's limit.

A tile consists of the vectors of some rows, or of the weights of a block. If workgroup memory
suffices, each tile has its own array: the rows' vectors then stay resident for the whole loop over
columns, and few barriers are needed. Otherwise tiles take turns in two arrays, in parts of the
vectors if necessary.

Workgroup memory has 32 banks of 4 bytes and serves the vec4 of eight adjacent invocations at once
if they fall into different banks. Row vectors are broadcast. Column c of a block is stored at index
c % 4 * 8 + c / 4, so that adjacent invocations, with four columns each, read eight consecutive
indices. Its vec4 d is stored at d ^ (c / 4), which avoids bank conflicts without padding.
`benchmarks.vulkan_counts` counts bank conflicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from backends.wgpu.shaders.attention.mask import ACROSS, BLOCK
from backends.wgpu.shaders.attention.problem import AttentionKernel, AttentionSizes

WORKGROUP_BYTES: Final = 16_384
"""Workgroup memory that every adapter has."""

_MOST_BYTES: Final = 32_768
"""With more, only one workgroup would fit on a compute unit."""
_ROWS: Final = 64
_VECTOR_BYTES: Final = 16

TILES: Final[Mapping[AttentionKernel, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "forward": (("query",), ("key", "value")),
    "queries": (("query", "grad_output"), ("key", "value")),
    "keys": (("key", "value"), ("query", "grad_output")),
}
"""By kernel: vectors of a workgroup's rows, and of a block's columns."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Tiles in workgroup memory.

    Attributes:
        kernel: The kernel's result.
        head_size: Elements of a vector.
        rows: Rows of a workgroup.
        width: Vec4 of a vector in workgroup memory at a time; a multiple of 8.
        is_resident: Whether each tile has its own array.
    """

    kernel: AttentionKernel
    head_size: int
    rows: int
    width: int
    is_resident: bool

    @property
    def invocations(self) -> int:
        """Invocations of a workgroup; each computes 4 x 4 scores of a block."""
        return self.rows // 4 * ACROSS

    @property
    def parts(self) -> range:
        """Indices of the parts that a vector is split into."""
        return range(-(-self.head_size // 4 // self.width))

    def fours(self, part: int) -> int:
        """Return the number of vec4 of a part."""
        return min(self.width, self.head_size // 4 - part * self.width)

    def stride(self, part: int) -> int:
        """Return the distance between rows of a part, in vec4."""
        return -(-self.fours(part) // ACROSS) * ACROSS

    def array(self, tile: str) -> str:
        """Return the name of the array that holds a tile."""
        rows, columns = TILES[self.kernel]
        if tile in columns:
            return ("right", "other")[columns.index(tile) if self.is_resident else 0]
        if tile in rows:
            return ("left", "beside")[rows.index(tile) if self.is_resident else 0]
        return "weights" if self.is_resident else "left"

    @property
    def arrays(self) -> dict[str, int]:
        """Size of each array, in vec4."""
        sizes: dict[str, int] = {}
        rows, columns = TILES[self.kernel]
        for tile in rows:
            sizes[self.array(tile)] = self.rows * self.width
        for tile in columns:
            sizes[self.array(tile)] = BLOCK * self.width
        sizes.setdefault(self.array("weights"), self.rows * ACROSS)
        if self.kernel == "forward":
            sizes["folds"] = self.invocations
        return sizes

    @property
    def nbytes(self) -> int:
        """Workgroup memory in bytes."""
        return _VECTOR_BYTES * sum(self.arrays.values())


def choose_layout(kernel: AttentionKernel, sizes: AttentionSizes, workgroup_bytes: int) -> Layout:
    """Return the best layout that fits in `workgroup_bytes`."""
    extent = sizes.keys if kernel == "keys" else sizes.queries
    rows = _ROWS if extent > BLOCK else BLOCK
    full_width = -(-sizes.head_size // BLOCK) * ACROSS
    layouts = [Layout(kernel, sizes.head_size, rows, full_width, is_resident=True)]
    layouts += [
        Layout(kernel, sizes.head_size, rows, min(width, full_width), is_resident=False)
        for width in (2 * ACROSS, ACROSS)
    ]
    budget = min(workgroup_bytes, _MOST_BYTES)
    return next((layout for layout in layouts if layout.nbytes <= budget), layouts[-1])
