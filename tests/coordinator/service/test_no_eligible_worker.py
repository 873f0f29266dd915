"""Data that changed before a run resumes: the run ends with that reason instead of waiting."""

from __future__ import annotations

import pytest

from coordinator.files.blob_index import index_blobs
from coordinator.run.workers import eligibility
from protocol.base.errors import ExitCode, SamestepError
from tests import reading_task
from tests.live_service import live_service, scripted_spec


@pytest.mark.parametrize(
    ("is_served", "exit_code", "expected_text"),
    [
        (True, ExitCode.USAGE, "has changed at the coordinator since the run was submitted"),
        (False, ExitCode.MISMATCH, "expected the data that the run started with"),
    ],
)
async def test_data_changed_before_a_resume_ends_the_run(
    tmp_path, monkeypatch, is_served, exit_code, expected_text
):
    monkeypatch.setattr(eligibility, "OTHERS_COME_WITHIN_MS", 200)
    data = tmp_path / "input.bin"
    data.write_bytes(b"good")
    spec = scripted_spec(task=reading_task.NAME, data={"train": str(data)}, steps=1000)
    next_spec = scripted_spec(steps=2)
    async with live_service(tmp_path / "runs", 1) as live:
        run_id = live.service.submit(spec, blobs=index_blobs(spec) if is_served else None)
        live.start_worker("w0", cache=tmp_path / "cache")
        await live.wait_for("committed")
    data.write_bytes(b"gone")
    async with live_service(tmp_path / "runs", 1) as live:
        live.service.resume(tmp_path / "runs" / run_id)
        next_id = live.service.submit(next_spec)
        live.start_worker("w0", cache=tmp_path / "another cache")
        run_end = await live.wait_for("run_ended", run_id=run_id)
        assert (run_end["outcome"], expected_text in run_end["reason"]) == ("failed", True), run_end
        assert "worker 'w0': " in run_end["reason"]
        finished_run = live.service.finished
        assert finished_run is not None
        assert finished_run.outcome is not None
        assert finished_run.outcome.exit_code == exit_code
        if exit_code == ExitCode.MISMATCH:
            with pytest.raises(SamestepError) as error_info:
                await live.workers["w0"]
            assert error_info.value.exit_code == ExitCode.MISMATCH
            live.start_worker("w1")
        await live.result(next_id)
