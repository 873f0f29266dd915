"""Rewrite a traced graph before lowering: its results stay the same, up to the rounding of sums."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from backends.wgpu.graph.decompositions import decompositions
from backends.wgpu.graph.opaque import PARTIAL
from backends.wgpu.graph.values import shape_of
from protocol.base.errors import SamestepError

_aten = torch.ops.aten
_FOLDED_ELEMENTS: Final = 1 << 20
"""Limit on the elements of a folded constant; the device computes larger constants itself."""

LOGGER: Final = "torch._subclasses.fake_tensor"
"""Name of the logger with which torch logs a stack trace if an operator cannot be traced."""
_IDENTITIES = frozenset({_aten.alias.default, _aten.detach.default, _aten.lift_fresh_copy.default})
_MULTIPLICATIONS = frozenset(
    {_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar}
)
_REDUCTIONS: Final[dict[Any, str]] = {
    _aten.sum.default: "sum",
    _aten.sum.dim_IntList: "sum",
    _aten.mean.default: "mean",
    _aten.mean.dim: "mean",
    _aten.amax.default: "amax",
    _aten.amin.default: "amin",
    _aten.any.default: "any",
    _aten.any.dim: "any",
    _aten.any.dims: "any",
}
_SECOND_STAGES: Final = {
    "sum": _aten.sum.dim_IntList,
    "mean": _aten.sum.dim_IntList,
    "amax": _aten.amax.default,
    "amin": _aten.amin.default,
    "any": _aten.any.dims,
}
"""Operators that reduce the results of the parts of a long reduction; those of a mean are sums."""
_MOST_TERMS: Final = 1 << 14
"""Reductions of more terms are split: Mesa's software Vulkan silently ends an invocation's loops
after 65,535 iterations, so this leaves room."""
_PARTS = frozenset({
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unbind.int,
})  # fmt: skip
_NOT_COMPUTABLE = frozenset({
    "samestep::attention",
    "samestep::attention_keys",
    "samestep::attention_queries",
    "samestep::joined_products",
    "samestep::keep",
    "samestep::layer_backward",
    "samestep::layer_forward",
    "samestep::partial",
    "samestep::sum_of_products",
    "samestep::uniform",
})  # fmt: skip
"""Operators that torch cannot compute, even for constant inputs."""


def simplify(graph: fx.GraphModule) -> fx.GraphModule:
    """Run all passes that need no values; they may modify the graph in place."""
    graph = _without_mutations(graph)
    _merge_equal_nodes(graph.graph)
    _rewrite(graph.graph)
    _merge_equal_nodes(graph.graph)
    graph.graph.eliminate_dead_code()
    return graph


def fold_constants(
    graph: fx.GraphModule, input_values: Mapping[fx.Node, torch.Tensor], *, portable: bool = False
) -> dict[fx.Node, torch.Tensor]:
    """Return the values of nodes that depend only on `input_values` and the graph's own tensors.

    Args:
        graph: A traced graph.
        input_values: Values of placeholders.
        portable: Whether to leave out results whose bits depend on the processor.
    """
    values: dict[fx.Node, Any] = {}
    constant_values: dict[fx.Node, torch.Tensor] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder" and node in input_values:
            values[node] = input_values[node]
        elif node.op == "get_attr":
            values[node] = constant_values[node] = getattr(graph, str(node.target))
            node.meta.setdefault("val", values[node])
        elif (
            node.op == "call_function"
            and _is_foldable(node, values)
            and not (portable and _varies_by_processor(node))
        ):
            args = fx.map_arg(node.args, values.__getitem__)
            kwargs = fx.map_arg(node.kwargs, values.__getitem__)
            values[node] = constant_values[node] = node.target(*args, **kwargs)
    return constant_values


def _is_foldable(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.numel() <= _FOLDED_ELEMENTS
        and _name(node) not in _NOT_COMPUTABLE
        and all(source in values for source in node.all_input_nodes)
    )


def _varies_by_processor(node: fx.Node) -> bool:
    """Whether torch's bits depend on the processor: transcendental functions and unordered sums."""
    return bool(node.meta["val"].is_floating_point()) and node.target in _INEXACT


_INEXACT: Final = frozenset({
    _aten.exp.default, _aten.exp2.default, _aten.expm1.default, _aten.log.default,
    _aten.log2.default, _aten.log1p.default, _aten.sin.default, _aten.cos.default,
    _aten.tanh.default, _aten.sigmoid.default, _aten.erf.default, _aten.rsqrt.default,
    _aten.pow.Tensor_Scalar, _aten.pow.Tensor_Tensor, _aten.pow.Scalar, _aten.mm.default,
    _aten.bmm.default, _aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default,
    _aten.mean.dim, _aten.cumsum.default,
})  # fmt: skip


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name)


def _without_mutations(graph: fx.GraphModule) -> fx.GraphModule:
    """Trace again with in-place operators replaced by functional ones, if there are any.

    Raises:
        SamestepError: Torch cannot replace the operators.
    """
    schemas = [getattr(node.target, "_schema", None) for node in graph.graph.nodes]
    if not any(schema is not None and schema.is_mutable for schema in schemas):
        return graph
    placeholder_values = [
        node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"
    ]
    with FakeTensorMode(allow_non_fake_inputs=True), silence_torch_log():
        fake_inputs = [torch.empty(value.shape, dtype=value.dtype) for value in placeholder_values]

        def run(*arguments: torch.Tensor) -> Any:
            return fx.Interpreter(graph).run(*arguments)

        functional: Callable[..., Any] = torch.func.functionalize(run, remove="mutations")
        retrace = make_fx(
            functional, decomposition_table=dict(decompositions()), tracing_mode="real"
        )
        try:
            return retrace(*fake_inputs)
        except Exception as error:
            reason = str(error).split("\n", maxsplit=1)[0][:400]
            raise SamestepError(
                "the vulkan backend cannot replace in-place operators by functional ones: "
                f"{type(error).__name__}: {reason}; use a cpu or cuda worker for this model"
            ) from error


def _merge_equal_nodes(graph: fx.Graph) -> None:
    """Merge nodes with equal operators and arguments."""
    unique: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        key = (node.target, _key(node.args), _key(node.kwargs))
        if key in unique:
            node.replace_all_uses_with(unique[key])
            graph.erase_node(node)
        else:
            unique[key] = node


def _key(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_key(item) for item in value)
    if isinstance(value, dict):
        return tuple(sorted((name, _key(item)) for name, item in value.items()))
    if isinstance(value, fx.Node):
        return value
    return type(value).__name__, str(value)


def _rewrite(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _IDENTITIES or _is_neutral(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in {_aten.var_mean.correction, _aten.var.correction}:
            _split_variance(graph, node)
        elif node.target in _PARTS:
            _split_parts(graph, node)
        elif node.target in _REDUCTIONS:
            _split_long_reduction(graph, node)
    graph.eliminate_dead_code()


def _is_neutral(node: fx.Node) -> bool:
    """Whether the node is x ** 1, x * 1, x / 1, or a cast or expand without effect."""
    if node.target is _aten.pow.Tensor_Scalar:
        return bool(node.args[1] == 1)
    if node.target in {_aten._to_copy.default, _aten.expand.default}:  # noqa: SLF001
        input_value, output_value = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
        return bool(
            input_value.dtype == output_value.dtype and input_value.shape == output_value.shape
        )
    if (
        node.target in _MULTIPLICATIONS
        and isinstance(node.args[1], int | float)
        and node.args[1] == 1
    ):
        input_value, output_value = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
        return bool(input_value.dtype == output_value.dtype)
    return False


def _split_parts(graph: fx.Graph, node: fx.Node) -> None:
    """Replace the parts of a split by slices, and the parts of an unbind by selections."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    is_unbind = node.target is _aten.unbind.int
    dim_position = 1 if is_unbind else 2
    dim: Any = node.args[dim_position] if len(node.args) > dim_position else 0
    starts = [0]
    for part in node.meta["val"]:
        starts.append(starts[-1] + (1 if is_unbind else part.shape[dim]))
    for user in list(node.users):
        number: Any = user.args[1]
        with graph.inserting_before(user):
            if is_unbind:
                selection = insert_node(graph, user, _aten.select.int, source, dim, number)
            else:
                ends = starts[number], starts[number + 1]
                selection = insert_node(graph, user, _aten.slice.Tensor, source, dim, *ends)
        user.replace_all_uses_with(selection)
        graph.erase_node(user)
    graph.erase_node(node)


def _split_long_reduction(graph: fx.Graph, node: fx.Node) -> None:
    """Split a long reduction into two stages: over parts, and over the parts' results."""
    source, reduction = node.args[0], _REDUCTIONS[node.target]
    assert isinstance(source, fx.Node)
    shape = shape_of(source)
    dims_argument: Any = node.args[1] if len(node.args) > 1 else None
    dims_list = (
        [dims_argument]
        if isinstance(dims_argument, int)
        else list(dims_argument or range(len(shape)))
    )
    dims = sorted(dim % len(shape) for dim in dims_list) if shape else []
    terms = math.prod(shape[dim] for dim in dims)
    if terms <= _MOST_TERMS:
        return
    first_stage = "sum" if reduction == "mean" else reduction
    with graph.inserting_before(node):
        if reduction == "any":
            source = insert_node(graph, node, _aten.ne.Scalar, source, 0)
        elif (dtype := _sum_dtype(node)) != source.meta["val"].dtype:
            source = insert_node(graph, node, _aten._to_copy.default, source, dtype=dtype)  # noqa: SLF001
        parts = insert_node(graph, node, PARTIAL, source, dims, math.isqrt(terms), first_stage)
        last_dim = len(shape) - len(dims)  # PARTIAL puts the parts behind the remaining dimensions
        total = insert_node(graph, node, _SECOND_STAGES[reduction], parts, [last_dim])
        if reduction == "mean":
            total = insert_node(graph, node, _aten.mul.Tensor, total, 1.0 / terms)
        result = insert_node(graph, node, _aten.view.default, total, list(shape_of(node)))
        if reduction != "any" and node.meta["val"].dtype == torch.float16:
            result = insert_node(graph, node, _aten._to_copy.default, result, dtype=torch.float16)  # noqa: SLF001
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _sum_dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return torch.float32 if dtype == torch.float16 else dtype


def _split_variance(graph: fx.Graph, node: fx.Node) -> None:
    """Expand a variance, with or without its mean: sum((x - mean)^2) / (count - correction)."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    dims_argument: Any = node.args[1] if len(node.args) > 1 else None
    dims = list(dims_argument if dims_argument and shape_of(x) else range(len(shape_of(x))))
    correction: Any = node.kwargs.get("correction")
    count = math.prod(shape_of(x)[d] for d in dims)
    subtracted = 1 if correction is None else correction
    keep = bool(node.kwargs.get("keepdim", False))
    with graph.inserting_before(node):
        mean = insert_node(graph, node, _aten.mean.dim, x, dims, True)
        centered = insert_node(graph, node, _aten.sub.Tensor, x, mean)
        square = insert_node(graph, node, _aten.mul.Tensor, centered, centered)
        total = insert_node(graph, node, _aten.sum.dim_IntList, square, dims, keep)
        variance = insert_node(
            graph, node, _aten.div.Scalar, total, float(max(count - subtracted, 0))
        )
        if not keep:
            mean = insert_node(graph, node, _aten.squeeze.dims, mean, dims)
    if node.target is _aten.var.correction:
        node.replace_all_uses_with(variance)
    for user in list(node.users):
        user.replace_all_uses_with(variance if user.args[1] == 0 else mean)
        graph.erase_node(user)
    graph.erase_node(node)


def insert_node(
    graph: fx.Graph, template: fx.Node, target: Any, *args: Any, **kwargs: Any
) -> fx.Node:
    """Insert a node at the graph's insertion point, attributed to the module of `template`."""
    inserted = graph.call_function(target, args, kwargs)
    values: Any = fx.map_arg(args, lambda node: node.meta["val"])
    inserted.meta["val"] = target(*values, **kwargs)
    inserted.meta["module"] = template.meta.get("module", "")
    return inserted


@contextmanager
def silence_torch_log() -> Iterator[None]:
    """Context in which torch's log is silent, because samestep's error describes a failed trace."""
    logger = logging.getLogger(LOGGER)
    logger.addFilter(_reject)
    try:
        yield
    finally:
        logger.removeFilter(_reject)


def _reject(_record: logging.LogRecord) -> bool:
    return False
