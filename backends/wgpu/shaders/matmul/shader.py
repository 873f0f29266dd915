"""Strided batched matrix product as WGSL: out[b, m, n] = sum over k of a[b, m, k] * b[b, k, n].

Every variant has one float32 accumulator per output, starts at zero and adds the terms in order of
k, each by one `fma`. All variants and tile sizes therefore give the same bits on one adapter, and
the choice affects speed only. There are no atomics. A long k is split at the same indices for all
variants, into dispatches that add up their sums in order (`split_into_dispatches`).

The right operand may be quantized (see `backends.wgpu.shaders.quantized_layout`): it is dequantized
on loading, and sums are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from backends.wgpu.shaders.dispatch import Shader
from backends.wgpu.shaders.matmul.lanes import Lanes, lanes_shader
from backends.wgpu.shaders.matmul.problem import (
    ElementForm,
    Epilogue,
    MatmulProblem,
    Operand,
    Result,
    split_into_dispatches,
)
from backends.wgpu.shaders.matmul.side import sides
from backends.wgpu.shaders.matmul.tiles import Tiles, tiles_shader

__all__ = (
    "ElementForm",
    "Epilogue",
    "Lanes",
    "MatmulProblem",
    "MatmulTraits",
    "Operand",
    "Result",
    "Tiles",
    "candidates",
    "matmul_shader",
    "split_into_dispatches",
)

Choice = Lanes | Tiles

_TILES: Final = (
    Tiles(64, 64, 16, 8, 4),
    Tiles(128, 128, 16, 8, 8),
    Tiles(128, 64, 16, 8, 4),
    Tiles(64, 128, 16, 4, 8),
    Tiles(64, 64, 32, 4, 4),
    Tiles(32, 32, 32, 4, 4),
    Tiles(16, 64, 32, 4, 4),
    Tiles(64, 16, 32, 4, 4),
)
_LOAD_COST: Final = 9.0
_PRODUCT_COST: Final = 1.4
"""Cycles of an element's load and of a vector multiplication, measured on Mesa 22.3's lavapipe."""

_COMPILING_COST: Final = 800.0
"""Cycles of compiling one unrolled multiplication, amortized over ten thousand runs."""

_PRODUCTS_PER_ROUND: Final = 512
"""Limit on unrolled multiplications: twice as many take a second to compile and gain 10 %."""


@dataclass(frozen=True, slots=True)
class MatmulTraits:
    """Properties of an adapter that decide which kernels run on it, and how fast.

    Attributes:
        subgroup: Lanes of a subgroup on a software adapter that has subgroup operations and
            64-bit integers; else 0.
        workgroup_bytes: Size of workgroup memory.
        invocations: Limit on invocations per workgroup.
        units: Approximate number of parallel units, such as threads of a software adapter.
    """

    subgroup: int = 0
    workgroup_bytes: int = 16_384
    invocations: int = 256
    units: int = 1


def matmul_shader(
    problem: MatmulProblem, choice: Choice | None = None
) -> tuple[Shader, tuple[int, int, int]]:
    """Return the shader of a product and its grid; bindings as in `MatmulProblem`.

    Args:
        problem: Shapes; k at most `MOST_TERMS`, see `split_into_dispatches`.
        choice: One of `candidates`; by default a kernel that runs on every adapter.
    """
    if isinstance(choice, Lanes):
        return lanes_shader(problem, choice)
    return tiles_shader(problem, choice or _TILES[0])


def candidates(problem: MatmulProblem, traits: MatmulTraits) -> tuple[Choice, ...]:
    """Return the kernels that fit the adapter, by expected speed, fastest first."""
    if traits.subgroup and problem.finish is None and problem.is_float32:
        ranked = sorted(
            _lane_candidates(problem, traits), key=lambda lanes: _cost(problem, lanes, traits)
        )
        return tuple(ranked)
    fitting_tiles = [
        tiles
        for tiles in _TILES
        if tiles.workgroup_bytes <= traits.workgroup_bytes
        and tiles.invocations <= traits.invocations
    ]
    return tuple(sorted(fitting_tiles, key=lambda tiles: _waste(problem, tiles)))


def _lane_candidates(problem: MatmulProblem, traits: MatmulTraits) -> list[Lanes]:
    swaps = (False, True) if problem.b_form is None else (False,)
    unroll = 4 if problem.b_form is not None else 2
    return [
        Lanes(rows, columns, swap, traits.subgroup)
        for swap in swaps
        for rows in (4, 8, 16, 32, 64)
        for columns in (1, 2, 4, 8)
        if rows * columns * unroll <= _PRODUCTS_PER_ROUND
    ]


def _cost(problem: MatmulProblem, lanes: Lanes, traits: MatmulTraits) -> float:
    """Estimate cycles: loads and stores per element, multiplications per vector, over all units.

    Includes compilation, which a large kernel for a small product would never amortize.
    """
    row, column = reversed(sides(problem)) if lanes.swap else sides(problem)
    size = lanes.subgroup
    width = lanes.columns * size
    blocks = -(-row.extent // lanes.rows) * -(-column.extent // width) * problem.batch
    paired_rows = row.along_k(2) or row.along_outer(2)
    paired_columns = column.along_k(2) or (column.along_outer(2) and lanes.columns % 2 == 0)
    rows = -(-lanes.rows // size) * size
    loads = rows / (2 if paired_rows else 1) + width / (2 if paired_columns else 1)
    products = lanes.rows * lanes.columns
    stores = lanes.rows * width / 2
    cycles = problem.k * (loads * _LOAD_COST + products * _PRODUCT_COST) + stores * _LOAD_COST
    return -(-blocks // traits.units) * cycles + products * _COMPILING_COST


def _waste(problem: MatmulProblem, tiles: Tiles) -> float:
    """Estimate memory traffic per useful output: large tiles reduce it, partial tiles raise it."""
    across, down = -(-problem.n // tiles.columns), -(-problem.m // tiles.rows)
    outputs = across * tiles.columns * down * tiles.rows
    per_output = 1 / tiles.rows + 1 / tiles.columns
    idle_factor = max(1.0, 64 / (across * down * problem.batch))
    return outputs / (problem.m * problem.n) * per_output * idle_factor
