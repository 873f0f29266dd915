"""Strided batched matrix product as WGSL: out[b, m, n] = sum over k of a[b, m, k] * b[b, k, n].

The output is contiguous (batch, m, n) in float32. Every variant sums one accumulator per output
over k in rising order, each term by one `fma`, from zero: so all variants and tile sizes give the
same bits, and which one is chosen decides speed alone. No atomics, no split of k.

The right operand may be stored as bf16, f16, int8 or int4 (see `backends.wgpu.quantise`): it is
widened, and multiplied by its group's scale, as it is loaded; the sum is over float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from backends.wgpu.dispatch import Shader

Storage = Literal["f32", "bf16", "f16", "int8", "int4"]


@dataclass(frozen=True, slots=True)
class Operand:
    """A strided view of a buffer, in elements.

    Attributes:
        strides: Of (batch, m, k) for the left operand, (batch, k, n) for the right one.
        offset: Of element (0, 0, 0).
    """

    strides: tuple[int, int, int]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class MatmulProblem:
    """The shapes of one product. Bindings are a, b, then scales for int8 and int4, then out."""

    batch: int
    m: int
    k: int
    n: int
    a: Operand
    b: Operand
    b_storage: Storage = "f32"
    group: int = 0


@dataclass(frozen=True, slots=True)
class MatmulChoice:
    """How a product is computed; see the module's text for what it does not change.

    Attributes:
        rows: Outputs per invocation along m.
        columns: Outputs per invocation along n.
        width: Invocations of a workgroup along n.
        height: Invocations of a workgroup along m.
    """

    rows: int = 8
    columns: int = 8
    width: int = 8
    height: int = 8


def matmul_shader(
    problem: MatmulProblem, choice: MatmulChoice | None = None
) -> tuple[Shader, tuple[int, int, int]]:
    """The shader of a product and its grid."""
    if problem.b_storage != "f32":
        raise NotImplementedError(problem.b_storage)
    kernel = _Registers(problem, choice or MatmulChoice())
    return kernel.shader(), kernel.grid()


def _aligned(*numbers: int) -> bool:
    return all(number % 4 == 0 for number in numbers)


class _Registers:
    """A block of rows x columns outputs per invocation, no shared memory.

    Loads are vec4 along whichever axis is contiguous and aligned.
    """

    def __init__(self, problem: MatmulProblem, choice: MatmulChoice) -> None:
        self.p = problem
        self.columns = self._columns(choice.columns)
        self.vectors = self.columns // 4
        self.rows = self._rows(choice.rows)
        self.unroll = 4 if problem.k % 4 == 0 else 1
        self.width, self.height = choice.width, choice.height
        self._fit_workgroup()
        a_batch, a_m, a_k = problem.a.strides
        b_batch, b_k, b_n = problem.b.strides
        whole = self.unroll == 4
        self.a_along_k = whole and a_k == 1 and _aligned(a_batch, a_m, problem.a.offset)
        self.a_along_m = (
            not self.a_along_k and a_m == 1 and problem.m % 4 == 0 and self.rows % 4 == 0
        ) and _aligned(a_batch, a_k, problem.a.offset)
        self.b_along_n = self.vectors > 0 and b_n == 1 and _aligned(b_batch, b_k, problem.b.offset)
        self.b_along_k = (not self.b_along_n and whole and b_k == 1) and _aligned(
            b_batch, b_n, problem.b.offset
        )

    def _columns(self, most: int) -> int:
        for columns in (8, 4):
            if columns <= most and self.p.n % columns == 0:
                return columns
        return 1

    def _rows(self, most: int) -> int:
        rows = most
        while rows > 1 and rows // 2 >= self.p.m:
            rows //= 2
        return rows

    def _fit_workgroup(self) -> None:
        across, down = self._blocks()
        self.width = min(self.width, 1 << (across - 1).bit_length())
        self.height = min(self.height, 1 << (down - 1).bit_length())

    def _blocks(self) -> tuple[int, int]:
        return -(-self.p.n // self.columns), -(-self.p.m // self.rows)

    def grid(self) -> tuple[int, int, int]:
        across, down = self._blocks()
        return -(-across // self.width), -(-down // self.height), self.p.batch

    def shader(self) -> Shader:
        out = "vec4f" if self.vectors else "f32"
        a = "vec4f" if self.a_along_k or self.a_along_m else "f32"
        b = "vec4f" if self.b_along_n or self.b_along_k else "f32"
        source = f"""\
@group(0) @binding(0) var<storage, read> a: array<{a}>;
@group(0) @binding(1) var<storage, read> b: array<{b}>;
@group(0) @binding(2) var<storage, read_write> out: array<{out}>;
@compute @workgroup_size({self.width}, {self.height})
fn main(@builtin(global_invocation_id) id: vec3u) {{
  let n = id.x * {self.columns}u;
  let m = id.y * {self.rows}u;
  if (n >= {self.p.n}u || m >= {self.p.m}u) {{ return; }}
  let a_base = id.z * {self.p.a.strides[0]}u + {self.p.a.offset}u;
  let b_base = id.z * {self.p.b.strides[0]}u + {self.p.b.offset}u;
{self._rows_and_sums()}
  for (var k = 0u; k < {self.p.k}u; k += {self.unroll}u) {{
{self._load_a()}
{self._load_b()}
{self._accumulate()}
  }}
{self._store()}
}}
"""
        return Shader(source, 3)

    def _rows_and_sums(self) -> str:
        whole = self.p.m % self.rows == 0
        lines = []
        for i in range(self.rows):
            row = f"m + {i}u" if whole else f"min(m + {i}u, {self.p.m - 1}u)"
            lines.append(f"  let m{i} = {row};")
        if self.vectors:
            sums = [f"c{i}_{j}" for i in range(self.rows) for j in range(self.vectors)]
            lines += [f"  var {name} = vec4f(0.0);" for name in sums]
        else:
            lines += [f"  var c{i} = 0.0;" for i in range(self.rows)]
        return "\n".join(lines)

    def _load_a(self) -> str:
        _, s_m, s_k = self.p.a.strides
        if self.a_along_k:
            lines = [f"a[(a_base + m{i} * {s_m}u + k) / 4u]" for i in range(self.rows)]
            return "\n".join(f"    let a{i} = {line};" for i, line in enumerate(lines))
        steps = range(self.unroll)
        if self.a_along_m:
            return "\n".join(
                f"    let a{q}_{t} = a[(a_base + (k + {t}u) * {s_k}u + m{4 * q}) / 4u];"
                for q in range(self.rows // 4)
                for t in steps
            )
        return "\n".join(
            f"    let a{i}_{t} = a[a_base + m{i} * {s_m}u + (k + {t}u) * {s_k}u];"
            for i in range(self.rows)
            for t in steps
        )

    def _a(self, i: int, t: int) -> str:
        if self.a_along_k:
            return f"a{i}[{t}]"
        return f"a{i // 4}_{t}[{i % 4}]" if self.a_along_m else f"a{i}_{t}"

    def _load_b(self) -> str:
        _, s_k, s_n = self.p.b.strides
        steps, vectors = range(self.unroll), range(self.vectors)
        if self.b_along_n:
            return "\n".join(
                f"    let b{t}_{j} = b[(b_base + (k + {t}u) * {s_k}u + n) / 4u + {j}u];"
                for t in steps
                for j in vectors
            )
        if self.b_along_k:
            lines = [
                f"    let w{c} = b[(b_base + (n + {c}u) * {s_n}u + k) / 4u];"
                for c in range(self.columns)
            ]
            for t in steps:
                for j in vectors:
                    parts = ", ".join(f"w{4 * j + c}[{t}]" for c in range(4))
                    lines.append(f"    let b{t}_{j} = vec4f({parts});")
                if not self.vectors:
                    lines.append(f"    let b{t}_0 = w0[{t}];")
            return "\n".join(lines)
        lines = []
        for t in steps:
            one = [
                f"b[b_base + (k + {t}u) * {s_k}u + (n + {c}u) * {s_n}u]"
                for c in range(self.columns)
            ]
            if not self.vectors:
                lines.append(f"    let b{t}_0 = {one[0]};")
            for j in vectors:
                lines.append(f"    let b{t}_{j} = vec4f({', '.join(one[4 * j : 4 * j + 4])});")
        return "\n".join(lines)

    def _accumulate(self) -> str:
        lines = []
        for t in range(self.unroll):
            for i in range(self.rows):
                if not self.vectors:
                    lines.append(f"    c{i} = fma({self._a(i, t)}, b{t}_0, c{i});")
                for j in range(self.vectors):
                    c = f"c{i}_{j}"
                    lines.append(f"    {c} = fma(vec4f({self._a(i, t)}), b{t}_{j}, {c});")
        return "\n".join(lines)

    def _store(self) -> str:
        m, n = self.p.m, self.p.n
        lines = []
        for i in range(self.rows):
            at = f"id.z * {m * n}u + m{i} * {n}u + n"
            if self.vectors:
                store = " ".join(
                    f"out[({at}) / 4u + {j}u] = c{i}_{j};" for j in range(self.vectors)
                )
            else:
                store = f"out[{at}] = c{i};"
            whole = m % self.rows == 0
            lines.append(f"  {store}" if whole else f"  if (m + {i}u < {m}u) {{ {store} }}")
        return "\n".join(lines)
