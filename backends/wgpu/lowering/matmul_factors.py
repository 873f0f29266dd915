"""What a node of a graph multiplies: one product, or those with a matrix that lies in parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from backends.wgpu.graph.opaque import PRODUCTS_BESIDE, SUM_OF_PRODUCTS
from backends.wgpu.graph.values import shape_of
from backends.wgpu.shaders.matmul.shader import Result


def factors(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, Result | None]]:
    """Left, right and where their product goes, in the order in which they must run.

    Products beside each other each fill columns of the output. In a sum of products each is added
    to those before it.
    """
    one: Any
    two: Any
    one, two = node.args
    row = shape_of(node)[-1]
    if node.target is PRODUCTS_BESIDE:
        column = 0
        for right in two:
            yield one, right, Result(row, column)
            column += shape_of(right)[1]
    elif node.target is SUM_OF_PRODUCTS:
        for number, (left, right) in enumerate(zip(one, two, strict=True)):
            yield left, right, Result(row, onto=number > 0)
    else:
        yield one, two, None
