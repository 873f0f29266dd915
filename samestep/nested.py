"""A collator's batch as named arrays, and back: tensors in dicts, lists and tuples.

What goes to a device is a flat mapping of arrays; what a loss is given looks as the collator made
it. A name is the way to the tensor: `input_ids`, `0`, `targets.boxes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.base.errors import DataError


@dataclass(frozen=True, slots=True)
class _Leaf:
    name: str


@dataclass(frozen=True, slots=True)
class _Node:
    """`make` puts together what the inner ones give, in their order."""

    make: Callable[[list[Any]], Any]
    inner: tuple[_Shape, ...]


@dataclass(frozen=True, slots=True)
class _Nothing:
    """A None of the batch."""


_Shape = _Leaf | _Node | _Nothing


class NestedBatches:
    """Takes batches apart, and puts tensors together as the batch of the same names was."""

    def __init__(self) -> None:
        self._shapes: dict[frozenset[str], _Shape] = {}

    def apart(self, batch: object) -> dict[str, NDArray[Any]]:
        """The arrays of a batch by name.

        Raises:
            DataError: Something in it is no tensor, array or number, or is not on the CPU.
        """
        arrays: dict[str, NDArray[Any]] = {}
        shape = _taken_apart(batch, "", arrays)
        if not arrays:
            raise DataError(
                f"expected tensors from the collator, got {type(batch).__name__} without any"
            )
        self._shapes[frozenset(arrays)] = shape
        return arrays

    def together(self, arrays: Mapping[str, Any]) -> Any:
        """The batch of these tensors; `apart` has seen one of the same names."""
        return _put_together(self._shapes[frozenset(arrays)], arrays)


def _taken_apart(value: object, name: str, arrays: dict[str, NDArray[Any]]) -> _Shape:
    if value is None:
        return _Nothing()
    if isinstance(value, Mapping):
        keys = [str(key) for key in value]
        inner = [_taken_apart(value[k], _below(name, str(k)), arrays) for k in value]
        return _Node(lambda values: dict(zip(keys, values, strict=True)), tuple(inner))
    if isinstance(value, list | tuple):
        shapes = [_taken_apart(v, _below(name, str(n)), arrays) for n, v in enumerate(value)]
        kind = type(value)
        make = kind._make if hasattr(kind, "_make") else kind
        return _Node(make, tuple(shapes))
    arrays[name or "batch"] = _array(value, name or "batch")
    return _Leaf(name or "batch")


def _below(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _array(value: object, name: str) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise DataError(
                f"the collator gives {name!r} on {value.device}: leave tensors on the CPU, each "
                "worker takes them to its own device"
            )
        if value.dtype == torch.bfloat16:
            value = value.float()
        return value.detach().contiguous().numpy()
    if isinstance(value, np.ndarray | np.generic) and np.asarray(value).dtype.kind in "biuf":
        return np.asarray(value)
    if isinstance(value, bool | int | float):
        return np.asarray(value)
    raise DataError(
        f"expected tensors from the collator, got {name!r} of type {type(value).__name__}: leave "
        "it out of the batch, or make a tensor of it"
    )


def _put_together(shape: _Shape, arrays: Mapping[str, Any]) -> Any:
    match shape:
        case _Leaf():
            return arrays[shape.name]
        case _Node():
            return shape.make([_put_together(each, arrays) for each in shape.inner])
        case _Nothing():
            return None
