"""One run of a plan on a device that fails under it."""

from __future__ import annotations

import numpy as np
import pytest

from backends.wgpu.device import Copy
from backends.wgpu.running import Ready, Running, Submission
from protocol.errors import DeviceError
from tests.backends.wgpu.test_device import doubling


def test_what_fails_is_told_once_and_can_still_be_stopped(own_device):
    buffers, steps = doubling(own_device, 2)
    prepared = own_device.prepare(steps, buffers)
    submission = Submission(prepared, (Copy(buffers[2], 16),), last=True)
    plan = capture = object()
    ready = Ready(plan, capture, buffers[0], (submission,) * 5)  # type: ignore[arg-type]
    own_device._device.destroy()
    running = Running(own_device, ready, np.empty(0, np.uint32))
    with pytest.raises(DeviceError, match="lost"):
        running.next()
    assert running._flying, "more of it fails"
    running.stop()
    assert running.next() is None
