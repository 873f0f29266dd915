"""What a node of a graph stands for on the device: a shape, and one of three types.

Integers of 64 bits become i32 (token numbers, positions; the upload checks their range), truth
values are kept as u32, and every float is computed in f32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from torch import fx

from protocol.base.errors import SamestepError

Scalar = Literal["f32", "i32", "bool"]

_SCALARS: Final[dict[torch.dtype, Scalar]] = {
    torch.float32: "f32",
    torch.float16: "f32",
    torch.bfloat16: "f32",
    torch.int64: "i32",
    torch.int32: "i32",
    torch.int16: "i32",
    torch.int8: "i32",
    torch.uint8: "i32",
    torch.bool: "bool",
}

HALVES: Final = frozenset({torch.float16, torch.bfloat16})

STORED: Final[dict[Scalar, str]] = {"f32": "f32", "i32": "i32", "bool": "u32"}
"""The type of a buffer's elements: 4 bytes each."""

NO_MODULE: Final = "the model's own forward, the loss, or the backward"
"""Where an operator came from that is in no part of the model."""
_NAMED: Final = 7
"""Operators without a rule that are named beside the first."""
_REMEDIES: Final = (
    (
        "_weight_norm_",
        "write weight norm out in forward: of a linear layer, g * v / v.norm(dim=1, keepdim=True)",
    ),
    ("_fft_", "take Fourier transforms where the batch is made, if nothing trained comes before"),
)
"""How torch's names of operators begin that stand for what a user calls otherwise, and what to
write instead."""


class NoRule(SamestepError):
    """An operator that the backend cannot compute.

    Attributes:
        operator: As torch calls it.
        shape: Of its result.
        module: Where in the model it came from.
        others: More of them, that were found with it.
    """

    def __init__(self, node: fx.Node, reason: str = "") -> None:
        value = node.meta.get("val")
        self.operator = str(node.target).removeprefix("aten.")
        first = value[0] if isinstance(value, list | tuple) and value else value
        self.shape = tuple(first.shape) if isinstance(first, torch.Tensor) else ()
        self.module = str(node.meta.get("module", "")) or NO_MODULE
        self.reason = reason
        self.others: tuple[NoRule, ...] = ()
        super().__init__(self.operator, self.shape, self.module, reason)

    def __str__(self) -> str:
        return self.told("the vulkan backend", "a cpu or cuda worker")

    def told(self, by: str, instead: str) -> str:
        """In one line.

        Args:
            by: Who has no rule.
            instead: What to use for the model.
        """
        named = f"{_named(self)}, which gives shape {list(self.shape)} in {self.module}"
        if self.others:
            rest = [_named(each) + self._elsewhere(each) for each in self.others[:_NAMED]]
            more = len(self.others) - len(rest)
            named += f"; nor for {', '.join(rest)}{f' and {more} more' if more else ''}"
        operators = [each.operator for each in (self, *self.others)]
        ways = [way for begin, way in _REMEDIES if any(op.startswith(begin) for op in operators)]
        what = ", or ".join([*ways, f"use {instead}"])
        return f"{by} has no rule for {named}; {what} for this model"

    def _elsewhere(self, other: NoRule) -> str:
        return "" if other.module == self.module else f" in {other.module}"


def _named(one: NoRule) -> str:
    return f"{one.operator!r} ({one.reason})" if one.reason else repr(one.operator)


def all_of(found: Sequence[NoRule]) -> NoRule:
    """The first of at least one, with the others: each operator once."""
    named: dict[str, NoRule] = {}
    for each in found:
        for one in (each, *each.others):
            named.setdefault(one.operator, one)
    first, *others = named.values()
    first.others = tuple(others)
    return first


def arrays_of(graph: fx.GraphModule, arrays: Sequence[str]) -> dict[fx.Node, str]:
    """The last placeholders of a traced graph, and the arrays, in order, that they stand for."""
    holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return dict(zip(holders[len(holders) - len(arrays) :], arrays, strict=True))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of the tensor that the node gives."""
    return tuple(int(size) for size in node.meta["val"].shape)


def scalar_of(node: fx.Node) -> Scalar:
    """The type of its elements.

    Raises:
        NoRule: The device has no such type.
    """
    dtype = node.meta["val"].dtype
    if dtype not in _SCALARS:
        raise NoRule(node, f"{str(dtype).removeprefix('torch.')} is not a type of the device")
    return _SCALARS[dtype]


def elements_of(node: fx.Node) -> int:
    """How many there are."""
    return math.prod(shape_of(node))


def literal(value: object, scalar: Scalar) -> str:
    """A number of Python's as WGSL. Infinities are made from bits: WGSL has no word for them."""
    if scalar == "bool":
        return "true" if value else "false"
    if scalar == "i32":
        return f"i32({_whole(value)})"
    number = float(value)  # type: ignore[arg-type]
    if math.isinf(number):
        return f"infinity({'0x80000000u' if number < 0 else '0u'})"
    if math.isnan(number):
        return "not_a_number(0u)"
    rounded = float(torch.tensor(number, dtype=torch.float32))
    if math.isinf(rounded):
        return literal(rounded, scalar)
    return f"f32({rounded!r})"


def _whole(value: Any) -> int:
    """A whole number of 32 bits; an infinity is the last of them.

    Raises:
        SamestepError: It takes more.
    """
    if isinstance(value, float) and math.isinf(value):
        return -(2**31) if value < 0 else 2**31 - 1
    if not -(2**31) <= int(value) < 2**31:
        raise SamestepError(
            f"the vulkan backend computes with whole numbers of 32 bits, but the model or its loss "
            f"names {int(value)}; use a cpu or cuda worker for this model"
        )
    return int(value)


def converted(expression: str, have: Scalar, want: Scalar) -> str:
    """A cast. Of a float: what is no number is true too, and `!=` would say that it is not."""
    if have == want:
        return expression
    if want == "bool":
        return f"!({expression} == {literal(0, have)})"
    if have == "bool":
        return f"select({literal(0, want)}, {literal(1, want)}, {expression})"
    return f"{want}({expression})"
