"""Convert a collator's batch, tensors in containers of any kind, to named arrays and back.

A device takes a flat mapping of arrays; a loss takes the batch that the collator made. A tensor
that occurs twice is rebuilt as one tensor. Overlapping views are rebuilt as separate tensors, so a
loss must not change one in place.

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

from backends.checks.trainable_checks import overlapping_pairs
from protocol.base.errors import DataError, SamestepError
from protocol.exact.digest import digest_arrays

Arrays = dict[str, NDArray[Any]]

_WITHOUT_NUMPY: Final = {
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize <= 2
} - {torch.float16}
"""Floating-point types that numpy lacks; float32 can represent each of their values."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One array.

    Attributes:
        number_type: int or float, if the leaf was a Python number.
        torch_dtype: The tensor's dtype, if numpy lacks it.
        requires_grad: Whether the tensor required a gradient.
        same_as: Name of an earlier leaf that is the same tensor.
    """

    name: str
    number_type: type | None = None
    torch_dtype: torch.dtype | None = None
    requires_grad: bool = False
    same_as: str | None = None


class _NamedArrays(Arrays):
    """The arrays of a batch by name, with the memory of the tensors among them."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}
        self.names: dict[object, str] = {}
        """The name of each tensor, by memory, shape, strides and other identifying properties."""

    def same_as(self, name: str, tensor: torch.Tensor) -> str | None:
        """Register a tensor under a name; return the name of an identical earlier one, or None."""
        if not tensor.numel():
            return None
        first_name = self.names.setdefault(
            (
                tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype,
                tensor.requires_grad, tensor.is_conj(), tensor.is_neg(),
            ),
            name,
        )  # fmt: skip
        if first_name != name:
            return first_name
        detached = tensor.detach()
        detached = detached.conj() if detached.is_conj() else detached
        self.tensors[name] = torch._neg_view(detached) if detached.is_neg() else detached  # noqa: SLF001
        return None


@dataclass(frozen=True, slots=True)
class _Constant:
    """None or a bool: part of the structure, because code branches on it."""

    value: bool | None


@dataclass(frozen=True, slots=True)
class _Container:
    """A container, or a tensor that consists of several arrays.

    Attributes:
        rebuild: Builds the container from this structure and the rebuilt members.
        container_class: The container's class; for a defaultdict, a pair of class and factory.
        keys: A mapping's keys, a dataclass's fields, or a tensor's layout and shape.
        inner: Structures of the members, in the order of `keys` for mappings and dataclasses.
    """

    rebuild: Callable[[_Container, list[Any]], Any]
    container_class: Any
    keys: tuple[Any, ...]
    inner: tuple[_Structure, ...]


_Structure = _Leaf | _Constant | _Container


class NestedBatches:
    """Flattens batches to named arrays and rebuilds them."""

    def __init__(self) -> None:
        self._structures: dict[frozenset[str], tuple[_Structure, int]] = {}
        self._variants: dict[_Structure, int] = {}
        """Numbers that distinguish structures whose arrays have the same names."""
        self._views: dict[frozenset[str], dict[str, str]] = {}
        """By the names of a batch: leaves that share memory, each with its partner's name."""

    def flatten(self, batch: object) -> Arrays:
        """Return the arrays of a batch by name.

        Raises:
            DataError: The batch contains anything but tensors, arrays and numbers on the CPU.
        """
        structure, arrays = _flatten(batch)
        variant = self._variants.get(structure, 1)
        while True:
            arrays_by_name = {_variant_name(name, variant): array for name, array in arrays.items()}
            registered = self._structures.setdefault(
                frozenset(arrays_by_name), (structure, variant)
            )
            if registered == (structure, variant):
                self._variants[structure] = variant
                if pairs := list(overlapping_pairs(arrays.tensors)):
                    views = self._views.setdefault(frozenset(arrays_by_name), {})
                    views |= {**dict(pairs), **{partner: name for name, partner in pairs}}
                return arrays_by_name
            variant += 1

    @contextmanager
    def rebuild(self, arrays: Mapping[str, Any]) -> Iterator[Any]:
        """Rebuild, for a context, a batch from tensors with the names of `flatten`.

        Raises:
            SamestepError: The batch has a Python number, and a device is recording the step.
            DataError: A tensor was changed that shared memory with another in the collator's batch.
        """
        names = frozenset(arrays)
        structure, variant = self._structures[names]
        leaves: dict[str, Any] = {}
        batch = _rebuild(structure, variant, arrays, leaves)
        views = self._views.get(names, {})
        versions = {name: leaves[name]._version for name in views}  # noqa: SLF001
        yield batch
        for name, version in versions.items():
            if leaves[name]._version != version:  # noqa: SLF001
                raise DataError(
                    f"expected separate memory for {name!r} of the batch, which the loss changes "
                    f"in place, got a view that shares memory with {views[name]!r}, which would "
                    "not change with it: change a .clone() instead"
                )


def batch_digest(batch: object) -> str:
    """Return the digest of a batch, values and structure; 64 hex digits."""
    structure, arrays = _flatten(batch)
    structure_digest = np.frombuffer(blake3(_describe(structure).encode()).digest(), np.uint8)
    return digest_arrays({**arrays, "the structure of the batch": structure_digest})


def _variant_name(name: str, variant: int) -> str:
    return name if variant == 1 else f"{name} ({variant})"


# Flattening.


def _flatten(batch: object) -> tuple[_Structure, _NamedArrays]:
    arrays = _NamedArrays()
    structure = _structure_of(batch, "", arrays)
    if not arrays:
        raise DataError(
            f"expected tensors from the collator, got {type(batch).__name__} without any"
        )
    return structure, arrays


def _structure_of(value: object, name: str, arrays: _NamedArrays) -> _Structure:
    """Return the structure of `value`; add its arrays to `arrays` by name."""
    if value is None or isinstance(value, bool):
        return _Constant(value)
    if isinstance(value, torch.Tensor):
        return _tensor_structure(value, name, arrays)
    if isinstance(value, np.ndarray | np.generic | int | float):
        return _number_structure(value, name, arrays)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        entries = {field: getattr(value, field) for field in fields}
        return _container(_dataclass, value, entries, name, arrays)
    if isinstance(value, Mapping):
        return _mapping_structure(value, name, arrays)
    if isinstance(value, list | tuple):
        return _container(_sequence, value, dict(enumerate(value)), name, arrays)
    raise DataError(
        f"expected tensors from the collator, got {_quoted_name(name)} of type "
        f"{type(value).__name__}: leave it out of the batch, or make a tensor of it"
    )


def _container(
    rebuild: Callable[[_Container, list[Any]], Any],
    value: object,
    entries: Mapping[Any, Any],
    name: str,
    arrays: _NamedArrays,
) -> _Container:
    for attribute, attribute_value in getattr(value, "__dict__", {}).items():
        if isinstance(attribute_value, torch.Tensor | np.ndarray) and attribute not in entries:
            raise DataError(
                f"expected every tensor of a batch inside its containers, got one as attribute "
                f"{attribute!r} of a {type(value).__name__}: make it a separate entry"
            )
    inner = [_structure_of(item, _child_name(name, key), arrays) for key, item in entries.items()]
    return _Container(rebuild, type(value), tuple(entries), tuple(inner))


def _mapping_structure(value: Mapping[Any, Any], name: str, arrays: _NamedArrays) -> _Structure:
    container = _container(_mapping, value, value, name, arrays)
    if isinstance(value, defaultdict) and type(value) is defaultdict:
        return dataclasses.replace(container, container_class=(defaultdict, value.default_factory))
    try:
        rebuilt_keys = list(container.container_class(dict(value)))
    except Exception:  # noqa: BLE001 -- its constructor may raise anything
        rebuilt_keys = None
    if rebuilt_keys != list(value):
        raise DataError(
            f"expected a mapping whose class accepts a dict, got {_quoted_name(name)} of type "
            f"{container.container_class.__name__}: use a dict"
        )
    return container


def _tensor_structure(value: torch.Tensor, name: str, arrays: _NamedArrays) -> _Structure:
    if value.device.type != "cpu":
        raise DataError(
            f"expected tensors on the CPU from the collator, got {_quoted_name(name)} on "
            f"{value.device}: each worker moves batches to its own device"
        )
    if value.is_nested:
        parts = value.detach().unbind()
        inner = [
            _tensor_structure(part, _child_name(name, n), arrays) for n, part in enumerate(parts)
        ]
        return _Container(_nested, torch.Tensor, (value.layout,), tuple(inner))
    if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer) or value.is_quantized:
        raise DataError(
            f"expected plain tensors from the collator, got {_quoted_name(name)} of type "
            f"{type(value).__name__} in {value.dtype}: write .as_subclass(torch.Tensor), or "
            ".dequantize()"
        )
    if value.layout in _SPARSE_PARTS:
        value = value.detach()
        value = value.coalesce() if value.layout == torch.sparse_coo else value
        inner = [
            _tensor_structure(getattr(value, part)(), _child_name(name, part), arrays)
            for part in _SPARSE_PARTS[value.layout]
        ]
        return _Container(_sparse, torch.Tensor, (value.layout, *value.shape), tuple(inner))
    if value.layout != torch.strided:
        raise DataError(
            f"expected a dense, sparse or nested tensor, got {_quoted_name(name)} in "
            f"{value.layout}: write .to_dense()"
        )
    torch_dtype = value.dtype if value.dtype in _WITHOUT_NUMPY else None
    tensor = value.detach().resolve_conj().resolve_neg().contiguous()
    array = (tensor.float() if torch_dtype else tensor).numpy()
    leaf = _leaf(array, name, arrays, torch_dtype=torch_dtype, requires_grad=value.requires_grad)
    return dataclasses.replace(leaf, same_as=arrays.same_as(leaf.name, value))


def _number_structure(
    value: np.ndarray[Any, Any] | np.generic | float, name: str, arrays: _NamedArrays
) -> _Structure:
    number_type = None if isinstance(value, np.ndarray | np.generic) else _type_of_number(value)
    array = np.asarray(value)
    if array.dtype.kind not in "biufc" or isinstance(value, np.ma.MaskedArray):
        raise DataError(
            f"expected numbers from the collator, got {_quoted_name(name)} of type "
            f"{type(value).__name__} in {array.dtype}: leave it out of the batch, or make a tensor "
            "of it"
        )
    leaf = _leaf(array, name, arrays, number_type=number_type)
    if not isinstance(value, np.ndarray) or not value.flags.writeable:
        return leaf
    with contextlib.suppress(TypeError, ValueError):  # torch lacks some types and strides
        return dataclasses.replace(leaf, same_as=arrays.same_as(leaf.name, torch.from_numpy(value)))
    return leaf


def _type_of_number(value: float) -> type:
    return int if isinstance(value, int) else float


def _leaf(array: NDArray[Any], name: str, arrays: _NamedArrays, **properties: Any) -> _Leaf:
    name = name or "batch"
    while name in arrays:  # keys may contain dots, or have the same text
        name += "'"
    arrays[name] = array
    return _Leaf(name, **properties)


def _child_name(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _quoted_name(name: str) -> str:
    return repr(name or "batch")


def _describe(structure: _Structure) -> str:
    """Describe a structure as text that is the same on every machine.

    The text is part of data digests: it contains the names of the functions that rebuild values.
    """
    match structure:
        case _Leaf():
            number_type = structure.number_type.__name__ if structure.number_type else ""
            return f"{structure.name!r} {number_type} {structure.torch_dtype or ''}".rstrip()
        case _Constant():
            return repr(structure.value)
        case _Container():
            class_name = getattr(structure.container_class, "__qualname__", "defaultdict")
            inner = ", ".join(map(_describe, structure.inner))
            return f"{structure.rebuild.__name__} {class_name} {structure.keys!r} [{inner}]"


# Rebuilding.


def _rebuild(
    structure: _Structure, variant: int, arrays: Mapping[str, Any], leaves: dict[str, Any]
) -> Any:
    """Rebuild a structure; add its leaves to `leaves` by name."""
    match structure:
        case _Leaf():
            if structure.same_as is not None:
                return leaves[structure.same_as]
            leaves[structure.name] = _restore_leaf(
                structure, arrays[_variant_name(structure.name, variant)]
            )
            return leaves[structure.name]
        case _Constant():
            return structure.value
        case _Container():
            inner = [_rebuild(part, variant, arrays, leaves) for part in structure.inner]
            return structure.rebuild(structure, inner)


def _restore_leaf(leaf: _Leaf, tensor: torch.Tensor) -> Any:
    if leaf.number_type is not None:
        if get_proxy_mode() is not None:
            raise SamestepError(
                f"expected tensors in a batch for this device, got {leaf.name!r} as a Python "
                f"{leaf.number_type.__name__}: make a tensor of it, or compute on cpu or cuda"
            )
        return leaf.number_type(tensor.item())
    if leaf.torch_dtype is not None:
        tensor = tensor.to(leaf.torch_dtype)
    return tensor.detach().requires_grad_() if leaf.requires_grad else tensor


def _mapping(container: _Container, values: list[Any]) -> Any:
    items = dict(zip(container.keys, values, strict=True))
    if isinstance(container.container_class, tuple):
        mapping_class, factory = container.container_class
        return mapping_class(factory, items)
    return items if container.container_class is dict else container.container_class(items)


def _sequence(container: _Container, values: list[Any]) -> Any:
    make = getattr(container.container_class, "_make", container.container_class)
    return make(values)


def _dataclass(container: _Container, values: list[Any]) -> Any:
    if issubclass(container.container_class, OrderedDict):  # a ModelOutput is also a dataclass
        return container.container_class(**dict(zip(container.keys, values, strict=True)))
    instance = object.__new__(container.container_class)
    for name, value in zip(container.keys, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


def _nested(container: _Container, values: list[Any]) -> torch.Tensor:
    (layout,) = container.keys
    return torch.nested.as_nested_tensor(values, layout=layout)


def _sparse(container: _Container, values: list[Any]) -> torch.Tensor:
    layout, *shape = container.keys
    tensor: torch.Tensor
    if layout == torch.sparse_coo:
        indices, values_ = values
        tensor = torch.sparse_coo_tensor(
            indices, values_, shape, is_coalesced=True, check_invariants=False
        )
    else:
        compressed: Any = torch.sparse_compressed_tensor  # torch's stubs lack some arguments
        tensor = compressed(*values, shape, layout=layout, check_invariants=False)
    return tensor


_SPARSE_PARTS: Final = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Methods that return the arrays of a sparse tensor, by its layout."""
