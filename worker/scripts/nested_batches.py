"""Converts a collator's batch, tensors in containers of any kind, to named arrays and back.

A device takes a flat mapping of arrays; a loss takes the batch as the collator made it. A tensor
that occurs twice is one tensor again; overlapping views are not, so no loss may change one.

An array's name is its path: `input_ids`, `0`, `targets.boxes`. Names are unique within a batch, and
different structures have different names, so the names alone determine how a batch is rebuilt.
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
"""Floating-point types that numpy lacks; float32 can represent each of their values."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One array.

    Attributes:
        number: The Python type to return, if it was a Python number.
        narrow: The tensor's dtype, if numpy lacks it.
        requires_grad: Whether the tensor required a gradient.
        same_as: Name of an earlier leaf that is the same tensor.
    """

    name: str
    number: type | None = None
    narrow: torch.dtype | None = None
    requires_grad: bool = False
    same_as: str | None = None


class _NamedArrays(Arrays):
    """The arrays of a batch by name, with the memory of the tensors among them."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}
        self.names: dict[object, str] = {}
        """The name of each tensor, by memory, shape, strides and what else identifies it."""

    def same_as(self, name: str, tensor: torch.Tensor) -> str | None:
        """Register a tensor under a name; return the name of an identical earlier one, or None."""
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
    """None or a bool: part of the structure, because code branches on it."""

    value: bool | None


@dataclass(frozen=True, slots=True)
class _Subtree:
    """A container, or a tensor that consists of several arrays.

    Attributes:
        kind: The container's class.
        keys: A mapping's keys, a dataclass's fields, or a tensor's layout and shape.
    """

    rebuild: Callable[[_Subtree, list[Any]], Any]
    kind: Any
    keys: tuple[Any, ...]
    inner: tuple[_Structure, ...]


_Structure = _Leaf | _Constant | _Subtree


class NestedBatches:
    """Flattens batches to named arrays and rebuilds them."""

    def __init__(self) -> None:
        self._known: dict[frozenset[str], tuple[_Structure, int]] = {}
        self._marks: dict[_Structure, int] = {}
        self._views: dict[frozenset[str], dict[str, str]] = {}
        """By the batch's names: leaves that share memory with another, and that one's name."""

    def flatten(self, batch: object) -> Arrays:
        """Return the arrays of a batch by name.

        Raises:
            DataError: It contains something other than tensors, arrays and numbers on the CPU.
        """
        structure, arrays = _flattened(batch)
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
    def rebuild(self, arrays: Mapping[str, Any]) -> Iterator[Any]:
        """Context manager that rebuilds a batch from tensors named by `flatten`.

        Raises:
            SamestepError: The batch has a Python number, and a device is recording the step.
            DataError: A tensor was changed that shared memory with another in the collator's batch.
        """
        names = frozenset(arrays)
        structure, mark = self._known[names]
        rebuilt: dict[str, Any] = {}
        batch = _rebuilt(structure, mark, arrays, rebuilt)
        views = self._views.get(names, {})
        versions = {name: rebuilt[name]._version for name in views}  # noqa: SLF001
        yield batch
        for name, version in versions.items():
            if rebuilt[name]._version != version:  # noqa: SLF001
                raise DataError(
                    f"expected memory of its own for {name!r} of the batch, which the loss changes "
                    f"in place, got a view that shares it with {views[name]!r}, which would not "
                    "change with it: change a .clone() of it"
                )


def batch_digest(batch: object) -> str:
    """Digest of a batch, values and structure; 64 hex digits."""
    structure, arrays = _flattened(batch)
    described = np.frombuffer(blake3(_described(structure).encode()).digest(), np.uint8)
    return digest_arrays({**arrays, "the structure of the batch": described})


def _marked(name: str, mark: int) -> str:
    return name if mark == 1 else f"{name} ({mark})"


# Flattening.


def _flattened(batch: object) -> tuple[_Structure, _NamedArrays]:
    arrays = _NamedArrays()
    structure = _structure_of(batch, "", arrays)
    if not arrays:
        raise DataError(
            f"expected tensors from the collator, got {type(batch).__name__} without any"
        )
    return structure, arrays


def _structure_of(value: object, name: str, arrays: _NamedArrays) -> _Structure:
    """The structure of `value`; its arrays are added under their names."""
    if value is None or isinstance(value, bool):
        return _Constant(value)
    if isinstance(value, torch.Tensor):
        return _of_tensor(value, name, arrays)
    if isinstance(value, np.ndarray | np.generic | int | float):
        return _of_numbers(value, name, arrays)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        entries = {field: getattr(value, field) for field in fields}
        return _subtree(_dataclass, value, entries, name, arrays)
    if isinstance(value, Mapping):
        return _of_mapping(value, name, arrays)
    if isinstance(value, list | tuple):
        return _subtree(_sequence, value, dict(enumerate(value)), name, arrays)
    raise DataError(
        f"expected tensors from the collator, got {_shown(name)} of type {type(value).__name__}: "
        "leave it out of the batch, or make a tensor of it"
    )


def _subtree(
    rebuild: Callable[[_Subtree, list[Any]], Any],
    value: object,
    entries: Mapping[Any, Any],
    name: str,
    arrays: _NamedArrays,
) -> _Subtree:
    for attribute, held in getattr(value, "__dict__", {}).items():
        if isinstance(held, torch.Tensor | np.ndarray) and attribute not in entries:
            raise DataError(
                f"expected every tensor of a batch inside of its containers, got one as attribute "
                f"{attribute!r} of a {type(value).__name__}: make it an entry of its own"
            )
    inner = [_structure_of(each, _below(name, key), arrays) for key, each in entries.items()]
    return _Subtree(rebuild, type(value), tuple(entries), tuple(inner))


def _of_mapping(value: Mapping[Any, Any], name: str, arrays: _NamedArrays) -> _Structure:
    subtree = _subtree(_mapping, value, value, name, arrays)
    if isinstance(value, defaultdict) and type(value) is defaultdict:
        return dataclasses.replace(subtree, kind=(defaultdict, value.default_factory))
    try:
        again = list(subtree.kind(dict(value)))
    except Exception:  # noqa: BLE001 -- whatever its constructor raises
        again = None
    if again != list(value):
        raise DataError(
            f"expected a mapping that its class makes of a dict, got {_shown(name)} of type "
            f"{subtree.kind.__name__}: give a dict"
        )
    return subtree


def _of_tensor(value: torch.Tensor, name: str, arrays: _NamedArrays) -> _Structure:
    if value.device.type != "cpu":
        raise DataError(
            f"the collator gives {_shown(name)} on {value.device}: leave tensors on the CPU, each "
            "worker takes them to its own device"
        )
    if value.is_nested:
        parts = value.detach().unbind()
        inner = [_of_tensor(part, _below(name, n), arrays) for n, part in enumerate(parts)]
        return _Subtree(_nested, torch.Tensor, (value.layout,), tuple(inner))
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
        return _Subtree(_sparse, torch.Tensor, (value.layout, *value.shape), tuple(inner))
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
    value: np.ndarray[Any, Any] | np.generic | float, name: str, arrays: _NamedArrays
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


def _leaf(array: NDArray[Any], name: str, arrays: _NamedArrays, **more: Any) -> _Leaf:
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
    """Describe a structure as text, the same on every machine."""
    match structure:
        case _Leaf():
            number = structure.number.__name__ if structure.number else ""
            return f"{structure.name!r} {number} {structure.narrow or ''}".rstrip()
        case _Constant():
            return repr(structure.value)
        case _Subtree():
            kind = getattr(structure.kind, "__qualname__", "defaultdict")
            inner = ", ".join(map(_described, structure.inner))
            return f"{structure.rebuild.__name__} {kind} {structure.keys!r} [{inner}]"


# Rebuilding.


def _rebuilt(
    structure: _Structure, mark: int, arrays: Mapping[str, Any], rebuilt: dict[str, Any]
) -> Any:
    """Rebuild a structure; its leaves are added to `rebuilt` by name."""
    match structure:
        case _Leaf():
            if structure.same_as is not None:
                return rebuilt[structure.same_as]
            rebuilt[structure.name] = _given_back(structure, arrays[_marked(structure.name, mark)])
            return rebuilt[structure.name]
        case _Constant():
            return structure.value
        case _Subtree():
            inner = [_rebuilt(each, mark, arrays, rebuilt) for each in structure.inner]
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


def _mapping(subtree: _Subtree, values: list[Any]) -> Any:
    plain = dict(zip(subtree.keys, values, strict=True))
    if isinstance(subtree.kind, tuple):
        kind, factory = subtree.kind
        return kind(factory, plain)
    return plain if subtree.kind is dict else subtree.kind(plain)


def _sequence(subtree: _Subtree, values: list[Any]) -> Any:
    make = getattr(subtree.kind, "_make", subtree.kind)
    return make(values)


def _dataclass(subtree: _Subtree, values: list[Any]) -> Any:
    if issubclass(subtree.kind, OrderedDict):  # a ModelOutput is both
        return subtree.kind(**dict(zip(subtree.keys, values, strict=True)))
    made = object.__new__(subtree.kind)
    for name, value in zip(subtree.keys, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _nested(subtree: _Subtree, values: list[Any]) -> torch.Tensor:
    (layout,) = subtree.keys
    return torch.nested.as_nested_tensor(values, layout=layout)


def _sparse(subtree: _Subtree, values: list[Any]) -> torch.Tensor:
    layout, *shape = subtree.keys
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
"""Methods that return the arrays of a sparse tensor, by its layout."""
