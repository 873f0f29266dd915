"""Tiled attention in workgroup memory: tuned for GPUs, correct on every adapter.

A workgroup owns 64 rows (32 if there are no more): queries or, for the gradients of keys and
values, keys. It loops over the columns (keys or, for those gradients, queries) in blocks of 32. Its
invocations, 8 across and one per four rows down, compute 4 x 4 scores each in registers. The scores
become weights (and their gradients) in workgroup memory. Products of the weights and the block's
vectors are added to sums that stay in registers. Every sum therefore has one order, independent of
the layout (see `layout`), and the scores are never stored in the device's memory.

While the product of two tiles is computed, the next tiles are loaded into registers. `barriers`
inserts the barriers. Rows past the end are read as the last row and not stored, so indices depend
on sizes and the invocation alone, and are in bounds.

With grouped heads, the keys' kernel loops over the queries of all heads of its group, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from backends.wgpu.graph.values import literal
from backends.wgpu.shaders.attention.barriers import Steps
from backends.wgpu.shaders.attention.layout import TILES, WORKGROUP_BYTES, Layout, choose_layout
from backends.wgpu.shaders.attention.mask import ACROSS, BLOCK, skip_masked_tile, visible_scores
from backends.wgpu.shaders.attention.problem import AttentionProblem, AttentionSizes, View
from backends.wgpu.shaders.dispatch import Shader

_MINUS_INFINITY: Final = "-3.4028234663852886e38"
"""The lowest float32, in place of minus infinity, which has no literal in WGSL."""
_MOST_SUMS: Final = 64
"""Limit on an invocation's registers for sums that leaves enough registers for prefetching."""


def loop_iterations(sizes: AttentionSizes) -> int:
    """Return an upper bound on the loop iterations of one invocation, over all kernels."""
    layout = choose_layout("keys", sizes, WORKGROUP_BYTES)
    products = sum(layout.fours(n) // _unroll(layout.fours(n)) for n in layout.parts)
    block = 1 + 2 * products + 2 * len(layout.parts) * ACROSS
    blocks = sizes.heads // sizes.groups * -(-sizes.queries // BLOCK)
    return block * max(blocks, -(-sizes.keys // BLOCK))


def attention_shader(
    problem: AttentionProblem, workgroup_bytes: int = WORKGROUP_BYTES
) -> tuple[Shader, tuple[int, int, int]]:
    """Return the shader and its grid, for an adapter with `workgroup_bytes` of workgroup memory.

    Bindings: query, key, value; the mask, if any; for gradients, the forward's output, grad_output
    and delta; the output. See `backends.wgpu.graph.opaque` for the layout of outputs.
    """
    kernel = _Kernel(problem, choose_layout(problem.kernel, problem.sizes, workgroup_bytes))
    sizes, rows = problem.sizes, kernel.layout.rows
    if problem.kernel == "keys":
        return kernel.shader(kernel.keys()), (-(-sizes.keys // rows), sizes.groups, sizes.batch)
    body = kernel.forward() if problem.kernel == "forward" else kernel.queries()
    return kernel.shader(body), (-(-sizes.queries // rows), sizes.heads, sizes.batch)


def _unroll(count: int) -> int:
    return 2 if count % 2 == 0 else 1


def _terms(name: str, arrays: tuple[str, str], four: str, stride: int, mark: str) -> list[str]:
    """Add four terms to every product, in order."""
    lines = []
    for i in range(4):
        lines.append(f"let x{mark}{i} = {arrays[0]}[(down * 4u + {i}u) * {stride}u + {four}];")
        at = f"({i * ACROSS}u + across) * {stride}u + ({four} ^ across)"
        lines.append(f"let y{mark}{i} = {arrays[1]}[{at}];")
    for t in range(4):
        transposed = ", ".join(f"y{mark}{j}[{t}]" for j in range(4))
        lines.append(f"let z{mark}{t} = vec4f({transposed});")
        lines += [
            f"{name}{i} = fma(vec4f(x{mark}{i}[{t}]), z{mark}{t}, {name}{i});" for i in range(4)
        ]
    return lines


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage of the computation of a block.

    Attributes:
        lines: Statements in WGSL.
        reads: Tiles in workgroup memory: names, or (name, part of the vectors).
        writes: Names of the tiles that the stage writes.
    """

    lines: Sequence[str]
    reads: Sequence[str | tuple[str, int]] = ()
    writes: Sequence[str] = ()

    @property
    def parts(self) -> list[tuple[str, int]]:
        """Tiles that the stage reads and that must be loaded from the device's memory."""
        return [tile for tile in self.reads if isinstance(tile, tuple)]


class _Kernel:
    """Generates one attention kernel."""

    def __init__(self, problem: AttentionProblem, layout: Layout) -> None:
        self.problem, self.sizes, self.layout = problem, problem.sizes, layout
        self.fours = self.sizes.head_size // 4
        self.sums = range(-(-self.fours // ACROSS))
        self.vectors: dict[str, tuple[View, int]] = {
            "query": (problem.query, self.sizes.queries),
            "key": (problem.key, self.sizes.keys),
            "value": (problem.value, self.sizes.keys),
        }
        if problem.grad_output is not None:
            self.vectors["grad_output"] = (problem.grad_output, self.sizes.queries)
        sums = 16 * len(self.sums) * (2 if problem.kernel == "keys" else 1)
        self.prefetches = sums <= _MOST_SUMS

    def shader(self, body: list[str]) -> Shader:
        """Wrap the body in declarations."""
        bindings = {name: self._element(view) for name, (view, _) in self.vectors.items()}
        grad_output = bindings.pop("grad_output", "")
        if self.problem.mask is not None:
            bindings["mask"] = "u32" if self.problem.is_mask_boolean else "f32"
        if grad_output:
            bindings |= {"packed": "vec4f", "grad_output": grad_output, "delta": "f32"}
        declarations = [
            f"@group(0) @binding({i}) var<storage, read> {name}: array<{element}>;"
            for i, (name, element) in enumerate(bindings.items())
        ]
        arrays = self.layout.arrays.items()
        declarations += [
            f"@group(0) @binding({len(bindings)}) var<storage, read_write> out: array<vec4f>;",
            *(f"var<workgroup> {name}: array<vec4f, {count}>;" for name, count in arrays),
            *(self._vec4_reader(name, view) for name, (view, _) in self.vectors.items()),
            f"@compute @workgroup_size({self.layout.invocations})",
            "fn main(@builtin(workgroup_id) group: vec3u,",
            "  @builtin(local_invocation_index) me: u32) {",
            f"let down = me / {ACROSS}u; let across = me % {ACROSS}u;",
            f"let first_row = group.x * {self.layout.rows}u; let batch = group.z;",
            *(
                f"var {name} = vec4f(0.0);"
                for tile in self.vectors
                for name in self._registers(tile)
            ),
        ]
        source = "\n".join([*declarations, *body, "}\n"])
        return Shader(source, len(bindings) + 1, in_bounds=True)

    def forward(self) -> list[str]:
        """Compute softmax in one pass: sums are rescaled whenever a row's maximum grows."""
        group = self.sizes.heads // self.sizes.groups
        steps = Steps()
        steps.add([f"let head = group.y; let pair = group.y / {group}u;", *self._sums("sum")])
        steps.add([f"var highest = vec4f({_MINUS_INFINITY}); var total = vec4f(0.0);"])
        maxima = [f"let top{i} = select(vec4f({_MINUS_INFINITY}), s{i}, on{i});" for i in range(4)]
        stages = [
            *self._products("s", "query", "key"),
            _Stage(
                [*self._scale_scores(), *maxima, self._fold_columns("max", "top")], writes=["folds"]
            ),
            _Stage(
                [self._fold_rows("max"), *self._weights(), *self._store_weights("p")],
                reads=["folds"],
                writes=["weights"],
            ),
            *self._accumulate("sum", "value"),
        ]
        self._load_rows(steps)
        self._loop_over_blocks(steps, *self._keys(), stages)
        subtotals = [f"let subtotal{i} = vec4f(total[{i}], 0.0, 0.0, 0.0);" for i in range(4)]
        steps.add([*subtotals, self._fold_columns("+", "subtotal")], writes=["folds"])
        steps.add([self._fold_rows("+")], reads=["folds"])
        return [
            *steps.lines,
            "let reciprocal = select(vec4f(0.0), 1.0 / top, top > vec4f(0.0));",
            *(f"sum{i}_{n} *= reciprocal[{i}];" for i in range(4) for n in self.sums),
            *self._store("sum", "query"),
            f"let rows = {self._statistics('first_row / 4u + down')};",
            f"if (across == 0u && first_row + down * 4u < {self.sizes.queries}u) {{",
            "out[rows] = highest; out[rows + 1u] = reciprocal;",
            "}",
        ]

    def _weights(self) -> list[str]:
        """Compute the forward's weights `p0` to `p3`, and update maxima and sums."""
        weights = [f"select(vec4f(0.0), exp(s{i} - vec4f(highest[{i}])), on{i})" for i in range(4)]
        sums = ", ".join(f"dot(p{i}, vec4f(1.0))" for i in range(4))
        return [
            "let before = highest;",
            "highest = max(highest, top);",
            "let shrink = exp(before - highest);",
            *(f"let p{i} = {weights[i]};" for i in range(4)),
            f"total = total * shrink + vec4f({sums});",
            *(f"sum{i}_{n} *= shrink[{i}];" for i in range(4) for n in self.sums),
        ]

    def queries(self) -> list[str]:
        """Compute d query = (weights * (grad_output value^T - delta)) key * scale."""
        group = self.sizes.heads // self.sizes.groups
        last_four = -(-self.sizes.queries // 4) - 1
        steps = Steps()
        steps.add(
            [
                f"let head = group.y; let pair = group.y / {group}u;",
                *self._sums("sum"),
                f"let rows = {self._statistics(f'min(first_row / 4u + down, {last_four}u)')};",
                "let highest = packed[rows]; let reciprocal = packed[rows + 1u];",
                *self._read_delta("first_row + down * 4u"),
            ]
        )
        gradients = [
            *self._scale_scores(),
            *(
                f"let p{i} = select(vec4f(0.0), "
                f"exp(s{i} - vec4f(highest[{i}])) * reciprocal[{i}], on{i});"
                for i in range(4)
            ),
            *(f"let g{i} = p{i} * (t{i} - vec4f(delta4[{i}])) * {self._scale};" for i in range(4)),
            *self._store_weights("g"),
        ]
        stages = [
            *self._score_stages(("query", "key"), ("grad_output", "value")),
            _Stage(gradients, writes=["weights"]),
            *self._accumulate("sum", "key"),
        ]
        self._load_rows(steps)
        self._loop_over_blocks(steps, *self._keys(), stages)
        return [*steps.lines, *self._store("sum", "query")]

    def keys(self) -> list[str]:
        """Compute d value = weights^T grad_output; and d key as d query, transposed."""
        group = self.sizes.heads // self.sizes.groups
        first_column = "first_row" if self.problem.causal else "0u"
        steps = Steps()
        steps.add(["let pair = group.y;", *self._sums("by_key"), *self._sums("by_value")])
        self._load_rows(steps)
        gradients = [
            *self._scale_scores(),
            *self._read_delta("first_column + across * 4u"),
            *(
                f"let p{i} = select(vec4f(0.0), exp(s{i} - highest) * reciprocal, on{i});"
                for i in range(4)
            ),
            *(f"let g{i} = p{i} * (t{i} - delta4) * {self._scale};" for i in range(4)),
            *self._store_weights("p"),
        ]
        stages = [
            *self._score_stages(("key", "query"), ("value", "grad_output")),
            _Stage(gradients, writes=["weights"]),
            *reversed(self._accumulate("by_value", "grad_output")),
            _Stage(self._store_weights("g"), writes=["weights"]),
            *self._accumulate("by_key", "query"),
        ]
        head = f"for (var head = pair * {group}u; head < (pair + 1u) * {group}u; head++) {{"
        steps.loop(
            head,
            lambda inner_steps: self._loop_over_blocks(
                inner_steps, first_column, f"{self.sizes.queries}u", stages
            ),
        )
        return [*steps.lines, *self._store("by_key", "key", 0), *self._store("by_value", "key", 1)]

    def _keys(self) -> tuple[str, str]:
        """Return the first and the end column of a loop over keys."""
        end = f"{self.sizes.keys}u"
        if self.problem.causal:
            end = f"min({end}, first_row + {self.layout.rows}u)"
        return "0u", end

    def _load_rows(self, steps: Steps) -> None:
        """Load the rows' vectors if they stay resident in workgroup memory."""
        for tile in TILES[self.problem.kernel][0] if self.layout.is_resident else ():
            steps.add(self._load_tile(tile, 0, "first_row"))
            steps.add(self._store_tile(tile, 0), writes=[self.layout.array(tile)])

    def _loop_over_blocks(
        self, steps: Steps, first_column: str, end: str, stages: Sequence[_Stage]
    ) -> None:
        """Add a loop that runs all stages for each block of columns that is not masked entirely."""
        loads = self._plan_loads(stages)
        has_mask = self.problem.mask is not None
        prefetches_next_block = self.prefetches and not has_mask
        if prefetches_next_block:
            steps.add(self._reads(next(filter(None, loads)), first_column))

        def block(inner: Steps) -> None:
            inner.add(self._begin_block())
            if not has_mask:
                self._stages(inner, stages, loads, end if prefetches_next_block else "")
                return
            votes = "folds" if self.problem.kernel == "forward" else self.layout.array("weights")
            head = skip_masked_tile(
                self.problem, inner, votes, self.layout.array("weights"), self.layout.invocations
            )
            inner.branch(head, lambda inner_steps: self._stages(inner_steps, stages, loads, ""))

        head = f"for (var first_column = {first_column}; first_column < {end}; "
        steps.loop(f"{head}first_column += {BLOCK}u) {{", block)

    def _begin_block(self) -> list[str]:
        """Compute values of a block that need no loaded tile."""
        lines = visible_scores(self.problem)
        if self.problem.kernel == "keys":
            last_four = -(-self.sizes.queries // 4) - 1
            rows = self._statistics(f"min(first_column / 4u + across, {last_four}u)")
            lines.append(f"let rows = {rows};")
            lines.append("let highest = packed[rows]; let reciprocal = packed[rows + 1u];")
        return lines

    def _plan_loads(self, stages: Sequence[_Stage]) -> list[list[tuple[str, int]]]:
        """List for each stage the tiles that workgroup memory does not already hold."""
        rows = TILES[self.problem.kernel][0] if self.layout.is_resident else ()
        contents: dict[str, tuple[str, int]] = {}
        loads = []
        for stage in stages:
            parts = [part for part in stage.parts if part[0] not in rows]
            parts = [part for part in parts if contents.get(self.layout.array(part[0])) != part]
            contents |= {self.layout.array(part[0]): part for part in parts}
            for tile in stage.writes:
                contents.pop(self.layout.array(tile), None)
            loads.append(parts)
        return loads

    def _stages(
        self,
        steps: Steps,
        stages: Sequence[_Stage],
        loads: Sequence[Sequence[tuple[str, int]]],
        end: str,
    ) -> None:
        """Add the stages of one block; with `end`, prefetch the next block's first tiles."""
        is_loaded = bool(end)
        for number, (stage, parts) in enumerate(zip(stages, loads, strict=True)):
            if parts:
                if not is_loaded:
                    steps.add(self._reads(parts, "first_column"))
                for part in parts:
                    steps.add(self._store_tile(*part), writes=[self.layout.array(part[0])])
                next_parts = next(filter(None, loads[number + 1 :]), [])
                is_loaded = self.prefetches and bool(next_parts)
                if is_loaded:
                    self._prefetch(steps, stage, self._reads(next_parts, "first_column"))
                elif end:
                    next_column = f"first_column + {BLOCK}u"
                    first_reads = self._reads(next(filter(None, loads)), next_column)
                    self._prefetch(
                        steps, stage, [f"if ({next_column} < {end}) {{", *first_reads, "}"]
                    )
            steps.add(stage.lines, self._arrays(stage.reads), self._arrays(stage.writes))

    def _prefetch(self, steps: Steps, stage: _Stage, reads: Sequence[str]) -> None:
        """Add reads that overlap with the stage, after the stage's barrier."""
        steps.add(reads, reads=self._arrays(stage.reads))

    def _arrays(self, tiles: Sequence[str | tuple[str, int]]) -> list[str]:
        names = [tile if isinstance(tile, str) else tile[0] for tile in tiles]
        return [name if name == "folds" else self.layout.array(name) for name in names]

    def _reads(self, parts: Sequence[tuple[str, int]], first_column: str) -> list[str]:
        rows = TILES[self.problem.kernel][0]
        return [
            line
            for tile, part in parts
            for line in self._load_tile(tile, part, "first_row" if tile in rows else first_column)
        ]

    @property
    def _scale(self) -> str:
        return literal(self.problem.scale, "f32")

    def _element(self, view: View) -> str:
        if view.is_half:
            return "vec4<f16>" if view.is_vec4_readable else "f16"
        return "vec4f" if view.is_vec4_readable else "f32"

    def _vec4_reader(self, name: str, view: View) -> str:
        """Return WGSL of `NAME4(at)`, which reads four consecutive elements of a vector."""
        if view.is_vec4_readable:
            four = f"{name}[at / 4u]"
            four = f"vec4f({four})" if view.is_half else four
            return f"fn {name}4(at: u32) -> vec4f {{ return {four}; }}"
        element = "f32({})" if view.is_half else "{}"
        elements = ", ".join(
            element.format(f"{name}[at + {i * view.strides[-1]}u]") for i in range(4)
        )
        return f"fn {name}4(at: u32) -> vec4f {{ return vec4f({elements}); }}"

    def _address(self, name: str, row: str, column: str) -> str:
        head = "head" if name in {"query", "grad_output"} else "pair"
        return self.vectors[name][0].index("batch", head, f"({row})", f"({column})")

    def _sums(self, name: str) -> list[str]:
        return [f"var {name}{i}_{n} = vec4f(0.0);" for i in range(4) for n in self.sums]

    def _registers(self, tile: str, part: int = 0) -> list[str]:
        """Return the registers that hold an invocation's vec4 of a tile during loading."""
        rows = self.layout.rows if tile in TILES[self.problem.kernel][0] else BLOCK
        count = rows * self.layout.stride(part) // self.layout.invocations
        return [f"{tile}_loaded{u}" for u in range(count)]

    def _position(self, part: int, number: int) -> tuple[str, str]:
        """Return the row and vec4 of an invocation's load; adjacent invocations read one vector."""
        stride, invocations = self.layout.stride(part), self.layout.invocations
        return f"(me / {stride}u + {number * (invocations // stride)}u)", f"(me % {stride}u)"

    def _load_tile(self, tile: str, part: int, first_row: str) -> list[str]:
        """Load a tile from the device's memory into registers; rows past the end repeat the last
        row."""
        last_row, lines = self.vectors[tile][1] - 1, []
        start, last_four = part * self.layout.width, self.layout.fours(part) - 1
        for u, name in enumerate(self._registers(tile, part)):
            row, four = self._position(part, u)
            clamped_four = (
                four if last_four % ACROSS == ACROSS - 1 else f"min({four}, {last_four}u)"
            )
            index = self._address(
                tile, f"min({first_row} + {row}, {last_row}u)", f"({start}u + {clamped_four}) * 4u"
            )
            lines.append(f"{name} = {tile}4({index});")
        return lines

    def _store_tile(self, tile: str, part: int) -> list[str]:
        """Store a tile from registers into workgroup memory."""
        array, stride = self.layout.array(tile), self.layout.stride(part)
        lines = []
        for u, name in enumerate(self._registers(tile, part)):
            row, four = self._position(part, u)
            if tile in TILES[self.problem.kernel][1]:
                row, four = f"({row} % 4u * {ACROSS}u + {row} / 4u)", f"({four} ^ {row} / 4u)"
            lines.append(f"{array}[{row} * {stride}u + {four}] = {name};")
        return lines

    def _products(self, name: str, left: str, right: str) -> list[_Stage]:
        """Compute `name0` to `name3`: products of an invocation's 4 rows with its 4 columns."""
        stages = []
        for part in self.layout.parts:
            fours, stride = self.layout.fours(part), self.layout.stride(part)
            unroll = _unroll(fours)
            lines = [] if part else [f"var {name}{i} = vec4f(0.0);" for i in range(4)]
            lines.append(f"for (var d = 0u; d < {fours}u; d += {unroll}u) {{")
            for u in range(unroll):
                arrays = self.layout.array(left), self.layout.array(right)
                lines += _terms(name, arrays, f"(d + {u}u)", stride, f"u{u}_")
            stages.append(_Stage([*lines, "}"], [(left, part), (right, part)]))
        return stages

    def _score_stages(self, scores: tuple[str, str], gradients: tuple[str, str]) -> list[_Stage]:
        """Compute products `s` and `t`, in one stage if all of their tiles are resident."""
        scores_stages, gradient_stages = (
            self._products("s", *scores),
            self._products("t", *gradients),
        )
        if not self.layout.is_resident:
            return [*scores_stages, *gradient_stages]
        return [
            _Stage(
                [*scores_stages[0].lines, *gradient_stages[0].lines],
                [*scores_stages[0].reads, *gradient_stages[0].reads],
            )
        ]

    def _scale_scores(self) -> list[str]:
        has_bias = self.problem.mask is not None and not self.problem.is_mask_boolean
        return [
            f"s{i} = s{i} * {self._scale}{f' + bias{i}' if has_bias else ''};" for i in range(4)
        ]

    def _fold_columns(self, fold: str, name: str) -> str:
        """Reduce an invocation's four rows over its columns."""
        four = "max(max({0}.x, {0}.y), max({0}.z, {0}.w))" if fold == "max" else "{0}.x"
        return f"folds[me] = vec4f({', '.join(four.format(f'{name}{i}') for i in range(4))});"

    def _fold_rows(self, fold: str) -> str:
        """Compute `top`: the maximum or sum of each of the four rows over all columns of the
        tile."""
        reads = [f"folds[down * {ACROSS}u + {t}u]" for t in range(ACROSS)]
        total = reads[0]
        for row_value in reads[1:]:
            total = f"max({total}, {row_value})" if fold == "max" else f"{total} + {row_value}"
        return f"let top = {total};"

    def _store_weights(self, name: str) -> list[str]:
        """Store the tile of weights in workgroup memory, by row: four columns per element."""
        array = self.layout.array("weights")
        return [f"{array}[(down * 4u + {i}u) * {ACROSS}u + across] = {name}{i};" for i in range(4)]

    def _accumulate(self, name: str, vectors: str) -> list[_Stage]:
        """Add the columns' vectors, weighted by the tile in workgroup memory, to the rows' sums."""
        weights, right = self.layout.array("weights"), self.layout.array(vectors)
        stages = []
        for part in self.layout.parts:
            stride = self.layout.stride(part)
            first_four = part * self.layout.width // ACROSS
            lines = [f"for (var k = 0u; k < {ACROSS}u; k++) {{"]
            lines += [
                f"let x{i} = {weights}[(down * 4u + {i}u) * {ACROSS}u + k];" for i in range(4)
            ]
            for t in range(4):
                for n in range(stride // ACROSS):
                    at = f"({t * ACROSS}u + k) * {stride}u + {n * ACROSS}u + (across ^ k)"
                    lines.append(f"let y{t}_{n} = {right}[{at}];")
                    lines += [
                        f"{name}{i}_{first_four + n} = "
                        f"fma(vec4f(x{i}[{t}]), y{t}_{n}, {name}{i}_{first_four + n});"
                        for i in range(4)
                    ]
            stages.append(_Stage([*lines, "}"], ["weights", (vectors, part)]))
        return stages

    def _read_delta(self, first_query: str) -> list[str]:
        """Read `delta4` of four queries, starting at `first_query`."""
        delta = self.problem.delta
        assert delta is not None
        last_query = self.sizes.queries - 1
        reads = [
            f"delta[{delta.index('batch', 'head', f'min({first_query} + {i}u, {last_query}u)')}]"
            for i in range(4)
        ]
        return [f"let delta4 = vec4f({', '.join(reads)});"]

    def _statistics(self, four: str) -> str:
        """Return the index of the statistics of four rows, in vec4f."""
        sizes = self.sizes
        start = sizes.batch * sizes.queries * sizes.heads * self.fours
        per_head = -(-sizes.queries // 4)
        return f"{start}u + ((batch * {sizes.heads}u + head) * {per_head}u + {four}) * 2u"

    def _store(self, name: str, shape_name: str, number: int = 0) -> list[str]:
        """Store the sums at (number, batch, row, head, size)."""
        extent = self.vectors[shape_name][1]
        count, head = (
            (self.sizes.heads, "head") if shape_name == "query" else (self.sizes.groups, "pair")
        )
        lines = []
        for i in range(4):
            row = f"(first_row + down * 4u + {i}u)"
            start = f"{number * self.sizes.batch}u + batch"
            at = f"((({start}) * {extent}u + {row}) * {count}u + {head}) * {self.fours}u"
            for n in self.sums:
                four = f"{n * ACROSS}u + across"
                guard = f"{row} < {extent}u && {four} < {self.fours}u"
                lines.append(f"if ({guard}) {{ out[{at} + {four}] = {name}{i}_{n}; }}")
        return lines
