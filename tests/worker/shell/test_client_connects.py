"""A worker waits for connections only as long as configured, and leaves at once when asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.base.errors import ExitCode, Unreachable
from tests.event_loop import on_uvloop
from tests.live_service import PATIENCE_S, ScriptedFactory, live_service
from tests.silent_address import dead_name_server, refusing_port, silent_address
from worker.join.credentials import WorkerCredentials
from worker.shell import client as shell
from worker.shell.client import Client, CoordinatorSearch, Target

UNLIMITED_S = 3600.0


@pytest.fixture(autouse=True)
def samestep_home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SAMESTEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def silent_host() -> Iterator[tuple[str, int]]:
    with silent_address() as address:
        yield address


@pytest.fixture
def unanswered_name() -> Iterator[threading.Event]:
    with dead_name_server("coordinator.example") as question_event:
        yield question_event


def client(
    address: tuple[str, int],
    retry_for_s: float,
    lines: list[str],
    search_again: CoordinatorSearch | None = None,
) -> Client:
    target = Target(*address, "w", "scripted", retry_for_s)
    return Client(
        target, ScriptedFactory(), WorkerCredentials(), lines.append, search_again=search_again
    )


async def final_error(address: tuple[str, int]) -> str:
    with pytest.raises(Unreachable) as error_info:
        async with asyncio.timeout(PATIENCE_S):
            await client(address, 0.1, []).serve()
    return str(error_info.value)


@on_uvloop
async def test_worker_gives_up_on_a_dropping_path(silent_host, monkeypatch):
    monkeypatch.setattr(shell, "_LEAST_ATTEMPT_S", 0.05)
    host, port = silent_host
    reason = await final_error(silent_host)
    assert reason.startswith(
        f"no coordinator at {host}:{port} for 0.1 s: no answer from {host}:{port} "
    )
    assert "a firewall drops packets to it" in reason


@pytest.mark.usefixtures("unanswered_name")
@on_uvloop
async def test_worker_gives_up_on_a_dead_name_server(monkeypatch):
    monkeypatch.setattr(shell, "_LEAST_ATTEMPT_S", 0.05)
    reason = await final_error(("coordinator.example", 9000))
    assert "no coordinator at coordinator.example:9000 for 0.1 s: no name server" in reason


@on_uvloop
async def test_address_error_is_explained():
    port = refusing_port()
    reason = await final_error(("127.0.0.1", port))
    assert f"127.0.0.1:{port} refused the connection; start it there" in reason


@on_uvloop
async def test_worker_leaves_at_once_while_connecting(silent_host):
    worker = client(silent_host, UNLIMITED_S, [])
    serving = asyncio.create_task(worker.serve())
    await asyncio.sleep(0)
    worker.drain()
    async with asyncio.timeout(PATIENCE_S):
        assert await serving == ExitCode.OK


@on_uvloop
async def test_worker_leaves_at_once_while_resolving_a_name(unanswered_name):
    worker = client(("coordinator.example", 9000), UNLIMITED_S, [])
    serving = asyncio.create_task(worker.serve())
    assert await asyncio.to_thread(unanswered_name.wait, PATIENCE_S)
    worker.drain()
    async with asyncio.timeout(PATIENCE_S):
        assert await serving == ExitCode.OK


@on_uvloop
async def test_discovered_coordinator_is_searched_again(tmp_path, monkeypatch):
    """The first address is dead, and the coordinator is announced at another one."""
    monkeypatch.setattr(shell, "_FIND_AGAIN_AFTER_S", 0.0)
    lines: list[str] = []
    async with live_service(tmp_path, 1) as live:
        ports = iter([0, live.port])

        async def search_again() -> tuple[str, int]:
            if not (port := next(ports)):
                raise Unreachable("none announces itself")
            return "127.0.0.1", port

        worker = client(("127.0.0.1", refusing_port()), UNLIMITED_S, lines, search_again)
        serving = asyncio.create_task(worker.serve())
        async with asyncio.timeout(PATIENCE_S):
            while not live.events_named("worker_connected"):
                live.changed.clear()
                await live.changed.wait()
        worker.drain()
        assert await serving == ExitCode.OK
    assert f"the coordinator is at 127.0.0.1:{live.port} now" in lines
