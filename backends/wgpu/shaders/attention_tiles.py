"""Attention by tiles in workgroup memory: for real GPUs, and right on every adapter.

A workgroup of 8 x 8 invocations owns 32 rows: queries, or for the gradients of keys and values the
keys. It walks over the other side in blocks of 32. Each invocation computes 4 x 4 scores in
registers; these become weights (and their gradients), go to workgroup memory, and are multiplied
there with the block's vectors into sums that stay in registers until the walk ends. So every sum
has one order, and nothing of the size of the scores is ever in the device's memory.

With grouped heads the keys' kernel walks over the queries of all heads of its group, in order.
"""

from __future__ import annotations

from typing import Final

from backends.wgpu.graph.values import literal
from backends.wgpu.shaders.attention_mask import ACROSS, BLOCK, needed, seen
from backends.wgpu.shaders.attention_problem import AttentionProblem, AttentionSizes, View
from backends.wgpu.shaders.dispatch import Shader

_INVOCATIONS: Final = ACROSS * ACROSS
_DEPTH: Final = 32
"""Elements of a vector that are in workgroup memory at a time."""
_LOWEST: Final = "-3.4028234663852886e38"
"""Stands for minus infinity, which WGSL has no word for."""


def rounds(sizes: AttentionSizes) -> int:
    """How often the longest kernel's loops go round, all together, in one invocation."""
    chunks = -(-sizes.size // _DEPTH)
    unrolled = _unroll(sizes)
    products = 2 * chunks * (1 + _DEPTH // unrolled)
    block = 1 + products + 2 * chunks * BLOCK // unrolled
    blocks = sizes.heads // sizes.groups * -(-sizes.queries // BLOCK)
    return block * max(blocks, -(-sizes.keys // BLOCK))


def attention_shader(problem: AttentionProblem) -> tuple[Shader, tuple[int, int, int]]:
    """The shader and its grid.

    Bindings: query, key, value, the mask if there is one; for gradients what the forward gave, the
    tangent and delta; the output. See `backends.wgpu.graph.opaque` for the layout of outputs.
    """
    kernel = _Kernel(problem)
    sizes = problem.sizes
    if problem.part == "keys":
        return kernel.shader(kernel.keys()), (-(-sizes.keys // BLOCK), sizes.groups, sizes.batch)
    body = kernel.forward() if problem.part == "forward" else kernel.queries()
    return kernel.shader(body), (-(-sizes.queries // BLOCK), sizes.heads, sizes.batch)


def _unroll(sizes: AttentionSizes) -> int:
    return 8 if sizes.size % 8 == 0 else 4


class _Kernel:
    def __init__(self, problem: AttentionProblem) -> None:
        self.problem, self.sizes = problem, problem.sizes
        self.fours = self.sizes.size // 4
        self.chunks = -(-self.sizes.size // _DEPTH)
        self.unroll = _unroll(self.sizes)
        self.vectors: dict[str, tuple[View, int]] = {
            "query": (problem.query, self.sizes.queries),
            "key": (problem.key, self.sizes.keys),
            "value": (problem.value, self.sizes.keys),
        }
        if problem.tangent is not None:
            self.vectors["tangent"] = (problem.tangent, self.sizes.queries)

    def shader(self, body: list[str]) -> Shader:
        """Declarations around the body."""
        held = {name: self._element(view) for name, (view, _) in self.vectors.items()}
        tangent = held.pop("tangent", "")
        if self.problem.mask is not None:
            held["mask"] = "u32" if self.problem.truth else "f32"
        if tangent:
            held |= {"packed": "vec4f", "tangent": tangent, "delta": "f32"}
        declared = [
            f"@group(0) @binding({i}) var<storage, read> {name}: array<{element}>;"
            for i, (name, element) in enumerate(held.items())
        ]
        tile = f"array<vec4f, {_DEPTH * ACROSS}>"
        declared += [
            f"@group(0) @binding({len(held)}) var<storage, read_write> out: array<vec4f>;",
            *(f"var<workgroup> {name}: {tile};" for name in ("left", "right", "weights")),
            f"var<workgroup> folds: array<vec4f, {_INVOCATIONS}>;",
            *(self._four(name, view) for name, (view, _) in self.vectors.items()),
            f"@compute @workgroup_size({_INVOCATIONS})",
            "fn main(@builtin(workgroup_id) group: vec3u,",
            "  @builtin(local_invocation_index) me: u32) {",
            f"let down = me / {ACROSS}u; let across = me % {ACROSS}u;",
            f"let first_row = group.x * {BLOCK}u; let batch = group.z;",
        ]
        return Shader("\n".join([*declared, *body, "}\n"]), len(held) + 1)

    def forward(self) -> list[str]:
        """Softmax in one pass: sums are scaled down whenever a row's maximum grows."""
        group = self.sizes.heads // self.sizes.groups
        scale_down = [f"sum{i}_{n} *= shrink[{i}];" for i in range(4) for n in range(self.chunks)]
        return [
            f"let head = group.y; let pair = group.y / {group}u;",
            *self._sums("sum"),
            f"var highest = vec4f({_LOWEST}); var total = vec4f(0.0);",
            self._walk_keys(),
            *seen(self.problem),
            *needed(self.problem),
            *self._products("s", "query", "key"),
            *self._scaled(),
            *(f"let top{i} = select(vec4f({_LOWEST}), s{i}, on{i});" for i in range(4)),
            *self._fold_across("max", "top"),
            "let before = highest;",
            "highest = max(highest, top);",
            "let shrink = exp(before - highest);",
            *(
                f"let p{i} = select(vec4f(0.0), exp(s{i} - vec4f(highest[{i}])), on{i});"
                for i in range(4)
            ),
            "total = total * shrink + vec4f("
            + ", ".join(f"dot(p{i}, vec4f(1.0))" for i in range(4))
            + ");",
            *scale_down,
            *self._to_memory("p"),
            *self._accumulate("sum", "value"),
            "}",
            "}",
            # All have read whether the last tile is needed before what they read is written anew.
            "workgroupBarrier();",
            "let own = total;",
            *(f"let share{i} = vec4f(own[{i}], 0.0, 0.0, 0.0);" for i in range(4)),
            *self._fold_across("+", "share"),
            "let share_of = select(vec4f(0.0), 1.0 / top, top > vec4f(0.0));",
            *(f"sum{i}_{n} *= share_of[{i}];" for i in range(4) for n in range(self.chunks)),
            *self._store("sum", "query"),
            f"let rows = {self._statistics('first_row / 4u + down')};",
            f"if (across == 0u && first_row + down * 4u < {self.sizes.queries}u) {{",
            "out[rows] = highest; out[rows + 1u] = share_of;",
            "}",
        ]

    def queries(self) -> list[str]:
        """For queries: d query = (weights * (tangent value^T - delta)) key * scale."""
        group = self.sizes.heads // self.sizes.groups
        return [
            f"let head = group.y; let pair = group.y / {group}u;",
            *self._sums("sum"),
            f"let rows = {self._statistics('first_row / 4u + down')};",
            "let highest = packed[rows]; let share_of = packed[rows + 1u];",
            *self._delta("first_row + down * 4u"),
            self._walk_keys(),
            *seen(self.problem),
            *needed(self.problem),
            *self._products("s", "query", "key"),
            *self._products("t", "tangent", "value"),
            *self._scaled(),
            *(
                f"let p{i} = select(vec4f(0.0), "
                f"exp(s{i} - vec4f(highest[{i}])) * share_of[{i}], on{i});"
                for i in range(4)
            ),
            *(f"let g{i} = p{i} * (t{i} - vec4f(delta4[{i}])) * {self._scale};" for i in range(4)),
            *self._to_memory("g"),
            *self._accumulate("sum", "key"),
            "}",
            "}",
            *self._store("sum", "query"),
        ]

    def keys(self) -> list[str]:
        """For keys and values: d value = weights^T tangent; d key as d query, transposed."""
        group = self.sizes.heads // self.sizes.groups
        first = f"first_row / {BLOCK}u * {BLOCK}u" if self.problem.causal else "0u"
        return [
            "let pair = group.y;",
            *self._sums("by_key"),
            *self._sums("by_value"),
            f"for (var head = pair * {group}u; head < (pair + 1u) * {group}u; head++) {{",
            self._walk(first, f"{self.sizes.queries}u"),
            f"let last = {-(-self.sizes.queries // 4) - 1}u;",
            f"let rows = {self._statistics('min(first_column / 4u + across, last)')};",
            "let highest = packed[rows]; let share_of = packed[rows + 1u];",
            *seen(self.problem),
            *needed(self.problem),
            *self._products("s", "key", "query"),
            *self._products("t", "value", "tangent"),
            *self._scaled(),
            *self._delta("first_column + across * 4u"),
            *(
                f"let p{i} = select(vec4f(0.0), exp(s{i} - highest) * share_of, on{i});"
                for i in range(4)
            ),
            *(f"let g{i} = p{i} * (t{i} - delta4) * {self._scale};" for i in range(4)),
            *self._to_memory("p"),
            *self._accumulate("by_value", "tangent"),
            *self._to_memory("g"),
            *self._accumulate("by_key", "query"),
            "}",
            "}",
            "}",
            *self._store("by_key", "key", 0),
            *self._store("by_value", "key", 1),
        ]

    @property
    def _scale(self) -> str:
        return literal(self.problem.scale, "f32")

    def _element(self, view: View) -> str:
        if view.half:
            return "vec4<f16>" if view.in_fours else "f16"
        return "vec4f" if view.in_fours else "f32"

    def _four(self, name: str, view: View) -> str:
        """WGSL of `name4(at)`: four neighbours of a vector."""
        if view.in_fours:
            four = f"{name}[at / 4u]"
            four = f"vec4f({four})" if view.half else four
            return f"fn {name}4(at: u32) -> vec4f {{ return {four}; }}"
        one = "f32({})" if view.half else "{}"
        each = ", ".join(one.format(f"{name}[at + {i * view.strides[-1]}u]") for i in range(4))
        return f"fn {name}4(at: u32) -> vec4f {{ return vec4f({each}); }}"

    def _address(self, name: str, row: str, column: str) -> str:
        head = "head" if name in {"query", "tangent"} else "pair"
        return self.vectors[name][0].at("batch", head, f"({row})", f"({column})")

    def _sums(self, name: str) -> list[str]:
        return [f"var {name}{i}_{n} = vec4f(0.0);" for i in range(4) for n in range(self.chunks)]

    def _walk_keys(self) -> str:
        end = f"{self.sizes.keys}u"
        if self.problem.causal:
            end = f"min({end}, first_row + {BLOCK}u)"
        return self._walk("0u", end)

    def _walk(self, first: str, end: str) -> str:
        return (
            f"for (var first_column = {first}; first_column < {end}; first_column += {BLOCK}u) {{"
        )

    def _products(self, name: str, one: str, two: str) -> list[str]:
        """`name0` to `name3`: products of this invocation's 4 rows, each with its 4 columns."""
        size = self.sizes.size
        depth = f"min({_DEPTH}u, {size}u - start)" if size % _DEPTH else f"{_DEPTH}u"
        lines = [f"var {name}{i} = vec4f(0.0);" for i in range(4)]
        lines.append(f"for (var start = 0u; start < {size}u; start += {_DEPTH}u) {{")
        lines += self._bring_turned(one, "left", "first_row")
        lines += self._bring_turned(two, "right", "first_column")
        lines.append("workgroupBarrier();")
        lines.append(f"for (var d = 0u; d < {depth}; d += {self.unroll}u) {{")
        for u in range(self.unroll):
            lines.append(f"let x{u} = left[(d + {u}u) * {ACROSS}u + down];")
            lines.append(f"let y{u} = right[(d + {u}u) * {ACROSS}u + across];")
            lines += [f"{name}{i} = fma(vec4f(x{u}[{i}]), y{u}, {name}{i});" for i in range(4)]
        return [*lines, "}", "workgroupBarrier();", "}"]

    def _bring_turned(self, name: str, into: str, first: str) -> list[str]:
        """Each invocation a block of 4 x 4: `into` holds four rows at each place of the vectors."""
        last = self.vectors[name][1] - 1
        reads = [
            f"let w{i} = {name}4("
            + self._address(name, f"min({first} + r + {i}u, {last}u)", "column")
            + ");"
            for i in range(4)
        ]
        stores = [
            f"{into}[(c + {t}u) * {ACROSS}u + r / 4u] = vec4f(w0[{t}], w1[{t}], w2[{t}], w3[{t}]);"
            for t in range(4)
        ]
        return [
            "{",
            "let r = down * 4u; let c = across * 4u; let column = start + c;",
            f"if (column < {self.sizes.size}u) {{",
            *reads,
            *stores,
            "}",
            "}",
        ]

    def _scaled(self) -> list[str]:
        bias = self.problem.mask is not None and not self.problem.truth
        return [f"s{i} = s{i} * {self._scale}{f' + bias{i}' if bias else ''};" for i in range(4)]

    def _fold_across(self, fold: str, name: str) -> list[str]:
        """`top`: for each of the four rows the maximum, or sum, over all columns of the tile."""
        each = f"{name}{{i}}"
        four = "max(max({0}.x, {0}.y), max({0}.z, {0}.w))" if fold == "max" else "{0}.x"
        own = ", ".join(four.format(each.format(i=i)) for i in range(4))
        reads = [f"folds[down * {ACROSS}u + {t}u]" for t in range(ACROSS)]
        folded = reads[0]
        for read in reads[1:]:
            folded = f"max({folded}, {read})" if fold == "max" else f"{folded} + {read}"
        return [f"folds[me] = vec4f({own});", "workgroupBarrier();", f"let top = {folded};"]

    def _to_memory(self, name: str) -> list[str]:
        """The tile into workgroup memory, by column: four rows at each place."""
        return [
            f"weights[(across * 4u + {c}u) * {ACROSS}u + down] = "
            f"vec4f({', '.join(f'{name}{i}[{c}]' for i in range(4))});"
            for c in range(4)
        ]

    def _accumulate(self, name: str, vectors: str) -> list[str]:
        """Add to each row's sums the columns' vectors, times the tile in workgroup memory."""
        last = self.vectors[vectors][1] - 1
        lines: list[str] = []
        for n in range(self.chunks):
            lines += [f"if ({n * ACROSS}u + across < {self.fours}u) {{"]
            for i in range(4):
                row = f"down + {ACROSS * i}u"
                near = f"min(first_column + {row}, {last}u)"
                at = self._address(vectors, near, f"{n * _DEPTH}u + across * 4u")
                lines.append(f"right[({row}) * {ACROSS}u + across] = {vectors}4({at});")
            lines += ["}", "workgroupBarrier();"]
            lines.append(f"for (var k = 0u; k < {BLOCK}u; k += {self.unroll}u) {{")
            for u in range(self.unroll):
                lines.append(f"let x{u} = weights[(k + {u}u) * {ACROSS}u + down];")
                lines.append(f"let y{u} = right[(k + {u}u) * {ACROSS}u + across];")
                lines += [
                    f"{name}{i}_{n} = fma(vec4f(x{u}[{i}]), y{u}, {name}{i}_{n});" for i in range(4)
                ]
            lines += ["}", "workgroupBarrier();"]
        return lines

    def _delta(self, first: str) -> list[str]:
        """`delta4`, of four queries from `first` on."""
        delta = self.problem.delta
        assert delta is not None
        last = self.sizes.queries - 1
        reads = [
            f"delta[{delta.at('batch', 'head', f'min({first} + {i}u, {last}u)')}]" for i in range(4)
        ]
        return [f"let delta4 = vec4f({', '.join(reads)});"]

    def _statistics(self, four: str) -> str:
        """Where those of four rows lie, in vec4f."""
        sizes = self.sizes
        start = sizes.batch * sizes.queries * sizes.heads * self.fours
        per_head = -(-sizes.queries // 4)
        return f"{start}u + ((batch * {sizes.heads}u + head) * {per_head}u + {four}) * 2u"

    def _store(self, name: str, like: str, number: int = 0) -> list[str]:
        """The sums to (number, batch, row, head, size)."""
        extent = self.vectors[like][1]
        count, head = (self.sizes.heads, "head") if like == "query" else (self.sizes.groups, "pair")
        lines = []
        for i in range(4):
            row = f"(first_row + down * 4u + {i}u)"
            start = f"{number * self.sizes.batch}u + batch"
            at = f"((({start}) * {extent}u + {row}) * {count}u + {head}) * {self.fours}u"
            for n in range(self.chunks):
                four = f"{n * ACROSS}u + across"
                guard = f"{row} < {extent}u && {four} < {self.fours}u"
                lines.append(f"if ({guard}) {{ out[{at} + {four}] = {name}{i}_{n}; }}")
        return lines
