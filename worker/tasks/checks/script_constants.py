"""Find the constants that a user's functions and layers read, to compare them between machines.

A script may read an environment variable, a file or an argument into a global, a closure, a
configuration or a layer. Machines with other values train another model with the same source. A
device name or a path may differ, and so may constants that no function of the user mentions.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import itertools
import math
import re
import sys
from collections import ChainMap, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from types import (
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3
from torch import nn

from protocol.base import limits
from worker.tasks.checks.user_code import is_user_file

_OBJECTS: Final = 20_000
"""Most objects to visit, the nearest first."""
_DEPTH: Final = 8
"""Most attributes, entries and functions between a root and a constant."""
_ENTRIES: Final = 256
"""Most entries to read of a container, the first ones."""
_SHOWN_ELEMENTS: Final = 16
"""Most elements of an array that are compared one by one; of others mean and deviation."""
_ARRAY_ELEMENTS: Final = 1 << 20
_NAME_CHARACTERS: Final = 100
_TEXT_CHARACTERS: Final = 64
_DIGESTED_CHARACTERS: Final = 65_536
_SHOWN: Final = re.compile(r"[\w.+-]{1,16}", re.ASCII)
"""Matches a text that is a mode such as `mse`; of other texts a digest is sent, for privacy."""
_LOCAL: Final = re.compile(
    r"(cpu|cuda|gpu|hip|mps|vulkan|xpu)(:\d+)?|[/~.\\].*|[A-Za-z]:\\.*|\w+://.*", re.DOTALL
)
"""Matches a device, a path or a URL, which may differ between machines."""
_PER_MACHINE: Final = re.compile(
    r"""(.*_)?(cache|cpu|cuda|debug|devices?|dir|directory|file|filename|folder|gpus?|host|hostname
    |logger|paths?|pid|quiet|threads|timestamp|user|username|uuid|verbose|verbosity|version|workers)
    |log_(every|freq|frequency|interval|level|steps)
    |(exp|experiment|job|project|run|session|wandb)_(id|name)
    |(global_|local_|node_)?rank|world_size|pin_memory|cpu_count
    |start(ed)?(_at|_time)?|.*_time|t0|now|date|id""",
    re.VERBOSE | re.IGNORECASE,
)
"""Matches names of values that may differ between machines, or that only logs read."""
_CONSTRUCTORS: Final = ("__init__", "__new__", "__post_init__")
"""Methods that mention attributes which no computation may read."""
_CONFIG_PACKAGES: Final = ("ml_collections", "omegaconf")
_MODULE_ATTRIBUTES: Final = frozenset(vars(nn.Module()))
_MAPPINGS: Final = (dict, MappingProxyType, ChainMap)
_EXACT_TYPES: Final = (bytes, complex, range, Decimal, Fraction)

_Members = Iterator[tuple[str, str, object]]
"""Name, last identifier in it, and value."""


def script_constants(roots: Mapping[str, object]) -> dict[str, str]:
    """Return the constants that user code reads, as text, by a name such as `SCALE`.

    Floats have four digits, so that a mean which unlike machines round differently is equal. Layers
    of one class share a name, such as `Dropout.p`, with all their values in order. Values that
    cannot be read are left out.

    Args:
        roots: The user's functions, modules and objects, by name.
    """
    names = _Search(None)
    names.visit_all(roots)
    search = _Search(names.mentioned)
    search.visit_all(roots)
    constants = {
        name: _shorten(", ".join(texts))
        for name, texts in search.texts.items()
        if name.isprintable() and len(name) <= _NAME_CHARACTERS
    }
    return dict(sorted(constants.items())[: limits.SCRIPT_CONSTANTS])


class _Search:
    """Visits objects breadth first, in an order that is the same in every process.

    Attributes:
        mentioned: Names and texts in the code of all visited user functions.
        texts: Texts of constants by name, without repetitions in sequence.

    Args:
        used_names: Only entries and attributes with these names are visited; None: all.
    """

    def __init__(self, used_names: AbstractSet[str] | None) -> None:
        self.mentioned: set[str] = set()
        self.texts: defaultdict[str, list[str]] = defaultdict(list)
        self._used_names = used_names
        self._visited: dict[int, object] = {}
        self._expanded_classes: set[type] = set()
        self._queue: deque[tuple[str, str, int, object]] = deque()

    def visit_all(self, roots: Mapping[str, object]) -> None:
        self._queue.extend((name, "", 0, value) for name, value in roots.items())
        while self._queue and len(self._visited) < _OBJECTS:
            name, key, depth, value = self._queue.popleft()
            # A proxy or a lazy configuration may raise anything, or import and read files.
            with contextlib.suppress(Exception):
                self._visit(name, key, depth, value)

    def _visit(self, name: str, key: str, depth: int, value: object) -> None:
        """Record a value and queue its members; a root itself is not recorded."""
        is_compared = depth > 0 and not _PER_MACHINE.fullmatch(key)
        if is_compared and (text := _text_of(value)) is not None:
            texts = self.texts[name]
            if texts[-1:] != [text]:
                texts.append(text)
        if id(value) in self._visited or depth == _DEPTH:
            return
        self._visited[id(value)] = value  # a reference, so that its id is not reused
        for member_name, member_key, member in self._members(name, key, value):
            self._queue.append((member_name, member_key, depth + 1, member))

    def _members(self, name: str, key: str, value: Any) -> _Members:
        if isinstance(value, nn.Module):
            yield from self._of_module(value)
        elif isinstance(value, FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, MethodType):
            yield from ((name, key, value.__self__), (name, key, value.__func__))
        elif isinstance(value, functools.partial):
            yield from ((name, key, part) for part in (value.func, value.args, value.keywords))
        elif isinstance(value, enum.Enum | enum.EnumType):
            return
        elif isinstance(value, type):
            yield from self._of_class(value)
        elif isinstance(value, list | tuple | set | frozenset | deque):
            yield from ((f"{name}[{n}]", key, item) for n, item in enumerate(_in_order(value)))
        elif isinstance(value, _MAPPINGS) or type(value).__module__.startswith(_CONFIG_PACKAGES):
            yield from self._of_mapping(name, value)
        elif _has_user_attributes(value):
            for attribute, member in _attributes(value).items():
                if self._is_used(attribute):
                    yield f"{name}.{attribute}", attribute, member
            yield from self._of_class(type(value))
        elif type(value).__module__.startswith("samestep."):  # such as the loss of a Trainer
            for attribute, member in _attributes(value).items():
                if isinstance(member, FunctionType | MethodType) or _is_user_class(type(member)):
                    yield f"{name}.{attribute.strip('_')}", attribute, member
        elif (function := getattr(value, "__wrapped__", None)) is not None:
            yield name, key, function

    def _is_used(self, name: object) -> bool:
        return self._used_names is None or name in self._used_names

    def _of_module(self, module: nn.Module) -> _Members:
        """Yield what the user's layers read, and floats of other layers, such as LoRA's scaling."""
        for layer in module.modules():
            self._visited.setdefault(id(layer), layer)
            kind = type(layer)
            is_of_user = _is_user_class(kind)
            for key, value in vars(layer).items():
                if key in _MODULE_ATTRIBUTES:
                    continue
                if type(value) is float or (is_of_user and self._is_used(key)):
                    yield f"{kind.__name__}.{key}", key, value
                elif type(value) is dict and not key.startswith("_"):
                    yield from (
                        (f"{kind.__name__}.{key}[{entry_key!r}]", key, entry)
                        for entry_key, entry in itertools.islice(value.items(), _ENTRIES)
                        if type(entry) is float
                    )
            yield from self._of_class(kind)

    def _of_mapping(self, name: str, value: Any) -> _Members:
        """Yield the entries that code mentions; all, if it mentions none, as it may loop."""
        keys = list(value)
        used_keys = [key for key in keys if self._is_used(key)] or keys
        for key in used_keys[:_ENTRIES]:
            with contextlib.suppress(Exception):  # a value that is missing or interpolated
                yield f"{name}[{key!r}]", str(key), value[key]

    def _of_class(self, kind: type) -> _Members:
        """Yield the functions and the attributes of the user's classes."""
        for base in kind.__mro__:
            if base in self._expanded_classes or not is_user_file(_file_of(base)):
                continue
            self._expanded_classes.add(base)
            for key, value in vars(base).items():
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if isinstance(function, FunctionType):
                    if key not in _CONSTRUCTORS:
                        yield from self._of_function(function)
                elif not key.startswith("__") and self._is_used(key):
                    yield f"{base.__name__}.{key}", key, value

    def _of_function(self, function: FunctionType) -> _Members:
        """Yield defaults, closure and globals; of a library's function the user's objects in its
        closure."""
        code, name = function.__code__, function.__name__
        cells = _closure(function)
        if not is_user_file(code.co_filename):
            yield from (
                (f"{key} in {name}", key, value)
                for key, value in cells.items()
                if isinstance(value, FunctionType | MethodType | functools.partial)
                or _is_user_class(type(value))
            )
            return
        names = _find_mentioned(code)
        self.mentioned |= names
        positional = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        by_name = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
        for key, value in (by_name | (function.__kwdefaults__ or {}) | cells).items():
            yield f"{key} in {name}", key, value
        module_name = function.__globals__.get("__name__", "__main__")
        yield from _of_namespace(module_name, function.__globals__, names)


def _of_namespace(
    module_name: str, namespace: Mapping[str, object], names: AbstractSet[str]
) -> _Members:
    """Yield the globals of a module that code mentions, and those of the user's modules in it."""
    for key in sorted(names & namespace.keys()):
        value = namespace[key]
        if not isinstance(value, ModuleType):
            yield key if module_name == "__main__" else f"{module_name}.{key}", key, value
        elif is_user_file(getattr(value, "__file__", None) or "<frozen>"):
            yield from _of_namespace(value.__name__, vars(value), names - {key})


def _text_of(value: object) -> str | None:
    """Return a constant as text; None for a value that is not compared."""
    match value:
        case enum.Enum():
            return f"{type(value).__name__}.{value.name}"
        case bool() | None:
            return str(value)
        case int() | float() | np.number() | np.bool_():
            return _number_text(value)
        case str():
            if _LOCAL.fullmatch(value[:_DIGESTED_CHARACTERS]):
                return None
            return value if _SHOWN.fullmatch(value) else _digest(value)
        case torch.Tensor() | np.ndarray():
            return _array_text(value)
        case nn.Module():
            return type(value).__name__
        case FunctionType():
            return _function_text(value)
    if isinstance(value, _EXACT_TYPES):
        return _digest(repr(value))
    name = getattr(value, "__name__", None) if callable(value) else None
    return name if isinstance(name, str) else None


def _function_text(function: FunctionType) -> str:
    """Return a function's name, with a digest of its names and constants if the name is shared."""
    name = function.__name__
    if function.__qualname__ == name != "<lambda>" or not is_user_file(
        function.__code__.co_filename
    ):
        return name
    return f"{name} with digest {_hexdigest(' '.join(sorted(_parts_of(function.__code__))))}"


def _parts_of(code: CodeType) -> set[str]:
    """Return names and constants of a function's code, which all releases of Python share."""
    names = (*code.co_names, *code.co_varnames, *code.co_freevars)
    parts = {name for name in names if name.isidentifier()}  # without a comprehension's ".0"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            parts |= _parts_of(constant)
        elif isinstance(constant, frozenset):  # whose order differs between processes
            parts |= {repr(element) for element in constant}
        elif constant is not None:
            parts.add(repr(constant))
    return parts


def _number_text(value: Any) -> str:
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, float):
        return f"{number:.4g}" if math.isfinite(number) else str(number)
    return str(number) if abs(number) < 10**30 else _digest(hex(number))


def _array_text(values: Any) -> str | None:
    """Return the elements of a small array; of a larger one shape, mean and standard deviation."""
    size = values.numel() if isinstance(values, torch.Tensor) else values.size
    if size > _ARRAY_ELEMENTS or isinstance(values, nn.Parameter):
        return None
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    if values.dtype.kind not in "biuf":
        return None
    if size <= _SHOWN_ELEMENTS:
        return f"[{' '.join(_number_text(element) for element in values.ravel().tolist())}]"
    mean, deviation = (_number_text(float(f(values, dtype=np.float64))) for f in (np.mean, np.std))
    return f"array of {'x'.join(map(str, values.shape))}, mean {mean}, deviation {deviation}"


def _shorten(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS else _digest(text)


def _digest(text: str) -> str:
    return f"text with digest {_hexdigest(text)}"


def _hexdigest(text: str) -> str:
    return blake3(text[:_DIGESTED_CHARACTERS].encode(errors="surrogatepass")).hexdigest(6)


def _in_order(entries: Collection[object]) -> list[object]:
    if isinstance(entries, set | frozenset):
        return sorted(entries, key=repr) if len(entries) <= _ENTRIES else []
    return list(itertools.islice(entries, _ENTRIES))


def _attributes(value: object) -> dict[str, object]:
    """Return an object's attributes, including those in slots."""
    slots = {
        slot: getattr(value, slot)
        for base in type(value).__mro__
        for slot in _slots_of(base)
        if hasattr(value, slot)
    }
    return slots | dict(getattr(value, "__dict__", {}))


def _slots_of(base: type) -> tuple[str, ...]:
    slots = vars(base).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


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
    if isinstance(value, PurePath):
        return False
    return isinstance(value, argparse.Namespace | SimpleNamespace) or _is_user_class(type(value))


def _is_user_class(owner: type) -> bool:
    return is_user_file(_file_of(owner))


def _file_of(owner: type) -> str:
    """Return the file of the module that defines a class; `<frozen>` for a built-in module."""
    if owner.__module__ == "__main__":
        return getattr(sys.modules["__main__"], "__file__", None) or "<prompt>"
    return getattr(sys.modules.get(owner.__module__), "__file__", None) or "<frozen>"
