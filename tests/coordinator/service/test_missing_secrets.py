"""Key files that vanish while a coordinator runs: no worker is dismissed, and a warning is
logged."""

from __future__ import annotations

import asyncio
import time

import pytest

from coordinator.operator.status import status_document
from coordinator.operator.status_text import status_lines
from tests.live_service import live_service


@pytest.fixture
def secrets_home(tmp_path, monkeypatch):
    """Return the directory with the secrets of this test's coordinator."""
    monkeypatch.setenv("SAMESTEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("missing", ["directory", "emptied"])
async def test_members_stay_and_return_while_the_keys_are_missing(tmp_path, secrets_home, missing):
    async with live_service(tmp_path / "runs", 1) as live:
        service = live.service
        live.start_worker("w0")
        await live.wait_for("worker_connected", worker="w0")
        directory = secrets_home / "coordinator"
        keys = directory / "workers.json"
        content = keys.read_text()
        if missing == "directory":
            directory.rename(tmp_path / "away")
        else:
            keys.write_text("")
        service._check_secrets()
        event = await live.wait_for("secrets_trouble")
        assert not service.sessions["w0"].check.is_revoked
        lines = list(status_lines(status_document(service, time.monotonic())))
        assert f"secrets  {event['reason']}" in lines
        live.events.clear()
        service.sessions["w0"].channel.abort("the test breaks the connection")
        await live.wait_for("worker_connected", worker="w0")
        if missing == "directory":
            (tmp_path / "away").rename(directory)
        else:
            keys.write_text(content)
        async with asyncio.timeout(10):
            while live.find_event("secrets_sound") is None:
                service._check_secrets()
                await asyncio.sleep(0)
        assert service.secrets_troubles == []
        assert live.events_named("worker_connected")[-1]["admitted_by"].startswith("the key")
