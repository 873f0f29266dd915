"""While the worker that keeps a run's copies is awaited."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator import main
from protocol.base.errors import UsageError
from tests.free_ports import free_address
from tests.live_service import RETRY_FOR_S, Scripted, live_service
from worker.joining.credentials import WorkerCredentials
from worker.shell.client import Client, Target


async def test_it_is_told_who_is_there_and_who_is_waited_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(main, "_FIRST_WORD_S", 0.0)
    async with live_service(tmp_path, 1) as live:
        live.worker("bob")
        await live.wait_for("worker_connected", worker="bob")
        arrival = main._Arrival("nosuch")
        waiting = asyncio.create_task(main._arrived(arrival, live.service))
        told = ""
        while "nosuch" not in told:
            await asyncio.sleep(0)
            told = capsys.readouterr().out
        arrival.seen.set()
        await waiting
    assert told.splitlines()[-1] == "coordinator: connected: 'bob'; waiting for 'nosuch'"


async def test_a_worker_is_not_told_of_a_run_that_does_not_go_on(tmp_path):
    host, port = free_address().split(":")
    options: Any = SimpleNamespace(bind=(host, int(port)), plaintext=False, name="")
    told: asyncio.Queue[str] = asyncio.Queue()
    target = Target(host, int(port), "ann", "scripted", RETRY_FOR_S)
    worker = asyncio.create_task(
        Client(target, Scripted(), WorkerCredentials(), told.put_nowait).serve()
    )
    with pytest.raises(UsageError, match="worker 'ann' has no copy of run 'nosuch'; it keeps none"):
        await main._bring_back_from_worker(options, "ann:nosuch", tmp_path / "out")
    while "no run was brought back" not in (line := await told.get()):
        assert "goes on" not in line
    worker.cancel()
