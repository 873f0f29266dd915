"""Find state that a user's model, loss, collator, data set or task keeps between calls.

Any idle worker may compute a microbatch, so its result must not depend on earlier microbatches. A
walk over the objects records every reachable number, text, array and generator, after a call and
after a second call on the same samples. A value that differs is a counter or a generator. Caches
are allowed: entries may be added or removed, and so may values that the first call sets.

`worker.shell.hidden_state_check` and `worker.tasks.checks.additivity` compare results, so they miss
state with no effect on the calls that they make: a counter that acts in every fiftieth call, a
generator whose draws are not used yet. Such a run ends with exit code 0, and its weights depend on
the assignment of microbatches to workers. Before training, this walk refuses such state
(`refuse_changes`); after training, it finds and names generators and tensors that affect no
gradient yet.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import logging
import operator
import random
import re
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3
from torch import nn

from backends.checks.trainable_checks import WHOLE_MICROBATCH
from protocol.base.errors import DataError
from worker.tasks.checks.user_code import is_user_file

State = dict[str, int | str]
"""By path: a value as text, or the length of a list or set, which may grow."""

Digests = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and digest of each tensor, by its name in errors."""
_WORDS_PER_SUM: Final = 1024
"""Words of a tensor that a card adds up as integers, so that only sums are copied to the host; a
changed_paths bit changes its sum."""

_OBJECTS: Final = 50_000
"""Most objects to visit, the nearest first."""
_ENTRIES: Final = 256
"""Most entries to visit of a container, the first ones."""
_ELEMENTS: Final = 4096
"""Most elements of an array to digest, evenly spread."""
_MESSAGE_CHARACTERS: Final = 60
_MODULE_MEMBER: Final = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")
_DOT: Final = r".\1"
"""Replacement of `_MODULE_MEMBER` in a tensor's path: users know its name in the state dict."""

_SCALAR_TYPES = bool, int, float, complex, str, bytes, bytearray, array, np.generic, type(None)
_METHODS = MethodType | BuiltinMethodType | MethodWrapperType
_SKIPPED = ModuleType, io.IOBase, logging.Logger, logging.Handler, torch.dtype, torch.device
_ELEMENT: Final = re.compile(r"\[\d+\]")
"""Matches the path to an entry of a list, such as a window or a log, whose values may change."""
_CONTAINERS: Final = (dict, OrderedDict, defaultdict, list, deque, set)

_Members = Iterator[tuple[str, object]]


class Fingerprint(str):
    """The digest of a tensor or a generator, after a description of the object."""

    __slots__ = ()

    @property
    def description(self) -> str:
        """Return the class and the shape of a tensor, or a generator's class and " at"."""
        return self.rpartition(" ")[0]


def reachable_state(roots: Mapping[str, object]) -> State:
    """Return all mutable state reachable from `roots`, by its path from their names."""
    return _Walk().visit_all(roots)


def reachable_tensors(roots: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return the tensors reachable from `roots`, by their path from their names."""
    walk = _Walk()
    walk.visit_all(roots)
    return {_MODULE_MEMBER.sub(_DOT, path): tensor for path, tensor in walk.tensors.items()}


def reachable_generators(roots: Mapping[str, object]) -> dict[str, object]:
    """Return the random generators reachable from `roots`, by their path from their names."""
    walk = _Walk()
    walk.visit_all(roots)
    return walk.generators


def find_changed_state(first_state: State, second_state: State) -> str | None:
    """Name a generator or a tensor that changed_paths between two calls on the same samples.

    Other calls happen between the two, so these may differ: a number (the longest sample so far), a
    tensor that was recreated in another shape, and an entry of a list.
    """
    for path, old_value in first_state.items():
        new_value = second_state.get(path, old_value)
        if (
            not isinstance(old_value, Fingerprint)
            or not isinstance(new_value, Fingerprint)
            or old_value == new_value
        ):
            continue
        is_generator = old_value.description.endswith(" at")
        has_same_shape = old_value.description == new_value.description
        if is_generator or (has_same_shape and not _ELEMENT.search(path)):
            return _name_of(path)
    return None


def find_likely_cause(first_state: State, second_state: State) -> str | None:
    """Name the value that most likely causes a difference: a changed value, or else a new value.

    Tensors come before numbers, entries of containers before attributes.
    """
    changed_paths = [
        path
        for path in first_state.keys() & second_state.keys()
        if first_state[path] != second_state[path]
    ]
    suspects = changed_paths or list(second_state.keys() - first_state.keys())

    def likelihood(path: str) -> tuple[bool, bool, str]:
        return not isinstance(second_state[path], Fingerprint), "[" not in path, path

    return _name_of(min(suspects, key=likelihood)) if suspects else None


def _name_of(path: str) -> str:
    return _MODULE_MEMBER.sub(_DOT, path)


class Containers:
    """The contents of all dicts, lists, sets and user objects reachable from `roots`."""

    def __init__(self, roots: Mapping[str, object]) -> None:
        walk = _Walk()
        walk.visit_all(roots)
        self._contents = [(container, _contents(container)) for container in walk.containers]

    def restore(self) -> None:
        """Undo additions and removals."""
        for container, contents in self._contents:
            current = _contents(container)
            is_unchanged = len(current) == len(contents) and all(
                current_item is original_item
                for current_item, original_item in zip(current, contents, strict=True)
            )
            if is_unchanged:
                continue
            container.clear()
            if isinstance(container, dict):
                container.update(zip(contents[::2], contents[1::2], strict=True))
            elif isinstance(container, set):
                container.update(contents)
            else:
                container.extend(contents)


def _contents(container: Any) -> list[object]:
    """Return the elements of a container; for a dict, keys and values alternately."""
    if isinstance(container, dict):
        return [element for item in container.items() for element in item]
    return list(container)


def refuse_changes(first_state: State, second_state: State) -> None:
    """Refuse state that changed_paths between two calls on the same samples.

    Raises:
        DataError: State changed_paths; the message names it.
    """
    for path, old_value in first_state.items():
        new_value = second_state.get(path, old_value)
        shrunk = isinstance(old_value, int) and isinstance(new_value, int) and new_value < old_value
        if shrunk or (isinstance(old_value, str) and new_value != old_value):
            remedy = (
                "take a layer without running state (no spectral_norm, no running statistics), or "
                f"{WHOLE_MICROBATCH}"
                if "._buffers[" in path
                else "leave out the counter, and draw from torch's, numpy's or Python's global "
                "generator, which are seeded for each microbatch"
            )
            raise DataError(
                f"expected a model, loss, collator and data set that keep no state from one call "
                f"to the next, got {_name_of(path)}, which goes from {_abbreviated(old_value)} to "
                f"{_abbreviated(new_value)} on the same samples: {remedy}"
            )


def _abbreviated(value: int | str) -> str:
    text = str(value)
    return text if len(text) <= _MESSAGE_CHARACTERS else f"{text[:_MESSAGE_CHARACTERS]}..."


class _Walk:
    """Visits every object once, breadth first.

    Attributes:
        tensors: Tensors, by their path.
        generators: Random generators, by their path.
        containers: Containers of the user or of a module, whose contents may change.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.generators: dict[str, object] = {}
        self.containers: list[Any] = []
        self._state: State = {}
        self._visited_objects: dict[int, object] = {}
        self._queue: deque[tuple[str, object, bool]] = deque()

    def visit_all(self, roots: Mapping[str, object]) -> State:
        self._queue.extend((name, root, True) for name, root in roots.items())
        while self._queue and len(self._visited_objects) < _OBJECTS:
            path, value, counts = self._queue.popleft()
            self._visit(path, value, counts=counts)
        return self._state

    def _visit(self, path: str, value: object, *, counts: bool) -> None:
        """Record a value or queue its members; a library's internal numbers do not count."""
        if isinstance(value, _SCALAR_TYPES):
            if counts:
                self._state[path] = repr(value)
            return
        if id(value) in self._visited_objects or isinstance(value, _SKIPPED):
            return
        self._visited_objects[id(value)] = value  # a reference, so that its id is not reused
        position = position_of(value)
        if position is not None:
            self._state[path] = position
            if not isinstance(value, itertools.count):
                self.generators[path] = value
        elif isinstance(value, torch.Tensor | np.ndarray):
            if isinstance(value, torch.Tensor):
                self.tensors[path] = value
            if counts:
                self._state[path] = _digest_elements(value)
        else:
            counts = _counts_as_state(value, counted_above=counts)
            if counts:
                self._note_container(path, value)
            self._queue.extend(
                (member_path, member, counts) for member_path, member in _members(path, value)
            )

    def _note_container(self, path: str, value: object) -> None:
        if isinstance(value, list | deque | set):
            self._state[f"len({path})"] = len(value)
        if type(value) in _CONTAINERS:
            self.containers.append(value)
        elif getattr(type(value), "only_own_names", False):
            return
        elif isinstance(attributes := getattr(value, "__dict__", None), dict):
            self.containers.append(attributes)


def position_of(value: object) -> str | None:
    """Return the position of a generator or a counter; None for anything else."""
    position: object
    match value:
        case random.SystemRandom():
            return None  # a generator without state
        case random.Random():
            position = value.getstate()
        case np.random.Generator():
            position = value.bit_generator.state
        case np.random.BitGenerator():
            position = value.state
        case np.random.RandomState():
            position = value.get_state()
        case torch.Generator():
            position = value.get_state().numpy().tobytes()
        case itertools.count():
            return repr(value)
        case _:
            return None
    with np.printoptions(threshold=100_000):
        digest = blake3(repr(position).encode()).hexdigest(8)
        return Fingerprint(f"{type(value).__name__} at {digest}")


def _digest_elements(value: torch.Tensor | np.ndarray[Any, Any]) -> int | str:
    """Digest an array's elements, or a sample of many; 0 for parameters, which updates change."""
    if isinstance(value, nn.Parameter) and value.requires_grad:
        return 0
    try:
        if isinstance(value, torch.Tensor):
            flat = value.detach().reshape(-1)
            sampled = flat[:: max(1, flat.numel() // _ELEMENTS)].cpu().contiguous()
            raw = sampled.view(torch.uint8).numpy().tobytes()
        elif value.dtype.hasobject:
            raw = repr(value.flat[:_ENTRIES].tolist()).encode()
        else:
            raw = np.ascontiguousarray(value.flat[:: max(1, value.size // _ELEMENTS)]).tobytes()
    except Exception:  # noqa: BLE001 -- without readable elements: meta, sparse, a subclass
        return 0
    shape = tuple(value.shape)
    return Fingerprint(f"{type(value).__name__} of {shape} {blake3(raw).hexdigest(8)}")


def _counts_as_state(value: object, *, counted_above: bool) -> bool:
    """Return whether an object's numbers count as state: yes for user objects and models."""
    if isinstance(value, list | tuple | deque | set | dict | partial | _METHODS):
        return counted_above
    if isinstance(value, FunctionType):
        return is_user_file(value.__code__.co_filename)
    if isinstance(value, nn.Module | SimpleNamespace | Iterator):
        return True
    value_class = value if isinstance(value, type) else type(value)
    has_user_code = any(True for _ in _users_functions(value_class))
    return has_user_code or value_class.__module__ == "__main__"


def _members(path: str, value: Any) -> _Members:
    """Yield the members of an object, with their paths."""
    match value:
        case dict():
            for key, entry in itertools.islice(value.items(), _ENTRIES):
                has_stable_text = isinstance(key, str | int | float | tuple)
                yield (
                    f"{path}[{key!r}]" if has_stable_text else f"{path}[{type(key)} {id(key)}]",
                    entry,
                )
        case list() | tuple() | deque():
            for number, entry in enumerate(itertools.islice(value, _ENTRIES)):
                yield f"{path}[{number}]", entry
        case partial():
            yield from ((path, value.func), (path, value.args), (path, value.keywords))
        case MethodType():
            yield from ((path, value.__self__), (path, value.__func__))
        case BuiltinMethodType() | MethodWrapperType():
            yield path, value.__self__
        case FunctionType():
            yield from _function_members(path, value)
        case type():
            yield from _class_members(value)
        case GeneratorType():
            if value.gi_frame is not None:
                yield f"{path} (its position)", value.gi_frame.f_lasti
                yield from _attributes(path, value.gi_frame.f_locals)
        case Iterator():
            yield f"{path} (its remaining length)", operator.length_hint(value, -1)
            yield from ((path, entry) for entry in gc.get_referents(value))
            yield from _instance_members(path, value)
        case _:
            yield from _instance_members(path, value)


def _attributes(path: str, values_by_name: Mapping[str, object]) -> _Members:
    return ((f"{path}.{name}", value) for name, value in list(values_by_name.items()))


def _instance_members(path: str, value: object) -> _Members:
    """Yield attributes; for some library objects only those that the user's classes mention."""
    value_class = type(value)
    attributes = dict(getattr(value, "__dict__", {}))
    if getattr(value_class, "only_own_names", False):
        functions = _users_functions(value_class)
        names = {name for function in functions for name in _mentioned_names(function.__code__)}
        attributes = {name: member for name, member in attributes.items() if name in names}
    yield from _attributes(path, attributes)
    for slot in (slot for base_class in value_class.__mro__ for slot in _slots(base_class)):
        if hasattr(value, slot):
            yield f"{path}.{slot}", getattr(value, slot)
    yield value_class.__name__, value_class


def _slots(owner: type) -> Iterable[str]:
    slots = vars(owner).get("__slots__", ()) if _functions(owner) else ()
    slot_names = (slots,) if isinstance(slots, str) else slots
    return [name for name in slot_names if not name.startswith("__")]


def _class_members(owner: type) -> _Members:
    """Yield attributes and functions of a class and its bases, as far as users wrote them."""
    for base_class in owner.__mro__:
        if any(is_user_file(f.__code__.co_filename) for f in _functions(base_class)):
            for name, value in list(vars(base_class).items()):
                if not name.startswith("__") and not hasattr(type(value), "__get__"):
                    yield f"{base_class.__name__}.{name}", value
            yield from ((f"{base_class.__name__}.{f.__name__}", f) for f in _functions(base_class))


def _functions(owner: type) -> list[FunctionType]:
    functions = []
    for value in list(vars(owner).values()):
        inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(inner, FunctionType):
            functions.append(inner)
    return functions


def _users_functions(owner: type) -> Iterator[FunctionType]:
    for base_class in owner.__mro__:
        yield from (f for f in _functions(base_class) if is_user_file(f.__code__.co_filename))


def _function_members(path: str, function: FunctionType) -> _Members:
    """Yield a function's defaults, attributes and closure; for user functions also the globals."""
    yield f"{path} (its defaults)", function.__defaults__
    yield f"{path} (its defaults)", function.__kwdefaults__
    yield from _attributes(path, function.__dict__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the cell is empty
            yield f"{path}.{name}", cell.cell_contents
    if not is_user_file(function.__code__.co_filename):
        return
    names = _mentioned_names(function.__code__)
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, ModuleType) and is_user_file(getattr(value, "__file__", None) or "<"):
            shared_names = names & vars(value).keys()
            yield from (
                (f"{name}.{shared_name}", vars(value)[shared_name]) for shared_name in shared_names
            )
        yield f"the global {name}", value


def _mentioned_names(code: CodeType) -> set[str]:
    """Return the globals and attributes that a function and its inner functions mention."""
    inner_codes = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_mentioned_names, inner_codes))


# Frozen tensors of a module: all elements.


def frozen_tensors(module: nn.Module) -> Digests:
    """Return the digests of frozen parameters and buffers that own their memory."""
    tensors: dict[str, torch.Tensor] = {
        f"the frozen tensor {name!r}": parameter
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    }
    tensors |= {f"the buffer {name!r}": buffer for name, buffer in module.named_buffers()}
    return {
        name: (tuple(tensor.shape), digest)
        for name, tensor in tensors.items()
        if (digest := _digest_tensor(tensor)) is not None
    }


def find_changed_tensor(first_digests: Digests, second_digests: Digests) -> str | None:
    """Name a tensor whose elements changed; a new shape means a recreated tensor, like a cache."""
    for name, (shape, digest) in first_digests.items():
        new_digest = second_digests.get(name, (shape, digest))
        if new_digest[0] == shape and new_digest[1] != digest:
            return name
    return None


def _digest_tensor(tensor: torch.Tensor) -> str | None:
    """Digest a tensor; None if its elements cannot be read (meta, sparse)."""
    local = getattr(
        tensor, "_local_tensor", tensor
    ).detach()  # of a sharded tensor, this rank's part
    if local.is_meta or local.layout is not torch.strided:
        return None
    raw = local.contiguous().reshape(-1).view(torch.uint8)
    if local.device.type == "cpu":
        return blake3(raw.numpy().data).hexdigest(16)
    integers = raw.view(torch.int32) if raw.numel() % 4 == 0 and local.element_size() >= 4 else raw
    whole_length = integers.numel() // _WORDS_PER_SUM * _WORDS_PER_SUM
    sums = integers[:whole_length].view(-1, _WORDS_PER_SUM).sum(1, dtype=torch.int64)
    hasher = blake3(sums.cpu().numpy().tobytes())
    hasher.update(integers[whole_length:].cpu().numpy().tobytes())
    return hasher.hexdigest(16)
