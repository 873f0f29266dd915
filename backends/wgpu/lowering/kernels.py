"""Generate a kernel for each value with a buffer: elementwise chains, reductions, scatters, scans,
attention, and matrix products.

No kernel uses atomics, and every sum has a fixed order, so results are reproducible.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import fx

from backends.wgpu.graph.halves import is_half
from backends.wgpu.graph.index import (
    Coordinate,
    as_coordinate,
    broadcast,
    linear_index,
    split_index,
)
from backends.wgpu.graph.opaque import PARTIAL
from backends.wgpu.graph.values import (
    HALF_DTYPES,
    NoRule,
    Scalar,
    elements_of,
    literal,
    scalar_of,
    shape_of,
)
from backends.wgpu.graph.views import is_copy, is_view, strided_view
from backends.wgpu.lowering.elementwise import ELEMENTWISE
from backends.wgpu.lowering.fusion import ATTENTIONS, MATMULS, REDUCTIONS, SCANS, SCATTERS
from backends.wgpu.lowering.indexing import INDEXING, broadcast_shape, leading_indices
from backends.wgpu.lowering.operands import attention_problem, list_products
from backends.wgpu.shaders.attention.layout import WORKGROUP_BYTES
from backends.wgpu.shaders.attention.tiles import attention_shader
from backends.wgpu.shaders.dispatch import WORKGROUPS_PER_DIMENSION, Shader
from backends.wgpu.shaders.kernel_text import (
    KernelText,
    NotFusable,
    convert_for_storage,
    element_type_of,
    guard_value,
    round_to_type,
)
from backends.wgpu.shaders.matmul.shader import (
    ElementForm,
    Epilogue,
    MatmulProblem,
    Operand,
    matmul_shader,
    split_into_dispatches,
)
from backends.wgpu.shaders.quantized_layout import quantized_layout_of, refuse_on_the_left

_aten = torch.ops.aten
_WORKGROUP: Final = 64
_PARTIAL_TERMS: Final = 64
"""Terms per partial sum: adding partial sums is more accurate than one running sum."""
_LOOP_ITERATIONS: Final = 60_000
"""Limit on loop iterations: software Vulkan silently ends an invocation's loops after 65,535."""
_COOPERATIVE_TERMS: Final = 128
"""A workgroup of a GPU shares sums of at least this many terms."""
_SUMS: Final = MATMULS | ATTENTIONS | SCATTERS | SCANS | REDUCTIONS
"""Operators with sums, which torch rounds in its own way in half precision."""
_RULES: Final = {**ELEMENTWISE, **INDEXING}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One dispatch, over graph values instead of buffers.

    Attributes:
        shader: The shader.
        reads: Values of the first bindings.
        writes: Values of the last bindings.
        grid: Workgroups of the dispatch.
        label: The node and its module, for logs and errors.
    """

    shader: Shader
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    grid: tuple[int, int, int]
    label: str


MatmulShader = Callable[[MatmulProblem], tuple[Shader, tuple[int, int, int]]]


@dataclass(frozen=True, slots=True)
class Emitter:
    """Generates the kernels of one graph.

    Attributes:
        buffers: Values with a buffer.
        constants: Nodes whose values are known.
        cooperative: Whether workgroups share long sums: faster on GPUs, slower on a CPU.
        matmul: Returns the shader and grid of a matrix product.
        workgroup_bytes: Workgroup memory for attention.
    """

    buffers: Collection[fx.Node]
    constants: Mapping[fx.Node, torch.Tensor]
    cooperative: bool = False
    matmul: MatmulShader = matmul_shader
    workgroup_bytes: int = WORKGROUP_BYTES

    def kernels(self, node: fx.Node) -> list[Kernel]:
        """Return the kernels that fill the value's buffer.

        Raises:
            NoRule: The operator has no rule.
        """
        target = node.target
        if node.meta["val"].dtype in HALF_DTYPES and target in _SUMS and not _sums_in_float32(node):
            raise NoRule(node, f"in {str(node.meta['val'].dtype).removeprefix('torch.')}")
        if target in MATMULS:
            return [*self._products(node)]
        if target in ATTENTIONS:
            return [self._attention(node)]
        if target in REDUCTIONS:
            return [self._reduction(node)]
        if target in SCATTERS:
            return self._scatter(node)
        if target in SCANS:
            return [self._scan(node)]
        if not (is_view(node) or is_copy(node) or target in _RULES):
            raise NoRule(node)
        return [self._elementwise(node)]

    def reads(self, node: fx.Node) -> frozenset[fx.Node]:
        """Return the buffers that the value's kernels read."""
        return frozenset(value for kernel in self.kernels(node) for value in kernel.reads)

    def can_be_fused_into(self, node: fx.Node) -> bool:
        """Whether the value's kernel can also compute other values; see `fuse`."""
        if not self.cooperative or node.meta["val"].dtype != torch.float32:
            return False
        if node.target in MATMULS:
            return len([*list_products(node)]) == 1 and len([*self._problems(node)]) == 1
        if node.target not in REDUCTIONS:
            return False
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return _Reduction.of(node, source).is_along_rows

    def fuse(self, members: Sequence[fx.Node], stored_nodes: Collection[fx.Node]) -> Kernel:
        """Fuse values into one kernel.

        A value may read earlier values only at the elements that its invocation, or workgroup,
        has computed.

        Args:
            members: A product and elementwise values, or reductions along rows and elementwise
                values.
            stored_nodes: Members that other kernels read.

        Raises:
            NotFusable: A value reads an earlier value at another index, or its operator or dtype
                cannot be fused.
        """
        for node in members[1:]:
            is_reduction = node.target in REDUCTIONS and members[0].target in REDUCTIONS
            has_rule = is_reduction or is_copy(node) or node.target in _RULES
            stores_half = is_half(node) and not is_reduction
            if not has_rule or not (stores_half or node.meta["val"].dtype == torch.float32):
                raise NotFusable
        if members[0].target in MATMULS:
            return self._fuse_into_product(members, stored_nodes)
        return self._fuse_rows(members, stored_nodes)

    def _fuse_into_product(
        self, members: Sequence[fx.Node], stored_nodes: Collection[fx.Node]
    ) -> Kernel:
        """Fuse elementwise values into a product, computed from its sums in registers."""
        product, *elementwise = members
        count = elements_of(product)
        text = self._text()
        text.registers[product] = "i", "product"
        outputs: list[fx.Node] = []
        for node in elementwise:
            if elements_of(node) != count:
                raise NotFusable
            value = text.compute(node, split_index(as_coordinate("i", count), shape_of(node)))
            text.registers[node] = "i", text.let(value)
            if node in stored_nodes:
                text.lines.append(f"e{len(outputs)}[i] = {convert_for_storage(value, node)};")
                outputs.append(node)
        types = tuple(element_type_of(node) for node in outputs)
        body, is_product_stored = "\n".join(text.lines), product in stored_nodes
        finish = Epilogue(*text.declarations(), types, body, is_product_stored, text.reads_indices)
        (problem,) = self._problems(product)
        shader, grid = self.matmul(replace(problem, finish=finish))
        a, b = (self._operand(operand)[1] for operand in next(list_products(product))[:2])
        writes = (*([product] if finish.is_product_stored else []), *outputs)
        label = " + ".join(map(_label, members))
        return Kernel(shader, (a, b, *text.buffers), writes, grid, label)

    def _fuse_rows(self, members: Sequence[fx.Node], stored_nodes: Collection[fx.Node]) -> Kernel:
        """Fuse reductions and values along rows, with one workgroup per row."""
        source = members[0].args[0]
        assert isinstance(source, fx.Node)
        first_reduction = _Reduction.of(members[0], source)
        rows, columns = first_reduction.outputs, first_reduction.terms
        body = [f"let i = group.x + group.y * {WORKGROUPS_PER_DIMENSION}u;"]
        body += [f"if (i >= {rows}u) {{ return; }}"]
        text = self._text()
        outputs: list[fx.Node] = []
        for number, node in enumerate(members):
            name = f"e{len(outputs)}"
            if node.target in REDUCTIONS:
                body += self._row_fold(node, text, number, (rows, columns))
                text.registers[node] = "i", f"fold{number}"
                if node in stored_nodes:
                    body.append(f"if (local.x == 0u) {{ {name}[i] = fold{number}; }}")
                    outputs.append(node)
                continue
            coords = _row_coordinates(shape_of(node), rows, columns)
            inner = text.inner_scope()
            value = inner.compute(node, coords)
            index = str(linear_index(coords))
            body += [f"for (var r = local.x; r < {columns}u; r += {_WORKGROUP}u) {{"]
            body += [*inner.lines, f"{name}[{index}] = {convert_for_storage(value, node)};", "}"]
            element = f"{name}[{index}]"
            text.registers[node] = index, f"f32({element})" if is_half(node) else element
            outputs.append(node)
        count = len(outputs)
        shader = Shader(text.module_of(body, outputs), len(text.buffers) + count, count)
        label = " + ".join(map(_label, members))
        return Kernel(shader, tuple(text.buffers), tuple(outputs), _folded_grid(rows), label)

    def _row_fold(
        self, node: fx.Node, text: KernelText, number: int, sizes: tuple[int, int]
    ) -> list[str]:
        """Return code that computes `foldNUMBER` in all invocations."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        fold = _Reduction.of(node, source)
        if not fold.is_along_rows or (fold.outputs, fold.terms) != sizes:
            raise NotFusable
        inner = text.inner_scope()
        value = inner.element(source, fold.coordinates(), fold.scalar)
        lines = fold.generate_shared_fold(inner.lines, value, f"sum{number}")
        return [
            *lines, "workgroupBarrier();", f"let fold{number} = {fold.result('shared_sums[0]')};",
            "workgroupBarrier();",
        ]  # fmt: skip

    def _problems(self, node: fx.Node) -> Iterator[MatmulProblem]:
        """Yield the products of a node, one per dispatch."""
        for left, right, result in list_products(node):
            a, a_base = self._operand(left)
            b, b_base = self._operand(right)
            refuse_on_the_left(a_base, _label(node))
            batch = shape_of(node)[0] if len(shape_of(node)) == 3 else 1
            (m, k), n = shape_of(left)[-2:], shape_of(right)[-1]
            yield from split_into_dispatches(
                MatmulProblem(batch, m, k, n, a, b, quantized_layout_of(b_base), result)
            )

    def _text(self) -> KernelText:
        return KernelText(_RULES, self.buffers, self.constants)

    def _elementwise(self, node: fx.Node, source: fx.Node | None = None) -> Kernel:
        """Generate an elementwise kernel by the operator's rule, or a copy of `source`."""
        text = self._text()
        count = elements_of(node)
        guard, grid = _invocations(count)
        coords = split_index(as_coordinate("i", count), shape_of(node))
        value = text.compute(node, coords) if source is None else text.element(source, coords)
        body = [*guard, *text.lines, f"out[i] = {convert_for_storage(value, node)};"]
        return _kernel(text, node, body, grid)

    def _reduction(self, node: fx.Node) -> Kernel:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        reduction = _Reduction.of(node, source)
        _refuse_long_loops(node, reduction.part_terms)
        text = self._text()
        coords = reduction.coordinates()
        value = text.element(source, coords, reduction.scalar)
        if self.cooperative and reduction.is_shareable:
            grid = _folded_grid(reduction.outputs)
            body = reduction.generate_cooperative(text.lines, value)
        else:
            guard, grid = _invocations(reduction.outputs)
            body = [*guard, *reduction.generate_serial(text.lines, value)]
        return _kernel(text, node, body, grid)

    def _scan(self, node: fx.Node) -> Kernel:
        """Generate a cumulative sum, for short dimensions: each element adds up its
        predecessors."""
        source, dim = node.args[:2]
        assert isinstance(source, fx.Node)
        text = self._text()
        count, scalar = elements_of(node), scalar_of(node)
        coords = split_index(as_coordinate("i", count), shape_of(node))
        if not coords:
            return self._elementwise(node, source)
        axis = operator.index(dim) % len(coords)  # type: ignore[arg-type]
        _refuse_long_loops(node, coords[axis].size)
        last_index = str(coords[axis])
        coords[axis] = as_coordinate("r", coords[axis].size)
        value = text.element(source, coords, scalar)
        guard, grid = _invocations(count)
        loop = f"for (var r = 0u; r <= {last_index}; r++) {{"
        body = [*guard, f"var sum = {literal(0, scalar)};", loop, *text.lines]
        body += [f"sum += {value};", "}", "out[i] = sum;"]
        return _kernel(text, node, body, grid)

    def _scatter(self, node: fx.Node) -> list[Kernel]:
        """Generate kernels that copy a base, then add source rows to it by column, in the order of
        the source rows.

        All additions to an element run in one invocation. For enough parallelism, each column is
        divided among invocations by target row.
        """
        if node.target is _aten.scatter_add.default:
            return [self._scatter_add(node)]
        base, indices, source = node.args[:3]
        assert isinstance(base, fx.Node)
        assert isinstance(source, fx.Node)
        if node.target is not _aten.index_put.default or len(node.args) < 4 or not node.args[3]:
            raise NoRule(node, "that does not add up rows")
        leading, _ = leading_indices(node, indices)
        copy_kernel = self._copy_base(node, base)
        shape = shape_of(node)
        columns = math.prod(shape[len(leading) :])
        rows_shape = broadcast_shape(leading)
        rows = math.prod(rows_shape)
        _refuse_long_loops(node, rows)
        shares = max(1, min(64, 4096 // max(columns, 1), math.prod(shape[: len(leading)])))
        guard, grid = _invocations(columns * shares)
        text = self._text()
        at_row = split_index(as_coordinate("r", rows), rows_shape)
        row, conditions = "0u", []
        for dim, numbers in enumerate(leading):
            index, is_valid = text.index(numbers, at_row, shape[dim], from_end=True)
            row = f"({row} * {shape[dim]}u + {index})" if dim else str(index)
            conditions.append(is_valid)
        row = text.let(row)
        index_lines = len(text.lines)
        at_column = split_index(as_coordinate("c", columns), shape[len(leading) :])
        coords = [*at_row, *at_column]
        value = text.element(source, broadcast(coords, shape_of(source)), scalar_of(node))
        value = guard_value(value, conditions, scalar_of(node))
        body = [*guard, f"let c = i % {columns}u;", f"let share = i / {columns}u;"]
        body += [f"for (var r = 0u; r < {rows}u; r++) {{", *text.lines[:index_lines]]
        body += [f"if ({row} % {shares}u == share) {{", *text.lines[index_lines:]]
        target = f"out[{row} * {columns}u + c]"
        body += [f"{target} = {target} + {value};", "}", "}"]
        return [copy_kernel, _kernel(text, node, body, grid)]

    def _scatter_add(self, node: fx.Node) -> Kernel:
        """Add to each element the source elements whose index is the element's coordinate."""
        base, dim, numbers, source = node.args
        assert isinstance(base, fx.Node)
        assert isinstance(numbers, fx.Node)
        assert isinstance(source, fx.Node)
        text, scalar, shape = self._text(), scalar_of(node), shape_of(node) or (1,)
        sizes = shape_of(numbers) or (1,)
        axis = operator.index(dim) % len(shape)  # type: ignore[arg-type]
        _refuse_long_loops(node, sizes[axis])
        count = elements_of(node)
        coords = split_index(as_coordinate("i", count), shape)
        own_index = str(coords[axis])
        start = text.element(base, coords[: len(shape_of(node))], scalar)
        base_lines = len(text.lines)
        coords[axis] = as_coordinate("r", sizes[axis])
        bounds = [
            f"{c} < {size}u"
            for d, (c, size) in enumerate(zip(coords, sizes, strict=True))
            if d != axis and size != shape[d]
        ]
        coords = coords[: len(shape_of(node))]
        index, is_valid = text.index(numbers, coords, shape[axis])
        value = guard_value(text.element(source, coords, scalar), [is_valid], scalar)
        guard, grid = _invocations(count)
        body = [*guard, *text.lines[:base_lines], f"var sum = {start};"]
        body += [f"if ({' && '.join(bounds)}) {{"] if bounds else ["{"]
        body += [f"for (var r = 0u; r < {sizes[axis]}u; r++) {{", *text.lines[base_lines:]]
        body += [f"if ({index} == {own_index}) {{ sum += {value}; }}", "}", "}", "out[i] = sum;"]
        return _kernel(text, node, body, grid)

    def _copy_base(self, node: fx.Node, base: fx.Node) -> Kernel:
        text = self._text()
        count = elements_of(node)
        guard, grid = _invocations(count)
        value = text.element(
            base, split_index(as_coordinate("i", count), shape_of(node)), scalar_of(node)
        )
        return _kernel(text, node, [*guard, *text.lines, f"out[i] = {value};"], grid)

    def _products(self, node: fx.Node) -> Iterator[Kernel]:
        for left, right, result in list_products(node):
            a, a_base = self._operand(left)
            b, b_base = self._operand(right)
            refuse_on_the_left(a_base, _label(node))
            batch = shape_of(node)[0] if len(shape_of(node)) == 3 else 1
            (m, k), n, form = shape_of(left)[-2:], shape_of(right)[-1], quantized_layout_of(b_base)
            label = f"{_label(node)} {batch}x{m}x{k}x{n}"
            for part in split_into_dispatches(MatmulProblem(batch, m, k, n, a, b, form, result)):
                shader, grid = self.matmul(part)
                yield Kernel(shader, (a_base, b_base), (node,), grid, label)

    def _attention(self, node: fx.Node) -> Kernel:
        problem, reads = attention_problem(node, self.buffers)
        shader, grid = attention_shader(problem, self.workgroup_bytes)
        s = problem.sizes
        sizes = f"{s.batch}x{s.heads}x{s.queries}x{s.keys}x{s.head_size}"
        return Kernel(shader, reads, (node,), grid, f"{_label(node)} {sizes}")

    def _operand(self, node: fx.Node) -> tuple[Operand, fx.Node]:
        view = strided_view(node, self.buffers, widens=True, rounds=True)
        assert view is not None, node
        strides = (0, *view.strides) if len(view.strides) == 2 else view.strides
        is_quantized = (
            quantized_layout_of(view.base) is not None
        )  # quantized weights are not rounded again
        form: ElementForm = "f16" if is_half(view.base) else "f32"
        form = "rounded" if view.rounds and not is_quantized else form
        return Operand((strides[0], strides[1], strides[2]), view.offset, form), view.base


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A reduction with `outputs` results of `terms` terms each."""

    node: fx.Node
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    scalar: Scalar
    name: str
    parts: int = 1

    @staticmethod
    def of(node: fx.Node, source: fx.Node) -> _Reduction:
        shape = shape_of(source)
        dims_argument: Any = node.args[1] if len(node.args) > 1 else None
        dims_list = (
            [dims_argument]
            if isinstance(dims_argument, int)
            else list(dims_argument or range(len(shape)))
        )
        dims = tuple(sorted({operator.index(d) % max(len(shape), 1) for d in dims_list}))
        scalar = scalar_of(source if "arg" in str(node.target) else node)
        name, parts = str(node.target).split(".")[1], 1
        if node.target is PARTIAL:
            parts, name = node.args[2:4]  # type: ignore[assignment]
        if not math.prod(shape):
            raise NoRule(node, "of a tensor without elements")
        return _Reduction(node, shape, dims if shape else (), scalar, name, parts)

    @property
    def terms(self) -> int:
        return math.prod(self.shape[d] for d in self.dims)

    @property
    def outputs(self) -> int:
        return math.prod(self.shape) // self.terms * self.parts

    @property
    def part_terms(self) -> int:
        """Terms per part; the last part may have fewer."""
        return -(-self.terms // self.parts)

    @property
    def is_shareable(self) -> bool:
        """Whether a workgroup may share one reduction."""
        return self.part_terms >= _COOPERATIVE_TERMS and "arg" not in self.name

    @property
    def is_along_rows(self) -> bool:
        """Whether a workgroup reduces exactly the last dimensions."""
        last_dims = tuple(range(len(self.shape) - len(self.dims), len(self.shape)))
        return (
            self.is_shareable
            and self.scalar == "f32"
            and self.parts == 1
            and self.dims == last_dims
        )

    def coordinates(self) -> list[Coordinate]:
        """Return the coordinates of term `r` of output `i`; with parts, the part is the last
        dimension of `i`."""
        outer_dims = [d for d in range(len(self.shape)) if d not in self.dims]
        sizes = [*(self.shape[d] for d in outer_dims), self.parts]
        outer = split_index(as_coordinate("i", self.outputs), sizes)[:-1]
        inner = split_index(as_coordinate("r", self.terms), [self.shape[d] for d in self.dims])
        coords = dict(zip(outer_dims, outer, strict=True)) | dict(
            zip(self.dims, inner, strict=True)
        )
        return [coords[d] for d in range(len(self.shape))]

    @property
    def start(self) -> str:
        if self.name in {"amax", "argmax"}:
            low = literal(-math.inf if self.scalar == "f32" else -(2**31) + 1, self.scalar)
            return low if self.scalar != "bool" else "false"
        if self.name in {"amin", "argmin"}:
            return literal(math.inf if self.scalar == "f32" else 2**31 - 1, self.scalar)
        return literal(0, self.scalar)

    def fold(self, left: str, right: str) -> str:
        """Return the combination of two partial results."""
        if self.name in {"amax", "amin"}:
            name = {"amax": "larger", "amin": "smaller"}[self.name]
            return f"{name if self.scalar == 'f32' else self.name[1:]}({left}, {right})"
        return f"({left} || {right})" if self.name == "any" else f"({left} + {right})"

    def result(self, total: str) -> str:
        if self.name == "mean":
            return f"({total} * {literal(1.0 / self.terms, 'f32')})"
        return convert_for_storage(
            round_to_type(total, self.node) if is_half(self.node) else total, self.node
        )

    def generate_serial(self, lines: Sequence[str], value: str) -> list[str]:
        """Generate a reduction with one invocation per output."""
        if "arg" in self.name:
            better = f"{value} {'>' if self.name == 'argmax' else '<'} best"
            if self.scalar == "f32":  # the first NaN wins, as in torch
                better = f"!is_nan(best) && ({better} || is_nan({value}))"
            body = [f"var best = {self.start};", "var best_index = 0u;", self._loop(), *lines]
            body += [f"if ({better}) {{ best = {value}; best_index = r; }}", "}"]
            return [*body, "out[i] = i32(best_index);"]
        if self.part_terms <= 2 * _PARTIAL_TERMS or self.name not in {"sum", "mean"}:
            body = [f"var sum = {self.start};", self._loop(), *lines]
            return [*body, f"sum = {self.fold('sum', value)};", "}", self._store("sum")]
        low, high = self._range()
        body = [f"var sum = {self.start};"]
        body += [f"for (var first = {low}; first < {high}; first += {_PARTIAL_TERMS}u) {{"]
        body += [f"var part = {self.start};", f"let end = min(first + {_PARTIAL_TERMS}u, {high});"]
        body += ["for (var r = first; r < end; r++) {", *lines, f"part += {value};", "}"]
        return [*body, "sum += part;", "}", self._store("sum")]

    def generate_cooperative(self, lines: Sequence[str], value: str) -> list[str]:
        """Generate a reduction with a workgroup per output and strided terms per invocation."""
        body = [f"let i = group.x + group.y * {WORKGROUPS_PER_DIMENSION}u;"]
        body += self.generate_shared_fold(lines, value, "sum")
        body += [f"if (local.x == 0u && i < {self.outputs}u) {{", self._store("shared_sums[0]")]
        return [*body, "}"]

    def generate_shared_fold(self, lines: Sequence[str], value: str, name: str) -> list[str]:
        """Return code that reduces into `shared_sums[0]`, which the first invocation may read."""
        body = [f"var {name} = {self.start};", f"if (i < {self.outputs}u) {{"]
        low, high = self._range()
        body += [f"for (var r = {low} + local.x; r < {high}; r += {_WORKGROUP}u) {{", *lines]
        body += [f"{name} = {self.fold(name, value)};", "}", "}"]
        body += [f"shared_sums[local.x] = {name};"]
        step = _WORKGROUP // 2
        while step:
            folded = self.fold("shared_sums[local.x]", f"shared_sums[local.x + {step}u]")
            body += ["workgroupBarrier();", f"if (local.x < {step}u) {{"]
            body += [f"shared_sums[local.x] = {folded};", "}"]
            step //= 2
        return body

    def _loop(self) -> str:
        low, high = self._range()
        return f"for (var r = {low}; r < {high}; r++) {{"

    def _range(self) -> tuple[str, str]:
        if self.parts == 1:
            return "0u", f"{self.terms}u"
        first = f"(i % {self.parts}u) * {self.part_terms}u"
        return first, f"min({first} + {self.part_terms}u, {self.terms}u)"

    def _store(self, total: str) -> str:
        return f"out[i] = {self.result(total)};"


def _sums_in_float32(node: fx.Node) -> bool:
    """Whether a float16 value is summed in float32 and the sum rounded."""
    return is_half(node) and node.target in REDUCTIONS and node.target is not PARTIAL


def _kernel(
    text: KernelText, node: fx.Node, body: Sequence[str], grid: tuple[int, int, int]
) -> Kernel:
    shader = Shader(text.module(body, node), len(text.buffers) + 1)
    return Kernel(shader, tuple(text.buffers), (node,), grid, _label(node))


def _label(node: fx.Node) -> str:
    module = node.meta.get("module", "")
    return f"{module}:{node.name}" if module else node.name


def _refuse_long_loops(node: fx.Node, iterations: int) -> None:
    if iterations > _LOOP_ITERATIONS:
        raise NoRule(node, f"over {iterations} terms, more than {_LOOP_ITERATIONS}")


def _row_coordinates(shape: tuple[int, ...], rows: int, columns: int) -> list[Coordinate]:
    """Return the coordinates of element `r` of row `i`.

    Raises:
        NotFusable: The shape has no such rows.
    """
    for axis in range(len(shape) + 1):
        if math.prod(shape[axis:]) == columns and math.prod(shape[:axis]) == rows:
            outer, inner = shape[:axis], shape[axis:]
            return [
                *split_index(as_coordinate("i", rows), outer),
                *split_index(as_coordinate("r", columns), inner),
            ]
    raise NotFusable


def _invocations(count: int) -> tuple[list[str], tuple[int, int, int]]:
    """Return code that declares `i` with one invocation per element, and the grid.

    A long grid is folded into y.
    """
    grid = _folded_grid(-(-count // _WORKGROUP))
    across = grid[0] * _WORKGROUP
    number = "id.x" if grid[1] == 1 else f"id.x + id.y * {across}u"
    return [f"let i = {number};", f"if (i >= {count}u) {{ return; }}"], grid


def _folded_grid(workgroups: int) -> tuple[int, int, int]:
    if workgroups <= WORKGROUPS_PER_DIMENSION:
        return max(workgroups, 1), 1, 1
    return WORKGROUPS_PER_DIMENSION, -(-workgroups // WORKGROUPS_PER_DIMENSION), 1


def is_known(node: fx.Node) -> bool:
    """Whether there is a rule for the operator; a rule may still refuse its arguments."""
    targets = REDUCTIONS | MATMULS | ATTENTIONS | SCATTERS | SCANS
    return node.target in targets or node.target in _RULES or is_view(node) or is_copy(node)
