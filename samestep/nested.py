"""A collator's batch as named arrays, and back: tensors in containers of any kind.

A device takes a flat mapping of arrays; a loss takes the batch as the collator made it. A name is
the path to the tensor: `input_ids`, `0`, `targets.boxes`. No two tensors of a batch have one name,
and no two structures of batch have the same names, so the names alone say how a batch is rebuilt.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from protocol.base.errors import DataError, SamestepError
from protocol.exact.digest import digest_arrays

Arrays = dict[str, NDArray[Any]]

_WITHOUT_NUMPY: Final = {
    kind
    for kind in vars(torch).values()
    if isinstance(kind, torch.dtype) and kind.is_floating_point and kind.itemsize <= 2
} - {torch.float16}
"""Floating types that numpy has not; float32 holds each of their values."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One array.

    Attributes:
        number: The Python type that it is given back as, if it was a number.
        narrow: The tensor's own type, where numpy has it not.
        requires_grad: Whether the tensor did.
    """

    name: str
    number: type | None = None
    narrow: torch.dtype | None = None
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class _Constant:
    """None or a bool: part of the structure, since code branches on it."""

    value: bool | None


@dataclass(frozen=True, slots=True)
class _Node:
    """A container, or a tensor of several arrays.

    Attributes:
        kind: The container's class, or what rebuilds the tensor.
        keys: Of a mapping its keys, of a dataclass its fields, of a tensor its shape or layout.
    """

    rebuild: Callable[[_Node, list[Any]], Any]
    kind: Any
    keys: tuple[Any, ...]
    inner: tuple[_Structure, ...]


_Structure = _Leaf | _Constant | _Node


class NestedBatches:
    """Takes batches apart, and rebuilds them."""

    def __init__(self) -> None:
        self._known: dict[frozenset[str], tuple[_Structure, int]] = {}
        self._marks: dict[_Structure, int] = {}

    def apart(self, batch: object) -> Arrays:
        """The arrays of a batch by name.

        Raises:
            DataError: Something in it is no tensor, array or number, or is not on the CPU.
        """
        structure, arrays = _taken_apart(batch)
        mark = self._marks.get(structure, 1)
        while True:
            named = {_marked(name, mark): array for name, array in arrays.items()}
            known = self._known.setdefault(frozenset(named), (structure, mark))
            if known == (structure, mark):
                self._marks[structure] = mark
                return named
            mark += 1

    def together(self, arrays: Mapping[str, Any]) -> Any:
        """The batch of these tensors; `apart` has given their names.

        Raises:
            SamestepError: The batch has a Python number, and a device is recording the step.
        """
        structure, mark = self._known[frozenset(arrays)]
        return _rebuilt(structure, mark, arrays)


def batch_digest(batch: object) -> str:
    """Digest of a batch, values and structure; 64 hex digits."""
    structure, arrays = _taken_apart(batch)
    described = np.frombuffer(blake3(_described(structure).encode()).digest(), np.uint8)
    return digest_arrays({**arrays, "the structure of the batch": described})


def _marked(name: str, mark: int) -> str:
    return name if mark == 1 else f"{name} ({mark})"


# Apart.


def _taken_apart(batch: object) -> tuple[_Structure, Arrays]:
    arrays: Arrays = {}
    structure = _structure_of(batch, "", arrays)
    if not arrays:
        raise DataError(
            f"expected tensors from the collator, got {type(batch).__name__} without any"
        )
    return structure, arrays


def _structure_of(value: object, name: str, arrays: Arrays) -> _Structure:
    """Of `value`, whose arrays are added by the names they get."""
    if value is None or isinstance(value, bool):
        return _Constant(value)
    if isinstance(value, torch.Tensor):
        return _of_tensor(value, name, arrays)
    if isinstance(value, np.ndarray | np.generic | int | float):
        return _of_numbers(value, name, arrays)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        entries = {field: getattr(value, field) for field in fields}
        return _node(_dataclass, value, entries, name, arrays)
    if isinstance(value, Mapping):
        return _of_mapping(value, name, arrays)
    if isinstance(value, list | tuple):
        return _node(_sequence, value, dict(enumerate(value)), name, arrays)
    raise DataError(
        f"expected tensors from the collator, got {_shown(name)} of type {type(value).__name__}: "
        "leave it out of the batch, or make a tensor of it"
    )


def _node(
    rebuild: Callable[[_Node, list[Any]], Any],
    value: object,
    entries: Mapping[Any, Any],
    name: str,
    arrays: Arrays,
) -> _Node:
    for attribute, held in getattr(value, "__dict__", {}).items():
        if isinstance(held, torch.Tensor | np.ndarray) and attribute not in entries:
            raise DataError(
                f"expected every tensor of a batch inside of its containers, got one as attribute "
                f"{attribute!r} of a {type(value).__name__}: make it an entry of its own"
            )
    inner = [_structure_of(each, _below(name, key), arrays) for key, each in entries.items()]
    return _Node(rebuild, type(value), tuple(entries), tuple(inner))


def _of_mapping(value: Mapping[Any, Any], name: str, arrays: Arrays) -> _Structure:
    node = _node(_mapping, value, value, name, arrays)
    if isinstance(value, defaultdict) and type(value) is defaultdict:
        return dataclasses.replace(node, kind=(defaultdict, value.default_factory))
    try:
        again = list(node.kind(dict(value)))
    except Exception:  # noqa: BLE001 -- whatever its constructor raises
        again = None
    if again != list(value):
        raise DataError(
            f"expected a mapping that its class makes of a dict, got {_shown(name)} of type "
            f"{node.kind.__name__}: give a dict"
        )
    return node


def _of_tensor(value: torch.Tensor, name: str, arrays: Arrays) -> _Structure:
    if value.device.type != "cpu":
        raise DataError(
            f"the collator gives {_shown(name)} on {value.device}: leave tensors on the CPU, each "
            "worker takes them to its own device"
        )
    if value.is_nested:
        parts = value.detach().unbind()
        inner = [_of_tensor(part, _below(name, n), arrays) for n, part in enumerate(parts)]
        return _Node(_nested, torch.Tensor, (value.layout,), tuple(inner))
    if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer) or value.is_quantized:
        raise DataError(
            f"expected plain tensors from the collator, got {_shown(name)} of type "
            f"{type(value).__name__} in {value.dtype}: write .as_subclass(torch.Tensor), or "
            ".dequantize()"
        )
    if value.layout in _SPARSE_PARTS:
        value = value.detach()
        value = value.coalesce() if value.layout == torch.sparse_coo else value
        inner = [
            _of_tensor(getattr(value, part)(), _below(name, part), arrays)
            for part in _SPARSE_PARTS[value.layout]
        ]
        return _Node(_sparse, torch.Tensor, (value.layout, *value.shape), tuple(inner))
    if value.layout != torch.strided:
        raise DataError(
            f"expected a dense, sparse or nested tensor, got {_shown(name)} in {value.layout}: "
            "write .to_dense()"
        )
    narrow = value.dtype if value.dtype in _WITHOUT_NUMPY else None
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    array = (plain.float() if narrow else plain).numpy()
    return _leaf(array, name, arrays, narrow=narrow, requires_grad=value.requires_grad)


def _of_numbers(
    value: np.ndarray[Any, Any] | np.generic | float, name: str, arrays: Arrays
) -> _Structure:
    number = None if isinstance(value, np.ndarray | np.generic) else _kind_of_number(value)
    array = np.asarray(value)
    if array.dtype.kind not in "biufc" or isinstance(value, np.ma.MaskedArray):
        raise DataError(
            f"expected numbers from the collator, got {_shown(name)} of type "
            f"{type(value).__name__} in {array.dtype}: leave it out of the batch, or make a tensor "
            "of it"
        )
    return _leaf(array, name, arrays, number=number)


def _kind_of_number(value: float) -> type:
    return int if isinstance(value, int) else float


def _leaf(array: NDArray[Any], name: str, arrays: Arrays, **more: Any) -> _Leaf:
    name = name or "batch"
    while name in arrays:  # keys that hold dots, or are alike as text
        name += "'"
    arrays[name] = array
    return _Leaf(name, **more)


def _below(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _shown(name: str) -> str:
    return repr(name or "batch")


def _described(structure: _Structure) -> str:
    """As text that says the same on every machine."""
    match structure:
        case _Leaf():
            number = structure.number.__name__ if structure.number else ""
            return f"{structure.name!r} {number} {structure.narrow or ''}".rstrip()
        case _Constant():
            return repr(structure.value)
        case _Node():
            kind = getattr(structure.kind, "__qualname__", "defaultdict")
            inner = ", ".join(map(_described, structure.inner))
            return f"{structure.rebuild.__name__} {kind} {structure.keys!r} [{inner}]"


# Together.


def _rebuilt(structure: _Structure, mark: int, arrays: Mapping[str, Any]) -> Any:
    match structure:
        case _Leaf():
            return _given_back(structure, arrays[_marked(structure.name, mark)])
        case _Constant():
            return structure.value
        case _Node():
            inner = [_rebuilt(each, mark, arrays) for each in structure.inner]
            return structure.rebuild(structure, inner)


def _given_back(leaf: _Leaf, tensor: torch.Tensor) -> Any:
    if leaf.number is not None:
        if get_proxy_mode() is not None:
            raise SamestepError(
                f"expected tensors in a batch for this device, got {leaf.name!r} as a Python "
                f"{leaf.number.__name__}: make a tensor of it, or have it computed by cpu or cuda"
            )
        return leaf.number(tensor.item())
    if leaf.narrow is not None:
        tensor = tensor.to(leaf.narrow)
    return tensor.detach().requires_grad_() if leaf.requires_grad else tensor


def _mapping(node: _Node, values: list[Any]) -> Any:
    plain = dict(zip(node.keys, values, strict=True))
    if isinstance(node.kind, tuple):
        kind, factory = node.kind
        return kind(factory, plain)
    return plain if node.kind is dict else node.kind(plain)


def _sequence(node: _Node, values: list[Any]) -> Any:
    make = getattr(node.kind, "_make", node.kind)
    return make(values)


def _dataclass(node: _Node, values: list[Any]) -> Any:
    if issubclass(node.kind, OrderedDict):  # a ModelOutput is both
        return node.kind(**dict(zip(node.keys, values, strict=True)))
    made = object.__new__(node.kind)
    for name, value in zip(node.keys, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _nested(node: _Node, values: list[Any]) -> torch.Tensor:
    (layout,) = node.keys
    return torch.nested.as_nested_tensor(values, layout=layout)


def _sparse(node: _Node, values: list[Any]) -> torch.Tensor:
    layout, *shape = node.keys
    made: torch.Tensor
    if layout == torch.sparse_coo:
        indices, held = values
        made = torch.sparse_coo_tensor(
            indices, held, shape, is_coalesced=True, check_invariants=False
        )
    else:
        compressed: Any = torch.sparse_compressed_tensor  # torch's stubs know fewer arguments
        made = compressed(*values, shape, layout=layout, check_invariants=False)
    return made


_SPARSE_PARTS: Final = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Methods that give the arrays of a sparse tensor, by its layout."""
