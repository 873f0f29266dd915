"""The kernels of node sums: keep a gradient, add one to another, note a loss.

They work on whole buffers, whose sizes are multiples of 16 bytes, so one shader does for all
tensors. What is read may be longer than what is written: its end is left alone.
"""

from __future__ import annotations

from typing import Final

from backends.wgpu.shaders.dispatch import Dispatch, Shader

_WORKGROUP: Final = 64
_ROW: Final = 32768
"""Workgroups of one row of the grid: adapters allow 65,535."""


def _over_vectors(kind: str, statement: str) -> Shader:
    return Shader(
        f"""\
@group(0) @binding(0) var<storage, read> given: array<{kind}>;
@group(0) @binding(1) var<storage, read_write> sum: array<{kind}>;
@compute @workgroup_size({_WORKGROUP})
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {{
  let i = id.x + id.y * groups.x * {_WORKGROUP}u;
  if (i < arrayLength(&sum)) {{ sum[i] = {statement}; }}
}}
""",
        2,
    )


_ADD: Final = _over_vectors("vec4f", "sum[i] + given[i]")
_KEEP: Final = _over_vectors("vec4u", "given[i]")  # integers: a copy, whatever floats are


def _note(count: str) -> Shader:
    return Shader(
        f"""\
@group(0) @binding(0) var<storage, read> loss: array<u32>;
@group(0) @binding(1) var<storage, read_write> losses: array<u32>;
@compute @workgroup_size(1)
fn main() {{
  let count = {count};
  losses[1u + count] = loss[0];
  losses[0] = count + 1u;
}}
""",
        2,
    )


_FIRST: Final = _note("0u")
_NEXT: Final = _note("losses[0]")


def add(given: int, total: int, nbytes: int) -> Dispatch:
    """`total += given`, in float32, over the `nbytes` of total."""
    return Dispatch(_ADD, (given, total), _grid(nbytes), "add to node sum")


def keep(given: int, total: int, nbytes: int) -> Dispatch:
    """`total = given`, bit by bit, over the `nbytes` of total."""
    return Dispatch(_KEEP, (given, total), _grid(nbytes), "begin node sum")


def note_loss(loss: int, losses: int, *, first: bool) -> Dispatch:
    """Put a loss behind those noted since the first: they stand from word 1 on, word 0 counts."""
    return Dispatch(_FIRST if first else _NEXT, (loss, losses), (1, 1, 1), "note loss")


def _grid(nbytes: int) -> tuple[int, int, int]:
    groups = -(-nbytes // (16 * _WORKGROUP))
    return (groups, 1, 1) if groups <= _ROW else (_ROW, -(-groups // _ROW), 1)
