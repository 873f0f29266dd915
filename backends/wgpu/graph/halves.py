"""float16 values in a graph, and casts that need no separate kernel.

A product's operands and its result are rounded to float16 and converted back to float32: see
`backends.wgpu.capture.half_products`. In between, a value is stored in two bytes, and kernels that
read the value widen it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import fx

_CAST: Final = torch.ops.aten._to_copy.default  # noqa: SLF001
_META: Final = "half"


def mark_float16(nodes: Iterable[fx.Node]) -> None:
    """Mark float16 values as stored in two bytes per element."""
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype == torch.float16:
            node.meta[_META] = True


def is_half(node: fx.Node) -> bool:
    """Whether the value is stored in two bytes per element."""
    return bool(node.meta.get(_META))


def is_widening(node: fx.Node) -> bool:
    """Whether the node widens a stored float16 value to float32."""
    if node.op != "call_function" or node.target is not _CAST:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return is_half(source) and node.meta["val"].dtype == torch.float32


def is_rounding(node: fx.Node) -> bool:
    """Whether the node rounds a float32 value to float16."""
    if node.op != "call_function" or node.target is not _CAST or not is_half(node):
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return bool(source.meta["val"].dtype == torch.float32)


def word_count(node: fx.Node, elements: int) -> int:
    """Return the number of 4-byte words for `elements` elements of the value."""
    return -(-elements // 2) if is_half(node) else elements
