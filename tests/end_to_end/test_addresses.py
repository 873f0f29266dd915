"""Runs over real links, with link-local and changing addresses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from coordinator.members.credentials import CoordinatorCredentials
from tests.cluster import PATIENCE_S, Cluster
from tests.network_hosts import Network, network

SPEC = "task: scripted\nsteps: {steps}\nbatch: {{samples: 4, microbatch: 1}}\n"


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SAMESTEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def options(tmp_path: Path, steps: int) -> tuple[str, ...]:
    spec = tmp_path / "run.yaml"
    spec.write_text(SPEC.format(steps=steps))
    return "--expect-workers", "1", "--control", "127.0.0.1:0", "--run", str(spec)


def worker_environment(tmp_path: Path, home: Path) -> dict[str, str]:
    token = CoordinatorCredentials.open(home).join_token().reveal()
    return {"SAMESTEP_HOME": str(tmp_path / "elsewhere"), "SAMESTEP_TOKEN": token}


def ip(hosts: Network, host: str, *arguments: str) -> str:
    command = ["ip", "-n", hosts.namespace(host).name, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def link_local(hosts: Network, host: str) -> str:
    """Return a host's link-local address, once duplicate address detection has finished."""
    while "tentative" in (addresses := ip(hosts, host, "-6", "-o", "addr", "show", "dev", "eth0")):
        pass
    return addresses.split()[3].partition("/")[0]


@pytest.mark.slow
def test_worker_joins_at_a_link_local_address_with_its_zone(tmp_path, own_home):
    with network("a", "b", subnet="10.8.5") as hosts:
        address = f"[{link_local(hosts, 'a')}%eth0]"

        def run_cluster() -> None:
            arguments = ("--bind", f"{address}:0", "--no-announce", *options(tmp_path, 3))
            with Cluster(tmp_path, *arguments) as cluster:
                assert cluster.address["data"].startswith(f"{address}:")
                worker = cluster.workers["w"] = hosts.start(
                    "b", "worker", "--coordinator", cluster.address["data"], "--backend",
                    "scripted", "--name", "w", environment=worker_environment(tmp_path, own_home),
                )  # fmt: skip
                assert cluster.result()["workers"].keys() == {"w"}
                _, err = worker.communicate(timeout=PATIENCE_S)
                assert worker.wait() == 0, err

        hosts.run_on("a", run_cluster)


@pytest.mark.slow
def test_coordinator_with_a_changed_address_is_found_again(tmp_path, own_home):
    """The worker found the coordinator by multicast DNS; nothing tells it about the new address."""
    with network("a", "b", subnet="192.0.2") as hosts:

        def run_cluster() -> None:
            arguments = ("--bind", "0.0.0.0:0", "--name", "den", *options(tmp_path, 60))
            with Cluster(tmp_path, *arguments) as cluster:
                worker = cluster.workers["w"] = hosts.start(
                    "b", "worker", "--backend", "scripted:20", "--name", "w",
                    environment=worker_environment(tmp_path, own_home),
                )  # fmt: skip
                cluster.wait_for("committed", step=2)
                ip(hosts, "a", "addr", "del", f"{hosts.address('a')}/24", "dev", "eth0")
                ip(hosts, "a", "addr", "add", "192.0.2.77/24", "dev", "eth0")
                ip(hosts, "a", "route", "add", "default", "dev", "eth0")
                assert cluster.result()["workers"].keys() == {"w"}
                stdout, err = worker.communicate(timeout=PATIENCE_S)
                assert worker.wait() == 0, err
                assert "worker: the coordinator is at 192.0.2.77:" in stdout

        hosts.run_on("a", run_cluster)
