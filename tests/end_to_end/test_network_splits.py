"""Links between hosts (network namespaces) are cut silently: half-open connections are noticed, and
nothing is lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.network_hosts import Network, network

SPEC = (
    "task: scripted\nsteps: 48\nbatch: {samples: 24, microbatch: 2}\n"
    "scripted: {blocks: 3, block_bytes: 8192, samples: 480}\n"
)
MICROBATCH_MS = 45
"""One worker alone needs half a second per step, so the run outlasts the detection of the cut."""
DETECTION_LIMIT_S = 60.0
"""For a busy machine: by design 9 s suffice (`LIVENESS_TIMEOUT_MS` and a heartbeat). The kernel
alone would notice an idle connection after hours."""


def write_spec(directory) -> Path:
    spec = directory / "job.yaml"
    spec.write_text(SPEC)
    return spec


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("reference")
    arguments = ("--expect-workers", "1", "--run", str(write_spec(directory)))
    with Cluster(directory, *arguments) as cluster:
        cluster.start_worker("w0", "--backend", "scripted")
        return cluster.result()


class SplitNetwork:
    """A coordinator and workers on separate hosts."""

    def __init__(self, hosts: Network, cluster: Cluster, workers: int) -> None:
        self.hosts = hosts
        self.cluster = cluster
        for number in range(workers):
            name = f"w{number}"
            cluster.workers[name] = hosts.start(
                name, "worker", "--coordinator", cluster.address["data"], "--name", name,
                "--backend", f"scripted:{MICROBATCH_MS}",
            )  # fmt: skip


def split_run(tmp_path, workers, scenario):
    """Run this scenario on that many hosts; return the result."""
    with network("c", *(f"w{number}" for number in range(workers))) as hosts:
        address = f"{hosts.address('c')}:0"

        def run_coordinator() -> dict[str, Any]:
            arguments = ("--expect-workers", str(workers), "--bind", address, "--control", address,
                         "--run", str(write_spec(tmp_path)))  # fmt: skip
            with Cluster(tmp_path, *arguments) as cluster:
                scenario(SplitNetwork(hosts, cluster, workers))
                return cluster.result()

        return hosts.run_on("c", run_coordinator)


def test_disconnected_worker_is_noticed_and_returns(tmp_path, reference):
    def scenario(split):
        cluster = split.cluster
        cluster.wait_for("committed", step=4)
        mark, cut_s = cluster.event_count(), time.monotonic()
        split.hosts.cut("w1")
        # w0 continues alone before the cut is noticed.
        straggler = cluster.wait_for("straggler", worker="w1", start=mark)
        cluster.wait_for("committed", step=straggler["step"] + 3)
        disconnection = cluster.wait_for("worker_disconnected", worker="w1", start=mark)
        assert "silent for" in disconnection["reason"] or "timed out" in disconnection["reason"]
        assert time.monotonic() - cut_s < DETECTION_LIMIT_S
        cluster.ask("POST", "/halt", {})
        split.hosts.mend("w1")
        cluster.wait_for("worker_ready", worker="w1", start=mark)
        cluster.ask("POST", "/continue", {})

    result = split_run(tmp_path, 2, scenario)
    assert result["weights_digest"] == reference["weights_digest"]
    assert result["losses"] == reference["losses"]


@pytest.mark.slow
def test_disconnected_coordinator_commits_nothing_and_all_return(tmp_path, reference):
    def scenario(split):
        cluster = split.cluster
        cluster.wait_for("committed", step=4)
        mark = cluster.event_count()
        split.hosts.cut("c")
        for name in ("w0", "w1"):
            cluster.wait_for("worker_disconnected", worker=name, start=mark)
        step = cluster.ask("GET", "/status")["step"]
        assert cluster.ask("GET", "/status")["waiting_for"] == "a worker: all have left"
        mark = cluster.event_count()
        split.hosts.mend("c")
        assert cluster.wait_for("worker_joined", start=mark)["step"] == step, (
            "nothing was committed without workers"
        )

    result = split_run(tmp_path, 2, scenario)
    assert result["weights_digest"] == reference["weights_digest"]
    assert result["losses"] == reference["losses"]
