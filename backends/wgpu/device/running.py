"""A plan placed on the device, and a run of it, submitted a few parts ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from backends.base.interface import Array
from backends.wgpu.capture.capture import Capture
from backends.wgpu.device.target import Buffer, CommandList, ComputeTarget, Copy, Readback
from backends.wgpu.graph.integer_bounds import IntegerBounds
from backends.wgpu.graph.table_indices import TableIndices
from backends.wgpu.lowering.plan import Plan
from protocol.base.errors import DeviceError

_MOST_DISPATCHES: Final = 128
"""Limit on dispatches per submission: drivers kill submissions that run for seconds, and an
abandoned microbatch still runs the submissions in flight."""
_NO_WORDS: Final = np.empty(0, np.uint32)
_SUBMISSIONS_AHEAD: Final = 3
"""Largest number of submissions in flight; several, so that the device never idles."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A part of a plan that is submitted at once.

    Attributes:
        commands: The dispatches.
        copies: Buffers to read back.
        is_last: Whether the submission is the last of its segment.
    """

    commands: CommandList
    copies: tuple[Copy, ...]
    is_last: bool


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """A plan on the device: its buffers, checks of its inputs, and its submissions by number of
    microbatches that run together."""

    plan: Plan
    capture: Capture
    upload: Buffer
    buffers: tuple[Buffer, ...]
    integer_bounds: IntegerBounds
    table_indices: TableIndices
    submissions: dict[int, tuple[Submission, ...]]

    def output(self, number: int, microbatch: int) -> Buffer | None:
        """Return the buffer of a microbatch's output; None if the output is zero."""
        buffer_number = self.plan.outputs[number]
        if buffer_number is None or not self.plan.strides:
            return None if buffer_number is None else self.buffers[buffer_number]
        stride = self.plan.strides[buffer_number]
        return self.buffers[buffer_number].part(microbatch * stride, stride)


def make_submissions(
    plan: Plan,
    buffers: Sequence[Buffer],
    device: ComputeTarget,
    microbatches: int = 1,
    per_microbatch: Collection[int] = (),
) -> Iterator[Submission]:
    """Split a plan into submissions, and create pipelines and bind groups.

    Args:
        plan: The plan.
        buffers: The plan's buffers by number.
        device: The target.
        microbatches: Number of microbatches that run together.
        per_microbatch: Numbers of the outputs that are copied back for every microbatch, in order;
            other outputs are copied back for the first one only.
    """
    dispatches = [replace(dispatch, microbatches=microbatches) for dispatch in plan.dispatches]
    start = 0
    for segment in plan.segments:
        while segment.end - start > _MOST_DISPATCHES:
            part = dispatches[start : start + _MOST_DISPATCHES]
            yield Submission(device.prepare(part, buffers), (), False)
            start += _MOST_DISPATCHES
        copies = []
        for output in segment.outputs:
            buffer_number = plan.outputs[output]
            if buffer_number is None:
                continue
            stride = plan.strides[buffer_number] if plan.strides else 0
            count = microbatches if output in per_microbatch else 1
            nbytes = 4 * plan.elements[output]
            copies += [
                Copy(buffers[buffer_number], nbytes, number * stride) for number in range(count)
            ]
        part = dispatches[start : segment.end]
        yield Submission(device.prepare(part, buffers), tuple(copies), True)
        start = segment.end


def empty_submissions(segments: int) -> tuple[Submission, ...]:
    """Return the submissions of a microbatch without samples."""
    return tuple(Submission(CommandList([], []), (), True) for _ in range(segments))


class RunningPlan:
    """One run of a plan's submissions, started after an upload. Any thread may call `stop`."""

    def __init__(
        self,
        device: ComputeTarget,
        parts: Sequence[Submission],
        upload: Buffer | None = None,
        words: NDArray[np.uint32] = _NO_WORDS,
    ) -> None:
        self._device = device
        self._pending = deque(parts)
        self._in_flight: deque[tuple[Submission, Readback]] = deque()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        if upload is not None and words.size:
            device.upload(upload, words)
        self._submit()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    def next(self) -> list[Array] | None:
        """Return the results of the next segment; None once stopped.

        Raises:
            DeviceError: The device was lost or is out of memory.
        """
        with self._lock:
            while not self._stopped.is_set():
                submission, readback = self._in_flight.popleft()
                arrays = readback.result()
                if not self._stopped.is_set():
                    self._submit()
                if submission.is_last:
                    return arrays
        return None

    def stop(self) -> None:
        """Submit nothing more, and wait for submissions in flight."""
        self._stopped.set()
        with self._lock:
            self._pending.clear()
            while self._in_flight:
                with suppress(DeviceError):  # the next computation raises it again
                    self._in_flight.popleft()[1].result()

    def _submit(self) -> None:
        while self._pending and len(self._in_flight) < _SUBMISSIONS_AHEAD:
            part = self._pending.popleft()
            self._in_flight.append((part, self._device.run(part.commands, part.copies)))
