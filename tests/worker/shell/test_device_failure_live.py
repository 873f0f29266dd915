"""A worker whose device fails, connected to a live service."""

from __future__ import annotations

import pytest

from protocol.base.errors import BackendUnavailable, DeviceError, ExitCode, RunFailed, Unreachable
from tests.event_loop import on_uvloop
from tests.live_service import ScriptedFactory, live_service, run_undisturbed, scripted_spec
from worker.logic.events import BlockSum, DeviceFailed, SubtreeDone
from worker.shell.client import Client


@on_uvloop
async def test_the_first_failure_is_reported_and_others_finish_the_run(tmp_path):
    spec = scripted_spec()
    async with live_service(tmp_path / "disturbed", 2) as live:
        failing_worker = live.start_worker("broken")
        run_id = live.service.submit(spec)
        await live.wait_for("worker_ready", worker="broken")
        # Jobs submitted earlier fail after the first failure.
        for reason in ("out of memory", "the device was lost"):
            failing_worker._result(DeviceFailed(DeviceError("card", reason)))
        with pytest.raises(RunFailed, match=r"^device 'card' failed: out of memory$") as error_info:
            await live.workers["broken"]
        assert error_info.value.exit_code == ExitCode.FAILED
        await live.wait_for("worker_lost", worker="broken")
        for name in ("w0", "w1"):
            live.start_worker(name)
        result = await live.result(run_id)
    reference = await run_undisturbed(tmp_path / "alone", spec)
    assert result["weights_digest"] == reference["weights_digest"]


class FailsAfterUpload(Client):
    """A client whose device fails once the sums of a subtree are queued for upload."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._pending_sums: list[BlockSum] = []

    def _result(self, event):
        if isinstance(event, BlockSum):
            self._pending_sums.append(event)
        elif isinstance(event, SubtreeDone):
            for each in self._pending_sums:
                super()._result(each)
            super()._result(DeviceFailed(DeviceError("card", "out of memory")))
        else:
            super()._result(event)


@on_uvloop
async def test_failure_reason_arrives_after_a_pending_upload(tmp_path):
    # 32 MiB exceed the socket buffers of both sides.
    large_blocks = {"blocks": 8, "block_bytes": 4 * 2**20, "samples": 8}
    async with live_service(tmp_path, 1) as live:
        live.start_worker("broken", FailsAfterUpload)
        live.service.submit(scripted_spec(scripted=large_blocks))
        with pytest.raises(RunFailed, match="out of memory"):
            await live.workers["broken"]
        disconnection = await live.wait_for("worker_disconnected", worker="broken")
        assert disconnection["reason"] == "device 'card' failed: out of memory"


class MissingDevice(ScriptedFactory):
    """A device that was requested by name and is missing."""

    def backend(self):
        raise BackendUnavailable("vulkan", "there is no device 7")


@on_uvloop
async def test_missing_device_leaves_at_once_without_a_run(tmp_path):
    async with live_service(tmp_path, 2) as live:
        live.start_worker("seven", backend_factory=MissingDevice())
        reason = "backend 'vulkan' is not usable here: there is no device 7"
        with pytest.raises(Unreachable, match=f"^{reason}$") as error_info:
            await live.workers["seven"]
        assert error_info.value.exit_code == ExitCode.UNREACHABLE
        await live.wait_for("worker_connected", worker="seven")
        await live.wait_for("worker_disconnected", worker="seven", reason=reason)


@on_uvloop
async def test_run_does_not_wait_for_workers_without_a_device(tmp_path):
    async with live_service(tmp_path, 1) as live:
        run_id = live.service.submit(scripted_spec())
        for name in ("seven", "eight"):
            live.start_worker(name, backend_factory=MissingDevice())
            await live.wait_for("worker_disconnected", worker=name)
        assert live.service.current is not None
        assert live.service.current.run.unfit.keys() == {"seven", "eight"}
        live.start_worker("w0")
        assert (await live.result(run_id))["outcome"] == "finished"
