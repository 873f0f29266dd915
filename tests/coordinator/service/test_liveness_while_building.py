"""A worker whose threads are all blocked while it builds its task does not count as lost."""

from __future__ import annotations

import asyncio
import os
import sys

from protocol.base import limits
from tests.cluster import ROOT
from tests.event_loop import on_uvloop
from tests.live_service import live_service, scripted_spec
from tests.stalled_task import NAME, STALL_S

_WORKER = """
from protocol.base import limits
limits.HEARTBEAT_INTERVAL_MS = 100
from worker.cli import main
main()
"""


@on_uvloop
async def test_worker_that_blocks_while_it_builds_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "HEARTBEAT_INTERVAL_MS", 100)
    monkeypatch.setattr(limits, "LIVENESS_TIMEOUT_MS", STALL_S * 1000 // 2)
    async with live_service(tmp_path, 1) as live:
        run_id = live.service.submit(scripted_spec(task=NAME))
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _WORKER, "--coordinator", f"127.0.0.1:{live.port}",
            "--name", "w0", "--backend", "scripted", cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        try:
            await live.result(run_id)
            assert live.events_named("worker_disconnected") == []
        finally:
            worker.kill()
            await worker.wait()
