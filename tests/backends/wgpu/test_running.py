"""A plan that runs while its device fails."""

from __future__ import annotations

import pytest

from backends.wgpu.device.running import RunningPlan, Submission
from backends.wgpu.device.target import Copy
from protocol.base.errors import DeviceError
from tests.backends.wgpu.test_device import doubling_chain


def test_a_running_plan_can_be_stopped_after_a_device_error(separate_device):
    buffers, dispatches = doubling_chain(separate_device, 2)
    commands = separate_device.prepare(dispatches, buffers)
    submission = Submission(commands, (Copy(buffers[2], 16),), is_last=True)
    separate_device._device.destroy()
    running_plan = RunningPlan(separate_device, (submission,) * 5)
    with pytest.raises(DeviceError, match="lost"):
        running_plan.next()
    assert running_plan._in_flight, "submissions that will fail too"
    running_plan.stop()
    assert running_plan.next() is None
