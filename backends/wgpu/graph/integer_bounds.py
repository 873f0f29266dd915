"""Bound the integers of a graph: torch computes with 64 bits, the device with 32.

Bounds of the inputs are known when a microbatch is uploaded, and are propagated through the
operators listed here, including casts from floats. Results of other operators are computed on the
host if they depend on neither weights nor random draws; otherwise they remain unbounded.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from backends.wgpu.graph.values import array_names_by_node
from backends.wgpu.graph.views import is_copy, is_view
from protocol.base.errors import DataError

_aten = torch.ops.aten
Bounds = tuple[float, float]
"""Bounds of integers are Python ints, which are exact at any size."""
_MIN_INT32: Final = -(2**31)
_MAX_INT32: Final = 2**31 - 1
_BOOLEAN_BOUNDS: Final[Bounds] = (0, 1)
_BoundsOf = Callable[[Any], Bounds | None]


@dataclass(frozen=True, slots=True)
class _Step:
    """A copy of a traced node, because lowering changes the graph."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: torch.Tensor


class IntegerBounds:
    """The bounds of a graph's integers.

    Args:
        graph: A traced graph.
        arrays: Names of the graph's last placeholders, in order.
    """

    def __init__(self, graph: fx.GraphModule, arrays: Sequence[str]) -> None:
        self._arrays = array_names_by_node(graph, arrays)
        self._steps = [
            _Step(node, node.args, node.kwargs, value)
            for node in graph.graph.nodes
            if node.op == "call_function"
            and isinstance(value := node.meta.get("val"), torch.Tensor)
        ]
        self._constants = {
            node: constant
            for node in graph.graph.nodes
            if node.op == "get_attr"
            and isinstance(constant := getattr(graph, str(node.target), None), torch.Tensor)
        }
        self._input_steps = [*_steps_from(self._steps, {*self._arrays, *self._constants})]
        self._batch_dependent: set[fx.Node] = set(self._arrays)
        for step in self._input_steps:
            if not self._batch_dependent.isdisjoint(step.node.all_input_nodes):
                self._batch_dependent.add(step.node)
        if not any(map(_is_cast_from_float, self._steps)):
            integer_steps = (step for step in self._steps if not step.value.dtype.is_floating_point)
            self._steps = [*integer_steps]
        self._safe_inputs: set[tuple[Bounds | None, ...]] = set()

    def refuse_overflow(self, arrays: Mapping[str, Any]) -> None:
        """Check the arrays' values.

        Args:
            arrays: NumPy arrays by name.

        Raises:
            DataError: An integer computed from the arrays may need more than 32 bits.
        """
        if not self._steps:
            return
        bounds = {name: _array_bounds(arrays[name]) for name in self._arrays.values()}
        widened = {name: None if b is None else _widen(b) for name, b in bounds.items()}
        key = tuple(widened.values())
        if key in self._safe_inputs:
            return
        node_bounds: dict[fx.Node, Bounds | None] = {}
        overflow = self._first_overflow(widened, node_bounds)
        is_safe_for_widened = overflow is None
        if overflow is not None:
            overflow = self._first_overflow(bounds, node_bounds)
        if overflow is None:
            unbounded_nodes = {
                x.node for x in self._input_steps if _is_long(x) and node_bounds[x.node] is None
            }
            overflow = (
                self._first_overflow_on_host(arrays, unbounded_nodes) if unbounded_nodes else None
            )
            if (
                is_safe_for_widened
                and overflow is None
                and unbounded_nodes.isdisjoint(self._batch_dependent)
            ):
                self._safe_inputs.add(key)
        if overflow is not None:
            step, (low, high) = overflow
            raise DataError(
                f"expected 32-bit integers, got {low} to {high} from {_step_name(step)}, which the "
                "vulkan backend does not support; use a cpu or cuda worker for this model"
            )

    def _first_overflow_on_host(
        self, arrays: Mapping[str, Any], unbounded_nodes: set[fx.Node]
    ) -> tuple[_Step, Bounds] | None:
        """Compute the nodes without bounds for these arrays; return the first overflow."""
        values = dict(self._constants)
        for node, name in self._arrays.items():
            values[node] = torch.tensor(arrays[name]).to(node.meta["val"].dtype)
        with torch.no_grad():
            for step in self._input_steps:
                args, kwargs = fx.map_arg((step.args, dict(step.kwargs)), values.__getitem__)
                torch_operator: Any = step.node.target
                try:
                    value = torch_operator(*args, **kwargs)
                except (IndexError, RuntimeError) as error:  # torch would raise, too
                    raise DataError(
                        f"{_step_name(step)} raised {' '.join(str(error).split())}"
                    ) from error
                if _is_cast_from_float(step) and args and isinstance(args[0], torch.Tensor):
                    value = _with_device_infinities(value, args[0])
                values[step.node] = value
                if step.node in unbounded_nodes and value.numel():
                    low, high = int(value.min()), int(value.max())
                    if low < _MIN_INT32 or high > _MAX_INT32:
                        return step, (low, high)
        return None

    def _first_overflow(
        self, input_bounds: Mapping[str, Bounds | None], node_bounds: dict[fx.Node, Bounds | None]
    ) -> tuple[_Step, Bounds] | None:
        """Return the first step that may overflow, and its bounds; fill `node_bounds` up to it."""
        node_bounds.clear()
        node_bounds.update({node: input_bounds[name] for node, name in self._arrays.items()})

        def bounds_of(value: Any) -> Bounds | None:
            if isinstance(value, fx.Node):
                return node_bounds.get(value)
            if isinstance(value, int | bool):
                return int(value), int(value)
            return (value, value) if isinstance(value, float) else None

        for step in self._steps:
            node_bound = (
                _BOOLEAN_BOUNDS if step.value.dtype == torch.bool else _step_bounds(step, bounds_of)
            )
            if node_bound is not None and (math.isnan(node_bound[0]) or math.isnan(node_bound[1])):
                node_bound = None
            if node_bound is not None and not step.value.dtype.is_floating_point:
                node_bound = _to_integers(node_bound)
                if node_bound[0] < _MIN_INT32 or node_bound[1] > _MAX_INT32:
                    if step.value.dtype == torch.int64:
                        return step, node_bound
                    node_bound = None  # torch's 32-bit integers wrap around, too
            node_bounds[step.node] = node_bound
        return None


def _steps_from(steps: Sequence[_Step], sources: Collection[fx.Node]) -> Iterator[_Step]:
    """Yield the steps that depend only on `sources` and lead to 64-bit integers."""
    reachable, derived = set(sources), list[_Step]()
    for step in steps:
        namespace = getattr(step.node.target, "namespace", "")
        if namespace == "aten" and reachable.issuperset(step.node.all_input_nodes):
            reachable.add(step.node)
            derived.append(step)
    needed_nodes: set[fx.Node] = set()
    for step in reversed(derived):
        if _is_long(step) or step.node in needed_nodes:
            needed_nodes.update([step.node, *step.node.all_input_nodes])
    return (step for step in derived if step.node in needed_nodes)


def _step_name(step: _Step) -> str:
    name = str(step.node.target).removeprefix("aten.").split(".")[0]
    return f"{name!r} of {step.node.meta.get('module') or 'the loss'}"


def _is_long(step: _Step) -> bool:
    return step.value.dtype == torch.int64


def _is_cast_from_float(step: _Step) -> bool:
    """Whether the step converts floats to 64-bit integers."""
    return step.value.dtype == torch.int64 and any(
        isinstance(value := input_node.meta.get("val"), torch.Tensor)
        and value.dtype.is_floating_point
        for input_node in step.node.all_input_nodes
    )


def _with_device_infinities(integers: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Clamp integers that come from infinities.

    In torch they are undefined, too, and models that produce them (such as the logarithm of a zero
    distance) select another value in their place.
    """
    if integers.shape != source.shape or not source.is_floating_point():
        return integers
    return torch.where(source.isfinite(), integers, integers.clamp(_MIN_INT32, _MAX_INT32))


def _to_integers(bounds: Bounds) -> Bounds:
    """Truncate towards zero, as torch does; infinities stay."""
    low, high = (int(x) if math.isfinite(x) else x for x in bounds)
    return low, high


def _array_bounds(array: Any) -> Bounds | None:
    if array.dtype.kind not in "iubf" or not array.size:
        return None
    if array.dtype.kind != "f":
        return int(array.min()), int(array.max())
    low, high = float(array.min()), float(array.max())
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _widen(bounds: Bounds) -> Bounds:
    """Widen to powers of two, so that few distinct bounds occur."""
    low, high = (math.floor(bounds[0]), math.ceil(bounds[1]))
    return -(2 ** (-low).bit_length()) if low < 0 else 0, 2 ** max(high, 0).bit_length() - 1


def _step_bounds(step: _Step, bounds_of: _BoundsOf) -> Bounds | None:
    node = step.node
    if is_view(node) or is_copy(node) or node.target in _SELECTIONS:
        return bounds_of(step.args[0])
    rule = _RULES.get(node.target)
    return None if rule is None else rule(step, bounds_of)


def _corners(
    function: Callable[[float, float], float],
) -> Callable[[_Step, _BoundsOf], Bounds | None]:
    """Return the rule of a binary operator whose extremes are at the operands' extremes."""

    def rule(step: _Step, bounds_of: _BoundsOf) -> Bounds | None:
        left, right = (bounds_of(x) for x in step.args[:2])
        if left is None or right is None:
            return None
        alpha = step.kwargs.get("alpha", 1)
        if not isinstance(alpha, int | float):
            return None
        corners = [function(a, b * alpha) for a in left for b in right]
        return min(corners), max(corners)

    return rule


def _union(bounds: Sequence[Bounds | None]) -> Bounds | None:
    known_bounds = [bound for bound in bounds if bound is not None]
    if not known_bounds or len(known_bounds) < len(bounds):
        return None
    return min(low for low, _ in known_bounds), max(high for _, high in known_bounds)


def _sum_bounds(step: _Step, bounds_of: _BoundsOf) -> Bounds | None:
    """Bound a sum of any part of the terms."""
    source, operand = step.args[0], bounds_of(step.args[0])
    if operand is None:
        return None
    shape = source.meta["val"].shape
    if step.node.target is _aten.cumsum.default:
        terms = shape[operator.index(step.args[1])] if shape else 1
    else:
        terms = math.prod(shape) // max(step.value.numel(), 1)
    return min(operand[0] * terms, operand[0]), max(operand[1] * terms, operand[1])


def _clamp_bounds(step: _Step, bounds_of: _BoundsOf) -> Bounds | None:
    args = [*step.args, None, None]
    low, high = (bounds_of(x) if x is not None else None for x in args[1:3])
    low = low or bounds_of(step.kwargs.get("min"))
    high = high or bounds_of(step.kwargs.get("max"))
    operand = bounds_of(step.args[0]) or (_MIN_INT32, _MAX_INT32)
    lower = max(operand[0], low[0]) if low else operand[0]
    upper = min(operand[1], high[1]) if high else operand[1]
    return min(lower, upper), max(lower, upper)


def _remainder_bounds(step: _Step, bounds_of: _BoundsOf) -> Bounds | None:
    divisor = bounds_of(step.args[1])
    if divisor is None or divisor[0] <= 0:
        return None
    return 0, divisor[1] if step.value.dtype.is_floating_point else divisor[1] - 1


def _quotient_bounds(step: _Step, bounds_of: _BoundsOf) -> Bounds | None:
    left, right = (bounds_of(x) for x in step.args[:2])
    if left is None or right is None or right[0] <= 0:
        return None
    if not isinstance(right[0], int):
        return min(left[0] / right[0], 0), max(left[1] / right[0], 0)
    return min(left[0], 0), max(left[1], 0)


def _power_bounds(step: _Step, bounds_of: _BoundsOf) -> Bounds | None:
    left, right = (bounds_of(x) for x in step.args[:2])
    if left is None or right is None or not 0 <= right[0] <= right[1] <= 64:
        return None
    if not isinstance(right[1], int):
        return None
    largest_power = max(abs(left[0]), abs(left[1]), 1) ** right[1]
    return (0 if left[0] >= 0 else -largest_power), largest_power


def _negation_bounds(step: _Step, bounds_of: _BoundsOf) -> Bounds | None:
    operand = bounds_of(step.args[0])
    return None if operand is None else (-operand[1], -operand[0])


def _absolute_bounds(step: _Step, bounds_of: _BoundsOf) -> Bounds | None:
    operand = bounds_of(step.args[0])
    return None if operand is None else (0, max(abs(operand[0]), abs(operand[1])))


def _arange_bounds(step: _Step, bounds_of: _BoundsOf) -> Bounds | None:
    del bounds_of
    numbers = [x for x in step.args if isinstance(x, int | float)]
    return (min(0, *numbers), max(0, *numbers)) if len(numbers) == len(step.args) else None


def _first_operand(step: _Step, bounds_of: _BoundsOf) -> Bounds | None:
    return bounds_of(step.args[0])


def _relu_bounds(step: _Step, bounds_of: _BoundsOf) -> Bounds | None:
    operand = bounds_of(step.args[0])
    return None if operand is None else (max(operand[0], 0), max(operand[1], 0))


def _rounding_bounds(step: _Step, bounds_of: _BoundsOf) -> Bounds | None:
    operand = bounds_of(step.args[0])
    return None if operand is None else (operand[0] - 1, operand[1] + 1)


_SELECTIONS: Final = frozenset({
    _aten._to_copy.default,  # noqa: SLF001
    _aten.gather.default,
    _aten.index.Tensor,
    _aten.embedding.default,
    _aten.amax.default,
    _aten.amin.default,
    _aten.lift_fresh_copy.default,
})  # fmt: skip
"""Operators whose result has elements of the first argument."""
_RULES: Final[Mapping[Any, Callable[[_Step, _BoundsOf], Bounds | None]]] = {
    **dict.fromkeys((_aten.add.Tensor, _aten.add.Scalar), _corners(operator.add)),
    **dict.fromkeys((_aten.sub.Tensor, _aten.sub.Scalar), _corners(operator.sub)),
    **dict.fromkeys((_aten.mul.Tensor, _aten.mul.Scalar), _corners(operator.mul)),
    _aten.maximum.default: _corners(max),
    _aten.minimum.default: _corners(min),
    **dict.fromkeys(
        (_aten.sum.default, _aten.sum.dim_IntList, _aten.cumsum.default), _sum_bounds
    ),
    _aten.clamp.default: _clamp_bounds,
    **dict.fromkeys((_aten.remainder.Scalar, _aten.remainder.Tensor), _remainder_bounds),
    **dict.fromkeys(
        (
            _aten.floor_divide.default, _aten.div.Tensor_mode, _aten.div.Tensor,
            _aten.div.Scalar,
        ),
        _quotient_bounds,
    ),
    _aten.mean.dim: _first_operand,
    _aten.mean.default: _first_operand,
    _aten.relu.default: _relu_bounds,
    **dict.fromkeys(
        (_aten.floor.default, _aten.ceil.default, _aten.trunc.default, _aten.round.default),
        _rounding_bounds,
    ),
    _aten.detach.default: _first_operand,
    **dict.fromkeys(
        (_aten.pow.Tensor_Scalar, _aten.pow.Tensor_Tensor, _aten.pow.Scalar), _power_bounds
    ),
    _aten.neg.default: _negation_bounds,
    _aten.abs.default: _absolute_bounds,
    **dict.fromkeys(
        (_aten.arange.default, _aten.arange.start, _aten.arange.start_step), _arange_bounds
    ),
    _aten.full.default: lambda step, bounds_of: bounds_of(step.args[1]),
    _aten.full_like.default: lambda step, bounds_of: bounds_of(step.args[1]),
    _aten.scalar_tensor.default: lambda step, bounds_of: bounds_of(step.args[0]),
    _aten.where.self: lambda step, bounds_of: _union([bounds_of(x) for x in step.args[1:3]]),
    _aten.cat.default: lambda step, bounds_of: _union([bounds_of(x) for x in step.args[0]]),
}  # fmt: skip
