"""A worker that keeps reconnecting is reported, and finally gives up by itself."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from coordinator.operator.control_client import request
from coordinator.operator.status import status_document
from coordinator.operator.status_text import status_lines
from coordinator.run.workers.membership import MemberState
from coordinator.service.flapping import FlapDetector, StrayConnections
from coordinator.storage.directory.run_directory import RunDirectory
from protocol.base.errors import Unreachable
from protocol.wire.acceptor import NOTHING_RECEIVED
from tests.live_service import ScriptedFactory, live_service, scripted_spec
from worker.join.credentials import WorkerCredentials
from worker.shell.client import Client, Target


def test_reports_follow_three_equal_ends_and_then_twice_as_many():
    detector = FlapDetector()
    events = [detector.count_end("w", "loading", "reset", is_explained=False) for _ in range(13)]
    assert [number for number, event in enumerate(events, 1) if event is not None] == [3, 6, 12]
    assert "lost 3 times in a row while loading: reset; likely: its process may" in str(events[2])
    assert detector.reported.keys() == {"w"}
    detector.reset("w")
    assert not detector.reported
    for phase in ("loading", "loading", "training", "training", "loading", "loading"):
        assert detector.count_end("w", phase, "reset", is_explained=False) is None


@pytest.mark.parametrize(
    ("phase", "reason", "cause"),
    [
        ("joining", "the handshake took longer than 5 s", "MTU"),
        ("fetching files", "the peer closed the connection", "MTU"),
        ("training", "silent for 8 s", "MTU"),
        ("training", "the peer closed the connection", "killed for memory"),
        ("loading", "the connection was reset", "killed for memory"),
    ],
)
def test_report_names_the_likely_cause(phase, reason, cause):
    detector = FlapDetector()
    for _ in range(3):
        event = detector.count_end("w", phase, reason, is_explained=False)
    assert event is not None
    assert cause in event.cause


def test_detector_memory_is_bounded():
    detector = FlapDetector()
    for number in range(5000):
        detector.count_end(f"host-{number}", "joining", "garbage", is_explained=False)
    assert len(detector._ends) <= 1024


async def test_worker_repeatedly_lost_in_its_first_step_is_reported(tmp_path):
    async with live_service(tmp_path, 1) as live:
        service = live.service
        run_id = service.submit(scripted_spec())
        target = Target("127.0.0.1", live.port, "w0", "scripted", retry_for_s=1.0)
        lines: list[str] = []
        client = Client(target, ScriptedFactory(100.0), WorkerCredentials(), lines.append)
        client_task = asyncio.create_task(client.serve())

        async def disturb() -> None:
            while service.current is not None:
                member = service.current.run.members.get("w0")
                if member is not None and member.state is MemberState.ACTIVE:
                    service.sessions["w0"].channel.abort("silent for 8 s")
                await asyncio.sleep(0.01)

        disturbance = asyncio.create_task(disturb())
        try:
            event = await live.wait_for("worker_flapping")
            assert (event["worker"], event["phase"], event["count"]) == ("w0", "training", 3)
            assert "MTU" in event["cause"]
            status = list(status_lines(status_document(service, time.monotonic())))
            assert any(
                line.startswith("again    worker w0 keeps disconnecting: lost") for line in status
            )
            async with asyncio.timeout(30):
                with pytest.raises(Unreachable, match=r"joined the coordinator .* without a step"):
                    await client_task
        finally:
            disturbance.cancel()
            client.drain()
        assert any("joined and lost the connection 3 times in a row" in line for line in lines)
        live.start_worker("w0")
        await live.result(run_id)
        assert not service.flap_detector.reported or "w0" in service.sessions
    journal = RunDirectory(tmp_path / run_id).journal.read_text()
    assert '"worker_flapping"' in journal


def test_stray_connections_are_reported_occasionally():
    stray_connections = StrayConnections()
    events = [
        stray_connections.count("10.0.0.9", "plain HTTP?", float(now_s)) for now_s in range(1300)
    ]
    assert [now_s for now_s, event in enumerate(events) if event is not None] == [0, 600, 1200]
    assert "something at 10.0.0.9 that is not a worker connects" in str(events[600])
    assert "(600 so far)" in str(events[600])
    assert StrayConnections().count("10.0.0.9", NOTHING_RECEIVED, 0.0) is None


@pytest.mark.parametrize(
    "data",
    [
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x00\x05nonsense of TLS",
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"",
    ],
    ids=["HTTP", "broken TLS", "SSH", "port check"],
)
async def test_peer_that_is_not_a_worker_is_not_reported_as_flapping(tmp_path, data):
    async with live_service(tmp_path, 1) as live:
        for _ in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
            writer.write(data)
            if not data:
                writer.close()
            with contextlib.suppress(ConnectionResetError):
                answer = await reader.read()
            writer.close()
        while live.service._pending:  # noqa: ASYNC110 -- strangers cause no event
            await asyncio.sleep(0)
        assert live.service.flap_detector.reported == {}
        assert live.service.flap_detector._ends == {}
        if data:
            event = await live.wait_for("not_a_worker")
            assert (event["address"], event["count"]) == ("127.0.0.1", 1)
        if data.startswith(b"GET"):
            assert b"421 Misdirected Request" in answer
            assert b"this is the workers' port: status, metrics" in answer


async def test_command_at_the_worker_port_gets_the_right_port(tmp_path):
    async with live_service(tmp_path, 1) as live:
        with pytest.raises(Unreachable, match="this is the workers' port: status, metrics"):
            await request(f"127.0.0.1:{live.port}", "GET", "/status")
