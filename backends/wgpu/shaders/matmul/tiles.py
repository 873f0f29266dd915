"""Matrix product by tiles in workgroup memory: for real GPUs, and right on every adapter.

A workgroup computes `rows` x `columns` outputs. Per step of k it brings both operands' tiles into
workgroup memory as vec4 along m and n, in blocks of 4 x 4 that are turned on the way where k is the
contiguous dimension; then each invocation adds its outputs' products in registers. The next step's
blocks are read from memory before that, and are in registers when they are wanted.

Workgroup memory has 32 banks of 4 bytes, and serves the vec4 of eight neighbours at once if all lie
in different ones. So the rows of a tile are an odd number of vec4 long, neighbours store two blocks
along k and four along the other dimension, and the columns of an invocation lie as far apart as
those of all its neighbours reach. `benchmarks.vulkan_counts` counts what is served twice.

What is read past an operand's end is its last row instead, what lies past the output's is not
stored: an index depends on sizes and the invocation alone, and is in bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from backends.wgpu.shaders.dispatch import Shader
from backends.wgpu.shaders.matmul.problem import ZERO, MatmulProblem
from backends.wgpu.shaders.matmul.side import Side, sides

_UNROLLED: Final = 4
"""Terms of a round of the inner loop."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of the kernel: multiples of 4, the depth of 8.

    Attributes:
        rows: Outputs of a workgroup along m.
        columns: Along n.
        depth: k per step.
        own_rows: Outputs of an invocation along m; divides `rows`.
        own_columns: Along n; divides `columns`.
    """

    rows: int
    columns: int
    depth: int
    own_rows: int
    own_columns: int

    def __post_init__(self) -> None:
        """Refuse what `_place` leaves holes in."""
        sizes = (self.rows, self.columns, self.depth // 2, self.own_rows, self.own_columns)
        if any(size % 4 for size in (*sizes, self.depth)):
            raise ValueError(f"expected multiples of 4, and a depth of 8, got {self}")

    @property
    def invocations(self) -> int:
        """Of a workgroup."""
        return self.rows // self.own_rows * (self.columns // self.own_columns)

    @property
    def across(self) -> int:
        """Invocations beside each other along n."""
        return self.columns // self.own_columns

    @property
    def blocks(self) -> int:
        """Of 4 x 4, in both tiles: what the invocations bring."""
        return self.depth // 4 * (self.rows + self.columns) // 4

    @property
    def workgroup_bytes(self) -> int:
        """Of workgroup memory."""
        return 16 * self.depth * (_padded(self.rows) + _padded(self.columns))


def _padded(width: int) -> int:
    """Vec4 of a tile's row, an odd number."""
    return width // 4 + 1 - width // 4 % 2


def tiles_shader(problem: MatmulProblem, tiles: Tiles) -> tuple[Shader, tuple[int, int, int]]:
    """The shader and its grid."""
    left, right = sides(problem)
    across = -(-problem.n // tiles.columns)
    down = -(-problem.m // tiles.rows)
    vector_out = problem.n % 4 == 0 and problem.result.aligned(4)
    source = f"""\
@group(0) @binding(0) var<storage, read> a: array<{left.element_type(vector=_vector(left))}>;
@group(0) @binding(1) var<storage, read> b: array<{right.element_type(vector=_vector(right))}>;
{_bindings(problem, "vec4f" if vector_out else "f32")}
var<workgroup> left: array<vec4f, {tiles.depth * _padded(tiles.rows)}>;
var<workgroup> right: array<vec4f, {tiles.depth * _padded(tiles.columns)}>;
{left.functions(vector=_vector(left))}{right.functions(vector=_vector(right))}
@compute @workgroup_size({tiles.invocations})
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) me: u32) {{
  let a_base = {left.base("group.z")};
  let b_base = {right.base("group.z")};
  let first_m = group.y * {tiles.rows}u;
  let first_n = group.x * {tiles.columns}u;
  let my_m = me / {tiles.across}u * {tiles.own_rows // 4}u;
  let my_n = me % {tiles.across}u;
{_sums(tiles)}
{_held(tiles)}
  for (var k0 = 0u; k0 < {problem.k + tiles.depth}u; k0 += {tiles.depth}u) {{
    if (k0 < {problem.k}u) {{
{_read((left, right), tiles)}
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
{_places(problem, tiles)}
{_store(problem, tiles, vector=vector_out)}
}}
"""
    finish = problem.finish
    reads = 2 + (len(finish.bindings) if finish else 0)
    writes = len(finish.writes) + finish.stored if finish else 1
    looks_up = finish is not None and finish.looks_up
    in_bounds = not (looks_up or (problem.b_form is not None and problem.b_form.looks_up))
    return Shader(source, reads + writes, writes, in_bounds), (across, down, problem.batch)


def _bindings(problem: MatmulProblem, element: str) -> str:
    """What is bound after the operands, and `finish`."""
    out = f"var<storage, read_write> out: array<{element}>;"
    finish = problem.finish
    if finish is None:
        return f"@group(0) @binding(2) {out}"
    read = [f"var<storage, read> b{i}: {kind};" for i, kind in enumerate(finish.bindings)]
    written = [
        f"var<storage, read_write> e{i}: array<{kind}>;" for i, kind in enumerate(finish.writes)
    ]
    listed = [*read, *([out] if finish.stored else []), *written]
    lines = [f"@group(0) @binding({i}) {each}" for i, each in enumerate(listed, 2)]
    return "\n".join(
        [
            *lines,
            finish.helpers,
            "fn finish(i: u32, product: f32) {",
            finish.body,
            "}",
        ]
    )


def _vector(side: Side) -> bool:
    return side.along_k(4) or side.along_outer(4)


def _sums(tiles: Tiles) -> str:
    names = (f"c{i}_{j}" for i in range(tiles.own_rows) for j in range(tiles.own_columns // 4))
    return "\n".join([f"  {ZERO}", *(f"  var {name} = vec4f(zero);" for name in names)])


def _held(tiles: Tiles) -> str:
    """What waits for the next step: an invocation's blocks."""
    names = (f"p{u}_{t}" for u in range(_turns(tiles)) for t in range(4))
    return "\n".join(f"  var {name} = vec4f(0.0);" for name in names)


def _turns(tiles: Tiles) -> int:
    """Blocks of an invocation, at most."""
    return -(-tiles.blocks // tiles.invocations)


def _each_block(tiles: Tiles, of: Callable[[int, str, int], str]) -> str:
    """For each of an invocation's blocks what `of` says of its number, tile and width.

    `r` and `t` are the block's places along the outer dimension and k.
    """
    first = tiles.depth // 4 * tiles.rows // 4
    lines = []
    for u in range(_turns(tiles)):
        low, high = u * tiles.invocations, (u + 1) * tiles.invocations
        begins = [
            f"if (me + {low}u < {first}u) {{" if low < first < high else "{",
            f"if (me + {low}u < {tiles.blocks}u) {{" if high > tiles.blocks else "{",
        ]
        parts = [("left", tiles.rows, 0)] * (low < first) + [("right", tiles.columns, first)] * (
            high > first
        )
        for number, (name, width, start) in enumerate(parts):
            begin = begins[0] if name == "left" else begins[1]
            begin = f"else {begin}" if number and begin.startswith("if") else begin
            begin = "else {" if number and begin == "{" else begin
            places = f"let q = me + {low}u - {start}u; {_place(width)}"
            lines.append(f"{begin} {places}\n{of(u, name, width)}\n}}")
    return "\n".join(lines)


def _place(width: int) -> str:
    """Neighbours have two blocks along k, then go along the outer dimension."""
    fours = width // 4
    return f"let r = q / 2u % {fours}u * 4u; let t = (q % 2u + q / {2 * fours}u * 2u) * 4u;"


def _read(both: tuple[Side, Side], tiles: Tiles) -> str:
    """Into registers; what lies past k's end is zero in both tiles."""
    side_of = dict(zip(("left", "right"), both, strict=True))

    def block(number: int, name: str, _width: int) -> str:
        outer = f"{'first_m' if name == 'left' else 'first_n'} + r"
        kept = " ".join(f"p{number}_{t} = v{t};" for t in range(4))
        return f"let k = k0 + t;\n{_block(side_of[name], outer)}\n{kept}"

    return _each_block(tiles, block)


def _store_tiles(tiles: Tiles) -> str:
    """From registers into workgroup memory."""

    def block(number: int, name: str, width: int) -> str:
        return " ".join(
            f"{name}[(t + {t}u) * {_padded(width)}u + r / 4u] = p{number}_{t};" for t in range(4)
        )

    return _each_block(tiles, block)


def _block(side: Side, outer: str) -> str:
    """WGSL of v0 to v3: at k to k + 3, four elements along the outer dimension."""
    base, last = f"{side.name}_base", side.extent - 1
    if side.along_k(4):
        within = f"min(k, {side.k - 4}u)"
        rows = [f"min({outer} + {i}u, {last}u)" for i in range(4)]
        reads = [
            f"      let w{i} = {side.name}_four({side.index(base, row, within)});"
            for i, row in enumerate(rows)
        ]
        turned = [f"vec4f(w0[{t}], w1[{t}], w2[{t}], w3[{t}])" for t in range(4)]
        guard = f"k < {side.k}u"
        values = [
            f"      let v{t} = select(vec4f(0.0), {v}, {guard});" for t, v in enumerate(turned)
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
                f"{side.name}_one({side.index(base, f'min({outer} + {i}u, {last}u)', k)})"
                for i in range(4)
            ]
            value = f"vec4f({', '.join(parts)})"
        lines.append(f"      let v{t} = select(vec4f(0.0), {value}, k + {t}u < {side.k}u);")
    return "\n".join(lines)


def _products(tiles: Tiles) -> str:
    """So many terms of every sum, in their order."""
    lines = []
    for u in range(_UNROLLED):
        lines += [
            f"      let x{u}_{i} = left[(k + {u}u) * {_padded(tiles.rows)}u + my_m + {i}u];"
            for i in range(tiles.own_rows // 4)
        ]
        lines += [
            f"      let y{u}_{j} = right[(k + {u}u) * {_padded(tiles.columns)}u + my_n"
            f" + {j * tiles.across}u];"
            for j in range(tiles.own_columns // 4)
        ]
        for i in range(tiles.own_rows):
            for j in range(tiles.own_columns // 4):
                c = f"c{i}_{j}"
                lines.append(f"      {c} = fma(vec4f(x{u}_{i // 4}[{i % 4}]), y{u}_{j}, {c});")
    return "\n".join(lines)


def _places(problem: MatmulProblem, tiles: Tiles) -> str:
    """Rows of this invocation's outputs."""
    lines = [f"  let out_base = group.z * {problem.m * problem.n}u + {problem.result.offset}u;"]
    lines += [f"  let m{i} = first_m + my_m * 4u + {i}u;" for i in range(tiles.own_rows)]
    return "\n".join(lines)


def _store(problem: MatmulProblem, tiles: Tiles, *, vector: bool) -> str:
    lines = []
    for sums, place, guard in _outputs(problem, tiles, vector=vector):
        value = f"{place} + {sums}" if problem.result.onto else sums
        done = [f"{place} = {value};"]
        if (finish := problem.finish) is not None:
            first = place.removeprefix("out[").removesuffix("]").removesuffix(" / 4u")
            each = [(f"{first} + {c}u", f"{sums}[{c}]") for c in range(4)]
            done = done if finish.stored else []
            done += [f"finish({i}, {x});" for i, x in (each if vector else [(first, sums)])]
        lines.append(f"  if ({guard}) {{ {' '.join(done)} }}")
    return "\n".join(lines)


def _outputs(
    problem: MatmulProblem, tiles: Tiles, *, vector: bool
) -> Iterator[tuple[str, str, str]]:
    """The registers of each output (or four), its place, and when it is there."""
    m, n = problem.m, problem.n
    for i in range(tiles.own_rows):
        for j in range(tiles.own_columns // 4):
            column = f"first_n + (my_n + {j * tiles.across}u) * 4u"
            at = f"out_base + m{i} * {problem.result.row}u + {column}"
            if vector:
                yield f"c{i}_{j}", f"out[({at}) / 4u]", f"m{i} < {m}u && {column} < {n}u"
                continue
            for c in range(4):
                guard = f"m{i} < {m}u && {column} + {c}u < {n}u"
                yield f"c{i}_{j}[{c}]", f"out[{at} + {c}u]", guard
