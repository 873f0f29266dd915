"""What a host's process and the process of a device say to one another, over a socket.

Short messages in msgpack; gradients and states lie in shared memory, and their places are told.
What a sender has put there is whole before the message that tells of it is sent, and a message
counts once all of it has come: of a process that is killed in between nothing is read.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from backends.base.interface import Loss
from protocol.base.errors import (
    BackendUnavailable,
    DeviceError,
    SamestepError,
    SubnormalsFlushed,
    error_for,
)
from protocol.exact.replica import StatePart
from protocol.exact.tree import Node
from protocol.exact.update import StepScalars
from protocol.host.shared_memory import Extent, SharedMemory
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import restore_run_spec
from worker.logic import actions as act
from worker.logic import events
from worker.logic.events import StepAttempt

_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 16

Packed = list[Any]


class Pipe:
    """One end. Any thread sends; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()

    def send(self, *messages: Packed) -> None:
        """Send these; what the other end does not read any more is dropped."""
        documents = [msgpack.packb(message) for message in messages]
        frames = b"".join(_LENGTH.pack(len(each)) + each for each in documents)
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(frames)

    def received(self) -> Iterator[Packed]:
        """Messages, until the other end is closed."""
        kept = bytearray()
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError:
                return
            if not data:
                return
            kept += data
            while len(kept) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(kept)
                end = _LENGTH.size + length
                if len(kept) < end:
                    break
                document = bytes(kept[_LENGTH.size : end])
                del kept[:end]
                message: Packed = msgpack.unpackb(document, strict_map_key=False)
                yield message

    def close(self) -> None:
        """The other end sees its end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


# Orders: from the host to a device. What they carry lies in the host's memory.


def pack_order(action: act.DeviceAction, host: SharedMemory) -> Packed:
    """An order; its arrays lie in the host's memory."""
    match action:
        case act.OpenDevice():
            return ["open"]
        case act.Build():
            return ["build", action.run_id, action.spec.to_bytes(), action.keep, action.inputs]
        case act.Compute():
            return ["compute", *_packed_place(action.place), action.microbatches, *action.node]
        case act.GiveStretch():
            place, content = _packed_place(action.place), bytes(action.content)
            return ["stretch", *place, action.replica, action.inner, content, action.own]
        case act.CancelWork():
            return ["cancel"]
        case act.CancelNode():
            return ["cancel node", *_packed_place(action.place), *action.node]
        case act.Apply():
            scalars = None if action.scalars is None else action.scalars.model_dump()
            averages = [_placed(values, host) for values in action.averages]
            return ["apply", averages, scalars, action.attempt]
        case act.LoadChunk():
            where = _placed(action.values, host)
            return ["load", action.kind, action.block, action.chunk, where]
        case act.Restore():
            return ["restore", action.step, action.optimizer_step]
        case act.Evaluate():
            return ["evaluate", action.step, action.part]
        case act.CopyState():
            return ["copy"]


def unpack_order(packed: Packed, host: SharedMemory) -> act.DeviceAction:
    """The order, its arrays as views of the host's memory."""
    kind, *fields = packed
    match kind:
        case "open":
            return act.OpenDevice()
        case "build":
            run_id, document, keep, inputs = fields
            return act.Build(run_id, restore_run_spec(document), keep, inputs)
        case "compute":
            *place, microbatches, lo, hi = fields
            return act.Compute(StepAttempt(*place), microbatches, Node(lo, hi))
        case "stretch":
            *place, replica, inner, content, own = fields
            values = np.frombuffer(content, np.uint8)
            return act.GiveStretch(StepAttempt(*place), replica, inner, values, own)
        case "cancel":
            return act.CancelWork()
        case "cancel node":
            *place, lo, hi = fields
            return act.CancelNode(StepAttempt(*place), Node(lo, hi))
        case "apply":
            places, scalars, attempt = fields
            averages = [host.array(Extent(*place)) for place in places]
            return act.Apply(averages, scalars and StepScalars.model_validate(scalars), attempt)
        case "load":
            part, block, chunk, place = fields
            return act.LoadChunk(part, block, chunk, host.array(Extent(*place)))
        case "restore":
            return act.Restore(*fields)
        case "evaluate":
            return act.Evaluate(*fields)
        case "copy":
            return act.CopyState()
        case _:
            raise AssertionError(kind)


def _packed_place(place: StepAttempt) -> tuple[int, int, float]:
    return place.step, place.attempt, place.loss_scale


def _placed(values: NDArray[Any], memory: SharedMemory) -> Extent:
    place = memory.place_of(values)
    assert place is not None, "whoever sends it has put it there"
    return place


# Reports: from a device to the host. What they carry is put into the device's own memory.


def pack_report(event: events.Event, own: SharedMemory) -> Packed:
    """A report; its arrays are copied into the device's memory.

    Raises:
        SharedMemoryFull: There is no room for them.
    """
    match event:
        case events.Built():
            document = event.manifest.to_bytes()
            names = (
                "run_id", "initial_digest", "step", "state_digest", "signature", "signature_text",
                "backend", "device", "memory", "parity",
            )  # fmt: skip
            return ["built", document, {name: getattr(event, name) for name in names}]
        case events.BuildFailed():
            error = event.error
            return ["build failed", event.run_id, int(error.exit_code), str(error), event.own]
        case events.TaskRefused():
            return ["moved", event.run_id, int(event.error.exit_code), str(event.error)]
        case events.BlockSum():
            where = own.put(event.values)
            return ["sum", *_part(event), event.block, where, event.weight]
        case events.NotFinite():
            return ["not finite", *_part(event), event.block]
        case events.MicrobatchRows():
            where = own.put(event.rows.reshape(-1))
            return ["rows", *_part(event), event.microbatch, where, event.rows.shape]
        case events.StretchStep():
            return ["stretch step", *_part(event), event.inner]
        case events.BoundaryReached():
            where = own.put(event.content.reshape(-1), once=True)
            return ["boundary", *_part(event), event.inner, where]
        case events.StretchStateWanted():
            return ["stretch wanted", *_part(event), event.microbatches, event.own]
        case events.NodeDone():
            loss = event.loss
            return ["node", *_part(event), loss.loss_sum, loss.weight, event.elapsed_ms]
        case events.Applied():
            return ["applied", event.step, event.state_digest]
        case events.PartEvaluated():
            return ["evaluated", event.step, event.part, dict(event.sums)]
        case events.FilesWanted():
            waits = event.for_node
            node = None if waits is None else [*_packed_place(waits[0]), waits[1], *waits[2]]
            return ["files", event.names, node, event.for_part]
        case events.StateCopied():
            parts = [
                (part.kind, part.block, own.put(part.values, once=True)) for part in event.parts
            ]
            return ["state", parts, event.step, event.optimizer_step]
        case events.DeviceFailed():
            return ["failed", *_packed_error(event.error)]
        case events.DevicesLost() | events.DeviceNoted() | events.SlicesAveraged():
            raise AssertionError("of a host, not of a device")


class Reports:
    """Reads what a device reports.

    Attributes:
        unneeded: Places in the device's memory that nobody looks at any more: it is to know.

    Args:
        memory: The device's.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self.unneeded: deque[Extent] = deque()

    def unpack(self, packed: Packed) -> events.Event:
        """The event; its arrays are the device's memory, told as unneeded when they are gone."""
        kind, *fields = packed
        match kind:
            case "built":
                document, named = fields
                return events.Built(manifest=Manifest.from_bytes(document), **named)
            case "build failed":
                run_id, exit_code, text, own = fields
                return events.BuildFailed(run_id, error_for(exit_code, text), own)
            case "moved":
                run_id, exit_code, text = fields
                return events.TaskRefused(run_id, error_for(exit_code, text))
            case "sum":
                *part, block, where, weight = fields
                return events.BlockSum(*_unpacked_part(part), block, self._array(where), weight)
            case "not finite":
                *part, block = fields
                return events.NotFinite(*_unpacked_part(part), block)
            case "rows":
                *part, microbatch, where, shape = fields
                rows = self._array(where, np.uint8).reshape(shape)
                return events.MicrobatchRows(*_unpacked_part(part), microbatch, rows)
            case "stretch step":
                *part, inner = fields
                return events.StretchStep(*_unpacked_part(part), inner)
            case "boundary":
                *part, inner, where = fields
                content = self._array(where, np.uint8)
                return events.BoundaryReached(*_unpacked_part(part), inner, content)
            case "stretch wanted":
                *part, microbatches, own = fields
                place, node = _unpacked_part(part)
                return events.StretchStateWanted(place, microbatches, node, own)
            case "node":
                *part, loss_sum, weight, elapsed_ms = fields
                return events.NodeDone(*_unpacked_part(part), Loss(loss_sum, weight), elapsed_ms)
            case "applied":
                return events.Applied(*fields)
            case "evaluated":
                return events.PartEvaluated(*fields)
            case "files":
                names, node, part = fields
                return events.FilesWanted(tuple(names), _unpacked_wait(node), part and tuple(part))
            case "state":
                parts, step, optimizer_step = fields
                copied = [
                    StatePart(part, block, self._array(place)) for part, block, place in parts
                ]
                return events.StateCopied(copied, step, optimizer_step)
            case "failed":
                return events.DeviceFailed(_unpacked_error(*fields))
            case _:
                raise AssertionError(kind)

    def _array(self, where: list[int], dtype: type[np.generic] = np.float32) -> NDArray[Any]:
        return self._memory.leased(Extent(*where), self.unneeded.append, dtype)


def _part(
    event: events.BlockSum
    | events.NotFinite
    | events.MicrobatchRows
    | events.NodeDone
    | events.StretchStep
    | events.BoundaryReached
    | events.StretchStateWanted,
) -> tuple[int, int, float, int, int]:
    return *_packed_place(event.place), event.node.lo, event.node.hi


def _unpacked_part(fields: list[Any]) -> tuple[StepAttempt, Node]:
    *place, lo, hi = fields
    return StepAttempt(*place), Node(lo, hi)


def _unpacked_wait(fields: list[Any] | None) -> tuple[StepAttempt, int, Node] | None:
    if fields is None:
        return None
    *place, microbatches, lo, hi = fields
    return StepAttempt(*place), microbatches, Node(lo, hi)


def _packed_error(error: Exception) -> tuple[str, str, str]:
    """Kind, and its two words."""
    match error:
        case BackendUnavailable():
            return "unavailable", error.backend, error.reason
        case SubnormalsFlushed():
            return "subnormals", error.device, ""
        case DeviceError():
            return "device", error.device, error.reason
        case _:
            return "other", "", str(error) or repr(error)


def _unpacked_error(kind: str, first: str, second: str) -> SamestepError:
    match kind:
        case "unavailable":
            return BackendUnavailable(first, second)
        case "subnormals":
            return SubnormalsFlushed(first)
        case "device":
            return DeviceError(first, second)
        case _:
            return SamestepError(second)
