"""Messages between a worker and its device processes, over a socket.

A message is a dataclass, encoded as msgpack by the type hints of its fields. Arrays are sent as
extents of shared memory. The sender writes an array before the message that names it, and the
receiver reads complete messages only, so the incomplete message of a killed process is dropped.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import abc, deque
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from protocol.base import errors
from protocol.base.errors import SamestepError
from protocol.machine.shared_memory import Extent, SharedMemory
from protocol.spec.run_spec import RunSpec, restore_run_spec
from worker.logic import actions as act
from worker.logic import events

_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 16
_PLAIN: Final = (NoneType, bool, int, float, str, bytes)

Packed = list[Any]
Values = NDArray[Any]
Write = Callable[[Values], Any]
Read = Callable[[Any, np.dtype[Any]], Values]


class Pipe:
    """One end of the pipe. Any thread may send; a single thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()

    def send(self, *messages: Packed) -> None:
        """Send messages; they are dropped if the other end is closed."""
        documents = [msgpack.packb(message) for message in messages]
        frames = b"".join(_LENGTH.pack(len(document)) + document for document in documents)
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(frames)

    def receive(self) -> Iterator[Packed]:
        """Yield messages until the other end is closed."""
        unread = bytearray()
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError:
                return
            if not data:
                return
            unread += data
            while len(unread) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(unread)
                end = _LENGTH.size + length
                if len(unread) < end:
                    break
                document = bytes(unread[_LENGTH.size : end])
                del unread[:end]
                message: Packed = msgpack.unpackb(document, strict_map_key=False)
                yield message

    def close(self) -> None:
        """Close both directions; the other end then reads the end of the stream."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Codec:
    """Encodes and decodes the dataclasses of one direction.

    Args:
        message_classes: The union of the dataclasses.
        write: Stores a contiguous array where the receiver can read it; returns its location.
        read: Returns the flat array at a location, with the given dtype.
    """

    def __init__(self, message_classes: Any, write: Write, read: Read) -> None:
        self._classes: dict[str, type[Any]] = {
            message_class.__name__: message_class for message_class in get_args(message_classes)
        }
        self._write, self._read = write, read

    def pack(self, message: Any) -> Packed:
        """Encode a message as the name of its class and its fields.

        Raises:
            SharedMemoryFull: There is no room for its arrays.
        """
        message_class = type(message)
        name = message_class.__name__
        assert self._classes[name] is message_class, "a message of the other direction"
        return [name, *self._encode(message, message_class)]

    def unpack(self, message: Packed) -> Any:
        """Decode a message; its arrays are views of shared memory."""
        name, *values = message
        return self._decode(values, self._classes[name])

    def _encode(self, value: Any, hint: Any) -> Any:
        if value is None:
            return None
        match _shape(hint):
            case "plain":
                return value
            case "array":
                flat = np.ascontiguousarray(value).reshape(-1)
                return [value.dtype.str, value.shape, self._write(flat)]
            case "document":
                encode = getattr(value, "to_bytes", None)
                return encode() if encode is not None else value.model_dump_json().encode()
            case "error":
                return _encode_error(value)
            case "record":
                hints = _hints(hint)
                return [self._encode(getattr(value, name), hints[name]) for name in hints]
            case "optional":
                return self._encode(value, _optional(hint))
            case "mapping":
                _, element = get_args(hint)
                return {key: self._encode(item, element) for key, item in value.items()}
            case "sequence":
                return [self._encode(item, _element(hint, n)) for n, item in enumerate(value)]

    def _decode(self, value: Any, hint: Any) -> Any:
        if value is None:
            return None
        match _shape(hint):
            case "plain":
                return value
            case "array":
                dtype, shape, location = value
                return self._read(location, np.dtype(dtype)).reshape(shape)
            case "document":
                if issubclass(hint, RunSpec):
                    return restore_run_spec(value)
                return hint.model_validate_json(value)
            case "error":
                return _decode_error(*value)
            case "record":
                hints = _hints(hint)
                return hint(*map(self._decode, value, hints.values()))
            case "optional":
                return self._decode(value, _optional(hint))
            case "mapping":
                _, element = get_args(hint)
                return {key: self._decode(item, element) for key, item in value.items()}
            case "sequence":
                items = (self._decode(item, _element(hint, n)) for n, item in enumerate(value))
                return list(items) if get_origin(hint) is list else tuple(items)


_Shape = Literal[
    "plain", "array", "document", "error", "record", "optional", "mapping", "sequence"
]  # fmt: skip


@cache
def _shape(hint: Any) -> _Shape:
    """Return how values of a type hint are encoded."""
    origin = get_origin(hint)
    if hint in _PLAIN or origin is Literal:
        return "plain"
    if origin in (UnionType, Union):
        return "optional"
    if origin is np.ndarray:
        return "array"
    if origin in (list, tuple):
        return "sequence"
    if origin in (dict, abc.Mapping):
        return "mapping"
    assert isinstance(hint, type), f"{hint} cannot be encoded"
    if issubclass(hint, BaseModel):
        return "document"
    if issubclass(hint, Exception):
        return "error"
    assert is_dataclass(hint) or hasattr(hint, "_fields"), f"{hint} cannot be encoded"
    return "record"


@cache
def _hints(record: type[Any]) -> dict[str, Any]:
    """Return the type hints of a dataclass's or a named tuple's fields, by name."""
    hints = get_type_hints(record)
    names = [f.name for f in fields(record)] if is_dataclass(record) else record._fields
    return {name: hints[name] for name in names}


@cache
def _optional(hint: Any) -> Any:
    (argument,) = (a for a in get_args(hint) if a is not NoneType)
    return argument


def _element(hint: Any, number: int) -> Any:
    """Return the type hint of an element; elements of a tuple may have different hints."""
    arguments = get_args(hint)
    is_uniform = len(arguments) == 1 or arguments[-1] is Ellipsis
    return arguments[0] if is_uniform else arguments[number]


def _encode_error(error: Exception) -> Packed:
    """Encode an error: its nearest class that both ends have, its arguments, plain attributes."""
    if not isinstance(error, SamestepError):
        error = SamestepError(str(error) or repr(error))
    known_class = next(c for c in type(error).__mro__ if c.__module__ == errors.__name__)
    args = [arg if isinstance(arg, _PLAIN) else str(arg) for arg in error.args]
    attributes = {key: value for key, value in vars(error).items() if isinstance(value, _PLAIN)}
    return [known_class.__name__, args, attributes]


def _decode_error(name: str, args: list[Any], attributes: dict[str, Any]) -> SamestepError:
    error: SamestepError = SamestepError.__new__(getattr(errors, name))
    error.args = tuple(args)
    vars(error).update(attributes)
    return error


def order_codec(worker: SharedMemory) -> Codec:
    """Return the codec for orders to a device.

    Arrays in the worker's shared memory are sent as extents, all others within the message.
    """

    def write(values: Values) -> Extent | bytes:
        return worker.extent_of(values) or values.tobytes()

    def read(location: Any, dtype: np.dtype[Any]) -> Values:
        if isinstance(location, bytes):
            return np.frombuffer(location, dtype)
        return worker.array(Extent(*location), dtype.type)

    return Codec(act.GroupOrder, write, read)


def report_codec(memory: SharedMemory, freed_extents: deque[Extent] | None = None) -> Codec:
    """Return the codec for a device's reports; arrays are sent through its shared memory.

    Args:
        memory: The device's shared memory. Arrays that are already in it are not copied.
        freed_extents: For the receiver: collects extents whose arrays are freed. The device reuses
            them.
    """
    extents = deque[Extent]() if freed_extents is None else freed_extents

    def write(values: Values) -> Extent:
        return memory.extent_of(values) or memory.store(values)

    def read(location: Any, dtype: np.dtype[Any]) -> Values:
        return memory.lease(Extent(*location), extents.append, dtype.type)

    return Codec(events.GroupReport, write, read)
