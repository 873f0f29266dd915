"""Find the constants that a user's functions and layers read, to compare them between machines.

A script may read an environment variable, a file or an argument into a global, a closure, a
configuration or a layer. Machines with other values train another model with the same source. A
device name or a path may differ, and so may constants that no function of the user mentions.
"""

from __future__ import annotations

import argparse
import enum
import functools
import itertools
import math
import re
import sys
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3
from torch import nn

from protocol.base import limits
from worker.tasks.checks.user_code import is_user_file

_OBJECTS: Final = 20_000
"""Most objects to visit, the nearest first."""
_ENTRIES: Final = 256
"""Most entries to read of a container, the first ones."""
_ELEMENTS: Final = 16
"""Most elements of an array that is compared; the data's digest covers larger ones."""
_NAME_CHARACTERS: Final = 100
_TEXT_CHARACTERS: Final = 64
_SHOWN: Final = re.compile(r"[\w.+-]{1,16}", re.ASCII)
"""Matches a text that is a mode such as `mse`; of other texts a digest is sent, for privacy."""
_LOCAL: Final = re.compile(r"(cpu|cuda|gpu|hip|mps|vulkan|xpu)(:\d+)?|.*[/\\].*", re.DOTALL)
"""Matches a device or a path, which may differ between machines."""
_PER_MACHINE: Final = frozenset(
    {"device", "host", "hostname", "num_workers", "pid"}
    | {"local_rank", "node_rank", "rank", "world_size"}
)
"""Names of values that may differ between machines, in lower case."""
_CONSTRUCTORS: Final = ("__init__", "__new__", "__post_init__")
"""Methods whose attributes are not compared: possibly no computation reads them."""
_CONFIG_PACKAGES: Final = ("ml_collections", "omegaconf")


def script_constants(roots: Mapping[str, object]) -> dict[str, str]:
    """Return the constants that user code reads, as text, by a name such as `SCALE`.

    Floats have four digits, so that a mean which unlike machines round differently is equal. Layers
    of one class share a name, such as `Dropout.p`, with all their values.

    Args:
        roots: The user's functions, modules and objects, by name.
    """
    names = _Search(None)
    names.visit_all(roots)
    search = _Search(names.mentioned)
    search.visit_all(roots)
    constants = {
        name[:_NAME_CHARACTERS]: _shorten(", ".join(sorted(texts)))
        for name, texts in search.texts.items()
        if name.isprintable()
    }
    return dict(sorted(constants.items())[: limits.SCRIPT_CONSTANTS])


class _Search:
    """Visits objects breadth first, in an order that is the same in every process.

    Attributes:
        mentioned: Names and texts in the code of all visited user functions.
        texts: Texts of constants, by name.

    Args:
        used_names: Only entries and attributes with these names are visited; None: all.
    """

    def __init__(self, used_names: frozenset[str] | set[str] | None) -> None:
        self.mentioned: set[str] = set()
        self.texts: defaultdict[str, set[str]] = defaultdict(set)
        self._used_names = used_names
        self._roots: Collection[str] = ()
        self._visited: dict[int, object] = {}
        self._queue: deque[tuple[str, object]] = deque()

    def visit_all(self, roots: Mapping[str, object]) -> None:
        self._roots = roots.keys()
        self._queue.extend(roots.items())
        while self._queue and len(self._visited) < _OBJECTS:
            self._visit(*self._queue.popleft())

    def _visit(self, name: str, value: object) -> None:
        is_compared = name not in self._roots and not _PER_MACHINE & _split_words(name)
        if is_compared and (text := _format_constant(value)) is not None:
            self.texts[name].add(text)
        if id(value) in self._visited:
            return
        self._visited[id(value)] = value  # a reference, so that its id is not reused
        self._queue.extend(self._members(name, value))

    def _members(self, name: str, value: Any) -> Iterator[tuple[str, object]]:
        if isinstance(value, nn.Module):
            yield from self._module_members(value)
        elif isinstance(value, FunctionType):
            yield from self._function_members(value)
        elif isinstance(value, MethodType):
            yield from ((name, value.__self__), (name, value.__func__))
        elif isinstance(value, functools.partial):
            yield from ((name, value.func), (name, value.args), (name, value.keywords))
        elif isinstance(value, enum.Enum | enum.EnumType):
            return
        elif isinstance(value, type):
            yield from self._class_members(value)
        elif isinstance(value, list | tuple | set | frozenset | deque):
            yield from ((f"{name}[{n}]", entry) for n, entry in enumerate(_list_in_order(value)))
        elif isinstance(value, dict) or type(value).__module__.startswith(_CONFIG_PACKAGES):
            yield from self._mapping_members(name, value)
        elif _has_user_attributes(value):
            attributes = _select_used(vars(value), self._used_names, default={})
            yield from ((f"{name}.{key}", entry) for key, entry in attributes.items())
            yield from self._class_members(type(value))
        elif (function := getattr(value, "__wrapped__", None)) is not None:
            yield name, function

    def _module_members(self, module: nn.Module) -> Iterator[tuple[str, object]]:
        for layer in module.modules():
            self._visited.setdefault(id(layer), layer)
            owner = type(layer)
            is_user_class = _is_user_class(owner)
            for key, value in vars(layer).items():
                is_read = is_user_class and (self._used_names is None or key in self._used_names)
                is_plain = not key.startswith("_") and key != "training"
                if is_plain and (is_read or type(value) is float):
                    yield f"{owner.__name__}.{key}", value
            yield from self._class_members(owner)

    def _mapping_members(self, name: str, value: Any) -> Iterator[tuple[str, object]]:
        """Yield the entries that code mentions; if it mentions none, all: it may loop over them."""
        entries = dict(value.items())
        used_entries = _select_used(entries, self._used_names, default=entries)
        for key, entry in itertools.islice(used_entries.items(), _ENTRIES):
            yield f"{name}[{key!r}]", entry

    def _class_members(self, owner: type) -> Iterator[tuple[str, object]]:
        """Yield the functions and the attributes of the user's classes."""
        for base in owner.__mro__:
            if id(base) in self._visited or not is_user_file(_file_of(base)):
                continue
            self._visited[id(base)] = base
            for key, value in vars(base).items():
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if isinstance(function, FunctionType):
                    if key not in _CONSTRUCTORS:
                        yield from self._function_members(function)
                elif not key.startswith("__") and (
                    self._used_names is None or key in self._used_names
                ):
                    yield f"{base.__name__}.{key}", value

    def _function_members(self, function: FunctionType) -> Iterator[tuple[str, object]]:
        """Yield defaults, closure and globals; of a library's function only inner functions."""
        code, name = function.__code__, function.__name__
        cells = _closure(function)
        if not is_user_file(code.co_filename):
            yield from (
                (f"{key} in {name}", value)
                for key, value in cells.items()
                if isinstance(value, FunctionType | MethodType | functools.partial)
            )
            return
        names = _find_mentioned(code)
        self.mentioned |= names
        positional = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        by_name = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
        for key, value in (by_name | (function.__kwdefaults__ or {}) | cells).items():
            yield f"{key} in {name}", value
        for key in sorted(names & function.__globals__.keys()):
            value = function.__globals__[key]
            if isinstance(value, ModuleType):
                if is_user_file(getattr(value, "__file__", None) or "<frozen>"):
                    shared = sorted(names & vars(value).keys())
                    yield from ((f"{value.__name__}.{n}", vars(value)[n]) for n in shared)
                continue
            module = function.__globals__.get("__name__", "__main__")
            yield key if module == "__main__" else f"{module}.{key}", value


def _format_constant(value: object) -> str | None:
    """Return a constant as text; None for a value that is not compared."""
    match value:
        case enum.Enum():
            return f"{type(value).__name__}.{value.name}"
        case bool() | None:
            return str(value)
        case int() | float() | np.number() | np.bool_():
            return _format_number(value)
        case str():
            if _LOCAL.fullmatch(value):
                return None
            return value if _SHOWN.fullmatch(value) else _digest(value)
        case torch.Tensor() | np.ndarray():
            return _format_array(value)
        case nn.Module():
            return type(value).__name__
        case FunctionType() | type() | functools.partial():
            return getattr(value, "__name__", None)
    return getattr(value, "__name__", None) if callable(value) else None


def _format_number(value: Any) -> str:
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, float):
        return f"{number:.4g}" if math.isfinite(number) else str(number)
    return str(number) if abs(number) < 10**30 else _digest(hex(number))


def _format_array(values: Any) -> str | None:
    if isinstance(values, torch.Tensor):
        if isinstance(values, nn.Parameter) or values.is_meta or values.layout != torch.strided:
            return None
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    if values.size > _ELEMENTS or values.dtype.kind not in "biuf":
        return None
    return f"[{' '.join(_format_number(element) for element in values.ravel().tolist())}]"


def _shorten(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS else _digest(text)


def _digest(text: str) -> str:
    return f"text with digest {blake3(text.encode(errors='surrogatepass')).hexdigest(6)}"


def _list_in_order(entries: Iterable[object]) -> list[object]:
    is_set = isinstance(entries, set | frozenset)
    return (sorted(entries, key=repr) if is_set else list(entries))[:_ENTRIES]


def _select_used(
    entries: Mapping[Any, object], names: set[str] | frozenset[str] | None, *, default: Any
) -> Mapping[Any, object]:
    """Return the entries with these names; `default` if there are none."""
    if names is None:
        return entries
    return {key: value for key, value in entries.items() if key in names} or default


def _split_words(name: str) -> set[str]:
    """Return the identifiers of a name such as `config['device']`, in lower case."""
    return set(re.findall(r"\w+", name.lower()))


def _closure(function: FunctionType) -> dict[str, object]:
    cells = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:
            continue  # the cell is empty
    return cells


def _find_mentioned(code: CodeType) -> set[str]:
    """Return the names and texts in the code of a function and its inner functions."""
    texts = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            texts |= _find_mentioned(constant)
        elif isinstance(constant, str):
            texts.add(constant)
        elif isinstance(constant, tuple):
            texts |= {entry for entry in constant if isinstance(entry, str)}
    return texts


def _has_user_attributes(value: object) -> bool:
    if isinstance(value, PurePath) or not hasattr(value, "__dict__"):
        return False
    return isinstance(value, argparse.Namespace | SimpleNamespace) or _is_user_class(type(value))


def _is_user_class(owner: type) -> bool:
    return is_user_file(_file_of(owner))


def _file_of(owner: type) -> str:
    """Return the file of the module that defines a class; `<frozen>` for a built-in module."""
    if owner.__module__ == "__main__":
        return getattr(sys.modules["__main__"], "__file__", None) or "<prompt>"
    return getattr(sys.modules.get(owner.__module__), "__file__", None) or "<frozen>"
