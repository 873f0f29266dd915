"""Queued runs: they hold no open files, their number is bounded, and they keep their
directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.disk.directory_lock import DirectoryLock
from protocol.base import limits
from protocol.base.errors import QueueFull, UsageError
from protocol.spec.run_spec import parse_run_spec_text
from tests.event_loop import on_uvloop
from tests.live_service import live_service, scripted_spec


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@on_uvloop
async def test_queued_runs_hold_no_open_files(tmp_path):
    async with live_service(tmp_path, 1) as live:
        live.service.submit(scripted_spec())
        before = open_files()
        for _ in range(20):
            live.service.submit(scripted_spec())
        assert open_files() < before + 5
        assert len(live.service.queue) == 20


@on_uvloop
async def test_queued_runs_lock_their_directories_again(tmp_path):
    """A directory that another coordinator has used meanwhile is skipped, with the reason."""
    async with live_service(tmp_path, 1) as live:
        first, middle_id, last = (live.service.submit(scripted_spec(steps=2)) for _ in range(3))
        other_lock = DirectoryLock.acquire(tmp_path / middle_id)
        live.start_worker("w0")
        assert await live.result(first)
        event = await live.wait_for("run_ended", run_id=middle_id)
        assert "cannot begin" in event["reason"]
        assert "in use by another coordinator" in event["reason"]
        assert await live.result(last)
        other_lock.release()


@on_uvloop
async def test_queued_run_starts_once_its_directory_is_back(tmp_path, monkeypatch):
    """A temporarily missing directory neither loses nor fails its run."""
    monkeypatch.setattr(limits, "HEARTBEAT_INTERVAL_MS", 50)
    async with live_service(tmp_path, 1) as live:
        first, queued_run = (live.service.submit(scripted_spec(steps=2)) for _ in range(2))
        (tmp_path / queued_run).rename(tmp_path / "elsewhere")
        live.start_worker("w0")
        assert await live.result(first)
        event = await live.wait_for("run_waits_for_disk", run_id=queued_run)
        assert queued_run in event["reason"]
        (tmp_path / "elsewhere").rename(tmp_path / queued_run)
        assert await live.result(queued_run)


@on_uvloop
async def test_new_run_with_evaluations_needs_held_out_data(tmp_path):
    without_data = parse_run_spec_text(
        "{task: digits, digits: {holdout: 0}, steps: 2, evaluate_every: 1}"
    )
    async with live_service(tmp_path, 1) as live:
        message = "evaluate_every 1: expected held-out data, got none"
        with pytest.raises(UsageError, match=message):
            live.service.submit(without_data)
        live.service.submit(without_data.model_copy(update={"evaluate_every": 0}))
        assert len([*tmp_path.glob("*/run.json")]) == 1


@on_uvloop
async def test_queue_length_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "QUEUED_RUNS", 2)
    async with live_service(tmp_path, 1) as live:
        for _ in range(3):
            live.service.submit(scripted_spec())
        with pytest.raises(QueueFull, match="expected at most 2 queued runs, got one more"):
            live.service.submit(scripted_spec())
