"""Transform a shader to process several microbatches, each with its slice of every buffer.

The grid's depth is multiplied by the number of microbatches, and a workgroup's z selects its
microbatch. Only indices change, by the slice's offset; the bits do not change. Buffers that all
microbatches share (parameters, constants) have no slices.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Final

from backends.wgpu.shaders.dispatch import Shader

_BINDING: Final = re.compile(
    r"@group\(0\) @binding\((\d+)\) var<storage, (?:read|read_write)> (\w+): array<(.+)>;"
)
_MAIN: Final = re.compile(r"@compute @workgroup_size\((\d+)\)\s*fn main\(([^{]*)\) \{")
_PARAMETER: Final = re.compile(r"@builtin\((\w+)\)\s*(\w+): (\w+)")
_VECTOR: Final = re.compile(r"vec(\d)(?:<(\w+)>|([fuih]))")
_SCALAR_BYTES: Final = {"f16": 2, "h": 2, "u64": 8}
"""Size of an element by type; other types have 4 bytes."""
_MICROBATCH: Final = "microbatch"
"""Name of the module's variable with a workgroup's microbatch."""

_BUILT_INS: Final = {
    "workgroup_id": "vec3u({0}.xy, {0}.z % {1}u)",
    "global_invocation_id": "vec3u({0}.xy, {0}.z % {1}u)",
    "num_workgroups": "vec3u({0}.xy, {1}u)",
}
"""Built-in values within a microbatch's part of the grid; workgroups have depth 1."""


@cache
def invocations(source: str) -> int:
    """Return the invocations per workgroup; 0 if the source is not WGSL."""
    main = _MAIN.search(source)
    return int(main[1]) if main else 0


@cache
def can_repeat(source: str) -> bool:
    """Whether the shader can be transformed."""
    main = _MAIN.search(source)
    if main is None or re.search(rf"\b{_MICROBATCH}\b", source):
        return False
    names = [name for _, name, _ in _BINDING.findall(source)]
    return not any(re.search(rf"&\s*{name}\b(?!\) == 0u)", source) for name in names)


@cache
def repeat_for_microbatches(shader: Shader, strides: Sequence[int], depth: int) -> Shader:
    """Return the shader for several microbatches.

    Args:
        shader: A shader that `can_repeat`.
        strides: Per binding, the distance between slices in bytes, a multiple of 16; 0 (also for
            missing entries) if all microbatches share the buffer.
        depth: Workgroups of one microbatch along z.
    """
    source = shader.source
    for number, name, kind in _BINDING.findall(source):
        stride = strides[int(number)] if int(number) < len(strides) else 0
        if stride:
            source = _shift_indices(
                source, name, f"{_MICROBATCH} * {stride // element_bytes(kind)}u"
            )
    main = _MAIN.search(source)
    assert main is not None
    lines, parameters, group = [], [], ""
    for builtin, name, kind in _PARAMETER.findall(main[2]):
        parameter = f"{name}_of_all" if builtin in _BUILT_INS else name
        parameters.append(f"@builtin({builtin}) {parameter}: {kind}")
        if builtin in _BUILT_INS:
            lines.append(f"let {name} = {_BUILT_INS[builtin].format(parameter, depth)};")
        group = parameter if builtin == "workgroup_id" else group
    if not group:
        group = f"{_MICROBATCH}_group"
        parameters.append(f"@builtin(workgroup_id) {group}: vec3u")
    entry = (
        f"var<private> {_MICROBATCH}: u32;\n@compute @workgroup_size({main[1]})\n"
        f"fn main({', '.join(parameters)}) {{\n"
    )
    body = "\n".join([f"{_MICROBATCH} = {group}.z / {depth}u;", *lines])
    text = source[: main.start()] + entry + body + source[main.end() :]
    return replace(shader, source=text)


def element_bytes(kind: str) -> int:
    """Return the size of an element in a storage buffer."""
    vector = _VECTOR.fullmatch(kind)
    if vector is None:
        return _SCALAR_BYTES.get(kind, 4)
    return int(vector[1]) * _SCALAR_BYTES.get(vector[2] or vector[3], 4)


def _shift_indices(source: str, name: str, start: str) -> str:
    """Add `start` to every index into the buffer."""
    pattern = re.compile(rf"(?<![\w.]){name}\[")
    parts, end = [], 0
    while access := pattern.search(source, end):
        end_of_index = _closing_bracket(source, access.end())
        index = _shift_indices(source[access.end() : end_of_index], name, start)
        parts += [source[end : access.end()], f"{start} + ({index})"]
        end = end_of_index
    return "".join([*parts, source[end:]])


def _closing_bracket(source: str, position: int) -> int:
    """Return the index of the bracket that closes the one opened before `position`."""
    depth = 1
    while depth:
        depth += {"[": 1, "]": -1}.get(source[position], 0)
        position += 1
    return position - 1
