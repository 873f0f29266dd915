"""A worker that comes and goes for ever is called out, and gives up by itself."""

from __future__ import annotations

import asyncio
import time

import pytest

from coordinator.operator.status import status_document
from coordinator.operator.status_text import status_lines
from coordinator.run.workers.membership import MemberState
from coordinator.service.repeated_ends import RepeatedEnds
from coordinator.storage.directory.run_directory import RunDirectory
from protocol.base.errors import Unreachable
from tests.live_service import Scripted, live_service, scripted_spec
from worker.joining.credentials import WorkerCredentials
from worker.shell.client import Client, Target


def test_three_alike_in_a_row_and_then_twice_as_many():
    ends = RepeatedEnds()
    told = [ends.ended("w", "loading", "reset", said=False) for _ in range(13)]
    assert [number for number, fact in enumerate(told, 1) if fact is not None] == [3, 6, 12]
    assert "lost 3 times in a row while loading: reset; likely: its process may" in str(told[2])
    assert ends.told.keys() == {"w"}
    ends.well("w")
    assert not ends.told
    for phase in ("loading", "loading", "training", "training", "loading", "loading"):
        assert ends.ended("w", phase, "reset", said=False) is None


@pytest.mark.parametrize(
    ("phase", "reason", "cause"),
    [
        ("joining", "no member after 5 s of handshake", "MTU"),
        ("fetching files", "the peer closed the connection", "MTU"),
        ("training", "silent for 8 s", "MTU"),
        ("training", "the peer closed the connection", "killed for memory"),
        ("loading", "the connection was reset", "killed for memory"),
    ],
)
def test_the_likely_cause(phase, reason, cause):
    ends = RepeatedEnds()
    for _ in range(3):
        fact = ends.ended("w", phase, reason, said=False)
    assert fact is not None
    assert cause in fact.cause


def test_what_is_kept_is_bounded():
    ends = RepeatedEnds()
    for number in range(5000):
        ends.ended(f"host-{number}", "joining", "garbage", said=False)
    assert len(ends._ends) <= 1024


async def test_a_worker_that_is_lost_in_its_first_step_again_and_again(tmp_path):
    async with live_service(tmp_path, 1) as live:
        service = live.service
        run_id = service.submit(scripted_spec())
        target = Target("127.0.0.1", live.port, "w0", "scripted", retry_for_s=1.0)
        lines: list[str] = []
        client = Client(target, Scripted(100.0), WorkerCredentials(), lines.append)
        serving = asyncio.create_task(client.serve())

        async def disturb() -> None:
            while service.current is not None:
                member = service.current.run.members.get("w0")
                if member is not None and member.state is MemberState.ACTIVE:
                    service.sessions["w0"].channel.abort("silent for 8 s")
                await asyncio.sleep(0.01)

        disturbing = asyncio.create_task(disturb())
        try:
            told = await live.wait_for("worker_comes_and_goes")
            assert (told["worker"], told["phase"], told["count"]) == ("w0", "training", 3)
            assert "MTU" in told["cause"]
            status = list(status_lines(status_document(service, time.monotonic())))
            assert any(
                line.startswith("again    worker w0 comes and goes: lost") for line in status
            )
            async with asyncio.timeout(30):
                with pytest.raises(Unreachable, match=r"joined the coordinator .* without a step"):
                    await serving
        finally:
            disturbing.cancel()
            client.drain()
        assert any("joined and lost 3 times in a row" in line for line in lines)
        live.worker("w0")
        await live.result(run_id)
        assert not service.repeated_ends.told or "w0" in service.sessions
    journal = RunDirectory(tmp_path / run_id).journal.read_text()
    assert '"worker_comes_and_goes"' in journal
