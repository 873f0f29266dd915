"""float16 in a graph: which values a device holds in it, and casts that cost no kernel.

A product's operands are rounded to float16 and widened again, and so is its result: see
`backends.wgpu.capture.half_products`. Between a rounding and a widening the value lies in memory in
two bytes; what reads it widens it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import fx

_CAST: Final = torch.ops.aten._to_copy.default  # noqa: SLF001
_META: Final = "half"


def hold_halves(nodes: Iterable[fx.Node]) -> None:
    """Note of each value in float16 that its buffer has two bytes for an element."""
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype == torch.float16:
            node.meta[_META] = True


def is_half(node: fx.Node) -> bool:
    """Whether its buffer has two bytes for an element."""
    return bool(node.meta.get(_META))


def is_widening(node: fx.Node) -> bool:
    """Whether the node is a value so held, in float32."""
    if node.op != "call_function" or node.target is not _CAST:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return is_half(source) and node.meta["val"].dtype == torch.float32


def is_rounding(node: fx.Node) -> bool:
    """Whether the node is a float32 value rounded to float16."""
    if node.op != "call_function" or node.target is not _CAST or not is_half(node):
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return bool(source.meta["val"].dtype == torch.float32)


def words_of(node: fx.Node, elements: int) -> int:
    """Words of four bytes that so many elements of the value take."""
    return -(-elements // 2) if is_half(node) else elements
