"""A plan made ready on the device, and one run of it, submitted a few parts ahead."""

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
from backends.wgpu.device.target import Buffer, ComputeTarget, Copy, Prepared, Readback
from backends.wgpu.graph.integer_bounds import IntegerBounds
from backends.wgpu.graph.table_indices import TableIndices
from backends.wgpu.lowering.plan import Plan
from protocol.base.errors import DeviceError

_DISPATCHES: Final = 128
"""Of one submission: cards end programs that run for seconds, and an abandoned microbatch ends
with the submission that runs."""
_NOTHING: Final = np.empty(0, np.uint32)
_AHEAD: Final = 3
"""Submissions that wait for the device, so that it never waits for us."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A part of a plan that is submitted at once.

    Attributes:
        copies: What it brings back.
        last: Whether it is the last of its segment.
    """

    prepared: Prepared
    copies: tuple[Copy, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """A plan on the device; its buffers; what its whole numbers can become; and what is submitted,
    by how many microbatches are computed at once."""

    plan: Plan
    capture: Capture
    upload: Buffer
    buffers: tuple[Buffer, ...]
    integer_bounds: IntegerBounds
    table_indices: TableIndices
    submissions: dict[int, tuple[Submission, ...]]

    def output(self, number: int, microbatch: int) -> Buffer | None:
        """Where a microbatch's output is; None for one that is zero."""
        held = self.plan.outputs[number]
        if held is None or not self.plan.strides:
            return None if held is None else self.buffers[held]
        stride = self.plan.strides[held]
        return self.buffers[held].part(microbatch * stride, stride)


def submissions(
    plan: Plan,
    buffers: Sequence[Buffer],
    device: ComputeTarget,
    microbatches: int = 1,
    of_each: Collection[int] = (),
) -> Iterator[Submission]:
    """Cut a plan into what is submitted at once, and make pipelines and bind groups.

    What is copied back is the first microbatch's; of the outputs in `of_each` every microbatch's,
    one after the other.
    """
    dispatches = [replace(each, microbatches=microbatches) for each in plan.dispatches]
    start = 0
    for segment in plan.segments:
        while segment.end - start > _DISPATCHES:
            part = dispatches[start : start + _DISPATCHES]
            yield Submission(device.prepare(part, buffers), (), False)
            start += _DISPATCHES
        copies = []
        for output in segment.outputs:
            held = plan.outputs[output]
            if held is None:
                continue
            stride = plan.strides[held] if plan.strides else 0
            many = microbatches if output in of_each else 1
            nbytes = 4 * plan.elements[output]
            copies += [Copy(buffers[held], nbytes, number * stride) for number in range(many)]
        part = dispatches[start : segment.end]
        yield Submission(device.prepare(part, buffers), tuple(copies), True)
        start = segment.end


def nothing(segments: int) -> tuple[Submission, ...]:
    """The submissions of a microbatch without samples."""
    return tuple(Submission(Prepared([], []), (), True) for _ in range(segments))


class Running:
    """One run of submissions, after an upload. Any thread may stop it."""

    def __init__(
        self,
        device: ComputeTarget,
        parts: Sequence[Submission],
        upload: Buffer | None = None,
        words: NDArray[np.uint32] = _NOTHING,
    ) -> None:
        self._device = device
        self._left = deque(parts)
        self._flying: deque[tuple[Submission, Readback]] = deque()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        if upload is not None and words.size:
            device.upload(upload, words)
        self._submit()

    @property
    def stopped(self) -> bool:
        """Whether it was abandoned."""
        return self._stopped.is_set()

    def next(self) -> list[Array] | None:
        """What the next segment brings; None once stopped.

        Raises:
            DeviceError: The device was lost or is out of memory.
        """
        with self._lock:
            while not self._stopped.is_set():
                submission, readback = self._flying.popleft()
                arrays = readback.result()
                if not self._stopped.is_set():
                    self._submit()
                if submission.last:
                    return arrays
        return None

    def stop(self) -> None:
        """Submit no more, and wait for what runs."""
        self._stopped.set()
        with self._lock:
            self._left.clear()
            while self._flying:
                with suppress(DeviceError):  # whoever computes next meets it again
                    self._flying.popleft()[1].result()

    def _submit(self) -> None:
        while self._left and len(self._flying) < _AHEAD:
            part = self._left.popleft()
            self._flying.append((part, self._device.run(part.prepared, part.copies)))
