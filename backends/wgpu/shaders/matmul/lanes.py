"""Matrix product without workgroup memory, for software adapters (Mesa's lavapipe).

On such an adapter an invocation is a lane of a vector register. Loads, one per element, dominate
the cost; multiplications are cheap. So a subgroup computes a block of `rows` x (`columns` times its
lanes) outputs. One operand, the row operand, is loaded once per subgroup and broadcast. Of the
other, the column operand, each lane loads its own columns. Two adjacent float32 values are loaded
as one u64 (feature `shader-int64`), which halves the loads.

Either operand can be broadcast (`swap`); sums run over k in order in both cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backends.wgpu.shaders.dispatch import Shader
from backends.wgpu.shaders.matmul.problem import ZERO, MatmulProblem
from backends.wgpu.shaders.matmul.side import sides


@dataclass(frozen=True, slots=True)
class Lanes:
    """Sizes of the kernel.

    Attributes:
        rows: Outputs of a subgroup along the broadcast operand's outer dimension.
        columns: Outputs of one lane along the other operand's outer dimension.
        swap: Whether the right operand is broadcast.
        subgroup: The adapter's subgroup size.
    """

    rows: int
    columns: int
    swap: bool = False
    subgroup: int = 8


def lanes_shader(problem: MatmulProblem, lanes: Lanes) -> tuple[Shader, tuple[int, int, int]]:
    """Return the shader and its grid."""
    kernel = _Kernel(problem, lanes)
    return kernel.shader(), kernel.grid()


class _Kernel:
    """Generates the shader of one product.

    Names in the shader: `x` and `z` are elements of rows that a lane has loaded (`z` the second of
    two rows), `y` elements of its columns, `q` and `p` the pairs or fours that it loaded, `s` an
    element of a row after the broadcast, and `c` the sums.
    """

    def __init__(self, problem: MatmulProblem, lanes: Lanes) -> None:
        left, right = sides(problem)
        self.problem, self.lanes = problem, lanes
        self.row, self.column = (right, left) if lanes.swap else (left, right)
        assert self.row.form is None, "expected a quantized operand only on the column side"
        # Distance between outputs along the rows and along the lanes.
        row = problem.result.row
        self.steps = (1, row) if lanes.swap else (row, 1)
        self.loads_row_pairs_along_k = self.row.along_k(2)
        self.loads_row_pairs = not self.loads_row_pairs_along_k and self.row.along_outer(2)
        self.loads_column_pairs_along_k = self.column.form is None and self.column.along_k(2)
        self.loads_fours_along_k = self.column.form is not None and self.column.along_k(4)
        self.loads_fours = (
            not self.loads_fours_along_k and self._columns_are_adjacent(4) and not self._is_f32
        )
        self.loads_column_pairs = (
            not self.loads_column_pairs_along_k and self._columns_are_adjacent(2) and self._is_f32
        )
        self.adjacent_columns = self._adjacent_columns()
        self.unroll = 4 if self.loads_fours_along_k else 2 if problem.k % 2 == 0 else 1

    @property
    def _is_f32(self) -> bool:
        return self.column.form is None

    def _columns_are_adjacent(self, elements: int) -> bool:
        return self.column.along_outer(elements) and self.lanes.columns % elements == 0

    def _adjacent_columns(self) -> int:
        """Return the number of adjacent columns of a lane, as the lane loads or can store them."""
        if self.loads_fours:
            return 4
        return 2 if self.column.extent % 2 == 0 and self.lanes.columns % 2 == 0 else 1

    def grid(self) -> tuple[int, int, int]:
        workgroups_across = -(-self.column.extent // (self.lanes.columns * self.lanes.subgroup))
        return workgroups_across, -(-self.row.extent // self.lanes.rows), self.problem.batch

    def shader(self) -> Shader:
        row_type = "u64" if self.loads_row_pairs_along_k or self.loads_row_pairs else "f32"
        column_type = "u64" if self.loads_column_pairs_along_k or self.loads_column_pairs else "f32"
        if not self._is_f32:
            column_type = "u32"
        bindings = {self.row.name: row_type, self.column.name: column_type}
        order = sorted(bindings)
        read_bindings = "".join(
            f"@group(0) @binding({i}) var<storage, read> {name}: array<{bindings[name]}>;\n"
            for i, name in enumerate(order)
        )
        out = "u64" if self._paired_dimension() else "f32"
        remainder = self.problem.k % self.unroll
        readers = (
            ""
            if self._is_f32
            else self.column.functions(vector=self.loads_fours or self.loads_fours_along_k)
        )
        source = f"""\
{read_bindings}@group(0) @binding({len(order)}) var<storage, read_write> out: array<{out}>;
{readers}
fn low(pair: u64) -> f32 {{ return bitcast<f32>(u32(pair)); }}
fn high(pair: u64) -> f32 {{ return bitcast<f32>(u32(pair >> 32u)); }}
@compute @workgroup_size({self.lanes.subgroup})
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_id) id: vec3u) {{
  let lane = id.x;
  let {self.row.name}_base = {self.row.base("group.z")};
  let {self.column.name}_base = {self.column.base("group.z")};
  let first_row = group.y * {self.lanes.rows}u;
  let first_column = group.x * {self.lanes.columns * self.lanes.subgroup}u;
{self._declare_coordinates()}
  for (var k = 0u; k < {self.problem.k - remainder}u; k += {self.unroll}u) {{
{self._add_terms(self.unroll)}
  }}
{self._add_remaining_terms(remainder)}
{self._store()}
}}
"""
        return Shader(source, len(order) + 1)

    def _add_terms(self, terms: int) -> str:
        """Add `terms` terms to every sum, starting at k."""
        return "\n".join(
            [self._read_columns(terms), self._read_rows(terms), self._multiply_rows(terms)]
        )

    def _add_remaining_terms(self, remainder: int) -> str:
        """Add the terms that remain after full iterations."""
        if not remainder:
            return ""
        return (
            f"  {{\n    let k = {self.problem.k - remainder}u;\n{self._add_terms(remainder)}\n  }}"
        )

    def _declare_coordinates(self) -> str:
        """Declare each lane's columns and rows, clamped to the operands' extents, and the sums."""
        lines = [f"  {ZERO}"]
        adjacent = self.adjacent_columns
        for c in range(self.lanes.columns):
            span = adjacent * self.lanes.subgroup
            at = f"first_column + {c // adjacent * span}u + lane * {adjacent}u + {c % adjacent}u"
            lines.append(f"  let column{c} = {at};")
            if c % adjacent == 0 or adjacent == 1:
                last_column = self.column.extent - adjacent
                lines.append(f"  let near{c} = min(column{c}, {last_column}u);")
            else:
                lines.append(f"  let near{c} = near{c // adjacent * adjacent} + {c % adjacent}u;")
        rows_per_lane = 2 if self.loads_row_pairs else 1
        for g in range(self._row_groups()):
            at = f"first_row + {g * rows_per_lane * self.lanes.subgroup}u + lane * {rows_per_lane}u"
            lines.append(f"  let row{g} = min({at}, {self.row.extent - rows_per_lane}u);")
        for i in range(self.lanes.rows):
            lines += [f"  var c{i}_{c} = zero;" for c in range(self.lanes.columns)]
        return "\n".join(lines)

    def _row_groups(self) -> int:
        """Return the number of loads for the rows of one k (or two), one or two rows per lane."""
        rows_per_lane = 2 if self.loads_row_pairs else 1
        return -(-self.lanes.rows // (rows_per_lane * self.lanes.subgroup))

    def _read_columns(self, terms: int) -> str:
        side, base = self.column, f"{self.column.name}_base"
        lines = []
        for c in range(self.lanes.columns):
            for t in range(terms):
                index = side.index(base, f"near{c}", f"k + {t}u")
                value = f"{side.name}[{index}]" if self._is_f32 else f"{side.name}_one({index})"
                if self.loads_column_pairs_along_k:
                    if t % 2 == 0:
                        lines.append(f"    let p{t}_{c} = {side.name}[({index}) / 2u];")
                    value = f"{'high' if t % 2 else 'low'}(p{t // 2 * 2}_{c})"
                elif self.loads_column_pairs:
                    if c % 2 == 0:
                        lines.append(f"    let p{t}_{c} = {side.name}[({index}) / 2u];")
                    value = f"{'high' if c % 2 else 'low'}(p{t}_{c // 2 * 2})"
                elif self.loads_fours_along_k:
                    if t == 0:
                        lines.append(f"    let p0_{c} = {side.name}_four({index});")
                    value = f"p0_{c}[{t}]"
                elif self.loads_fours:
                    if c % 4 == 0:
                        lines.append(f"    let p{t}_{c} = {side.name}_four({index});")
                    value = f"p{t}_{c // 4 * 4}[{c % 4}]"
                lines.append(f"    let y{t}_{c} = {value};")
        return "\n".join(lines)

    def _read_rows(self, terms: int) -> str:
        side, base = self.row, f"{self.row.name}_base"
        lines = []
        for g in range(self._row_groups()):
            for t in range(terms):
                index = side.index(base, f"row{g}", f"k + {t}u")
                if self.loads_row_pairs_along_k:
                    if t % 2 == 0:
                        lines.append(f"    let q{g}_{t} = {side.name}[({index}) / 2u];")
                        lines.append(f"    let x{g}_{t} = low(q{g}_{t});")
                        lines.append(f"    let x{g}_{t + 1} = high(q{g}_{t});")
                elif self.loads_row_pairs:
                    lines.append(f"    let q{g}_{t} = {side.name}[({index}) / 2u];")
                    lines.append(f"    let x{g}_{t} = low(q{g}_{t});")
                    lines.append(f"    let z{g}_{t} = high(q{g}_{t});")
                else:
                    lines.append(f"    let x{g}_{t} = {side.name}[{index}];")
        return "\n".join(lines)

    def _multiply_rows(self, terms: int) -> str:
        """Multiply two rows at a time for all terms of an iteration; sums stay in registers."""
        lines = []
        for first_row in range(0, self.lanes.rows, 2):
            for t in range(terms):
                for i in range(first_row, min(first_row + 2, self.lanes.rows)):
                    lines.append(f"    let s{t}_{i} = {self._broadcast(i, t)};")
                    lines += [
                        f"    c{i}_{c} = fma(s{t}_{i}, y{t}_{c}, c{i}_{c});"
                        for c in range(self.lanes.columns)
                    ]
        return "\n".join(lines)

    def _broadcast(self, i: int, t: int) -> str:
        size = self.lanes.subgroup
        if self.loads_row_pairs:
            register = "z" if i % 2 else "x"
            return f"subgroupBroadcast({register}{i // (2 * size)}_{t}, {i % (2 * size) // 2}u)"
        return f"subgroupBroadcast(x{i // size}_{t}, {i % size}u)"

    def _paired_dimension(self) -> str:
        """Return the dimension along which two outputs are stored as one u64: columns, rows or
        none."""
        if not self.problem.result.is_aligned(2):
            return ""
        if self.steps[1] == 1 and self.adjacent_columns % 2 == 0:
            return "columns"
        if self.steps[0] == 1 and self.row.extent % 2 == 0 and self.lanes.rows % 2 == 0:
            return "rows"
        return ""

    def _store(self) -> str:
        result = self.problem.result
        size = self.problem.m * self.problem.n
        lines = [f"  let out_base = group.z * {size}u + {result.offset}u;"]
        for sums, at, row, column in self._list_outputs():
            if len(sums) == 2:
                target = f"out[({at}) / 2u]"
                values = self._add_to_output(sums, [f"low({target})", f"high({target})"])
                low, high = (f"u64(bitcast<u32>({value}))" for value in values)
                store = f"{target} = {low} | ({high} << 32u);"
            else:
                (value,) = self._add_to_output(sums, [f"out[{at}]"])
                store = f"out[{at}] = {value};"
            lines.append(self._guard(store, row, column))
        return "\n".join(lines)

    def _add_to_output(self, sums: Sequence[str], outputs: Sequence[str]) -> list[str]:
        if not self.problem.result.accumulates:
            return [*sums]
        return [f"{output} + {sum_}" for output, sum_ in zip(outputs, sums, strict=True)]

    def _list_outputs(self) -> Iterator[tuple[tuple[str, ...], str, str, str]]:
        """Yield the sums of each output (or pair), its index, its row and its column."""
        paired = self._paired_dimension()
        row_step, column_step = (2 if paired == "rows" else 1), (2 if paired == "columns" else 1)
        for i in range(0, self.lanes.rows, row_step):
            for c in range(0, self.lanes.columns, column_step):
                row, column = f"first_row + {i}u", f"column{c}"
                at = f"out_base + ({row}) * {self.steps[0]}u + {column} * {self.steps[1]}u"
                sums: tuple[str, ...] = (f"c{i}_{c}",)
                if paired:
                    sums += (f"c{i + 1}_{c}" if paired == "rows" else f"c{i}_{c + 1}",)
                yield sums, at, row, column

    def _guard(self, store: str, row: str, column: str) -> str:
        guards = []
        if self.row.extent % self.lanes.rows:
            guards.append(f"{row} < {self.row.extent}u")
        if self.column.extent % (self.lanes.columns * self.lanes.subgroup):
            guards.append(f"{column} < {self.column.extent}u")
        return f"  if ({' && '.join(guards)}) {{ {store} }}" if guards else f"  {store}"
