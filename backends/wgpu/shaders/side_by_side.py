"""Several shaders as one, side by side: each workgroup runs the body of the one that it belongs to.

What a body computes is not touched, so the bits stay. Names of one shader that others have as well
are told apart by a prefix, and none is one that a body may give to a value of its own, which would
hide the buffer; workgroup memory of the same name is shared, for a workgroup runs only
one of the bodies. Shaders whose workgroups differ in size, or in what memory they share, are not
put together: each would hold the registers and memory of the largest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from backends.wgpu.shaders.dispatch import WORKGROUPS_PER_DIMENSION, Shader

Grid = tuple[int, int, int]

_BINDING: Final = re.compile(
    r"@group\(0\) @binding\((\d+)\) var<storage, (read|read_write)> (\w+): (.+);\n"
)
_SHARED: Final = re.compile(r"var<workgroup> (\w+): array<(\w+), (\d+)>;\n")
_MAIN: Final = re.compile(r"@compute @workgroup_size\((\d+)\)\s*fn main\(([^{]*)\) \{")
_PARAMETER: Final = re.compile(r"@builtin\((\w+)\)\s*(\w+): \w+")
_NAME: Final = re.compile(r"^(?:fn|const|alias|struct) (\w+)", re.MULTILINE)
_ANYWHERE: Final = frozenset({"shared_sums"})
"""Workgroup memory so small that whatever has none may run beside it."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """A shader's text in pieces.

    Attributes:
        bindings: Access, name and type of each, in order.
        shared: Workgroup memory by name: the type of an element, and how many.
        invocations: Of a workgroup.
        parameters: What `main` calls each of WGSL's builtin values.
        helpers: Functions and constants, as text.
        body: Of `main`.
    """

    bindings: tuple[tuple[str, str, str], ...]
    shared: Mapping[str, tuple[str, int]]
    invocations: int
    parameters: Mapping[str, str]
    helpers: str
    body: str

    @property
    def names(self) -> list[str]:
        """Of the module, that a second one may have too."""
        return [*(name for _, name, _ in self.bindings), *_NAME.findall(self.helpers)]


@cache
def _parts(source: str) -> _Parts:
    main = _MAIN.search(source)
    assert main is not None
    before, body = source[: main.start()], source[main.end() :].rstrip().removesuffix("}")
    found = sorted((int(number), rest) for number, *rest in _BINDING.findall(before))
    shared = {name: (kind, int(count)) for name, kind, count in _SHARED.findall(before)}
    helpers = _SHARED.sub("", _BINDING.sub("", before))
    return _Parts(
        tuple((access, name, kind) for _, (access, name, kind) in found),
        shared,
        int(main[1]),
        dict(_PARAMETER.findall(main[2])),
        helpers.strip(),
        body,
    )


def alike(one: Shader, two: Shader) -> bool:
    """Whether they may share workgroups."""
    first, second = _parts(one.source), _parts(two.source)
    return first.invocations == second.invocations and (
        first.shared.keys() - _ANYWHERE == second.shared.keys() - _ANYWHERE
    )


def _shared(shaders: Sequence[Shader]) -> dict[str, tuple[str, int]]:
    most: dict[str, tuple[str, int]] = {}
    for shader in shaders:
        for name, (kind, count) in _parts(shader.source).shared.items():
            held = name if most.get(name, (kind,))[0] == kind else f"{name}_{kind}"
            most[held] = kind, max(count, most.get(held, (kind, 0))[1])
    return most


def buffer_type(shader: Shader, binding: int) -> str:
    """Of a binding: the same buffer is bound once for all who read it as the same."""
    return _parts(shader.source).bindings[binding][2]


def side_by_side(
    shaders: Sequence[tuple[Shader, Grid]], bound: Sequence[Sequence[int]], writes: int
) -> tuple[Shader, Grid]:
    """One shader over the bindings of all, and its grid.

    Args:
        shaders: With their grids; all `alike`.
        bound: For each of a shader's bindings the number that it has in the whole.
        writes: How many of the last bindings are written.
    """
    parts = [_parts(shader.source) for shader, _ in shaders]
    count = 1 + max(number for numbers in bound for number in numbers)
    declared: dict[int, str] = {}
    for part, numbers in zip(parts, bound, strict=True):
        for (access, _, kind), number in zip(part.bindings, numbers, strict=True):
            declared[number] = f"var<storage, {access}> bound{number}: {kind};"
    shared = _shared([shader for shader, _ in shaders])
    lines = [f"@group(0) @binding({number}) {declared[number]}" for number in range(count)]
    lines += [f"var<workgroup> {name}: array<{k}, {n}>;" for name, (k, n) in shared.items()]
    bodies, first = [], 0
    for number, (part, numbers, (_, grid)) in enumerate(zip(parts, bound, shaders, strict=True)):
        names = {name: f"part{number}_{name}" for name in part.names}
        names |= {
            name: f"bound{at}" for (_, name, _), at in zip(part.bindings, numbers, strict=True)
        }
        names |= {n: f"{n}_{k}" for n, (k, _) in part.shared.items() if shared[n][0] != k}
        if part.helpers:
            lines.append(_renamed(part.helpers, names))
        groups = math.prod(grid)
        bodies += [
            f"if (which >= {first}u && which < {first + groups}u) {{",
            f"let at = which - {first}u;",
            *_builtins(part, grid),
            _renamed(part.body, names),
            "}",
        ]
        first += groups
    whole = (first, 1, 1)
    which = "workgroup.x"
    if first > WORKGROUPS_PER_DIMENSION:
        whole = (WORKGROUPS_PER_DIMENSION, -(-first // WORKGROUPS_PER_DIMENSION), 1)
        which = f"workgroup.x + workgroup.y * {WORKGROUPS_PER_DIMENSION}u"
    entry = (
        f"@compute @workgroup_size({parts[0].invocations})\n"
        "fn main(@builtin(workgroup_id) workgroup: vec3u, "
        "@builtin(local_invocation_index) invocation: u32) {"
    )
    source = "\n".join([*lines, entry, f"let which = {which};", *bodies, "}\n"])
    in_bounds = all(shader.in_bounds for shader, _ in shaders)
    return Shader(source, count, writes, in_bounds), whole


def _builtins(part: _Parts, grid: Grid) -> list[str]:
    """What a body takes from `main`'s parameters, of its own grid."""
    x, y, z = grid
    place = (
        "vec3u(at, 0u, 0u)" if y == z == 1 else f"vec3u(at % {x}u, at / {x}u % {y}u, at / {x * y}u)"
    )
    local = "vec3u(invocation, 0u, 0u)"
    values = {
        "workgroup_id": place,
        "num_workgroups": f"vec3u({x}u, {y}u, {z}u)",
        "local_invocation_id": local,
        "local_invocation_index": "invocation",
        "global_invocation_id": f"{place} * vec3u({part.invocations}u, 1u, 1u) + {local}",
    }
    return [f"let {name} = {values[builtin]};" for builtin, name in part.parameters.items()]


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """Whole words, but for members of vectors."""
    if not names:
        return text
    words = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    return re.sub(rf"(?<![\w.])(?:{words})\b", lambda found: names[found[0]], text)
