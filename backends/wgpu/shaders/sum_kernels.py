"""Kernels of subtree sums: copy gradients, add gradients, collect losses.

The kernels process whole buffers, whose sizes are multiples of 16 bytes. So one shader serves all
tensors, and one dispatch processes several tensors. The source may be longer than the target; the
excess is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

from backends.wgpu.shaders.dispatch import Dispatch, Shader

_WORKGROUP: Final = 64
_ROW: Final = 32768
"""Workgroups per row of the grid; adapters allow 65,535."""


@cache
def _vector_shader(element_type: str, statement: str, pairs: int) -> Shader:
    """Return a shader that processes all pairs in one dispatch, whose depth is their number."""
    bindings = [f"var<storage, read> source{n}: array<{element_type}>;" for n in range(pairs)]
    bindings += [f"var<storage, read_write> sum{n}: array<{element_type}>;" for n in range(pairs)]
    declarations = "\n".join(
        f"@group(0) @binding({index}) {text}" for index, text in enumerate(bindings)
    )
    lines = "\n".join(
        f"  if ({f'id.z == {n}u && ' if pairs > 1 else ''}i < arrayLength(&sum{n})) "
        f"{{ {statement.format(f'sum{n}[i]', f'source{n}[i]')} }}"
        for n in range(pairs)
    )
    return Shader(
        f"""\
{declarations}
@compute @workgroup_size({_WORKGROUP})
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {{
  let i = id.x + id.y * groups.x * {_WORKGROUP}u;
{lines}
}}
""",
        2 * pairs,
        pairs,
    )


@cache
def _loss_shader(count: str, losses: int, stride: int) -> Shader:
    return Shader(
        f"""\
@group(0) @binding(0) var<storage, read> loss: array<u32>;
@group(0) @binding(1) var<storage, read_write> losses: array<u32>;
@compute @workgroup_size(1)
fn main() {{
  let count = {count};
  for (var i = 0u; i < {losses}u; i++) {{
    losses[1u + count + i] = loss[i * {stride}u];
  }}
  losses[0] = count + {losses}u;
}}
""",
        2,
    )


def add(gradients: Sequence[int], totals: Sequence[int], nbytes: int) -> Dispatch:
    """Add gradients to totals in float32, pair by pair; `nbytes` is the size of the largest
    total."""
    shader = _vector_shader("vec4f", "{0} = {0} + {1};", len(gradients))
    return _pair_dispatch(shader, gradients, totals, nbytes, "add to subtree sums")


def copy(gradients: Sequence[int], totals: Sequence[int], nbytes: int) -> Dispatch:
    """Copy gradients to totals bit by bit (as integers), pair by pair; `nbytes` is the size of the
    largest total."""
    shader = _vector_shader("vec4u", "{0} = {1};", len(gradients))
    return _pair_dispatch(shader, gradients, totals, nbytes, "begin subtree sums")


def store_losses(loss: int, losses: int, count: int, stride: int, *, first: bool) -> Dispatch:
    """Append `count` losses, `stride` bytes apart, to the list, whose word 0 is its length; with
    `first`, start a new list."""
    shader = _loss_shader("0u" if first else "losses[0]", count, stride // 4)
    return Dispatch(shader, (loss, losses), (1, 1, 1), "store losses")


def _pair_dispatch(
    shader: Shader, gradients: Sequence[int], totals: Sequence[int], nbytes: int, label: str
) -> Dispatch:
    groups = -(-nbytes // (16 * _WORKGROUP))
    x, y = (groups, 1) if groups <= _ROW else (_ROW, -(-groups // _ROW))
    return Dispatch(shader, (*gradients, *totals), (x, y, len(gradients)), label)
