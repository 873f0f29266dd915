"""How large whole numbers can become in a graph: torch has 64 bits for them, the device 32.

Bounds of the inputs, which are known when a microbatch is uploaded, give bounds of all that is
computed from them by operators known here, and of whole numbers that are made of others. Those that
other operators lead to are computed once more on the host, if no weight and no draw has a part in
them; else they are unknown.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from backends.wgpu.graph.values import arrays_of
from backends.wgpu.graph.views import is_copy, is_view
from protocol.base.errors import DataError

_aten = torch.ops.aten
Bounds = tuple[float, float]
"""Of whole numbers ints, which are exact whatever their size."""
_LEAST: Final = -(2**31)
_MOST: Final = 2**31 - 1
_TRUTH: Final[Bounds] = (0, 1)
_Of = Callable[[Any], Bounds | None]


@dataclass(frozen=True, slots=True)
class _Step:
    """A node as it was traced: lowering changes the graph."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: torch.Tensor


class WholeNumbers:
    """The whole numbers of a graph.

    Args:
        graph: As traced.
        arrays: Its last placeholders, in order.
    """

    def __init__(self, graph: fx.GraphModule, arrays: Sequence[str]) -> None:
        self._arrays = arrays_of(graph, arrays)
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
        self._from_inputs = [*_from_these(self._steps, {*self._arrays, *self._constants})]
        self._varying: set[fx.Node] = set(self._arrays)
        for step in self._from_inputs:
            if not self._varying.isdisjoint(step.node.all_input_nodes):
                self._varying.add(step.node)
        if not any(map(_made_of_others, self._steps)):
            whole = (step for step in self._steps if not step.value.dtype.is_floating_point)
            self._steps = [*whole]
        self._fit: set[tuple[Bounds | None, ...]] = set()

    def refuse_what_does_not_fit(self, given: Mapping[str, Any]) -> None:
        """Look at the arrays' values.

        Args:
            given: The arrays, numpy's, by name.

        Raises:
            DataError: What is computed from them may take more than 32 bits.
        """
        if not self._steps:
            return
        bounds = {name: _bounds(given[name]) for name in self._arrays.values()}
        wide = {name: None if b is None else _rounded(b) for name, b in bounds.items()}
        key = tuple(wide.values())
        if key in self._fit:
            return
        known: dict[fx.Node, Bounds | None] = {}
        found = self._too_large(wide, known)
        fits_all = found is None
        if found is not None:
            found = self._too_large(bounds, known)
        if found is None:
            unknown = {x.node for x in self._from_inputs if _is_long(x) and known[x.node] is None}
            found = self._too_large_there(given, unknown) if unknown else None
            if fits_all and found is None and unknown.isdisjoint(self._varying):
                self._fit.add(key)
        if found is not None:
            step, (low, high) = found
            raise DataError(
                f"{_named(step)} may give whole numbers from {low} to {high}, and the vulkan "
                "backend computes with 32 bits; use a cpu or cuda worker for this model"
            )

    def _too_large_there(
        self, given: Mapping[str, Any], unknown: set[fx.Node]
    ) -> tuple[_Step, Bounds] | None:
        """What is, of the nodes without bounds, with these very arrays."""
        values = dict(self._constants)
        for node, name in self._arrays.items():
            values[node] = torch.tensor(given[name]).to(node.meta["val"].dtype)
        with torch.no_grad():
            for step in self._from_inputs:
                args, kwargs = fx.map_arg((step.args, dict(step.kwargs)), values.__getitem__)
                operator_of_torch: Any = step.node.target
                try:
                    value = operator_of_torch(*args, **kwargs)
                except (IndexError, RuntimeError) as error:  # as it would where torch computes
                    raise DataError(
                        f"{_named(step)} raised {' '.join(str(error).split())}"
                    ) from error
                if _made_of_others(step) and args and isinstance(args[0], torch.Tensor):
                    value = _as_the_device_has(value, args[0])
                values[step.node] = value
                if step.node in unknown and value.numel():
                    low, high = int(value.min()), int(value.max())
                    if low < _LEAST or high > _MOST:
                        return step, (low, high)
        return None

    def _too_large(
        self, given: Mapping[str, Bounds | None], known: dict[fx.Node, Bounds | None]
    ) -> tuple[_Step, Bounds] | None:
        """What may be, and the bounds of all before it in `known`."""
        known.clear()
        known.update({node: given[name] for node, name in self._arrays.items()})

        def of(value: Any) -> Bounds | None:
            if isinstance(value, fx.Node):
                return known.get(value)
            if isinstance(value, int | bool):
                return int(value), int(value)
            return (value, value) if isinstance(value, float) else None

        for step in self._steps:
            found = _TRUTH if step.value.dtype == torch.bool else _of_step(step, of)
            if found is not None and (math.isnan(found[0]) or math.isnan(found[1])):
                found = None
            if found is not None and not step.value.dtype.is_floating_point:
                found = _whole(found)
                if found[0] < _LEAST or found[1] > _MOST:
                    if step.value.dtype == torch.int64:
                        return step, found
                    found = None  # torch wraps it too
            known[step.node] = found
        return None


def _from_these(steps: Sequence[_Step], given: Collection[fx.Node]) -> Iterator[_Step]:
    """What leads from these alone to whole numbers of 64 bits."""
    known, found = set(given), list[_Step]()
    for step in steps:
        namespace = getattr(step.node.target, "namespace", "")
        if namespace == "aten" and known.issuperset(step.node.all_input_nodes):
            known.add(step.node)
            found.append(step)
    wanted: set[fx.Node] = set()
    for step in reversed(found):
        if _is_long(step) or step.node in wanted:
            wanted.update([step.node, *step.node.all_input_nodes])
    return (step for step in found if step.node in wanted)


def _named(step: _Step) -> str:
    name = str(step.node.target).removeprefix("aten.").split(".")[0]
    return f"{name!r} of {step.node.meta.get('module') or 'the loss'}"


def _is_long(step: _Step) -> bool:
    return step.value.dtype == torch.int64


def _made_of_others(step: _Step) -> bool:
    """Whether whole numbers of 64 bits are made of such as are not."""
    return step.value.dtype == torch.int64 and any(
        isinstance(value := each.meta.get("val"), torch.Tensor) and value.dtype.is_floating_point
        for each in step.node.all_input_nodes
    )


def _as_the_device_has(whole: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """What is made of infinities: no number of torch's either, and where formulas have them (a
    logarithm of no distance, say) they choose another value."""
    if whole.shape != source.shape or not source.is_floating_point():
        return whole
    return torch.where(source.isfinite(), whole, whole.clamp(_LEAST, _MOST))


def _whole(bounds: Bounds) -> Bounds:
    """Towards zero, as torch does; what is infinite stays so."""
    low, high = (int(x) if math.isfinite(x) else x for x in bounds)
    return low, high


def _bounds(array: Any) -> Bounds | None:
    if array.dtype.kind not in "iubf" or not array.size:
        return None
    if array.dtype.kind != "f":
        return int(array.min()), int(array.max())
    least, most = float(array.min()), float(array.max())
    return (least, most) if math.isfinite(least) and math.isfinite(most) else None


def _rounded(bounds: Bounds) -> Bounds:
    """To powers of two: few different ones come."""
    low, high = (math.floor(bounds[0]), math.ceil(bounds[1]))
    return -(2 ** (-low).bit_length()) if low < 0 else 0, 2 ** max(high, 0).bit_length() - 1


def _of_step(step: _Step, of: _Of) -> Bounds | None:
    node = step.node
    if is_view(node) or is_copy(node) or node.target in _SAME:
        return of(step.args[0])
    rule = _RULES.get(node.target)
    return None if rule is None else rule(step, of)


def _corners(function: Callable[[float, float], float]) -> Callable[[_Step, _Of], Bounds | None]:
    """Of two operands, where the extremes give the extremes."""

    def rule(step: _Step, of: _Of) -> Bounds | None:
        one, two = (of(x) for x in step.args[:2])
        if one is None or two is None:
            return None
        alpha = step.kwargs.get("alpha", 1)
        if not isinstance(alpha, int | float):
            return None
        found = [function(a, b * alpha) for a in one for b in two]
        return min(found), max(found)

    return rule


def _union(bounds: Sequence[Bounds | None]) -> Bounds | None:
    found = [each for each in bounds if each is not None]
    if not found or len(found) < len(bounds):
        return None
    return min(low for low, _ in found), max(high for _, high in found)


def _sum(step: _Step, of: _Of) -> Bounds | None:
    """So many terms, any part of them."""
    source, one = step.args[0], of(step.args[0])
    if one is None:
        return None
    shape = source.meta["val"].shape
    if step.node.target is _aten.cumsum.default:
        terms = shape[operator.index(step.args[1])] if shape else 1
    else:
        terms = math.prod(shape) // max(step.value.numel(), 1)
    return min(one[0] * terms, one[0]), max(one[1] * terms, one[1])


def _clamp(step: _Step, of: _Of) -> Bounds | None:
    args = [*step.args, None, None]
    low, high = (of(x) if x is not None else None for x in args[1:3])
    low = low or of(step.kwargs.get("min"))
    high = high or of(step.kwargs.get("max"))
    one = of(step.args[0]) or (_LEAST, _MOST)
    least = max(one[0], low[0]) if low else one[0]
    most = min(one[1], high[1]) if high else one[1]
    return min(least, most), max(least, most)


def _remainder(step: _Step, of: _Of) -> Bounds | None:
    two = of(step.args[1])
    if two is None or two[0] <= 0:
        return None
    return 0, two[1] if step.value.dtype.is_floating_point else two[1] - 1


def _divided(step: _Step, of: _Of) -> Bounds | None:
    one, two = (of(x) for x in step.args[:2])
    if one is None or two is None or two[0] <= 0:
        return None
    if not isinstance(two[0], int):
        return min(one[0] / two[0], 0), max(one[1] / two[0], 0)
    return min(one[0], 0), max(one[1], 0)


def _power(step: _Step, of: _Of) -> Bounds | None:
    one, two = (of(x) for x in step.args[:2])
    if one is None or two is None or not 0 <= two[0] <= two[1] <= 64:
        return None
    if not isinstance(two[1], int):
        return None
    most = max(abs(one[0]), abs(one[1]), 1) ** two[1]
    return (0 if one[0] >= 0 else -most), most


def _negated(step: _Step, of: _Of) -> Bounds | None:
    one = of(step.args[0])
    return None if one is None else (-one[1], -one[0])


def _absolute(step: _Step, of: _Of) -> Bounds | None:
    one = of(step.args[0])
    return None if one is None else (0, max(abs(one[0]), abs(one[1])))


def _arange(step: _Step, of: _Of) -> Bounds | None:
    del of
    numbers = [x for x in step.args if isinstance(x, int | float)]
    return (min(0, *numbers), max(0, *numbers)) if len(numbers) == len(step.args) else None


def _of_the_first(step: _Step, of: _Of) -> Bounds | None:
    return of(step.args[0])


def _positive(step: _Step, of: _Of) -> Bounds | None:
    one = of(step.args[0])
    return None if one is None else (max(one[0], 0), max(one[1], 0))


def _to_whole(step: _Step, of: _Of) -> Bounds | None:
    one = of(step.args[0])
    return None if one is None else (one[0] - 1, one[1] + 1)


_SAME: Final = frozenset({
    _aten._to_copy.default,  # noqa: SLF001
    _aten.gather.default,
    _aten.index.Tensor,
    _aten.embedding.default,
    _aten.amax.default,
    _aten.amin.default,
    _aten.lift_fresh_copy.default,
})  # fmt: skip
"""What gives elements of the first argument."""
_RULES: Final[Mapping[Any, Callable[[_Step, _Of], Bounds | None]]] = {
    **dict.fromkeys((_aten.add.Tensor, _aten.add.Scalar), _corners(operator.add)),
    **dict.fromkeys((_aten.sub.Tensor, _aten.sub.Scalar), _corners(operator.sub)),
    **dict.fromkeys((_aten.mul.Tensor, _aten.mul.Scalar), _corners(operator.mul)),
    _aten.maximum.default: _corners(max),
    _aten.minimum.default: _corners(min),
    **dict.fromkeys(
        (_aten.sum.default, _aten.sum.dim_IntList, _aten.cumsum.default), _sum
    ),
    _aten.clamp.default: _clamp,
    **dict.fromkeys((_aten.remainder.Scalar, _aten.remainder.Tensor), _remainder),
    **dict.fromkeys(
        (
            _aten.floor_divide.default, _aten.div.Tensor_mode, _aten.div.Tensor,
            _aten.div.Scalar,
        ),
        _divided,
    ),
    _aten.mean.dim: _of_the_first,
    _aten.mean.default: _of_the_first,
    _aten.relu.default: _positive,
    **dict.fromkeys(
        (_aten.floor.default, _aten.ceil.default, _aten.trunc.default, _aten.round.default),
        _to_whole,
    ),
    _aten.detach.default: _of_the_first,
    **dict.fromkeys(
        (_aten.pow.Tensor_Scalar, _aten.pow.Tensor_Tensor, _aten.pow.Scalar), _power
    ),
    _aten.neg.default: _negated,
    _aten.abs.default: _absolute,
    **dict.fromkeys(
        (_aten.arange.default, _aten.arange.start, _aten.arange.start_step), _arange
    ),
    _aten.full.default: lambda step, of: of(step.args[1]),
    _aten.full_like.default: lambda step, of: of(step.args[1]),
    _aten.scalar_tensor.default: lambda step, of: of(step.args[0]),
    _aten.where.self: lambda step, of: _union([of(x) for x in step.args[1:3]]),
    _aten.cat.default: lambda step, of: _union([of(x) for x in step.args[0]]),
}  # fmt: skip
