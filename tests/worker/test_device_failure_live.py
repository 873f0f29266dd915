"""A worker whose device fails, connected to a live service."""

from __future__ import annotations

import pytest

from protocol.errors import DeviceError, ExitCode, RunFailed
from tests.event_loop import on_uvloop
from tests.live_service import live_service, scripted_spec, undisturbed
from worker.engine import DeviceFailed


@on_uvloop
async def test_the_first_failure_is_told_and_others_finish_the_run(tmp_path):
    spec = scripted_spec()
    async with live_service(tmp_path / "disturbed", 2) as live:
        broken = live.worker("broken")
        run_id = live.service.submit(spec)
        await live.wait_for("worker_ready", worker="broken")
        # Jobs that had been asked for before fail after the first.
        for reason in ("out of memory", "the device was lost"):
            broken._result(DeviceFailed(DeviceError("card", reason)))
        with pytest.raises(RunFailed, match=r"^the device 'card' failed: out of memory$") as caught:
            await live.workers["broken"]
        assert caught.value.exit_code == ExitCode.FAILED
        await live.wait_for("worker_lost", worker="broken")
        for name in ("w0", "w1"):
            live.worker(name)
        disturbed = await live.result(run_id)
    alone = await undisturbed(tmp_path / "alone", spec)
    assert disturbed["weights_digest"] == alone["weights_digest"]
