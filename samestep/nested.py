"""A collator's batch as named arrays, and back: tensors in containers of any kind.

A device takes a flat mapping of arrays; a loss takes the batch as the collator made it. A tensor
that is in it twice is one tensor again; overlapping views are not, so no loss may change one.

A name is the path to the tensor: `input_ids`, `0`, `targets.boxes`. No two tensors of a batch have
one name, and no two structures of batch have the same names, so the names alone say how a batch is
rebuilt.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from backends.base.trainable_checks import overlapping
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
        same_as: The name of the leaf that is the same tensor.
    """

    name: str
    number: type | None = None
    narrow: torch.dtype | None = None
    requires_grad: bool = False
    same_as: str | None = None


class _Taken(Arrays):
    """The arrays of a batch by name, and of what memory the tensors among them were."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}
        self.names: dict[object, str] = {}
        """Of a tensor by its memory, its strides and what else makes it that tensor."""

    def same_as(self, name: str, tensor: torch.Tensor) -> str | None:
        """The name of the tensor that this one, now of that name, is; None if it is the first."""
        if not tensor.numel():
            return None
        known = self.names.setdefault(
            (
                tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype,
                tensor.requires_grad, tensor.is_conj(), tensor.is_neg(),
            ),
            name,
        )  # fmt: skip
        if known != name:
            return known
        plain = tensor.detach()
        plain = plain.conj() if plain.is_conj() else plain
        self.tensors[name] = torch._neg_view(plain) if plain.is_neg() else plain  # noqa: SLF001
        return None


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
        self._views: dict[frozenset[str], dict[str, str]] = {}
        """By the batch's names: leaves that share memory with another, and that one."""

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
                if pairs := list(overlapping(arrays.tensors)):
                    views = self._views.setdefault(frozenset(named), {})
                    views |= {**dict(pairs), **{other: name for name, other in pairs}}
                return named
            mark += 1

    @contextmanager
    def together(self, arrays: Mapping[str, Any]) -> Iterator[Any]:
        """The batch of these tensors, to be computed with; `apart` has given their names.

        Raises:
            SamestepError: The batch has a Python number, and a device is recording the step.
            DataError: A tensor was changed that shared memory with another in the collator's batch.
        """
        names = frozenset(arrays)
        structure, mark = self._known[names]
        given: dict[str, Any] = {}
        batch = _rebuilt(structure, mark, arrays, given)
        views = self._views.get(names, {})
        versions = {name: given[name]._version for name in views}  # noqa: SLF001
        yield batch
        for name, version in versions.items():
            if given[name]._version != version:  # noqa: SLF001
                raise DataError(
                    f"expected memory of its own for {name!r} of the batch, which the loss changes "
                    f"in place, got a view that shares it with {views[name]!r}, which would not "
                    "change with it: change a .clone() of it"
                )


def batch_digest(batch: object) -> str:
    """Digest of a batch, values and structure; 64 hex digits."""
    structure, arrays = _taken_apart(batch)
    described = np.frombuffer(blake3(_described(structure).encode()).digest(), np.uint8)
    return digest_arrays({**arrays, "the structure of the batch": described})


def _marked(name: str, mark: int) -> str:
    return name if mark == 1 else f"{name} ({mark})"


# Apart.


def _taken_apart(batch: object) -> tuple[_Structure, _Taken]:
    arrays = _Taken()
    structure = _structure_of(batch, "", arrays)
    if not arrays:
        raise DataError(
            f"expected tensors from the collator, got {type(batch).__name__} without any"
        )
    return structure, arrays


def _structure_of(value: object, name: str, arrays: _Taken) -> _Structure:
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
    arrays: _Taken,
) -> _Node:
    for attribute, held in getattr(value, "__dict__", {}).items():
        if isinstance(held, torch.Tensor | np.ndarray) and attribute not in entries:
            raise DataError(
                f"expected every tensor of a batch inside of its containers, got one as attribute "
                f"{attribute!r} of a {type(value).__name__}: make it an entry of its own"
            )
    inner = [_structure_of(each, _below(name, key), arrays) for key, each in entries.items()]
    return _Node(rebuild, type(value), tuple(entries), tuple(inner))


def _of_mapping(value: Mapping[Any, Any], name: str, arrays: _Taken) -> _Structure:
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


def _of_tensor(value: torch.Tensor, name: str, arrays: _Taken) -> _Structure:
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
    leaf = _leaf(array, name, arrays, narrow=narrow, requires_grad=value.requires_grad)
    return dataclasses.replace(leaf, same_as=arrays.same_as(leaf.name, value))


def _of_numbers(
    value: np.ndarray[Any, Any] | np.generic | float, name: str, arrays: _Taken
) -> _Structure:
    number = None if isinstance(value, np.ndarray | np.generic) else _kind_of_number(value)
    array = np.asarray(value)
    if array.dtype.kind not in "biufc" or isinstance(value, np.ma.MaskedArray):
        raise DataError(
            f"expected numbers from the collator, got {_shown(name)} of type "
            f"{type(value).__name__} in {array.dtype}: leave it out of the batch, or make a tensor "
            "of it"
        )
    leaf = _leaf(array, name, arrays, number=number)
    if not isinstance(value, np.ndarray) or not value.flags.writeable:
        return leaf
    with contextlib.suppress(TypeError, ValueError):  # of types or strides that torch has not
        return dataclasses.replace(leaf, same_as=arrays.same_as(leaf.name, torch.from_numpy(value)))
    return leaf


def _kind_of_number(value: float) -> type:
    return int if isinstance(value, int) else float


def _leaf(array: NDArray[Any], name: str, arrays: _Taken, **more: Any) -> _Leaf:
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


def _rebuilt(
    structure: _Structure, mark: int, arrays: Mapping[str, Any], given: dict[str, Any]
) -> Any:
    """Of `structure`, whose leaves are added to `given` by name."""
    match structure:
        case _Leaf():
            if structure.same_as is not None:
                return given[structure.same_as]
            given[structure.name] = _given_back(structure, arrays[_marked(structure.name, mark)])
            return given[structure.name]
        case _Constant():
            return structure.value
        case _Node():
            inner = [_rebuilt(each, mark, arrays, given) for each in structure.inner]
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
