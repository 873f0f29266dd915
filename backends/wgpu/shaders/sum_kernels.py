"""The kernels of subtree sums: keep gradients, add them to others, note losses.

They work on whole buffers, whose sizes are multiples of 16 bytes, so one shader does for all
tensors, and for several at once. What is read may be longer than what is written: its end is left
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

from backends.wgpu.shaders.dispatch import Dispatch, Shader

_WORKGROUP: Final = 64
_ROW: Final = 32768
"""Workgroups of one row of the grid: adapters allow 65,535."""


@cache
def _over_vectors(kind: str, statement: str, pairs: int) -> Shader:
    """All pairs side by side: the grid is as deep as there are pairs."""
    bound = [f"var<storage, read> given{n}: array<{kind}>;" for n in range(pairs)]
    bound += [f"var<storage, read_write> sum{n}: array<{kind}>;" for n in range(pairs)]
    declared = "\n".join(f"@group(0) @binding({at}) {text}" for at, text in enumerate(bound))
    lines = "\n".join(
        f"  if ({f'id.z == {n}u && ' if pairs > 1 else ''}i < arrayLength(&sum{n})) "
        f"{{ {statement.format(f'sum{n}[i]', f'given{n}[i]')} }}"
        for n in range(pairs)
    )
    return Shader(
        f"""\
{declared}
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
def _note(count: str, losses: int, apart: int) -> Shader:
    return Shader(
        f"""\
@group(0) @binding(0) var<storage, read> loss: array<u32>;
@group(0) @binding(1) var<storage, read_write> losses: array<u32>;
@compute @workgroup_size(1)
fn main() {{
  let count = {count};
  for (var i = 0u; i < {losses}u; i++) {{
    losses[1u + count + i] = loss[i * {apart}u];
  }}
  losses[0] = count + {losses}u;
}}
""",
        2,
    )


def add(given: Sequence[int], totals: Sequence[int], nbytes: int) -> Dispatch:
    """`total += given`, in float32, for each pair; `nbytes` of the largest total."""
    shader = _over_vectors("vec4f", "{0} = {0} + {1};", len(given))
    return _pairs(shader, given, totals, nbytes, "add to subtree sums")


def keep(given: Sequence[int], totals: Sequence[int], nbytes: int) -> Dispatch:
    """`total = given`, bit by bit, for each pair; `nbytes` of the largest total."""
    shader = _over_vectors("vec4u", "{0} = {1};", len(given))  # integers: whatever floats are
    return _pairs(shader, given, totals, nbytes, "begin subtree sums")


def note_losses(loss: int, losses: int, many: int, stride: int, *, first: bool) -> Dispatch:
    """Put so many losses, `stride` bytes apart, behind those noted since the first: they stand
    from word 1 on, word 0 counts."""
    shader = _note("0u" if first else "losses[0]", many, stride // 4)
    return Dispatch(shader, (loss, losses), (1, 1, 1), "note losses")


def _pairs(
    shader: Shader, given: Sequence[int], totals: Sequence[int], nbytes: int, label: str
) -> Dispatch:
    groups = -(-nbytes // (16 * _WORKGROUP))
    x, y = (groups, 1) if groups <= _ROW else (_ROW, -(-groups // _ROW))
    return Dispatch(shader, (*given, *totals), (x, y, len(given)), label)
