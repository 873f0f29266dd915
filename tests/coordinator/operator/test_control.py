"""The control port over real HTTP: routes, refusals, and the life cycle of a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.audit.audit import audit
from coordinator.members.listening import require_loopback
from coordinator.operator.control import ControlPort
from coordinator.operator.control_client import request
from coordinator.run.outputs.events import Event
from coordinator.service.run_instance import abandoned_runs, unfinished_runs
from coordinator.service.service import Service, Settings
from protocol.base import limits
from protocol.base.errors import ExitCode, Unreachable, UsageError
from tests.event_loop import on_uvloop
from tests.free_ports import free_address
from tests.live_service import LiveService, live_service, run_undisturbed, scripted_spec
from tests.processes import run_to_end
from tests.silent_address import dead_name_server

ROOT = Path(__file__).parents[3]
SPEC = {
    "name": "scripted", "task": "scripted", "seed": 3, "steps": 4,
    "batch": {"samples": 8, "microbatch": 1},
    "scripted": {"blocks": 3, "block_bytes": 64, "samples": 64},
}  # fmt: skip
LONG = {**SPEC, "steps": 100_000}


@dataclass(frozen=True, slots=True)
class Ticked(Event):
    """An event of any kind."""

    event = "tick"
    number: int
    loss: float = math.nan


class Operator:
    """A client of the control port."""

    def __init__(self, live: LiveService, control: ControlPort, http: aiohttp.ClientSession):
        self.live = live
        self.control = control
        self.http = http
        self.address = f"127.0.0.1:{control.address[1]}"

    async def ask(self, method: str, path: str, **overrides: Any) -> tuple[int, Any]:
        """Return status and document."""
        async with self.http.request(method, f"http://{self.address}{path}", **overrides) as answer:
            return answer.status, await answer.json(content_type=None)

    async def post(self, path: str, document: object = None) -> tuple[int, Any]:
        return await self.ask("POST", path, json=document if document is not None else {})

    async def status(self) -> dict[str, Any]:
        code, document = await self.ask("GET", "/status")
        assert code == 200
        assert isinstance(document, dict)
        return document


@contextlib.asynccontextmanager
async def operating(directory: Path, expect_workers: int = 1) -> AsyncIterator[Operator]:
    async with live_service(directory, expect_workers) as live:
        control = ControlPort(live.service)
        live.service.event_sinks.append(control)
        await control.start("127.0.0.1", 0)
        try:
            bearing = {"Authorization": f"Bearer {control.guard.token}"}
            async with aiohttp.ClientSession(headers=bearing) as http:
                yield Operator(live, control, http)
        finally:
            await control.stop()


# Routes; test_control_guard checks who may use which.


@on_uvloop
async def test_health_readiness_and_page_are_served(tmp_path):
    async with operating(tmp_path) as operator:
        assert await operator.ask("GET", "/healthz") == (200, {"ok": True})
        assert await operator.ask("GET", "/readyz") == (503, {"ready": False})
        operator.live.start_worker("w0")
        await operator.live.wait_for("worker_connected", worker="w0")
        assert await operator.ask("GET", "/readyz") == (200, {"ready": True})
        async with operator.http.get(f"http://{operator.address}/") as answer:
            assert answer.status == 200
            assert answer.content_type == "text/html"
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


@on_uvloop
async def test_alias_bomb_and_full_queue_are_refused(tmp_path, monkeypatch):
    """Nested aliases are refused without delaying other requests; a full queue answers 429."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    async with operating(tmp_path) as operator:
        bomb = {"run": SPEC, "overrides": ["data=" + "\n".join(lines)]}
        (code, answer), healthy = await asyncio.gather(
            operator.post("/submit", bomb), operator.ask("GET", "/healthz")
        )
        assert (code, healthy[0]) == (400, 200)
        assert "values with aliases expanded" in answer["error"]
        code, answer = await operator.ask("POST", "/check", data="\n".join(lines))
        assert (code, "values with aliases expanded" in answer["error"]) == (400, True)
        monkeypatch.setattr(limits, "QUEUED_RUNS", 1)
        codes = [(await operator.post("/submit", {"run": LONG}))[0] for _ in range(3)]
        assert codes == [200, 200, 429]


@on_uvloop
async def test_commands_without_a_run_are_a_conflict(tmp_path):
    async with operating(tmp_path) as operator:
        for path in ("/halt", "/continue"):
            code, document = await operator.post(path)
            assert code == 409
            assert "no run is" in document["error"]
        status = await operator.status()
        assert status["phase"] == "idle"
        assert status["workers"] == []
        # A run that waits for workers cannot be halted or continued.
        assert (await operator.post("/submit", {"run": SPEC}))[0] == 200
        for path in ("/halt", "/continue"):
            assert (await operator.post(path))[0] == 409
        assert "1 more worker" in (await operator.status())["waiting_for"]


# Refusals.


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "'run'"),
        (b"{", "JSON"),
        (b"[]", "/submit"),
        (b'"run"', "/submit"),
        (b"\xff\xfe{}", "/submit"),
        (b'{"run": 3}', "'run'"),
        (b'{"run": {}, "colour": 3}', "'colour'"),
        (b'{"run": {"task": "scripted"}}', "the key 'steps' is missing"),
        (b'{"run": {"task": "scripted", "stepz": 3}}', "'stepz'; did you mean 'steps'?"),
        (
            b'{"run": {"task": "scripted", "steps": 3, "optimizer": {"lrr": 1}}}',
            "'optimizer.lrr'; did you mean 'lr'?",
        ),
        (b'{"run": {"task": "scripted", "steps": "3"}}', "steps"),
        (b'{"run": {"task": "scripted", "steps": NaN}}', "steps"),
        (b'{"run": {"task": "scripted", "steps": 3}, "overrides": ["x"]}', "KEY=VALUE"),
        (b'{"run": {"task": "scripted", "steps": 3}, "overrides": [3]}', "overrides"),
        (b'{"run": ' * 1000, "JSON"),
    ],
)
@on_uvloop
async def test_invalid_submission_is_refused(tmp_path, body, text):
    async with operating(tmp_path) as operator:
        code, document = await operator.ask("POST", "/submit", data=body)
        assert code == 400
        assert text in document["error"]
        assert "\n" not in document["error"]
        assert document["exit_code"] == ExitCode.USAGE
        assert (await operator.status())["phase"] == "idle"


@on_uvloop
async def test_body_that_is_too_large_or_in_an_unknown_charset_is_refused(tmp_path):
    async with operating(tmp_path) as operator:
        assert (await operator.ask("POST", "/submit", data=bytes(300_000)))[0] == 413
        unknown_charset = {"Content-Type": "application/json; charset=klingon"}
        code, document = await operator.ask("POST", "/submit", data=b"{}", headers=unknown_charset)
        assert code == 400
        assert "'run'" in document["error"]


@pytest.mark.parametrize("body", [b"{", b'{"skip_step": 3}', b'{"skip": true}', b"[]"])
@on_uvloop
async def test_invalid_continue_request_is_refused(tmp_path, body):
    async with operating(tmp_path) as operator:
        code, document = await operator.ask("POST", "/continue", data=body)
        assert code == 400
        assert "/continue" in document["error"]


@on_uvloop
async def test_command_line_gets_the_same_errors(tmp_path):
    async with operating(tmp_path) as operator:
        invalid_request = {"run": {"task": "scripted", "steps": 3, "sead": 1}}
        with pytest.raises(UsageError, match="did you mean 'seed'"):
            await request(operator.address, "POST", "/submit", invalid_request)
        assert (await request(operator.address, "GET", "/status"))["phase"] == "idle"
        address = operator.address
    with pytest.raises(Unreachable, match="--control HOST:PORT"):
        await request(address, "GET", "/status")


# The life cycle.


@on_uvloop
async def test_run_is_submitted_halted_continued_and_drained(tmp_path):
    async with operating(tmp_path) as operator:
        live = operator.live
        code, document = await operator.post("/submit", {"run": LONG, "overrides": ["seed=4"]})
        assert code == 200
        run_id = document["run_id"]
        assert run_id.startswith("scripted-")
        live.start_worker("w0")
        await live.wait_for("committed", step=2)

        assert await operator.post("/halt") == (200, {"phase": "halted"})
        halt = await operator.status()
        assert halt["reason"] == "halted by the operator"
        assert "operator" in halt["waiting_for"]
        assert halt["run_id"] == run_id
        code, refusal = await operator.post("/halt")
        assert (code, refusal["error"]) == (
            409,
            "the run is halted already: halted by the operator",
        )

        assert await operator.post("/continue") == (200, {"phase": "training"})
        step = halt["step"]
        await live.wait_for("committed", step=step, skipped=False)
        assert (await operator.post("/halt"))[0] == 200
        # If a commit was being written at the halt, its step completes, and the next step is
        # skipped.
        step = live.events_named("halted")[-1]["step"]
        assert (await operator.post("/continue", {"skip_step": True}))[0] == 200
        await live.wait_for("committed", step=step, skipped=True)

        assert await operator.post("/drain") == (200, {"draining": True})
        run_end = await live.wait_for("run_ended", run_id=run_id)
        assert run_end["outcome"] == "drained"
        await asyncio.wait_for(live.service.should_end.wait(), 10)
        final = await operator.status()
        assert final["phase"] == "drained"
        assert final["result"]["steps"] == final["step"] > step


@on_uvloop
async def test_abandoned_run_continues_by_its_name(tmp_path):
    """A coordinator that continues with unfinished runs does not resume it by itself."""
    reference = await run_undisturbed(tmp_path / "undisturbed", scripted_spec(steps=40))
    runs = tmp_path / "runs"
    async with operating(runs) as operator:
        live = operator.live
        assert (await operator.post("/give-up"))[0] == 409
        _, first = await operator.post("/submit", {"run": {**SPEC, "steps": 40}})
        _, second = await operator.post("/submit", {"run": SPEC})
        live.start_worker("w0")
        await live.wait_for("committed", step=2)
        await operator.post("/halt")
        code, answer = await operator.post("/give-up")
        assert code == 200
        assert answer["run_id"] == first["run_id"]
        run_end = await live.wait_for("run_ended", run_id=first["run_id"])
        assert run_end["outcome"] == "failed"
        assert run_end["reason"].startswith("given up by the operator, when halted: ")
        await live.result(second["run_id"])
        assert unfinished_runs(runs) == []
        assert abandoned_runs(runs) == [first["run_id"]]

        for name, refusal in ((second["run_id"], 409), ("nowhere", 400), ("../runs", 400)):
            assert (await operator.post("/resume", {"run_id": name}))[0] == refusal
        mark = len(live.events)
        assert await operator.post("/resume", first) == (200, first)
        assert (await operator.post("/resume", first))[0] == 400, "it is in progress"
        while not any(event["event"] == "run_ended" for event in live.events[mark:]):
            live.changed.clear()
            await live.changed.wait()
        assert abandoned_runs(runs) == []
    result = json.loads((runs / first["run_id"] / "result.json").read_text())
    assert result["weights_digest"] == reference["weights_digest"]
    assert audit(runs / first["run_id"]).ok


@on_uvloop
async def test_run_that_waits_for_workers_can_be_abandoned(tmp_path):
    async with operating(tmp_path, 9) as operator:
        _, first = await operator.post("/submit", {"run": SPEC})
        assert (await operator.post("/give-up"))[0] == 200
        await operator.live.wait_for("run_ended", run_id=first["run_id"])
        assert abandoned_runs(tmp_path) == [first["run_id"]]
        assert await operator.post("/resume", first) == (200, first)


@on_uvloop
async def test_halt_does_not_change_a_bit(tmp_path):
    reference = await run_undisturbed(tmp_path / "undisturbed", scripted_spec(steps=40))
    async with operating(tmp_path) as operator:
        live = operator.live
        _, document = await operator.post("/submit", {"run": {**SPEC, "steps": 40}})
        live.start_worker("w0")
        for step in (1, 3, 7):
            await live.wait_for("committed", step=step)
            if (await operator.post("/halt"))[0] == 200:
                assert (await operator.post("/continue"))[0] == 200
        result = await live.result(document["run_id"])
        assert live.events_named("halted")
    assert result["weights_digest"] == reference["weights_digest"]
    assert result["losses"] == reference["losses"]


@on_uvloop
async def test_runs_start_in_sequence_and_status_names_waiting_ones(tmp_path):
    async with operating(tmp_path) as operator:
        ids = [(await operator.post("/submit", {"run": SPEC}))[1]["run_id"] for _ in range(3)]
        assert len(set(ids)) == 3
        assert (await operator.status())["queued_runs"] == ids[1:]
        operator.live.start_worker("w0")
        digests = {(await operator.live.result(run_id))["weights_digest"] for run_id in ids}
        assert len(digests) == 1
        started_runs = [event["run_id"] for event in operator.live.events_named("run_accepted")]
        assert started_runs == ids
        for run_id in ids:
            result = json.loads((tmp_path / run_id / "result.json").read_text())
            assert result["run_id"] == run_id
        status = await operator.status()
        assert status["phase"] == "finished"
        assert status["workers"][0]["name"] == "w0"


@on_uvloop
async def test_status_document_describes_a_training_run(tmp_path):
    async with operating(tmp_path) as operator:
        await operator.post("/submit", {"run": LONG})
        operator.live.start_worker("w0")
        await operator.live.wait_for("committed", step=3)
        status = await operator.status()
        assert status["phase"] == "training"
        assert (status["steps"], status["view"], status["exact"]) == (100_000, 1, True)
        assert status["step"] >= 4
        assert isinstance(status["loss"], float)
        assert len(status["weights_digest"]) == 64
        (worker,) = status["workers"]
        assert worker["state"] == "active"
        assert worker["backend"] == "scripted"
        assert worker["microbatches"] >= 32
        assert worker["bytes_received"] > worker["bytes_sent"] / 100 > 0
        await operator.post("/halt")


# Metrics and events.


@on_uvloop
async def test_metrics_are_in_prometheus_format(tmp_path):
    async with operating(tmp_path) as operator:

        async def figures() -> dict[str, float]:
            async with operator.http.get(f"http://{operator.address}/metrics") as answer:
                assert answer.status == 200
                assert answer.content_type == "text/plain"
                page = await answer.text()
            return {
                sample.name + "".join(sample.labels.values()): sample.value
                for family in text_string_to_metric_families(page)
                for sample in family.samples
            }

        assert (await figures())["samestep_workers"] == 0
        await operator.post("/submit", {"run": LONG})
        operator.live.start_worker("w0")
        await operator.live.wait_for("committed", step=2)
        await operator.post("/halt")
        halt = await operator.live.wait_for("halted")
        # The commit may have been in progress at the halt.
        await operator.live.wait_for("committed", step=halt["step"] - 1)
        metrics, status = await figures(), await operator.status()
        assert metrics["samestep_workers"] == 1
        assert metrics["samestep_step"] == status["step"]
        assert metrics["samestep_view"] == 1
        assert metrics["samestep_loss"] == pytest.approx(status["loss"])
        assert metrics["samestep_microbatchesw0"] == status["workers"][0]["microbatches"]
        assert metrics["samestep_ms_per_microbatchw0"] >= 0


@on_uvloop
async def test_event_stream_reports_all_events_in_order(tmp_path):
    async with operating(tmp_path) as operator:
        events: list[dict[str, Any]] = []
        async with operator.http.get(f"http://{operator.address}/events") as stream:
            assert stream.content_type == "text/event-stream"
            _, document = await operator.post("/submit", {"run": SPEC})
            operator.live.start_worker("w0")
            async with asyncio.timeout(20):
                async for line in stream.content:
                    if line.startswith(b"data: "):
                        events.append(json.loads(line.removeprefix(b"data: ")))
                        if events[-1]["event"] == "run_ended":
                            break
                    else:
                        assert line == b"\n" or line.startswith(b"id: ")
        assert [event["event"] for event in events] == [
            event["event"] for event in operator.live.events[: len(events)]
        ]
        assert [event["step"] for event in events if event["event"] == "committed"] == [0, 1, 2, 3]
        run_end = events[-1]
        assert (run_end["run_id"], run_end["outcome"]) == (document["run_id"], "finished")


@on_uvloop
async def test_event_stream_ends_with_the_port(tmp_path):
    async with (
        operating(tmp_path) as operator,
        operator.http.get(f"http://{operator.address}/events") as stream,
    ):
        stopping = asyncio.create_task(operator.control.stop())
        async with asyncio.timeout(10):
            assert await stream.content.read() == b""
            await stopping


@on_uvloop
async def test_returning_reader_gets_missed_events(tmp_path):
    async with operating(tmp_path) as operator:
        for number in range(3):
            operator.control.emit(Ticked(number))
        first = await read_events(operator, last_id="0", count=2)
        assert [each["number"] for _, each in first] == [0, 1]
        assert [each["loss"] for _, each in first] == [None, None]
        last, _ = first[-1]
        rest = await read_events(operator, last_id=last, count=1)
        assert [each["number"] for _, each in rest] == [2]


@on_uvloop
async def test_last_event_id_must_be_a_number(tmp_path):
    async with operating(tmp_path) as operator:
        headers = {"Last-Event-ID": "yesterday"}
        url = f"http://{operator.address}/events"
        async with operator.http.get(url, headers=headers) as answer:
            assert answer.status == 400
            assert "Last-Event-ID: expected" in (await answer.json())["error"]


async def read_events(operator, last_id, count):
    """Read `count` (number, event) pairs of the stream."""
    events: list[tuple[str, dict[str, Any]]] = []
    url = f"http://{operator.address}/events"
    async with (
        asyncio.timeout(20),
        operator.http.get(url, headers={"Last-Event-ID": last_id}) as stream,
    ):
        number = ""
        async for line in stream.content:
            if line.startswith(b"id: "):
                number = line.removeprefix(b"id: ").strip().decode()
            if line.startswith(b"data: "):
                events.append((number, json.loads(line.removeprefix(b"data: "))))
            if len(events) == count:
                break
    return events


# Addresses.


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_loopback_is_accepted(host):
    require_loopback(host, "--control")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org", "", "127.1"])
@on_uvloop
async def test_plain_http_is_refused_for_other_machines(tmp_path, host):
    service = Service(Settings(("127.0.0.1", 0), 1, tmp_path, once=False))
    with pytest.raises(UsageError, match="--control: expected a loopback address") as error_info:
        await ControlPort(service).start(host, 0)
    assert error_info.value.exit_code == ExitCode.USAGE


@on_uvloop
async def test_port_in_use_is_a_one_line_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        service = Service(Settings(("127.0.0.1", port), 1, tmp_path, once=False))
        with pytest.raises(UsageError, match=f"--bind 127.0.0.1:{port} is in use"):
            await service.start()
        control = ControlPort(service)
        with pytest.raises(UsageError, match=f"--control 127.0.0.1:{port} is in use"):
            await control.start("127.0.0.1", port)
        await control.stop()


@pytest.mark.parametrize("option", ["--bind", "--control"])
def test_command_reports_a_port_in_use(tmp_path, option):
    other = {"--bind": "--control", "--control": "--bind"}[option]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        completed = run_to_end(
            "coordinator", "--expect-workers", "1", "--out", str(tmp_path),
            option, f"127.0.0.1:{port}", other, "127.0.0.1:0",
        )  # fmt: skip
    assert completed.returncode == ExitCode.USAGE
    (line,) = completed.stderr.strip().splitlines()
    assert line.startswith(f"coordinator: {option} 127.0.0.1:{port} is in use")


@pytest.mark.parametrize(
    "request_",
    [b"GET / HTTP/9.9\r\n\r\n", b"GET /\0 HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\nA\r\n\r\n"],
)
@on_uvloop
async def test_non_http_request_is_answered_and_not_logged(tmp_path, capfd, request_):
    async with operating(tmp_path) as operator:
        reader, writer = await asyncio.open_connection("127.0.0.1", operator.control.address[1])
        writer.write(request_)
        assert (await reader.readline()).split()[1].startswith(b"4")
        writer.close()
    assert capfd.readouterr().err == ""


@on_uvloop
async def test_connection_error_is_explained():
    with pytest.raises(
        Unreachable,
        match=r"answers at 127.0.0.1:\d+ \(.* refused the connection\); start one",
    ) as error_info:
        await request(free_address(), "GET", "/status")
    assert "Error" not in str(error_info.value)


def test_dead_name_server_does_not_block_a_command(monkeypatch):
    """Neither the error nor the exit of the process waits for the name server."""
    monkeypatch.setattr("coordinator.operator.control_client._NAME_PATIENCE_S", 0.05)
    with dead_name_server("coordinator.example") as query_event:
        with pytest.raises(Unreachable, match="no name server answered for"):
            asyncio.run(request("coordinator.example:9001", "GET", "/status"))
        assert query_event.is_set()
