"""Describe the problem and the operands of attention and matmul nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

from torch import fx

from backends.wgpu.graph.halves import is_half
from backends.wgpu.graph.opaque import (
    ATTENTION,
    ATTENTION_KEYS,
    ATTENTION_QUERIES,
    JOINED_PRODUCTS,
    SUM_OF_PRODUCTS,
)
from backends.wgpu.graph.values import scalar_of, shape_of
from backends.wgpu.graph.views import strided_view
from backends.wgpu.shaders.attention.problem import (
    AttentionKernel,
    AttentionProblem,
    AttentionSizes,
    View,
)
from backends.wgpu.shaders.matmul.shader import Result

_KERNELS: Final[dict[Any, AttentionKernel]] = {
    ATTENTION: "forward",
    ATTENTION_QUERIES: "queries",
    ATTENTION_KEYS: "keys",
}


def attention_problem(
    node: fx.Node, buffers: Collection[fx.Node]
) -> tuple[AttentionProblem, tuple[fx.Node, ...]]:
    """Return the node's problem, and its inputs' buffers in the order of bindings."""
    tensors: list[Any] = list(node.args[:-2])
    scale, causal = node.args[-2:]
    strided_views = [None if x is None else strided_view(x, buffers, widens=True) for x in tensors]
    views = [
        None if x is None else View(x.strides, x.offset, is_half(x.base)) for x in strided_views
    ]
    query, key, value, mask, *gradient_views = views
    _packed, grad_output, delta = gradient_views or (None, None, None)
    assert query is not None
    assert key is not None
    assert value is not None
    (batch, heads, queries, size), (_, groups, keys, _) = map(shape_of, tensors[:2])
    problem = AttentionProblem(
        _KERNELS[node.target],
        AttentionSizes(batch, heads, groups, queries, keys, size),
        query,
        key,
        value,
        mask,
        mask is not None and scalar_of(tensors[3]) == "bool",
        grad_output,
        delta,
        float(scale),  # type: ignore[arg-type]
        bool(causal),
    )
    return problem, tuple(x.base for x in strided_views if x is not None)


def list_products(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, Result | None]]:
    """Yield (left, right, layout of the product) for each product, in order of execution.

    The node is a product, JOINED_PRODUCTS, each of whose products fills columns of the output, or
    SUM_OF_PRODUCTS, which adds each product to the previous ones.
    """
    lefts: Any
    rights: Any
    lefts, rights = node.args
    row = shape_of(node)[-1]
    if node.target is JOINED_PRODUCTS:
        column = 0
        for right in rights:
            yield lefts, right, Result(row, column)
            column += shape_of(right)[1]
    elif node.target is SUM_OF_PRODUCTS:
        for number, (left, right) in enumerate(zip(lefts, rights, strict=True)):
            yield left, right, Result(row, accumulates=number > 0)
    else:
        yield lefts, rights, None
