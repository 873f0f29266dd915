"""Merge several shaders into one dispatch: each workgroup runs the body of one of them.

Bodies are unchanged, and so are the bits. Module names get a prefix, which no local name has,
so that they neither collide nor are shadowed. Workgroup memory of the same name is shared, because
a workgroup runs only one body. Shaders that differ in workgroup size or workgroup memory are not
merged: each would occupy as many registers and as much memory as the largest.
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
_SMALL_MEMORY: Final = frozenset({"shared_sums"})
"""Names of workgroup memory so small that shaders with and without it may be merged."""


@dataclass(frozen=True, slots=True)
class _ParsedShader:
    """A shader's parsed source.

    Attributes:
        bindings: Access, name and type of each binding, in order.
        shared: Workgroup memory by name: element type and number of elements.
        invocations: Invocations per workgroup.
        parameters: Parameters of `main`, by built-in value.
        helpers: Source of functions and constants.
        body: Body of `main`.
    """

    bindings: tuple[tuple[str, str, str], ...]
    shared: Mapping[str, tuple[str, int]]
    invocations: int
    parameters: Mapping[str, str]
    helpers: str
    body: str

    @property
    def names(self) -> list[str]:
        """Module-level names, which may collide with another shader's."""
        return [*(name for _, name, _ in self.bindings), *_NAME.findall(self.helpers)]


@cache
def _parse(source: str) -> _ParsedShader:
    main = _MAIN.search(source)
    assert main is not None
    preamble, body = source[: main.start()], source[main.end() :].rstrip().removesuffix("}")
    bindings = sorted((int(number), binding) for number, *binding in _BINDING.findall(preamble))
    shared_memory = {name: (kind, int(count)) for name, kind, count in _SHARED.findall(preamble)}
    helpers = _SHARED.sub("", _BINDING.sub("", preamble))
    return _ParsedShader(
        tuple((access, name, kind) for _, (access, name, kind) in bindings),
        shared_memory,
        int(main[1]),
        dict(_PARAMETER.findall(main[2])),
        helpers.strip(),
        body,
    )


def can_merge(first_shader: Shader, second_shader: Shader) -> bool:
    """Whether two shaders may be merged."""
    first_parts, second_parts = _parse(first_shader.source), _parse(second_shader.source)
    return first_parts.invocations == second_parts.invocations and (
        first_parts.shared.keys() - _SMALL_MEMORY == second_parts.shared.keys() - _SMALL_MEMORY
    )


def _merge_workgroup_memory(shaders: Sequence[Shader]) -> dict[str, tuple[str, int]]:
    sizes: dict[str, tuple[str, int]] = {}
    for shader in shaders:
        for name, (kind, count) in _parse(shader.source).shared.items():
            unique_name = name if sizes.get(name, (kind,))[0] == kind else f"{name}_{kind}"
            sizes[unique_name] = kind, max(count, sizes.get(unique_name, (kind, 0))[1])
    return sizes


def buffer_type(shader: Shader, binding: int) -> str:
    """Return the type of a binding. Shaders that read a buffer as the same type share the
    binding."""
    return _parse(shader.source).bindings[binding][2]


def merged_shader(
    shaders: Sequence[tuple[Shader, Grid]], bound: Sequence[Sequence[int]], writes: int
) -> tuple[Shader, Grid]:
    """Merge shaders; return the merged shader and its grid.

    Args:
        shaders: Shaders with their grids; all pairs `can_merge`.
        bound: Per shader, the merged numbers of its bindings.
        writes: Number of outputs, the last bindings.
    """
    parts = [_parse(shader.source) for shader, _ in shaders]
    count = 1 + max(number for numbers in bound for number in numbers)
    declarations: dict[int, str] = {}
    for part, numbers in zip(parts, bound, strict=True):
        for (access, _, kind), number in zip(part.bindings, numbers, strict=True):
            declarations[number] = f"var<storage, {access}> bound{number}: {kind};"
    shared_memory = _merge_workgroup_memory([shader for shader, _ in shaders])
    lines = [f"@group(0) @binding({number}) {declarations[number]}" for number in range(count)]
    lines += [f"var<workgroup> {name}: array<{k}, {n}>;" for name, (k, n) in shared_memory.items()]
    bodies, first_workgroup = [], 0
    for number, (part, numbers, (_, grid)) in enumerate(zip(parts, bound, shaders, strict=True)):
        names = {name: f"part{number}_{name}" for name in part.names}
        names |= {
            name: f"bound{index}"
            for (_, name, _), index in zip(part.bindings, numbers, strict=True)
        }
        names |= {n: f"{n}_{k}" for n, (k, _) in part.shared.items() if shared_memory[n][0] != k}
        if part.helpers:
            lines.append(_rename(part.helpers, names))
        groups = math.prod(grid)
        bodies += [
            f"if (which >= {first_workgroup}u && which < {first_workgroup + groups}u) {{",
            f"let at = which - {first_workgroup}u;",
            *_declare_builtins(part, grid),
            _rename(part.body, names),
            "}",
        ]
        first_workgroup += groups
    merged_grid = (first_workgroup, 1, 1)
    workgroup_number = "workgroup.x"
    if first_workgroup > WORKGROUPS_PER_DIMENSION:
        merged_grid = (WORKGROUPS_PER_DIMENSION, -(-first_workgroup // WORKGROUPS_PER_DIMENSION), 1)
        workgroup_number = f"workgroup.x + workgroup.y * {WORKGROUPS_PER_DIMENSION}u"
    entry = (
        f"@compute @workgroup_size({parts[0].invocations})\n"
        "fn main(@builtin(workgroup_id) workgroup: vec3u, "
        "@builtin(local_invocation_index) invocation: u32) {"
    )
    source = "\n".join([*lines, entry, f"let which = {workgroup_number};", *bodies, "}\n"])
    in_bounds = all(shader.in_bounds for shader, _ in shaders)
    return Shader(source, count, writes, in_bounds), merged_grid


def _declare_builtins(part: _ParsedShader, grid: Grid) -> list[str]:
    """Declare the built-in values of a body within the shader's original grid."""
    x, y, z = grid
    workgroup = (
        "vec3u(at, 0u, 0u)" if y == z == 1 else f"vec3u(at % {x}u, at / {x}u % {y}u, at / {x * y}u)"
    )
    local = "vec3u(invocation, 0u, 0u)"
    values = {
        "workgroup_id": workgroup,
        "num_workgroups": f"vec3u({x}u, {y}u, {z}u)",
        "local_invocation_id": local,
        "local_invocation_index": "invocation",
        "global_invocation_id": f"{workgroup} * vec3u({part.invocations}u, 1u, 1u) + {local}",
    }
    return [f"let {name} = {values[builtin]};" for builtin, name in part.parameters.items()]


def _rename(text: str, names: Mapping[str, str]) -> str:
    """Rename whole words, except vector components."""
    if not names:
        return text
    pattern = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    return re.sub(rf"(?<![\w.])(?:{pattern})\b", lambda match_: names[match_[0]], text)
