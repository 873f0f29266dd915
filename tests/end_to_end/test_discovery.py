"""Workers without an address find their coordinator over real links; they still need the token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator.members.credentials import CoordinatorCredentials
from tests.cluster import PATIENCE_S, Cluster
from tests.network_hosts import Network, network
from tests.processes import Process

SPEC = "task: scripted\nsteps: 3\nbatch: {samples: 4, microbatch: 1}\n"
WORKER = ("worker", "--backend", "scripted", "--name", "w")
DOCTOR = ("worker", "doctor", "--backend", "scripted")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with network("a", "b", "c", subnet="192.0.2") as three_hosts:
        yield three_hosts


@pytest.fixture
def run_options(tmp_path) -> tuple[str, ...]:
    spec = tmp_path / "run.yaml"
    spec.write_text(SPEC)
    return "--expect-workers", "1", "--control", "127.0.0.1:0", "--run", str(spec)


def worker_environment(tmp_path: Path, home: Path | None = None) -> dict[str, str]:
    """Return the environment of another machine, with the token of the coordinator of this home."""
    environment = {"SAMESTEP_HOME": str(tmp_path / "elsewhere")}
    if home is not None:
        environment["SAMESTEP_TOKEN"] = CoordinatorCredentials.open(home).join_token().reveal()
    return environment


def run_with_coordinator(
    hosts: Network, host: str, cluster: Callable[[], Cluster], scenario: Any
) -> None:
    """Run the scenario here, with a coordinator on that host."""

    def run_cluster() -> None:
        with cluster() as running_cluster:
            scenario(running_cluster)

    hosts.run_on(host, run_cluster)


def wait_until_announced(cluster: Cluster) -> None:
    """Wait until the coordinator is announced; only then does it answer searches."""
    assert cluster.coordinator.stderr is not None
    assert any('"event": "announced"' in line for line in cluster.coordinator.stderr)


def ask_network(start: Callable[[], Process], accept: Callable[[str], bool]) -> Any:
    """Return the output of a command that gives the network a moment to answer; repeat it on a busy
    machine."""
    for _ in range(5):
        code, stdout, err = wait_for_end(start())
        if accept(stdout + err):
            break
    return code, stdout, err


def wait_for_end(process: Process) -> tuple[int, str, str]:
    stdout, err = process.communicate(timeout=PATIENCE_S)
    return process.wait(), stdout, err


def test_coordinator_is_found_and_the_token_is_still_needed(
    hosts, tmp_path, run_options, monkeypatch
):
    home = tmp_path / "home"
    monkeypatch.setenv("SAMESTEP_HOME", str(home))

    def scenario(cluster: Cluster) -> None:
        worker = hosts.start("b", *WORKER, environment=worker_environment(tmp_path))
        code, stdout, err = wait_for_end(worker)
        address = f"{hosts.address('a')}:{cluster.address['data'].rpartition(':')[2]}"
        assert f"worker: found coordinator 'den' at {address}" in stdout.splitlines()
        assert code == 77
        assert "no join token" in err
        code, stdout, err = ask_network(
            lambda: hosts.start("b", *DOCTOR, environment=worker_environment(tmp_path, home)),
            lambda text: "found coordinator" in text,
        )
        assert code == 0, stdout + err
        *_, token = (line for line in stdout.splitlines() if line.startswith("ok       "))
        assert f"ok       coordinator: found coordinator 'den' at {address}" in stdout.splitlines()
        assert "the join token fits" in token
        hosts_worker = hosts.start("b", *WORKER, environment=worker_environment(tmp_path, home))
        assert cluster.result()["workers"].keys() == {"w"}
        assert wait_for_end(hosts_worker)[0] == 0

    def coordinator() -> Cluster:
        return Cluster(tmp_path, "--bind", "0.0.0.0:0", "--name", "den", *run_options)

    run_with_coordinator(hosts, "a", coordinator, scenario)


def test_token_selects_among_coordinators_or_a_name_is_required(
    hosts, tmp_path, run_options, monkeypatch
):
    home_by_name = {name: tmp_path / f"home of {name}" for name in ("den", "lab")}
    clusters: dict[str, Cluster] = {}

    def on_c(lab: Cluster) -> None:
        clusters["lab"] = lab
        wait_until_announced(lab)
        code, _, err = ask_network(
            lambda: hosts.start("b", *WORKER, environment=worker_environment(tmp_path)),
            lambda text: "several" in text,
        )
        assert code == 2
        (line,) = err.splitlines()
        assert line.startswith("worker: found several coordinators: den (192.0.2.1:")
        assert "lab (192.0.2.3:" in line
        assert line.endswith("choose one: worker --coordinator NAME")
        worker = hosts.start(
            "b", *WORKER, environment=worker_environment(tmp_path, home_by_name["lab"])
        )
        assert lab.result()["workers"].keys() == {"w"}
        assert wait_for_end(worker)[0] == 0
        named_worker = hosts.start(
            "b", *WORKER, "--coordinator", "den",
            environment=worker_environment(tmp_path / "again", home_by_name["den"]),
        )  # fmt: skip
        assert clusters["den"].result()["workers"].keys() == {"w"}
        assert wait_for_end(named_worker)[0] == 0

    def coordinator(name: str) -> Callable[[], Cluster]:
        def start() -> Cluster:
            monkeypatch.setenv("SAMESTEP_HOME", str(home_by_name[name]))
            directory = tmp_path / name
            directory.mkdir()
            arguments = ("--bind", "0.0.0.0:0", "--name", name)
            return Cluster(directory, "--log-json", *arguments, *run_options)

        return start

    def on_a(den: Cluster) -> None:
        clusters["den"] = den
        wait_until_announced(den)
        run_with_coordinator(hosts, "c", coordinator("lab"), on_c)

    run_with_coordinator(hosts, "a", coordinator("den"), on_a)


def test_worker_without_a_coordinator_gives_one_line_and_exit_code_69(
    hosts, tmp_path, run_options, monkeypatch
):
    """A coordinator that is not announced, or listens on loopback only, is not found."""
    monkeypatch.setenv("SAMESTEP_HOME", str(tmp_path / "home"))
    unannounced = ("--bind", "0.0.0.0:0", "--no-announce")
    for number, options in enumerate((unannounced, ("--bind", "127.0.0.1:0"))):
        directory = tmp_path / str(number)
        directory.mkdir()

        def scenario(cluster: Cluster) -> None:
            del cluster
            arguments = (*WORKER, "--retry-for", "2")
            code, _, err = wait_for_end(
                hosts.start("b", *arguments, environment=worker_environment(tmp_path))
            )
            assert code == 69
            (line,) = err.splitlines()
            assert "none announces itself on the network" in line
            assert "worker --coordinator HOST:PORT" in line

        run_with_coordinator(
            hosts, "a", partial(Cluster, directory, *options, *run_options), scenario
        )


def test_worker_on_the_same_machine_does_not_search(hosts, tmp_path, run_options, monkeypatch):
    """The coordinator is at the default address, so the worker does not search."""
    monkeypatch.setenv("SAMESTEP_HOME", str(tmp_path / "home"))

    def scenario(cluster: Cluster) -> None:
        worker = hosts.start("a", *WORKER)
        assert cluster.result()["workers"].keys() == {"w"}
        code, stdout, _ = wait_for_end(worker)
        assert code == 0
        assert "network" not in stdout
        assert "found" not in stdout

    run_with_coordinator(
        hosts, "a", lambda: Cluster(tmp_path, "--bind", "127.0.0.1:9000", *run_options), scenario
    )
