"""Tiled matrix product in workgroup memory: tuned for GPUs, correct on every adapter.

A workgroup computes `rows` x `columns` outputs. Per step of k it loads both operands' tiles into
workgroup memory as vec4 along m and n, in blocks of 4 x 4, transposed if k is the contiguous
dimension. Each invocation then accumulates its outputs in registers, while the next step's blocks
are prefetched into registers.

Workgroup memory has 32 banks of 4 bytes and serves the vec4 of eight adjacent invocations at once
if they fall into different banks. Therefore a tile's row has an odd number of vec4, adjacent
invocations store two blocks along k and four along the other dimension, and an invocation's columns
are interleaved with its neighbors'. `benchmarks.vulkan_counts` counts bank conflicts.

Reads past an operand's end repeat its last row, and outputs past the end are not stored, so indices
depend on sizes and the invocation alone, and are in bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from backends.wgpu.shaders.dispatch import Shader
from backends.wgpu.shaders.matmul.problem import ZERO, MatmulProblem
from backends.wgpu.shaders.matmul.side import Side, sides

_UNROLLED: Final = 4
"""Terms per iteration of the inner loop."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of the kernel: multiples of 4; the depth is a multiple of 8.

    Attributes:
        rows: Outputs of a workgroup along m.
        columns: Outputs of a workgroup along n.
        depth: Terms per step of k.
        rows_per_invocation: Outputs of an invocation along m; divides `rows`.
        columns_per_invocation: Outputs of an invocation along n; divides `columns`.
    """

    rows: int
    columns: int
    depth: int
    rows_per_invocation: int
    columns_per_invocation: int

    def __post_init__(self) -> None:
        """Refuse sizes that `_block_position` does not cover."""
        sizes = (
            self.rows,
            self.columns,
            self.depth // 2,
            self.rows_per_invocation,
            self.columns_per_invocation,
        )
        if any(size % 4 for size in (*sizes, self.depth)):
            raise ValueError(f"expected multiples of 4, and a depth of 8, got {self}")

    @property
    def invocations(self) -> int:
        """Invocations of a workgroup."""
        return self.rows // self.rows_per_invocation * (self.columns // self.columns_per_invocation)

    @property
    def across(self) -> int:
        """Number of invocations along n."""
        return self.columns // self.columns_per_invocation

    @property
    def blocks(self) -> int:
        """Number of 4 x 4 blocks in both tiles, which the invocations load."""
        return self.depth // 4 * (self.rows + self.columns) // 4

    @property
    def workgroup_bytes(self) -> int:
        """Workgroup memory in bytes."""
        return 16 * self.depth * (_row_stride(self.rows) + _row_stride(self.columns))


def _row_stride(width: int) -> int:
    """Return the distance between a tile's rows in vec4, an odd number."""
    return width // 4 + 1 - width // 4 % 2


def tiles_shader(problem: MatmulProblem, tiles: Tiles) -> tuple[Shader, tuple[int, int, int]]:
    """Return the shader and its grid."""
    left, right = sides(problem)
    workgroups_across = -(-problem.n // tiles.columns)
    workgroups_down = -(-problem.m // tiles.rows)
    has_vector_output = problem.n % 4 == 0 and problem.result.is_aligned(4)
    source = f"""\
@group(0) @binding(0) var<storage, read> a: array<{left.element_type(vector=_has_vectors(left))}>;
@group(0) @binding(1) var<storage, read> b: array<{right.element_type(vector=_has_vectors(right))}>;
{_bindings(problem, "vec4f" if has_vector_output else "f32")}
var<workgroup> left: array<vec4f, {tiles.depth * _row_stride(tiles.rows)}>;
var<workgroup> right: array<vec4f, {tiles.depth * _row_stride(tiles.columns)}>;
{left.functions(vector=_has_vectors(left))}{right.functions(vector=_has_vectors(right))}
@compute @workgroup_size({tiles.invocations})
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) me: u32) {{
  let a_base = {left.base("group.z")};
  let b_base = {right.base("group.z")};
  let first_m = group.y * {tiles.rows}u;
  let first_n = group.x * {tiles.columns}u;
  let my_m = me / {tiles.across}u * {tiles.rows_per_invocation // 4}u;
  let my_n = me % {tiles.across}u;
{_sums(tiles)}
{_block_registers(tiles)}
  for (var k0 = 0u; k0 < {problem.k + tiles.depth}u; k0 += {tiles.depth}u) {{
    if (k0 < {problem.k}u) {{
{_load_blocks((left, right), tiles)}
    }}
    if (k0 > 0u) {{
      for (var k = 0u; k < {tiles.depth}u; k += {_UNROLLED}u) {{
{_products(tiles)}
      }}
      workgroupBarrier();
    }}
    if (k0 < {problem.k}u) {{
{_store_tiles(tiles)}
      workgroupBarrier();
    }}
  }}
{_output_rows(problem, tiles)}
{_store(problem, tiles, vector=has_vector_output)}
}}
"""
    finish = problem.finish
    reads = 2 + (len(finish.bindings) if finish else 0)
    writes = len(finish.writes) + finish.is_product_stored if finish else 1
    reads_indices = finish is not None and finish.reads_indices
    in_bounds = not (reads_indices or (problem.b_form is not None and problem.b_form.uses_table))
    return Shader(source, reads + writes, writes, in_bounds), (
        workgroups_across,
        workgroups_down,
        problem.batch,
    )


def _bindings(problem: MatmulProblem, element: str) -> str:
    """Declare the bindings after the operands, and the function `finish`."""
    out = f"var<storage, read_write> out: array<{element}>;"
    finish = problem.finish
    if finish is None:
        return f"@group(0) @binding(2) {out}"
    read_bindings = [f"var<storage, read> b{i}: {kind};" for i, kind in enumerate(finish.bindings)]
    write_bindings = [
        f"var<storage, read_write> e{i}: array<{kind}>;" for i, kind in enumerate(finish.writes)
    ]
    bindings = [*read_bindings, *([out] if finish.is_product_stored else []), *write_bindings]
    lines = [f"@group(0) @binding({i}) {binding}" for i, binding in enumerate(bindings, 2)]
    return "\n".join(
        [
            *lines,
            finish.helpers,
            "fn finish(i: u32, product: f32) {",
            finish.body,
            "}",
        ]
    )


def _has_vectors(side: Side) -> bool:
    return side.along_k(4) or side.along_outer(4)


def _sums(tiles: Tiles) -> str:
    names = (
        f"c{i}_{j}"
        for i in range(tiles.rows_per_invocation)
        for j in range(tiles.columns_per_invocation // 4)
    )
    return "\n".join([f"  {ZERO}", *(f"  var {name} = vec4f(zero);" for name in names)])


def _block_registers(tiles: Tiles) -> str:
    """Declare the registers of an invocation's prefetched blocks."""
    names = (f"p{u}_{t}" for u in range(_blocks_per_invocation(tiles)) for t in range(4))
    return "\n".join(f"  var {name} = vec4f(0.0);" for name in names)


def _blocks_per_invocation(tiles: Tiles) -> int:
    """Return the largest number of blocks that an invocation loads."""
    return -(-tiles.blocks // tiles.invocations)


def _for_each_block(tiles: Tiles, print_block: Callable[[int, str, int], str]) -> str:
    """Return WGSL of each of an invocation's blocks, by `print_block(number, tile, width)`.

    `r` and `t` are the block's coordinates along the outer dimension and k.
    """
    left_blocks = tiles.depth // 4 * tiles.rows // 4
    lines = []
    for u in range(_blocks_per_invocation(tiles)):
        low, high = u * tiles.invocations, (u + 1) * tiles.invocations
        begins = [
            f"if (me + {low}u < {left_blocks}u) {{" if low < left_blocks < high else "{",
            f"if (me + {low}u < {tiles.blocks}u) {{" if high > tiles.blocks else "{",
        ]
        parts = [("left", tiles.rows, 0)] * (low < left_blocks) + [
            ("right", tiles.columns, left_blocks)
        ] * (high > left_blocks)
        for number, (name, width, start) in enumerate(parts):
            condition = begins[0] if name == "left" else begins[1]
            condition = f"else {condition}" if number and condition.startswith("if") else condition
            condition = "else {" if number and condition == "{" else condition
            position = f"let q = me + {low}u - {start}u; {_block_position(width)}"
            lines.append(f"{condition} {position}\n{print_block(u, name, width)}\n}}")
    return "\n".join(lines)


def _block_position(width: int) -> str:
    """Return a block's coordinates: two adjacent blocks along k, then along the outer dimension."""
    fours = width // 4
    return f"let r = q / 2u % {fours}u * 4u; let t = (q % 2u + q / {2 * fours}u * 2u) * 4u;"


def _load_blocks(operands: tuple[Side, Side], tiles: Tiles) -> str:
    """Load blocks into registers; terms past the end of k are zero in both tiles."""
    side_by_tile = dict(zip(("left", "right"), operands, strict=True))

    def block(number: int, name: str, _width: int) -> str:
        outer = f"{'first_m' if name == 'left' else 'first_n'} + r"
        assignments = " ".join(f"p{number}_{t} = v{t};" for t in range(4))
        return f"let k = k0 + t;\n{_block(side_by_tile[name], outer)}\n{assignments}"

    return _for_each_block(tiles, block)


def _store_tiles(tiles: Tiles) -> str:
    """Store blocks from registers into workgroup memory."""

    def block(number: int, name: str, width: int) -> str:
        return " ".join(
            f"{name}[(t + {t}u) * {_row_stride(width)}u + r / 4u] = p{number}_{t};"
            for t in range(4)
        )

    return _for_each_block(tiles, block)


def _block(side: Side, outer: str) -> str:
    """Return WGSL of v0 to v3: for k to k + 3, four elements along the outer dimension."""
    base, last_row = f"{side.name}_base", side.extent - 1
    if side.along_k(4):
        clamped = f"min(k, {side.k - 4}u)"
        rows = [f"min({outer} + {i}u, {last_row}u)" for i in range(4)]
        reads = [
            f"      let w{i} = {side.name}_four({side.index(base, row, clamped)});"
            for i, row in enumerate(rows)
        ]
        transposed = [f"vec4f(w0[{t}], w1[{t}], w2[{t}], w3[{t}])" for t in range(4)]
        guard = f"k < {side.k}u"
        values = [
            f"      let v{t} = select(vec4f(0.0), {v}, {guard});" for t, v in enumerate(transposed)
        ]
        return "\n".join(reads + values)
    lines = []
    for t in range(4):
        k = f"min(k + {t}u, {side.k - 1}u)"
        if side.along_outer(4):
            index = side.index(base, f"min({outer}, {side.extent - 4}u)", k)
            value = f"{side.name}_four({index})"
        else:
            parts = [
                f"{side.name}_one({side.index(base, f'min({outer} + {i}u, {last_row}u)', k)})"
                for i in range(4)
            ]
            value = f"vec4f({', '.join(parts)})"
        lines.append(f"      let v{t} = select(vec4f(0.0), {value}, k + {t}u < {side.k}u);")
    return "\n".join(lines)


def _products(tiles: Tiles) -> str:
    """Add `_UNROLLED` terms to every sum, in order."""
    lines = []
    for u in range(_UNROLLED):
        lines += [
            f"      let x{u}_{i} = left[(k + {u}u) * {_row_stride(tiles.rows)}u + my_m + {i}u];"
            for i in range(tiles.rows_per_invocation // 4)
        ]
        lines += [
            f"      let y{u}_{j} = right[(k + {u}u) * {_row_stride(tiles.columns)}u + my_n"
            f" + {j * tiles.across}u];"
            for j in range(tiles.columns_per_invocation // 4)
        ]
        for i in range(tiles.rows_per_invocation):
            for j in range(tiles.columns_per_invocation // 4):
                c = f"c{i}_{j}"
                lines.append(f"      {c} = fma(vec4f(x{u}_{i // 4}[{i % 4}]), y{u}_{j}, {c});")
    return "\n".join(lines)


def _output_rows(problem: MatmulProblem, tiles: Tiles) -> str:
    """Declare the rows of an invocation's outputs."""
    lines = [f"  let out_base = group.z * {problem.m * problem.n}u + {problem.result.offset}u;"]
    lines += [f"  let m{i} = first_m + my_m * 4u + {i}u;" for i in range(tiles.rows_per_invocation)]
    return "\n".join(lines)


def _store(problem: MatmulProblem, tiles: Tiles, *, vector: bool) -> str:
    lines = []
    for sums, target, guard in _outputs(problem, tiles, vector=vector):
        value = f"{target} + {sums}" if problem.result.accumulates else sums
        statements = [f"{target} = {value};"]
        if (finish := problem.finish) is not None:
            first_index = target.removeprefix("out[").removesuffix("]").removesuffix(" / 4u")
            stores = [(f"{first_index} + {c}u", f"{sums}[{c}]") for c in range(4)]
            statements = statements if finish.is_product_stored else []
            statements += [
                f"finish({i}, {x});" for i, x in (stores if vector else [(first_index, sums)])
            ]
        lines.append(f"  if ({guard}) {{ {' '.join(statements)} }}")
    return "\n".join(lines)


def _outputs(
    problem: MatmulProblem, tiles: Tiles, *, vector: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield the register of each output (or four), its target, and the bounds check."""
    m, n = problem.m, problem.n
    for i in range(tiles.rows_per_invocation):
        for j in range(tiles.columns_per_invocation // 4):
            column = f"first_n + (my_n + {j * tiles.across}u) * 4u"
            index = f"out_base + m{i} * {problem.result.row}u + {column}"
            if vector:
                yield f"c{i}_{j}", f"out[({index}) / 4u]", f"m{i} < {m}u && {column} < {n}u"
                continue
            for c in range(4):
                guard = f"m{i} < {m}u && {column} + {c}u < {n}u"
                yield f"c{i}_{j}[{c}]", f"out[{index} + {c}u]", guard
