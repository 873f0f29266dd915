"""Which scores of a tile take part, as WGSL, and whether any does: tiles without one are left out.

Each invocation, numbered by `down` and `across`, has the 4 x 4 scores from `first_row + 4 down` and
`first_column + 4 across` on.
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
"""An addend below it makes a weight of zero, in a row whose maximum is not as low itself."""


def seen(problem: AttentionProblem) -> list[str]:
    """`on0` to `on3`, four columns each; and `bias0` to `bias3` of a mask that is added."""
    by_key = problem.part == "keys"
    sizes, mask = problem.sizes, problem.mask
    rows, columns = (sizes.keys, sizes.queries) if by_key else (sizes.queries, sizes.keys)
    lines = ["let columns = vec4u(first_column + across * 4u) + vec4u(0u, 1u, 2u, 3u);"]
    for i in range(4):
        row = f"row{i}"
        lines.append(f"let {row} = first_row + down * 4u + {i}u;")
        there = [f"(columns < vec4u({columns}u))", f"vec4<bool>({row} < {rows}u)"]
        if problem.causal:
            there.append(f"(vec4u({row}) {'<=' if by_key else '>='} columns)")
        if mask is not None:
            near = f"min({row}, {rows - 1}u)"
            each = [f"min(first_column + across * 4u + {c}u, {columns - 1}u)" for c in range(4)]
            pairs = [(other, near) if by_key else (near, other) for other in each]
            read = ", ".join(f"mask[{mask.at('batch', 'head', *pair)}]" for pair in pairs)
            if problem.truth:
                there.append(f"(vec4u({read}) != vec4u(0u))")
            else:
                lines.append(f"let bias{i} = vec4f({read});")
        lines.append(f"let on{i} = {' & '.join(there)};")
    return lines


def vote(problem: AttentionProblem, steps: Steps, votes: str, sums: str, invocations: int) -> str:
    """Opens a block that is entered by all invocations, or by none: then no weight is above zero.

    Args:
        problem: Its mask hides something.
        steps: To which the vote is added. `highest` are the maxima of the rows, or for keys of the
            columns: so far, or of all.
        votes: An array of workgroup memory with a vec4 for each invocation.
        sums: One with room for an eighth more behind them; it may be the same.
        invocations: Of a workgroup.
    """
    counted = [f"on{i}" for i in range(4)]
    if not problem.truth:
        lowest = [f"vec4f(highest[{i}])" if problem.part != "keys" else "highest" for i in range(4)]
        counted = [
            f"({on} & (!(bias{i} <= vec4f({_HIDES})) | ({lowest[i]} < vec4f({_HIDES}))))"
            for i, on in enumerate(counted)
        ]
    own = f"vec4<bool>(any({' | '.join(counted)}))"
    steps.add([f"{votes}[me] = select(vec4f(0.0), vec4f(1.0), {own});"], writes=[votes])
    groups = invocations // ACROSS
    of_group = _sum([f"{votes}[me + {i * groups}u]" for i in range(ACROSS)])
    added = f"if (me < {groups}u) {{ {sums}[{invocations}u + me] = {of_group}; }}"
    steps.add([added], reads=[votes], writes=[sums])
    all_groups = _sum([f"{sums}[{invocations + i}u]" for i in range(groups)])
    steps.add([f"let counted = {all_groups};"], reads=[sums])
    return "if (counted.x > 0.0) {"


def _sum(terms: list[str]) -> str:
    return " + ".join(terms)
