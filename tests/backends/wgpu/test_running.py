"""One execution of a plan on a device that fails meanwhile."""

from __future__ import annotations

import pytest

from backends.wgpu.device.running import RunningPlan, Submission
from backends.wgpu.device.target import Copy
from protocol.base.errors import DeviceError
from tests.backends.wgpu.test_device import doubling


def test_failure_is_reported_once_and_allows_stop(own_device):
    buffers, steps = doubling(own_device, 2)
    commands = own_device.prepare(steps, buffers)
    submission = Submission(commands, (Copy(buffers[2], 16),), is_last=True)
    own_device._device.destroy()
    execution = RunningPlan(own_device, (submission,) * 5)
    with pytest.raises(DeviceError, match="lost"):
        execution.next()
    assert execution._in_flight, "more of it fails"
    execution.stop()
    assert execution.next() is None
