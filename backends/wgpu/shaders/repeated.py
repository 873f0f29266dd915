"""A shader for several microbatches at once: each has its own slice of every buffer.

The grid is as many times as deep; a workgroup's z tells its microbatch, and what it does there is
what the shader does alone: indices have the slice's start added, and no other operation is touched,
so the bits stay. What all microbatches read (parameters, constants) has no slices.
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
"""All others have four."""
_NUMBER: Final = "microbatch"
"""Of the module's names: which one a workgroup computes."""

_OF_ONE: Final = {
    "workgroup_id": "vec3u({0}.xy, {0}.z % {1}u)",
    "global_invocation_id": "vec3u({0}.xy, {0}.z % {1}u)",
    "num_workgroups": "vec3u({0}.xy, {1}u)",
}
"""What a microbatch's own grid would have; workgroups are one deep."""


@cache
def invocations(source: str) -> int:
    """Of a workgroup; 0 for what is no WGSL."""
    main = _MAIN.search(source)
    return int(main[1]) if main else 0


@cache
def repeats(source: str) -> bool:
    """Whether the shader can be had for several microbatches."""
    main = _MAIN.search(source)
    if main is None or re.search(rf"\b{_NUMBER}\b", source):
        return False
    names = [name for _, name, _ in _BINDING.findall(source)]
    return not any(re.search(rf"&\s*{name}\b(?!\) == 0u)", source) for name in names)


@cache
def repeated(shader: Shader, strides: Sequence[int], deep: int) -> Shader:
    """The shader over slices.

    Args:
        shader: One that `repeats`.
        strides: For each binding the bytes from a microbatch's slice to the next one's, a multiple
            of 16; 0 where there is but one, as for all that are not named.
        deep: Workgroups of one microbatch along z.
    """
    source = shader.source
    for number, name, kind in _BINDING.findall(source):
        stride = strides[int(number)] if int(number) < len(strides) else 0
        if stride:
            source = _shifted(source, name, f"{_NUMBER} * {stride // element_bytes(kind)}u")
    main = _MAIN.search(source)
    assert main is not None
    lines, listed, group = [], [], ""
    for builtin, name, kind in _PARAMETER.findall(main[2]):
        given = f"{name}_of_all" if builtin in _OF_ONE else name
        listed.append(f"@builtin({builtin}) {given}: {kind}")
        if builtin in _OF_ONE:
            lines.append(f"let {name} = {_OF_ONE[builtin].format(given, deep)};")
        group = given if builtin == "workgroup_id" else group
    if not group:
        group = f"{_NUMBER}_group"
        listed.append(f"@builtin(workgroup_id) {group}: vec3u")
    entry = (
        f"var<private> {_NUMBER}: u32;\n@compute @workgroup_size({main[1]})\n"
        f"fn main({', '.join(listed)}) {{\n"
    )
    body = "\n".join([f"{_NUMBER} = {group}.z / {deep}u;", *lines])
    text = source[: main.start()] + entry + body + source[main.end() :]
    return replace(shader, source=text)


def element_bytes(kind: str) -> int:
    """Of an array's element in a storage buffer."""
    vector = _VECTOR.fullmatch(kind)
    if vector is None:
        return _SCALAR_BYTES.get(kind, 4)
    return int(vector[1]) * _SCALAR_BYTES.get(vector[2] or vector[3], 4)


def _shifted(source: str, name: str, start: str) -> str:
    """Every index into the buffer, from this start on."""
    read = re.compile(rf"(?<![\w.]){name}\[")
    parts, end = [], 0
    while found := read.search(source, end):
        close = _closing(source, found.end())
        index = _shifted(source[found.end() : close], name, start)
        parts += [source[end : found.end()], f"{start} + ({index})"]
        end = close
    return "".join([*parts, source[end:]])


def _closing(source: str, at: int) -> int:
    """Where the bracket that is open there is closed."""
    depth = 1
    while depth:
        depth += {"[": 1, "]": -1}.get(source[at], 0)
        at += 1
    return at - 1
