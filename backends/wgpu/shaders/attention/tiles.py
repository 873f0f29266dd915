"""Attention by tiles in workgroup memory: for real GPUs, and right on every adapter.

A workgroup owns 64 rows (32 where there are no more): queries, or for the gradients of keys and
values the keys. It walks over the other side in blocks of 32. Each of its invocations, 8 across and
one for each four rows down, computes 4 x 4 scores in registers; these become weights (and their
gradients), go to workgroup memory, and are multiplied there with the block's vectors into sums that
stay in registers until the walk ends. So every sum has one order, whatever lies where (see
`layout`), and nothing of the size of the scores is ever in the device's memory.

While a product of two tiles is computed, what the next one needs is read into registers; barriers
stand where `barriers` puts them. Rows past an end are read as the last one, and not stored: an
index depends on sizes and the invocation alone, and is in bounds.

With grouped heads the keys' kernel walks over the queries of all heads of its group, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from backends.wgpu.graph.values import literal
from backends.wgpu.shaders.attention.barriers import Steps
from backends.wgpu.shaders.attention.layout import TILES, WORKGROUP_BYTES, Layout, layout_of
from backends.wgpu.shaders.attention.mask import ACROSS, BLOCK, seen, vote
from backends.wgpu.shaders.attention.problem import AttentionProblem, AttentionSizes, View
from backends.wgpu.shaders.dispatch import Shader

_LOWEST: Final = "-3.4028234663852886e38"
"""Stands for minus infinity, which WGSL has no word for."""
_MOST_SUMS: Final = 64
"""Registers of an invocation's sums that leave room for what is read ahead."""


def rounds(sizes: AttentionSizes) -> int:
    """How often the longest kernel's loops go round, all together, in one invocation, at most."""
    layout = layout_of("keys", sizes, WORKGROUP_BYTES)
    products = sum(layout.fours(n) // _unroll(layout.fours(n)) for n in layout.parts)
    block = 1 + 2 * products + 2 * len(layout.parts) * ACROSS
    blocks = sizes.heads // sizes.groups * -(-sizes.queries // BLOCK)
    return block * max(blocks, -(-sizes.keys // BLOCK))


def attention_shader(
    problem: AttentionProblem, workgroup_bytes: int = WORKGROUP_BYTES
) -> tuple[Shader, tuple[int, int, int]]:
    """The shader and its grid, for an adapter with so much workgroup memory.

    Bindings: query, key, value, the mask if there is one; for gradients what the forward gave, the
    tangent and delta; the output. See `backends.wgpu.graph.opaque` for the layout of outputs.
    """
    kernel = _Kernel(problem, layout_of(problem.part, problem.sizes, workgroup_bytes))
    sizes, rows = problem.sizes, kernel.layout.rows
    if problem.part == "keys":
        return kernel.shader(kernel.keys()), (-(-sizes.keys // rows), sizes.groups, sizes.batch)
    body = kernel.forward() if problem.part == "forward" else kernel.queries()
    return kernel.shader(body), (-(-sizes.queries // rows), sizes.heads, sizes.batch)


def _unroll(count: int) -> int:
    return 2 if count % 2 == 0 else 1


def _terms(name: str, arrays: tuple[str, str], four: str, stride: int, mark: str) -> list[str]:
    """Four terms of every product, in their order."""
    lines = []
    for i in range(4):
        lines.append(f"let x{mark}{i} = {arrays[0]}[(down * 4u + {i}u) * {stride}u + {four}];")
        at = f"({i * ACROSS}u + across) * {stride}u + ({four} ^ across)"
        lines.append(f"let y{mark}{i} = {arrays[1]}[{at}];")
    for t in range(4):
        turned = ", ".join(f"y{mark}{j}[{t}]" for j in range(4))
        lines.append(f"let z{mark}{t} = vec4f({turned});")
        lines += [
            f"{name}{i} = fma(vec4f(x{mark}{i}[{t}]), z{mark}{t}, {name}{i});" for i in range(4)
        ]
    return lines


@dataclass(frozen=True, slots=True)
class _Stage:
    """A part of what is done for a block.

    Attributes:
        lines: WGSL.
        reads: Tiles in workgroup memory: names, or with the number of a part of their vectors.
        writes: The same.
    """

    lines: Sequence[str]
    reads: Sequence[str | tuple[str, int]] = ()
    writes: Sequence[str] = ()

    @property
    def parts(self) -> list[tuple[str, int]]:
        """What is read that comes from the device's memory."""
        return [each for each in self.reads if isinstance(each, tuple)]


class _Kernel:
    def __init__(self, problem: AttentionProblem, layout: Layout) -> None:
        self.problem, self.sizes, self.layout = problem, problem.sizes, layout
        self.fours = self.sizes.size // 4
        self.sums = range(-(-self.fours // ACROSS))
        self.vectors: dict[str, tuple[View, int]] = {
            "query": (problem.query, self.sizes.queries),
            "key": (problem.key, self.sizes.keys),
            "value": (problem.value, self.sizes.keys),
        }
        if problem.tangent is not None:
            self.vectors["tangent"] = (problem.tangent, self.sizes.queries)
        sums = 16 * len(self.sums) * (2 if problem.part == "keys" else 1)
        self.ahead = sums <= _MOST_SUMS

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
        arrays = self.layout.arrays.items()
        declared += [
            f"@group(0) @binding({len(held)}) var<storage, read_write> out: array<vec4f>;",
            *(f"var<workgroup> {name}: array<vec4f, {count}>;" for name, count in arrays),
            *(self._four(name, view) for name, (view, _) in self.vectors.items()),
            f"@compute @workgroup_size({self.layout.invocations})",
            "fn main(@builtin(workgroup_id) group: vec3u,",
            "  @builtin(local_invocation_index) me: u32) {",
            f"let down = me / {ACROSS}u; let across = me % {ACROSS}u;",
            f"let first_row = group.x * {self.layout.rows}u; let batch = group.z;",
            *(f"var {name} = vec4f(0.0);" for tile in self.vectors for name in self._held(tile)),
        ]
        source = "\n".join([*declared, *body, "}\n"])
        return Shader(source, len(held) + 1, in_bounds=True)

    def forward(self) -> list[str]:
        """Softmax in one pass: sums are scaled down whenever a row's maximum grows."""
        group = self.sizes.heads // self.sizes.groups
        steps = Steps()
        steps.add([f"let head = group.y; let pair = group.y / {group}u;", *self._sums("sum")])
        steps.add([f"var highest = vec4f({_LOWEST}); var total = vec4f(0.0);"])
        maxima = [f"let top{i} = select(vec4f({_LOWEST}), s{i}, on{i});" for i in range(4)]
        stages = [
            *self._products("s", "query", "key"),
            _Stage([*self._scaled(), *maxima, self._fold_of("max", "top")], writes=["folds"]),
            _Stage(
                [self._folded("max"), *self._weights(), *self._to_memory("p")],
                reads=["folds"],
                writes=["weights"],
            ),
            *self._accumulated("sum", "value"),
        ]
        self._keep(steps)
        self._walk(steps, *self._keys(), stages)
        shares = [f"let share{i} = vec4f(total[{i}], 0.0, 0.0, 0.0);" for i in range(4)]
        steps.add([*shares, self._fold_of("+", "share")], writes=["folds"])
        steps.add([self._folded("+")], reads=["folds"])
        return [
            *steps.lines,
            "let share_of = select(vec4f(0.0), 1.0 / top, top > vec4f(0.0));",
            *(f"sum{i}_{n} *= share_of[{i}];" for i in range(4) for n in self.sums),
            *self._store("sum", "query"),
            f"let rows = {self._statistics('first_row / 4u + down')};",
            f"if (across == 0u && first_row + down * 4u < {self.sizes.queries}u) {{",
            "out[rows] = highest; out[rows + 1u] = share_of;",
            "}",
        ]

    def _weights(self) -> list[str]:
        """Of the forward: `p0` to `p3`, with the maxima and sums so far."""
        each = [f"select(vec4f(0.0), exp(s{i} - vec4f(highest[{i}])), on{i})" for i in range(4)]
        sums = ", ".join(f"dot(p{i}, vec4f(1.0))" for i in range(4))
        return [
            "let before = highest;",
            "highest = max(highest, top);",
            "let shrink = exp(before - highest);",
            *(f"let p{i} = {each[i]};" for i in range(4)),
            f"total = total * shrink + vec4f({sums});",
            *(f"sum{i}_{n} *= shrink[{i}];" for i in range(4) for n in self.sums),
        ]

    def queries(self) -> list[str]:
        """For queries: d query = (weights * (tangent value^T - delta)) key * scale."""
        group = self.sizes.heads // self.sizes.groups
        last = -(-self.sizes.queries // 4) - 1
        steps = Steps()
        steps.add(
            [
                f"let head = group.y; let pair = group.y / {group}u;",
                *self._sums("sum"),
                f"let rows = {self._statistics(f'min(first_row / 4u + down, {last}u)')};",
                "let highest = packed[rows]; let share_of = packed[rows + 1u];",
                *self._delta("first_row + down * 4u"),
            ]
        )
        gradients = [
            *self._scaled(),
            *(
                f"let p{i} = select(vec4f(0.0), "
                f"exp(s{i} - vec4f(highest[{i}])) * share_of[{i}], on{i});"
                for i in range(4)
            ),
            *(f"let g{i} = p{i} * (t{i} - vec4f(delta4[{i}])) * {self._scale};" for i in range(4)),
            *self._to_memory("g"),
        ]
        stages = [
            *self._both(("query", "key"), ("tangent", "value")),
            _Stage(gradients, writes=["weights"]),
            *self._accumulated("sum", "key"),
        ]
        self._keep(steps)
        self._walk(steps, *self._keys(), stages)
        return [*steps.lines, *self._store("sum", "query")]

    def keys(self) -> list[str]:
        """For keys and values: d value = weights^T tangent; d key as d query, transposed."""
        group = self.sizes.heads // self.sizes.groups
        first = "first_row" if self.problem.causal else "0u"
        steps = Steps()
        steps.add(["let pair = group.y;", *self._sums("by_key"), *self._sums("by_value")])
        self._keep(steps)
        gradients = [
            *self._scaled(),
            *self._delta("first_column + across * 4u"),
            *(
                f"let p{i} = select(vec4f(0.0), exp(s{i} - highest) * share_of, on{i});"
                for i in range(4)
            ),
            *(f"let g{i} = p{i} * (t{i} - delta4) * {self._scale};" for i in range(4)),
            *self._to_memory("p"),
        ]
        stages = [
            *self._both(("key", "query"), ("value", "tangent")),
            _Stage(gradients, writes=["weights"]),
            *reversed(self._accumulated("by_value", "tangent")),
            _Stage(self._to_memory("g"), writes=["weights"]),
            *self._accumulated("by_key", "query"),
        ]
        head = f"for (var head = pair * {group}u; head < (pair + 1u) * {group}u; head++) {{"
        steps.loop(head, lambda each: self._walk(each, first, f"{self.sizes.queries}u", stages))
        return [*steps.lines, *self._store("by_key", "key", 0), *self._store("by_value", "key", 1)]

    def _keys(self) -> tuple[str, str]:
        """Where a walk over keys begins and ends."""
        end = f"{self.sizes.keys}u"
        if self.problem.causal:
            end = f"min({end}, first_row + {self.layout.rows}u)"
        return "0u", end

    def _keep(self, steps: Steps) -> None:
        """The rows' vectors, where they stay in workgroup memory."""
        for tile in TILES[self.problem.part][0] if self.layout.kept else ():
            steps.add(self._read(tile, 0, "first_row"))
            steps.add(self._put(tile, 0), writes=[self.layout.array(tile)])

    def _walk(self, steps: Steps, first: str, end: str, stages: Sequence[_Stage]) -> None:
        """All stages for each block of columns that is not hidden as a whole."""
        brought = self._brought(stages)
        hides = self.problem.mask is not None
        across_blocks = self.ahead and not hides
        if across_blocks:
            steps.add(self._reads(next(filter(None, brought)), first))

        def block(inner: Steps) -> None:
            inner.add(self._at_block())
            if not hides:
                self._stages(inner, stages, brought, end if across_blocks else "")
                return
            where = "folds" if self.problem.part == "forward" else self.layout.array("weights")
            head = vote(
                self.problem, inner, where, self.layout.array("weights"), self.layout.invocations
            )
            inner.choice(head, lambda needed: self._stages(needed, stages, brought, ""))

        head = f"for (var first_column = {first}; first_column < {end}; "
        steps.loop(f"{head}first_column += {BLOCK}u) {{", block)

    def _at_block(self) -> list[str]:
        """Known of a block before anything is brought."""
        lines = seen(self.problem)
        if self.problem.part == "keys":
            last = -(-self.sizes.queries // 4) - 1
            rows = self._statistics(f"min(first_column / 4u + across, {last}u)")
            lines.append(f"let rows = {rows};")
            lines.append("let highest = packed[rows]; let share_of = packed[rows + 1u];")
        return lines

    def _brought(self, stages: Sequence[_Stage]) -> list[list[tuple[str, int]]]:
        """What each stage needs that its array does not hold from an earlier one."""
        rows = TILES[self.problem.part][0] if self.layout.kept else ()
        holds: dict[str, tuple[str, int]] = {}
        found = []
        for stage in stages:
            parts = [part for part in stage.parts if part[0] not in rows]
            parts = [part for part in parts if holds.get(self.layout.array(part[0])) != part]
            holds |= {self.layout.array(part[0]): part for part in parts}
            for tile in stage.writes:
                holds.pop(self.layout.array(tile), None)
            found.append(parts)
        return found

    def _stages(
        self,
        steps: Steps,
        stages: Sequence[_Stage],
        brought: Sequence[Sequence[tuple[str, int]]],
        end: str,
    ) -> None:
        """One block's; with `end`, of the walk, the next block's first tiles are read ahead."""
        there = bool(end)
        for number, (stage, parts) in enumerate(zip(stages, brought, strict=True)):
            if parts:
                if not there:
                    steps.add(self._reads(parts, "first_column"))
                for part in parts:
                    steps.add(self._put(*part), writes=[self.layout.array(part[0])])
                after = next(filter(None, brought[number + 1 :]), [])
                there = self.ahead and bool(after)
                if there:
                    self._before(steps, stage, self._reads(after, "first_column"))
                elif end:
                    following = f"first_column + {BLOCK}u"
                    first = self._reads(next(filter(None, brought)), following)
                    self._before(steps, stage, [f"if ({following} < {end}) {{", *first, "}"])
            steps.add(stage.lines, self._arrays(stage.reads), self._arrays(stage.writes))

    def _before(self, steps: Steps, stage: _Stage, reads: Sequence[str]) -> None:
        """Reads that are under way while the stage is computed: its barrier comes first."""
        steps.add(reads, reads=self._arrays(stage.reads))

    def _arrays(self, tiles: Sequence[str | tuple[str, int]]) -> list[str]:
        names = [each if isinstance(each, str) else each[0] for each in tiles]
        return [name if name == "folds" else self.layout.array(name) for name in names]

    def _reads(self, parts: Sequence[tuple[str, int]], first_column: str) -> list[str]:
        rows = TILES[self.problem.part][0]
        return [
            line
            for tile, part in parts
            for line in self._read(tile, part, "first_row" if tile in rows else first_column)
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
        return [f"var {name}{i}_{n} = vec4f(0.0);" for i in range(4) for n in self.sums]

    def _held(self, tile: str, part: int = 0) -> list[str]:
        """Names of an invocation's vec4 of a tile, between two memories."""
        rows = self.layout.rows if tile in TILES[self.problem.part][0] else BLOCK
        count = rows * self.layout.stride(part) // self.layout.invocations
        return [f"{tile}_held{u}" for u in range(count)]

    def _place(self, part: int, number: int) -> tuple[str, str]:
        """Row and vec4 of an invocation's so-manieth of a tile: neighbours go along the vectors."""
        stride, below = self.layout.stride(part), self.layout.invocations
        return f"(me / {stride}u + {number * (below // stride)}u)", f"(me % {stride}u)"

    def _read(self, tile: str, part: int, first: str) -> list[str]:
        """From the device's memory into registers; past the end the last row again."""
        last, lines = self.vectors[tile][1] - 1, []
        start, most = part * self.layout.width, self.layout.fours(part) - 1
        for u, name in enumerate(self._held(tile, part)):
            row, four = self._place(part, u)
            near = four if most % ACROSS == ACROSS - 1 else f"min({four}, {most}u)"
            at = self._address(tile, f"min({first} + {row}, {last}u)", f"({start}u + {near}) * 4u")
            lines.append(f"{name} = {tile}4({at});")
        return lines

    def _put(self, tile: str, part: int) -> list[str]:
        """From registers into workgroup memory."""
        array, stride = self.layout.array(tile), self.layout.stride(part)
        lines = []
        for u, name in enumerate(self._held(tile, part)):
            row, four = self._place(part, u)
            if tile in TILES[self.problem.part][1]:
                row, four = f"({row} % 4u * {ACROSS}u + {row} / 4u)", f"({four} ^ {row} / 4u)"
            lines.append(f"{array}[{row} * {stride}u + {four}] = {name};")
        return lines

    def _products(self, name: str, one: str, two: str) -> list[_Stage]:
        """`name0` to `name3`: products of this invocation's 4 rows, each with its 4 columns."""
        stages = []
        for part in self.layout.parts:
            fours, stride = self.layout.fours(part), self.layout.stride(part)
            unroll = _unroll(fours)
            lines = [] if part else [f"var {name}{i} = vec4f(0.0);" for i in range(4)]
            lines.append(f"for (var d = 0u; d < {fours}u; d += {unroll}u) {{")
            for u in range(unroll):
                arrays = self.layout.array(one), self.layout.array(two)
                lines += _terms(name, arrays, f"(d + {u}u)", stride, f"u{u}_")
            stages.append(_Stage([*lines, "}"], [(one, part), (two, part)]))
        return stages

    def _both(self, scores: tuple[str, str], tangents: tuple[str, str]) -> list[_Stage]:
        """Products `s` and `t`; side by side where all of their tiles are there at once."""
        one, two = self._products("s", *scores), self._products("t", *tangents)
        if not self.layout.kept:
            return [*one, *two]
        return [_Stage([*one[0].lines, *two[0].lines], [*one[0].reads, *two[0].reads])]

    def _scaled(self) -> list[str]:
        bias = self.problem.mask is not None and not self.problem.truth
        return [f"s{i} = s{i} * {self._scale}{f' + bias{i}' if bias else ''};" for i in range(4)]

    def _fold_of(self, fold: str, name: str) -> str:
        """Of this invocation's four rows, over its own columns."""
        four = "max(max({0}.x, {0}.y), max({0}.z, {0}.w))" if fold == "max" else "{0}.x"
        return f"folds[me] = vec4f({', '.join(four.format(f'{name}{i}') for i in range(4))});"

    def _folded(self, fold: str) -> str:
        """`top`: for each of the four rows the maximum, or sum, over all columns of the tile."""
        reads = [f"folds[down * {ACROSS}u + {t}u]" for t in range(ACROSS)]
        folded = reads[0]
        for read in reads[1:]:
            folded = f"max({folded}, {read})" if fold == "max" else f"{folded} + {read}"
        return f"let top = {folded};"

    def _to_memory(self, name: str) -> list[str]:
        """The tile of weights into workgroup memory, by row: four columns at each place."""
        array = self.layout.array("weights")
        return [f"{array}[(down * 4u + {i}u) * {ACROSS}u + across] = {name}{i};" for i in range(4)]

    def _accumulated(self, name: str, vectors: str) -> list[_Stage]:
        """Add to each row's sums the columns' vectors, times the tile in workgroup memory."""
        weights, right = self.layout.array("weights"), self.layout.array(vectors)
        stages = []
        for part in self.layout.parts:
            stride = self.layout.stride(part)
            first = part * self.layout.width // ACROSS
            lines = [f"for (var k = 0u; k < {ACROSS}u; k++) {{"]
            lines += [
                f"let x{i} = {weights}[(down * 4u + {i}u) * {ACROSS}u + k];" for i in range(4)
            ]
            for t in range(4):
                for n in range(stride // ACROSS):
                    at = f"({t * ACROSS}u + k) * {stride}u + {n * ACROSS}u + (across ^ k)"
                    lines.append(f"let y{t}_{n} = {right}[{at}];")
                    lines += [
                        f"{name}{i}_{first + n} = "
                        f"fma(vec4f(x{i}[{t}]), y{t}_{n}, {name}{i}_{first + n});"
                        for i in range(4)
                    ]
            stages.append(_Stage([*lines, "}"], ["weights", (vectors, part)]))
        return stages

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
            for n in self.sums:
                four = f"{n * ACROSS}u + across"
                guard = f"{row} < {extent}u && {four} < {self.fours}u"
                lines.append(f"if ({guard}) {{ out[{at} + {four}] = {name}{i}_{n}; }}")
        return lines
