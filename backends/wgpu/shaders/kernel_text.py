"""Generate the WGSL of one kernel.

A value is either read from its buffer or computed inline by its operator's rule, at the coordinates
where it is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from backends.wgpu.graph.halves import is_half
from backends.wgpu.graph.index import Coordinate, broadcast, linear_index
from backends.wgpu.graph.values import (
    BUFFER_TYPES,
    NoRule,
    Scalar,
    cast,
    elements_of,
    literal,
    scalar_of,
    shape_of,
)
from backends.wgpu.graph.views import Coordinates, is_copy, is_view, map_to_source, source_of
from backends.wgpu.shaders.functions import called_functions
from backends.wgpu.shaders.quantized_layout import quantized_layout_of

_NUMBER: Final = re.compile(r"[fi]32\(-?[\d.]+(?:e[+-]?\d+)?\)")

Terms = frozenset[tuple[int, str]]
"""Terms of a sum: (1 or -1, a name or a number)."""

Rule = Callable[["KernelText", fx.Node, Coordinates], str]


class NotFusable(Exception):
    """Values cannot be computed in one kernel, for example because a value in registers is read at
    another index."""


class KernelText:
    """Builder of one kernel.

    Attributes:
        lines: Statements so far.
        buffers: Values that are read, with the names of their bindings.
        registers: Values in registers: their linear index and expression.
        reads_indices: Whether an index is read from a buffer.
    """

    def __init__(
        self,
        rules: Mapping[Any, Rule],
        buffers: Collection[fx.Node],
        constants: Mapping[fx.Node, torch.Tensor],
    ) -> None:
        self.lines: list[str] = []
        self.buffers: dict[fx.Node, str] = {}
        self.registers: dict[fx.Node, tuple[str, str]] = {}
        self.reads_indices = False
        self._rules = rules
        self._buffered_values = buffers
        self._constants = constants
        self._elements: dict[tuple[fx.Node, tuple[str, ...]], str] = {}
        self._terms: dict[str, Terms] = {}
        self._name_count = 0

    def inner_scope(self) -> KernelText:
        """Return a builder for an inner block, which shares buffers and registers."""
        inner = KernelText(self._rules, self._buffered_values, self._constants)
        inner.buffers, inner.registers = self.buffers, self.registers
        return inner

    def let(self, expression: str) -> str:
        """Bind the expression to a name, and return the name. Names are returned unchanged, and so
        are literals, so that rules can recognize zeros."""
        if expression.isidentifier() or _NUMBER.fullmatch(expression):
            return expression
        self._name_count += 1
        self.lines.append(f"let t{self._name_count} = {expression};")
        return f"t{self._name_count}"

    def let_sum(self, expression: str, terms: Terms) -> str:
        """Bind a sum to a name and store the sum's terms."""
        name = self.let(expression)
        self._terms[name] = terms
        return name

    def terms_of(self, name: str, *, is_negated: bool = False) -> Terms:
        """Return the terms of a value, negated if `is_negated`; the value itself if it is no known
        sum."""
        terms = self._terms.get(name, frozenset({(1, name)}))
        return frozenset((-sign, term) for sign, term in terms) if is_negated else terms

    def buffer(self, node: fx.Node) -> str:
        """Return the name of a value's buffer, and add the buffer if necessary."""
        return self.buffers.setdefault(node, f"b{len(self.buffers)}")

    def argument(self, value: object, coordinates: Coordinates, target: Scalar) -> str:
        """Return an operand's element, broadcast against the result, or a literal."""
        if not isinstance(value, fx.Node):
            return literal(value, target)
        return self.element(value, broadcast(coordinates, shape_of(value)), target)

    def element(self, node: fx.Node, coordinates: Coordinates, target: Scalar | None = None) -> str:
        """Return one element of a value."""
        key = (node, tuple(map(str, coordinates)))
        if key not in self._elements:
            self._elements[key] = self._element(node, coordinates)
        expression = self._elements[key]
        return expression if target is None else cast(expression, scalar_of(node), target)

    def index(
        self, node: object, coordinates: Coordinates, size: int, *, from_end: bool = False
    ) -> tuple[Coordinate, str]:
        """Read an index from a tensor; return it as a coordinate, and the condition that it is
        valid.

        Args:
            node: The tensor of indices.
            coordinates: The element to read.
            size: Size of the indexed dimension; an invalid index becomes coordinate 0.
            from_end: Whether negative indices count from the end; otherwise they are invalid.
        """
        assert isinstance(node, fx.Node)
        self.reads_indices = True
        value = self.element(node, broadcast(coordinates, shape_of(node)), "i32")
        if from_end:
            value = self.let(f"select({value}, {value} + {size}, {value} < 0)")
        is_valid = self.let(f"({value} >= 0 && {value} < {size})")
        return Coordinate(
            self.let(f"select(0u, u32({value}), {is_valid})"), 1, None, size
        ), is_valid

    def compute(self, node: fx.Node, coordinates: Coordinates) -> str:
        """Compute one element even if the value has a buffer: for the kernel that fills the
        buffer."""
        if is_view(node):
            return self.element(source_of(node), map_to_source(node, coordinates))
        if is_copy(node):
            return self.element(source_of(node), coordinates)
        rule = self._rules.get(node.target)
        if rule is None:
            raise NoRule(node)
        sized_coordinates = [
            c.with_size(size) for c, size in zip(coordinates, shape_of(node), strict=True)
        ]
        return self.let(round_to_type(rule(self, node, sized_coordinates), node))

    def _element(self, node: fx.Node, coordinates: Coordinates) -> str:
        if node in self._constants and elements_of(node) == 1:
            return literal(self._constants[node].item(), scalar_of(node))
        if node not in self._buffered_values:
            return self.compute(node, coordinates)
        shape = shape_of(node)
        sized_coordinates = [c.with_size(size) for c, size in zip(coordinates, shape, strict=True)]
        if node in self.registers:
            index, value = self.registers[node]
            if str(linear_index(sized_coordinates)) != index:
                raise NotFusable
            return self.let(value)
        form = quantized_layout_of(node)
        if form is not None:
            self.reads_indices |= form.uses_table
            return self.let(f"{self.buffer(node)}_at({linear_index(sized_coordinates)})")
        element = f"{self.buffer(node)}[{linear_index(sized_coordinates)}]"
        element = f"f32({element})" if is_half(node) else element
        return self.let(f"({element} != 0u)" if scalar_of(node) == "bool" else element)

    def declarations(self) -> tuple[tuple[str, ...], str]:
        """Return the types of the buffers, in order, and the functions that the lines call."""
        helpers = called_functions("\n".join(self.lines)) + self._quantized_readers()
        return tuple(f"array<{_element_type(node)}>" for node in self.buffers), "\n".join(helpers)

    def _quantized_readers(self) -> list[str]:
        return [
            form.scalar_reader(f"{name}_at", name)
            for node, name in self.buffers.items()
            if (form := quantized_layout_of(node)) is not None
        ]

    def module(self, body: Sequence[str], output: fx.Node) -> str:
        """Return the shader's source: declarations, helper functions, and `main` with the body."""
        return self._module(body, {"out": element_type_of(output)}, scalar_of(output))

    def module_of(self, body: Sequence[str], outputs: Sequence[fx.Node]) -> str:
        """Return the shader's source with several outputs, named `e0`, `e1` and so on."""
        element_types = {f"e{i}": element_type_of(node) for i, node in enumerate(outputs)}
        return self._module(body, element_types, "f32")

    def _module(self, body: Sequence[str], outputs: Mapping[str, str], shared_type: Scalar) -> str:
        text = "\n".join(f"  {line}" for line in body)
        read_bindings = {name: ("read", _element_type(node)) for node, name in self.buffers.items()}
        outputs_access = {name: ("read_write", element) for name, element in outputs.items()}
        declarations = [
            f"@group(0) @binding({i}) var<storage, {access}> {name}: array<{element}>;"
            for i, (name, (access, element)) in enumerate((read_bindings | outputs_access).items())
        ]
        if "shared_sums[" in text:
            declarations.append(f"var<workgroup> shared_sums: array<{shared_type}, 64>;")
        helpers = called_functions(text) + self._quantized_readers()
        entry = (
            "@compute @workgroup_size(64)\n"
            "fn main(@builtin(global_invocation_id) id: vec3u,\n"
            "  @builtin(local_invocation_id) local: vec3u, @builtin(workgroup_id) group: vec3u) {"
        )
        return "\n".join([*declarations, *helpers, entry, text, "}\n"])


def _element_type(node: fx.Node) -> str:
    return "u32" if quantized_layout_of(node) is not None else element_type_of(node)


def element_type_of(node: fx.Node) -> str:
    """Return the element type of a value's buffer."""
    return "f16" if is_half(node) else BUFFER_TYPES[scalar_of(node)]


def convert_for_storage(expression: str, node: fx.Node) -> str:
    """Convert a value to its buffer's element type; float16 values are already rounded."""
    if is_half(node):
        return f"f16({expression})"
    return f"select(0u, 1u, {expression})" if scalar_of(node) == "bool" else expression


def guard_value(value: str, conditions: Sequence[str], scalar: Scalar) -> str:
    """Guard a value that is read at indices from a buffer.

    torch refuses invalid indices; here they give NaN, which halts the step, or the lowest integer,
    which is an invalid index again.
    """
    if scalar == "bool":
        return value
    fallback = literal(-math.inf if scalar == "i32" else math.nan, scalar)
    return f"select({fallback}, {value}, {' && '.join(conditions)})"


def round_to_type(expression: str, node: fx.Node) -> str:
    """Round a result to its dtype: shaders compute in f32 and i32 only."""
    form = _ROUNDING.get(node.meta["val"].dtype)
    return form.format(expression) if form else expression


_ROUNDING: Final[Mapping[torch.dtype, str]] = {
    torch.float16: "to_float16({0})",
    torch.bfloat16: "to_bfloat16({0})",
    torch.uint8: "({0} & 255)",
    torch.int8: "(({0} << 24u) >> 24u)",
    torch.int16: "(({0} << 16u) >> 16u)",
}
