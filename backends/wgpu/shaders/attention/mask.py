"""WGSL that masks the scores of a tile, and skips tiles that are masked entirely.

Each invocation (`down`, `across`) has the 4 x 4 scores that start at row `first_row + 4 down` and
column `first_column + 4 across`.
"""

from __future__ import annotations

from typing import Final

from backends.wgpu.shaders.attention.barriers import Steps
from backends.wgpu.shaders.attention.problem import AttentionProblem

ACROSS: Final = 8
"""Invocations across a tile."""
BLOCK: Final = 4 * ACROSS
"""Columns of a tile of scores."""
_HIDES: Final = "-1e30"
"""A bias below this gives a zero weight unless the row's maximum is as low."""


def visible_scores(problem: AttentionProblem) -> list[str]:
    """Return WGSL that declares an invocation's visible scores, `on0` to `on3`, one vec4 of columns
    per row, and `bias0` to `bias3` for an additive mask."""
    by_key = problem.kernel == "keys"
    sizes, mask = problem.sizes, problem.mask
    rows, columns = (sizes.keys, sizes.queries) if by_key else (sizes.queries, sizes.keys)
    lines = ["let columns = vec4u(first_column + across * 4u) + vec4u(0u, 1u, 2u, 3u);"]
    for i in range(4):
        row = f"row{i}"
        lines.append(f"let {row} = first_row + down * 4u + {i}u;")
        conditions = [f"(columns < vec4u({columns}u))", f"vec4<bool>({row} < {rows}u)"]
        if problem.causal:
            conditions.append(f"(vec4u({row}) {'<=' if by_key else '>='} columns)")
        if mask is not None:
            clamped_row = f"min({row}, {rows - 1}u)"
            clamped_columns = [
                f"min(first_column + across * 4u + {c}u, {columns - 1}u)" for c in range(4)
            ]
            pairs = [
                (column, clamped_row) if by_key else (clamped_row, column)
                for column in clamped_columns
            ]
            values = ", ".join(f"mask[{mask.index('batch', 'head', *pair)}]" for pair in pairs)
            if problem.is_mask_boolean:
                conditions.append(f"(vec4u({values}) != vec4u(0u))")
            else:
                lines.append(f"let bias{i} = vec4f({values});")
        lines.append(f"let on{i} = {' & '.join(conditions)};")
    return lines


def skip_masked_tile(
    problem: AttentionProblem, steps: Steps, votes: str, sums: str, invocations: int
) -> str:
    """Return the head of a block that the whole workgroup skips if no weight of the tile is above
    zero.

    Args:
        problem: A problem with a mask.
        steps: Receives the statements of the vote. Its variable `highest` has the maxima of the
            rows so far, or for the keys' kernel the final maxima of the columns.
        votes: An array of workgroup memory with a vec4 per invocation.
        sums: An array with an eighth more elements; it may be the same.
        invocations: Invocations of a workgroup.
    """
    visible = [f"on{i}" for i in range(4)]
    if not problem.is_mask_boolean:
        lowest = [
            f"vec4f(highest[{i}])" if problem.kernel != "keys" else "highest" for i in range(4)
        ]
        visible = [
            f"({is_visible} & (!(bias{i} <= vec4f({_HIDES})) | ({lowest[i]} < vec4f({_HIDES}))))"
            for i, is_visible in enumerate(visible)
        ]
    any_visible = f"vec4<bool>(any({' | '.join(visible)}))"
    steps.add([f"{votes}[me] = select(vec4f(0.0), vec4f(1.0), {any_visible});"], writes=[votes])
    groups = invocations // ACROSS
    of_group = _sum([f"{votes}[me + {i * groups}u]" for i in range(ACROSS)])
    partial_sum = f"if (me < {groups}u) {{ {sums}[{invocations}u + me] = {of_group}; }}"
    steps.add([partial_sum], reads=[votes], writes=[sums])
    all_groups = _sum([f"{sums}[{invocations + i}u]" for i in range(groups)])
    steps.add([f"let counted = {all_groups};"], reads=[sums])
    return "if (counted.x > 0.0) {"


def _sum(terms: list[str]) -> str:
    return " + ".join(terms)
