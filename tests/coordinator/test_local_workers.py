"""Workers that the coordinator starts itself."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator import local_workers
from coordinator.local_workers import RESTARTS
from coordinator.main import _until_over
from protocol.base.errors import RunFailed
from protocol.cli.command_line import child_environment
from tests.cluster import PATIENCE_S, Cluster
from tests.live_service import live_service, scripted_spec

RUN = """
task: scripted
steps: 1000000
batch: {samples: 4, microbatch: 1}
scripted: {blocks: 2, block_bytes: 64, samples: 4}
"""


def test_killed_local_worker_is_restarted_up_to_the_limit(tmp_path):
    spec = tmp_path / "run.yaml"
    spec.write_text(RUN)
    options = ("--run", str(spec), "--local-workers", "1", "--backend", "scripted")
    with Cluster(tmp_path, *options) as cluster:
        for start in range(1, RESTARTS + 2):
            cluster.wait_for("worker_ready", nth=start, worker="local-0")
            os.kill(only_child(cluster.coordinator.pid), signal.SIGKILL)
        assert cluster.wait_for_exit(cluster.coordinator) == 1
        assert cluster.coordinator.stderr is not None
        *lines, last = cluster.coordinator.stderr.read().splitlines()
    line = "coordinator: local worker 'local-0' was ended by SIGKILL; restarted, {} of at most 3"
    assert [each.removesuffix(" times") for each in lines] == [line.format(n) for n in (1, 2, 3)]
    assert last.startswith("coordinator: all local workers have ended")


async def test_run_ends_when_the_connection_outlives_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(local_workers, "command_of", lambda _: ["true"])
    async with live_service(tmp_path, 1) as live:
        live.service.settings = replace(live.service.settings, once=True)
        live.service.submit(scripted_spec(steps=1_000_000))
        worker = live.start_worker("local-0")
        await live.wait_for("committed")
        local = local_workers.LocalWorkers(
            ("127.0.0.1", 1), "scripted", (), tmp_path / "token", print
        )
        await local.start(1)
        ending = asyncio.create_task(_until_over(live.service, local))
        await local.all_ended()
        worker.drain()
        run_end = await live.wait_for("run_ended")
        await ending
    assert run_end["outcome"] == "failed"


def only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.mark.skipif(
    signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="nohup: a worker ignores SIGHUP too"
)
def test_drained_local_worker_is_not_restarted(tmp_path):
    """The worker is in another process group, where a terminal's Ctrl-C does not reach it."""
    spec = tmp_path / "run.yaml"
    spec.write_text(RUN)
    options = ("--run", str(spec), "--local-workers", "1", "--backend", "scripted")
    with Cluster(tmp_path, *options) as cluster:
        cluster.wait_for("worker_ready", worker="local-0")
        child = only_child(cluster.coordinator.pid)
        assert os.getpgid(child) != os.getpgid(cluster.coordinator.pid)
        os.kill(child, signal.SIGHUP)
        cluster.wait_for_exit(cluster.coordinator)
        assert cluster.coordinator.stderr is not None
        assert "restarted" not in cluster.coordinator.stderr.read()


def test_local_worker_ends_with_a_killed_coordinator(tmp_path):
    """A remaining worker would compete with those of the next coordinator of this run."""
    spec = tmp_path / "run.yaml"
    spec.write_text(RUN)
    options = ("--run", str(spec), "--local-workers", "1", "--backend", "scripted")
    with Cluster(tmp_path, *options) as cluster:
        cluster.wait_for("committed")
        child = os.pidfd_open(only_child(cluster.coordinator.pid))
        cluster.coordinator.kill()
        ended_processes, _, _ = select.select([child], [], [], PATIENCE_S)
        os.close(child)
    assert ended_processes, "the worker continues without its coordinator"


@pytest.mark.parametrize("command", ["coordinator", "worker"])
def test_early_ctrl_c_prints_one_line(command):
    """The interrupt arrives while the first modules are imported: an import hook sends it."""
    script = (
        "import os, runpy, signal, sys\n"
        "class Interrupter:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == '{command}.cli': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupter())\n"
        f"runpy.run_module('{command}', run_name='__main__')\n"
    )
    completed = subprocess.run(
        [sys.executable, "-P", "-c", script], env=child_environment(),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (completed.returncode, completed.stderr) == (130, f"{command}: interrupted\n")


async def test_unstartable_worker_is_a_one_line_error(tmp_path, monkeypatch):
    missing_python = str(tmp_path / "python")
    monkeypatch.setattr(local_workers, "command_of", lambda _: [missing_python])
    address = ("127.0.0.1", 1)
    workers = local_workers.LocalWorkers(address, "cpu", (), tmp_path / "token", print)
    with pytest.raises(
        RunFailed, match=f"cannot be started with '{missing_python}': No such file"
    ) as error:
        await workers.start(1)
    assert "\n" not in str(error.value)
    await workers.stop()


async def test_worker_killed_for_memory_is_reported_as_such(tmp_path, monkeypatch):
    counts = iter(range(20))
    monkeypatch.setattr(local_workers, "count_oom_kills", lambda: {"group": next(counts)})
    kill = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr(local_workers, "command_of", lambda _: kill)
    lines: list[str] = []
    workers = local_workers.LocalWorkers(
        ("127.0.0.1", 1), "cpu", (), tmp_path / "token", lines.append
    )
    await workers.start(1)
    assert await workers.all_ended() == [-signal.SIGKILL]
    await workers.stop()
    assert len(lines) == RESTARTS
    line = "local worker 'local-0' was killed by the kernel for memory (oom_kill); restarted"
    assert all(each.startswith(line) for each in lines)
