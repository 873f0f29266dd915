"""Multi-device workers: one member of a run, whose device processes are restarted or lost."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.cli.command_line import child_environment
from tests.cluster import PATIENCE_S, RUNS, Cluster
from tests.processes import Process

SCRIPTED = """
task: scripted
steps: {steps}
batch: {{samples: 12, microbatch: 1}}
scripted: {{blocks: 2, block_bytes: 4096, samples: 64}}
"""
TWO_DEVICES = ("--backend", "scripted:2", "--gpus", "0,1")


def device_processes(worker: Process | int) -> list[int]:
    """Return the process ids of a worker's device processes."""
    pid = worker if isinstance(worker, int) else worker.pid
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def spec_of(directory: Path, steps: int) -> str:
    path = directory / "run.yaml"
    path.write_text(SCRIPTED.format(steps=steps))
    return str(path)


def digest(cluster: Cluster) -> str:
    return str(cluster.result()["weights_digest"])


def test_two_devices_are_one_member_with_the_same_bits(tmp_path):
    """The gradients are real, of the task regress."""
    run_options = ("--run", str(RUNS / "regress.yaml"), "--set", "steps=10")
    with Cluster(tmp_path / "one", "--expect-workers", "1", *run_options) as cluster:
        cluster.start_worker("w0", "--backend", "cpu")
        reference = digest(cluster)
    with Cluster(tmp_path / "two", "--expect-workers", "2", *run_options) as cluster:
        worker = cluster.start_worker("box", "--backend", "cpu", "--gpus", "0,1")
        assert digest(cluster) == reference
        assert cluster.result()["workers"].keys() == {"box"}
        assert cluster.wait_for_exit(worker) == 0


@pytest.mark.slow
def test_multi_device_owners_have_the_bits_of_the_star(tmp_path):
    """The devices of one worker are one peer, beside a local worker of the coordinator."""
    run_options = ("--run", spec_of(tmp_path, 60))
    with Cluster(tmp_path / "star", "--expect-workers", "1", *run_options) as cluster:
        cluster.start_worker("w0", "--backend", "scripted")
        star = digest(cluster)
    sharded_option = ("--set", "exchange.topology=sharded")
    with Cluster(
        tmp_path / "sharded", "--expect-workers", "5", *run_options, *sharded_option
    ) as cluster:
        workers = [cluster.start_worker(name, *TWO_DEVICES) for name in ("one", "other")]
        workers.append(cluster.start_worker("alone", "--backend", "scripted:2"))
        assert digest(cluster) == star
        owners = [set(event["owners"]) for event in cluster.events_named("owners")]
        assert {"one", "other", "alone"} in owners
        assert cluster.result()["workers"].keys() == {"one", "other", "alone"}
        assert [cluster.wait_for_exit(worker) for worker in workers] == [0, 0, 0]


def test_killed_device_process_is_restarted_and_the_worker_stays(tmp_path):
    with Cluster(tmp_path / "one", "--expect-workers", "1", "--run", spec_of(tmp_path, 60)) as one:
        one.start_worker("w0", "--backend", "scripted")
        reference = digest(one)
    with Cluster(tmp_path / "two", "--expect-workers", "2", "--run", spec_of(tmp_path, 60)) as two:
        worker = two.start_worker("box", *TWO_DEVICES)
        two.wait_for("committed", step=3)
        os.kill(device_processes(worker)[1], signal.SIGKILL)
        assert digest(two) == reference
        assert two.wait_for_exit(worker) == 0
        assert not two.events_named("worker_lost")
        assert worker.stderr is not None
        error_text = worker.stderr.read()
    assert "was ended by SIGKILL; restarted, 1 of at most 3 times" in error_text


def test_main_process_does_not_import_torch():
    """The main process handles only the network."""
    modules = "worker.cli, worker.main, worker.shell.client, worker.shell.device_processes, sys"
    completed = subprocess.run(
        [sys.executable, "-P", "-c", f"import {modules}; print('torch' in sys.modules)"],
        env=child_environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert completed.stdout == "False\n"


@pytest.mark.parametrize("command", ["worker", "coordinator"])
def test_kill_9_leaves_no_device_process(tmp_path, command):
    local_options = ("--local-workers", "2", "--backend", "scripted:2")
    run_options = (
        "--run",
        spec_of(tmp_path, 100_000),
        *(local_options if command == "coordinator" else ()),
    )
    # The children of a freshly started process are not forks.
    is_fresh = command == "coordinator"
    with Cluster(tmp_path, "--expect-workers", "2", *run_options, fresh=is_fresh) as cluster:
        worker = cluster.start_worker("box", *TWO_DEVICES).pid if command == "worker" else None
        cluster.wait_for("committed", step=1)
        worker = worker or device_processes(cluster.coordinator)[0]
        process_fds = [os.pidfd_open(pid) for pid in (worker, *device_processes(worker))]
        assert len(process_fds) == 3
        os.kill(worker if command == "worker" else cluster.coordinator.pid, signal.SIGKILL)
        for process_fd in process_fds:
            assert select.select([process_fd], [], [], PATIENCE_S)[0], "it outlives its parent"
            os.close(process_fd)


def test_non_finite_gradients_name_the_device(tmp_path):
    """The learning rate is far too high, as when a real run diverges."""
    run_options = (
        "--run",
        str(RUNS / "regress.yaml"),
        "--set",
        "optimizer.lr=1000",
        "--set",
        "steps=30",
    )
    with Cluster(tmp_path, "--expect-workers", "2", *run_options) as cluster:
        cluster.start_worker("box", "--backend", "cpu", "--gpus", "0,1")
        halt = cluster.wait_for("halted")
    assert "non-finite" in halt["reason"]
    assert "from worker 'box', device 'cpu" in halt["reason"]
