"""Shape and device type of a graph's nodes.

64-bit integers become i32 (token ids, positions; the upload checks their range), booleans are
stored as u32, and every float is computed in f32.
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

HALF_DTYPES: Final = frozenset({torch.float16, torch.bfloat16})

BUFFER_TYPES: Final[dict[Scalar, str]] = {"f32": "f32", "i32": "i32", "bool": "u32"}
"""The type of a buffer's elements, 4 bytes each."""

NO_MODULE: Final = "the model's own forward, the loss, or the backward"
"""Description of the origin of an operator that belongs to no submodule."""
_FURTHER_OPERATORS: Final = 7
"""Limit on the further operators without a rule that an error names."""
_REMEDIES: Final = (
    (
        "_weight_norm_",
        "compute weight norm in forward: for a linear layer, g * v / v.norm(dim=1, keepdim=True)",
    ),
    (
        "_fft_",
        "compute Fourier transforms where the batch is made, if no trained layer precedes them",
    ),
)
"""(prefix of an operator's name, replacement), for operators that users know by another name."""


class NoRule(SamestepError):
    """An operator that the backend cannot compute.

    Attributes:
        operator: Torch's name of the operator.
        shape: Shape of the operator's result.
        module: The submodule that the operator belongs to.
        reason: Why the operator has no rule; may be empty.
        further: Further operators without a rule.
    """

    def __init__(self, node: fx.Node, reason: str = "") -> None:
        value = node.meta.get("val")
        self.operator = str(node.target).removeprefix("aten.")
        first_value = value[0] if isinstance(value, list | tuple) and value else value
        self.shape = tuple(first_value.shape) if isinstance(first_value, torch.Tensor) else ()
        self.module = str(node.meta.get("module", "")) or NO_MODULE
        self.reason = reason
        self.further: tuple[NoRule, ...] = ()
        super().__init__(self.operator, self.shape, self.module, reason)

    def __str__(self) -> str:
        return self.message("the vulkan backend", "a cpu or cuda worker")

    def message(self, backend: str, alternative: str) -> str:
        """Return the error's text in one line.

        Args:
            backend: The backend without a rule.
            alternative: The backend that the text recommends.
        """
        description = (
            f"{_operator_text(self)}, which gives shape {list(self.shape)} in {self.module}"
        )
        if self.further:
            further_texts = [
                _operator_text(error) + self._location(error)
                for error in self.further[:_FURTHER_OPERATORS]
            ]
            count = len(self.further) - len(further_texts)
            description += (
                f"; nor for {', '.join(further_texts)}{f' and {count} more' if count else ''}"
            )
        operators = [error.operator for error in (self, *self.further)]
        advice = [
            remedy for prefix, remedy in _REMEDIES if any(op.startswith(prefix) for op in operators)
        ]
        remedies = ", or ".join([*advice, f"use {alternative}"])
        return f"{backend} has no rule for {description}; {remedies} for this model"

    def _location(self, error: NoRule) -> str:
        return "" if error.module == self.module else f" in {error.module}"


def _operator_text(error: NoRule) -> str:
    return f"{error.operator!r} ({error.reason})" if error.reason else repr(error.operator)


def combine_errors(errors: Sequence[NoRule]) -> NoRule:
    """Combine errors into the first error, which lists each further operator once."""
    by_operator: dict[str, NoRule] = {}
    for no_rule in errors:
        for error in (no_rule, *no_rule.further):
            by_operator.setdefault(error.operator, error)
    first_error, *other_errors = by_operator.values()
    first_error.further = tuple(other_errors)
    return first_error


def array_names_by_node(graph: fx.GraphModule, arrays: Sequence[str]) -> dict[fx.Node, str]:
    """Map the last placeholders of a traced graph to the names of the arrays, in order."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return dict(zip(placeholders[len(placeholders) - len(arrays) :], arrays, strict=True))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of the node's tensor."""
    return tuple(int(size) for size in node.meta["val"].shape)


def scalar_of(node: fx.Node) -> Scalar:
    """Return the device type of the node's elements.

    Raises:
        NoRule: The device does not support the dtype.
    """
    dtype = node.meta["val"].dtype
    if dtype not in _SCALARS:
        raise NoRule(node, f"{str(dtype).removeprefix('torch.')} is not a type of the device")
    return _SCALARS[dtype]


def elements_of(node: fx.Node) -> int:
    """Return the number of elements."""
    return math.prod(shape_of(node))


def literal(value: object, scalar: Scalar) -> str:
    """Return a Python number as WGSL. Infinities, which have no literal, are built from bits."""
    if scalar == "bool":
        return "true" if value else "false"
    if scalar == "i32":
        return f"i32({_to_int32(value)})"
    number = float(value)  # type: ignore[arg-type]
    if math.isinf(number):
        return f"infinity({'0x80000000u' if number < 0 else '0u'})"
    if math.isnan(number):
        return "not_a_number(0u)"
    as_float32 = float(torch.tensor(number, dtype=torch.float32))
    if math.isinf(as_float32):
        return literal(as_float32, scalar)
    return f"f32({as_float32!r})"


def _to_int32(value: Any) -> int:
    """Convert to a 32-bit integer; infinities saturate.

    Raises:
        SamestepError: The number needs more bits.
    """
    if isinstance(value, float) and math.isinf(value):
        return -(2**31) if value < 0 else 2**31 - 1
    if not -(2**31) <= int(value) < 2**31:
        raise SamestepError(
            f"expected 32-bit integers in the model and its loss, got {int(value)}, which the "
            "vulkan backend does not support; use a cpu or cuda worker for this model"
        )
    return int(value)


def cast(expression: str, source: Scalar, target: Scalar) -> str:
    """Return a cast as WGSL. NaN becomes true, as in torch; with `!=` it would become false."""
    if source == target:
        return expression
    if target == "bool":
        return f"!({expression} == {literal(0, source)})"
    if source == "bool":
        return f"select({literal(0, target)}, {literal(1, target)}, {expression})"
    return f"{target}({expression})"
