"""Writes the body of one kernel: what is read from which buffer, and statements in order.

A value is either read from its buffer or computed in place, by the rule of its operator, at the
coordinates where it is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from backends.wgpu.graph.halves import is_half
from backends.wgpu.graph.index import Coordinate, broadcast, linear
from backends.wgpu.graph.values import (
    STORED,
    NoRule,
    Scalar,
    converted,
    elements_of,
    literal,
    scalar_of,
    shape_of,
)
from backends.wgpu.graph.views import Coordinates, above, is_copy, is_view, through
from backends.wgpu.shaders.functions import called
from backends.wgpu.shaders.narrow import form_of

_NUMBER: Final = re.compile(r"[fi]32\(-?[\d.]+(?:e[+-]?\d+)?\)")

Terms = frozenset[tuple[int, str]]
"""Of a sum: 1 or -1, and a name or a number."""

Rule = Callable[["KernelText", fx.Node, Coordinates], str]


class ReadElsewhere(Exception):
    """A value that a kernel has in registers is wanted from another place."""


class KernelText:
    """One kernel in the making.

    Attributes:
        lines: Statements, in order.
        buffers: What is read, by binding.
        registers: Values that the kernel has: at which linear index, and their expressions.
        looks_up: Whether an index is a number that a buffer holds.
    """

    def __init__(
        self,
        rules: Mapping[Any, Rule],
        buffers: Collection[fx.Node],
        folded: Mapping[fx.Node, torch.Tensor],
    ) -> None:
        self.lines: list[str] = []
        self.buffers: dict[fx.Node, str] = {}
        self.registers: dict[fx.Node, tuple[str, str]] = {}
        self.looks_up = False
        self._rules = rules
        self._in_memory = buffers
        self._folded = folded
        self._known: dict[tuple[fx.Node, tuple[str, ...]], str] = {}
        self._terms: dict[str, Terms] = {}
        self._names = 0

    def scope(self) -> KernelText:
        """Of an inner block: with statements of its own, over the same buffers and registers."""
        inner = KernelText(self._rules, self._in_memory, self._folded)
        inner.buffers, inner.registers = self.buffers, self.registers
        return inner

    def let(self, expression: str) -> str:
        """A name for the expression's value; numbers stay, so that rules see zeros."""
        if expression.isidentifier() or _NUMBER.fullmatch(expression):
            return expression
        self._names += 1
        self.lines.append(f"let t{self._names} = {expression};")
        return f"t{self._names}"

    def let_sum(self, expression: str, terms: Terms) -> str:
        """A name for a sum."""
        name = self.let(expression)
        self._terms[name] = terms
        return name

    def terms_of(self, name: str, *, turned: bool = False) -> Terms:
        """What a value, or that negated, is the sum of: itself, if nothing else is known."""
        terms = self._terms.get(name, frozenset({(1, name)}))
        return frozenset((-sign, each) for sign, each in terms) if turned else terms

    def buffer(self, node: fx.Node) -> str:
        """The name of a value's buffer."""
        return self.buffers.setdefault(node, f"b{len(self.buffers)}")

    def argument(self, value: object, coordinates: Coordinates, want: Scalar) -> str:
        """An operand, broadcast against the result: a tensor's element, or a number."""
        if not isinstance(value, fx.Node):
            return literal(value, want)
        return self.element(value, broadcast(coordinates, shape_of(value)), want)

    def element(self, node: fx.Node, coordinates: Coordinates, want: Scalar | None = None) -> str:
        """One element of a value."""
        key = (node, tuple(map(str, coordinates)))
        if key not in self._known:
            self._known[key] = self._element(node, coordinates)
        expression = self._known[key]
        return expression if want is None else converted(expression, scalar_of(node), want)

    def index(
        self, node: object, coordinates: Coordinates, size: int, *, from_end: bool = False
    ) -> tuple[Coordinate, str]:
        """An element of a tensor of indices as a coordinate, and whether there is such a place.

        Args:
            node: The tensor.
            coordinates: Where in it.
            size: How many places there are; the coordinate is 0 for what is none of them.
            from_end: Whether negative ones count from the end, or are no places.
        """
        assert isinstance(node, fx.Node)
        self.looks_up = True
        value = self.element(node, broadcast(coordinates, shape_of(node)), "i32")
        if from_end:
            value = self.let(f"select({value}, {value} + {size}, {value} < 0)")
        there = self.let(f"({value} >= 0 && {value} < {size})")
        return Coordinate(self.let(f"select(0u, u32({value}), {there})"), 1, None, size), there

    def computed(self, node: fx.Node, coordinates: Coordinates) -> str:
        """One element, computed though the value may have a buffer: the kernel that fills it."""
        if is_view(node):
            return self.element(above(node), through(node, coordinates))
        if is_copy(node):
            return self.element(above(node), coordinates)
        rule = self._rules.get(node.target)
        if rule is None:
            raise NoRule(node)
        sized = [c.sized(size) for c, size in zip(coordinates, shape_of(node), strict=True)]
        return self.let(rounded(rule(self, node, sized), node))

    def _element(self, node: fx.Node, coordinates: Coordinates) -> str:
        if node in self._folded and elements_of(node) == 1:
            return literal(self._folded[node].item(), scalar_of(node))
        if node not in self._in_memory:
            return self.computed(node, coordinates)
        shape = shape_of(node)
        sized = [c.sized(size) for c, size in zip(coordinates, shape, strict=True)]
        if node in self.registers:
            place, value = self.registers[node]
            if str(linear(sized)) != place:
                raise ReadElsewhere
            return self.let(value)
        form = form_of(node)
        if form is not None:
            self.looks_up |= form.looks_up
            return self.let(f"{self.buffer(node)}_at({linear(sized)})")
        read = f"{self.buffer(node)}[{linear(sized)}]"
        read = f"f32({read})" if is_half(node) else read
        return self.let(f"({read} != 0u)" if scalar_of(node) == "bool" else read)

    def declared(self) -> tuple[tuple[str, ...], str]:
        """Types of the buffers, in order, and the functions that the lines call."""
        helpers = called("\n".join(self.lines)) + self._widening()
        return tuple(f"array<{_held(node)}>" for node in self.buffers), "\n".join(helpers)

    def _widening(self) -> list[str]:
        return [
            form.one(f"{name}_at", name)
            for node, name in self.buffers.items()
            if (form := form_of(node)) is not None
        ]

    def module(self, body: Sequence[str], output: fx.Node) -> str:
        """The whole shader: declarations, helpers, and `main` around the body."""
        return self._module(body, {"out": held_type(output)}, scalar_of(output))

    def module_of(self, body: Sequence[str], written: Sequence[fx.Node]) -> str:
        """The same with these outputs, `e0`, `e1` and so on."""
        held = {f"e{i}": held_type(node) for i, node in enumerate(written)}
        return self._module(body, held, "f32")

    def _module(self, body: Sequence[str], outputs: Mapping[str, str], folded: Scalar) -> str:
        text = "\n".join(f"  {line}" for line in body)
        read = {name: ("read", _held(node)) for node, name in self.buffers.items()}
        written = {name: ("read_write", held) for name, held in outputs.items()}
        declared = [
            f"@group(0) @binding({i}) var<storage, {access}> {name}: array<{held}>;"
            for i, (name, (access, held)) in enumerate((read | written).items())
        ]
        if "shared_sums[" in text:
            declared.append(f"var<workgroup> shared_sums: array<{folded}, 64>;")
        helpers = called(text) + self._widening()
        entry = (
            "@compute @workgroup_size(64)\n"
            "fn main(@builtin(global_invocation_id) id: vec3u,\n"
            "  @builtin(local_invocation_id) local: vec3u, @builtin(workgroup_id) group: vec3u) {"
        )
        return "\n".join([*declared, *helpers, entry, text, "}\n"])


def _held(node: fx.Node) -> str:
    return "u32" if form_of(node) is not None else held_type(node)


def held_type(node: fx.Node) -> str:
    """The type of the elements of a value's buffer."""
    return "f16" if is_half(node) else STORED[scalar_of(node)]


def stored(expression: str, node: fx.Node) -> str:
    """A value as its buffer keeps it; one in float16 is rounded to that already."""
    if is_half(node):
        return f"f16({expression})"
    return f"select(0u, 1u, {expression})" if scalar_of(node) == "bool" else expression


def where_there(value: str, there: Sequence[str], scalar: Scalar) -> str:
    """A value that is read at indices, where torch refuses those that are no places: here it is no
    number then, which ends the step, or the lowest whole number, which is no place either."""
    if scalar == "bool":
        return value
    other = literal(-math.inf if scalar == "i32" else math.nan, scalar)
    return f"select({other}, {value}, {' && '.join(there)})"


def rounded(expression: str, node: fx.Node) -> str:
    """A result as its type holds it: the device has but one type of floats, and one of integers."""
    form = _ROUNDED.get(node.meta["val"].dtype)
    return form.format(expression) if form else expression


_ROUNDED: Final[Mapping[torch.dtype, str]] = {
    torch.float16: "to_float16({0})",
    torch.bfloat16: "to_bfloat16({0})",
    torch.uint8: "({0} & 255)",
    torch.int8: "(({0} << 24u) >> 24u)",
    torch.int16: "(({0} << 16u) >> 16u)",
}
