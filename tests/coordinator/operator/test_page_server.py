"""The page's requests over real HTTP: its files, histories, the report, and the check of a spec."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coordinator.operator.page_server import PAGE_PATHS
from tests.coordinator.operator.test_control import LONG, SPEC, operating
from tests.event_loop import on_uvloop

FOLDER = Path(__file__).parents[3] / "coordinator" / "operator" / "page"
RUN = """
name: short
task: scripted
steps: 4
batch: {samples: 8, microbatch: 1}
scripted: {blocks: 3, block_bytes: 64, samples: 64}
"""


@on_uvloop
async def test_page_files_load_nothing_external(tmp_path):
    async with operating(tmp_path) as operator:
        for path in PAGE_PATHS:
            async with operator.http.get(f"http://{operator.address}{path}") as answer:
                assert answer.status == 200, path
                policy = answer.headers["Content-Security-Policy"]
                text = await answer.text()
            assert "unsafe" not in policy
            assert "connect-src 'self'" in policy
            if "uPlot" not in path:
                assert re.findall(r"https?://", text) == []


def test_page_escapes_external_values():
    script = (FOLDER / "page.js").read_text()
    assert (
        re.findall(r"innerHTML|insertAdjacentHTML|outerHTML|document\.write|eval\(", script) == []
    )


def test_chart_library_comes_with_its_license():
    assert "MIT" in (FOLDER / "uPlot.LICENSE").read_text()
    assert "uPlot (v" in (FOLDER / "uPlot.min.js").read_text()[:200].replace("leeoniya/", "")


@on_uvloop
async def test_history_is_available_during_and_after_a_run(tmp_path):
    async with operating(tmp_path) as operator:
        code, document = await operator.ask("GET", "/history")
        assert (code, document["exit_code"]) == (400, 2)
        operator.live.start_worker("w0")
        _, first = await operator.post("/submit", {"run": SPEC})
        await operator.live.result(first["run_id"])
        _, second = await operator.post("/submit", {"run": LONG})
        await operator.live.wait_for("committed", run_id=second["run_id"])
        _, history = await operator.ask("GET", f"/history?run={first['run_id']}")
        assert history["loss"]["step"] == [1, 2, 3, 4]
        assert history["outcome"] == "finished"
        assert [worker["name"] for worker in history["workers"]] == ["w0"]
        _, later_history = await operator.ask("GET", f"/history?run={first['run_id']}&after=3")
        assert later_history["loss"]["step"] == [4]
        _, current_history = await operator.ask("GET", "/history")
        assert current_history["run_id"] == second["run_id"]
        _, runs = await operator.ask("GET", "/runs")
        assert {run["run_id"]: run["outcome"] for run in runs["runs"]} == {
            first["run_id"]: "finished", second["run_id"]: "",
        }  # fmt: skip


@on_uvloop
async def test_only_the_unreadable_run_is_omitted(tmp_path):
    async with operating(tmp_path) as operator:
        operator.live.start_worker("w0")
        _, submission = await operator.post("/submit", {"run": SPEC})
        await operator.live.result(submission["run_id"])
        _, damaged = await operator.post("/submit", {"run": SPEC})
        await operator.live.result(damaged["run_id"])
        (tmp_path / damaged["run_id"] / "run.json").write_text('{"run_id":')
        code, runs = await operator.ask("GET", "/runs")
        assert (code, [run["run_id"] for run in runs["runs"]]) == (200, [submission["run_id"]])
        [run] = runs["runs"]
        assert (run["task"], run["steps"], run["step"], run["exact"]) == ("scripted", 4, 4, True)


@pytest.mark.parametrize(
    ("query", "expected_text"),
    [("run=nothing", "expected a run of this"), ("run=../..", "expected a run of this"),
     ("after=-1", "expected the number"), ("after=x", "expected the number")],
)  # fmt: skip
@on_uvloop
async def test_invalid_history_query_is_a_one_line_error(tmp_path, query, expected_text):
    async with operating(tmp_path) as operator:
        operator.live.start_worker("w0")
        _, submission = await operator.post("/submit", {"run": SPEC})
        await operator.live.result(submission["run_id"])
        code, document = await operator.ask("GET", f"/history?{query}")
        assert code == 400
        assert expected_text in document["error"]


@on_uvloop
async def test_report_of_a_run_is_served(tmp_path):
    async with operating(tmp_path) as operator:
        operator.live.start_worker("w0")
        _, submission = await operator.post("/submit", {"run": SPEC})
        await operator.live.result(submission["run_id"])
        url = f"http://{operator.address}/report?run={submission['run_id']}"
        async with operator.http.get(url) as answer:
            assert answer.content_type == "text/html"
            assert f"<h1>Run {submission['run_id']}</h1>" in await answer.text()


@on_uvloop
async def test_a_spec_is_checked_before_it_is_submitted(tmp_path):
    async with operating(tmp_path) as operator:
        code, document = await operator.ask("POST", "/check", data=RUN)
        assert code == 200
        assert document["run"]["steps"] == 4
        assert (await operator.post("/submit", {"run": document["run"]}))[0] == 200
        for text in ("", "steps: [", RUN.replace("steps", "stebs"), "x" * 10):
            code, document = await operator.ask("POST", "/check", data=text)
            assert code == 400, text
            assert "\n" not in document["error"]


@on_uvloop
async def test_page_shows_the_join_line_and_revokes_a_worker(tmp_path):
    async with operating(tmp_path) as operator:
        _, join_document = await operator.ask("GET", "/join")
        assert join_document["lines"][0].startswith("listening for workers: worker --coordinator")
        operator.live.start_worker("w0")
        await operator.live.wait_for("worker_connected", worker="w0")
        code, document = await operator.post("/revoke", {"name": "nobody"})
        assert code == 400
        assert "nobody" in document["error"]
        assert await operator.post("/revoke", {"name": "w0"}) == (200, {"revoked": "w0"})
        await operator.live.wait_for("worker_disconnected", worker="w0")


@on_uvloop
async def test_check_of_binary_data_is_a_one_line_error(tmp_path):
    async with operating(tmp_path) as operator:
        status, answer = await operator.ask("POST", "/check", data=b"task: caf\xe9")
    assert status == 400
    assert answer["error"] == "the run spec is not UTF-8 at byte 9; convert it to UTF-8"
