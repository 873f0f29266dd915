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
    with network("a", "b", "c", subnet="192.0.2") as network_of_three:
        yield network_of_three


@pytest.fixture
def job(tmp_path) -> tuple[str, ...]:
    spec = tmp_path / "run.yaml"
    spec.write_text(SPEC)
    return "--expect-workers", "1", "--control", "127.0.0.1:0", "--run", str(spec)


def elsewhere(tmp_path: Path, home: Path | None = None) -> dict[str, str]:
    """The environment of another machine, with the token of the coordinator that has that home."""
    environment = {"SAMESTEP_HOME": str(tmp_path / "elsewhere")}
    if home is not None:
        environment["SAMESTEP_TOKEN"] = CoordinatorCredentials.open(home).join_token().reveal()
    return environment


def beside(hosts: Network, host: str, cluster: Callable[[], Cluster], story: Any) -> None:
    """Have a coordinator on that host while the story goes on here."""

    def there() -> None:
        with cluster() as running:
            story(running)

    hosts.run_on(host, there)


def announced(cluster: Cluster) -> None:
    """Wait until it is: only then does it answer those who look for it."""
    assert cluster.coordinator.stderr is not None
    assert any('"event": "announced"' in line for line in cluster.coordinator.stderr)


def asked(start: Callable[[], Process], fits: Callable[[str], bool]) -> Any:
    """What one says that gives the network a moment to answer: on a busy machine ask it again."""
    for _ in range(5):
        code, out, err = ended(start())
        if fits(out + err):
            break
    return code, out, err


def ended(process: Process) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.wait(), out, err


def test_one_is_found_and_the_token_is_still_needed(hosts, tmp_path, job, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("SAMESTEP_HOME", str(home))

    def story(cluster: Cluster) -> None:
        without = hosts.start("b", *WORKER, environment=elsewhere(tmp_path))
        code, out, err = ended(without)
        at = f"{hosts.address('a')}:{cluster.address['data'].rpartition(':')[2]}"
        assert f"worker: found coordinator 'den' at {at}" in out.splitlines()
        assert code == 77
        assert "no join token" in err
        code, out, err = asked(
            lambda: hosts.start("b", *DOCTOR, environment=elsewhere(tmp_path, home)),
            lambda text: "found coordinator" in text,
        )
        assert code == 0, out + err
        *_, token = (line for line in out.splitlines() if line.startswith("ok       "))
        assert f"ok       coordinator: found coordinator 'den' at {at}" in out.splitlines()
        assert "the join token fits" in token
        hosts_worker = hosts.start("b", *WORKER, environment=elsewhere(tmp_path, home))
        assert cluster.result()["workers"].keys() == {"w"}
        assert ended(hosts_worker)[0] == 0

    def coordinator() -> Cluster:
        return Cluster(tmp_path, "--bind", "0.0.0.0:0", "--name", "den", *job)

    beside(hosts, "a", coordinator, story)


def test_of_several_the_token_s_own_is_taken_else_a_name_is_asked_for(
    hosts, tmp_path, job, monkeypatch
):
    homes = {name: tmp_path / f"home of {name}" for name in ("den", "lab")}
    clusters: dict[str, Cluster] = {}

    def on_c(lab: Cluster) -> None:
        clusters["lab"] = lab
        announced(lab)
        code, _, err = asked(
            lambda: hosts.start("b", *WORKER, environment=elsewhere(tmp_path)),
            lambda text: "several" in text,
        )
        assert code == 2
        (line,) = err.splitlines()
        assert line.startswith("worker: found several coordinators: den (192.0.2.1:")
        assert "lab (192.0.2.3:" in line
        assert line.endswith("choose one: worker --coordinator NAME")
        ours = hosts.start("b", *WORKER, environment=elsewhere(tmp_path, homes["lab"]))
        assert lab.result()["workers"].keys() == {"w"}
        assert ended(ours)[0] == 0
        named = hosts.start(
            "b", *WORKER, "--coordinator", "den",
            environment=elsewhere(tmp_path / "again", homes["den"]),
        )  # fmt: skip
        assert clusters["den"].result()["workers"].keys() == {"w"}
        assert ended(named)[0] == 0

    def coordinator(name: str) -> Callable[[], Cluster]:
        def start() -> Cluster:
            monkeypatch.setenv("SAMESTEP_HOME", str(homes[name]))
            directory = tmp_path / name
            directory.mkdir()
            at = ("--bind", "0.0.0.0:0", "--name", name)
            return Cluster(directory, "--log-json", *at, *job)

        return start

    def on_a(den: Cluster) -> None:
        clusters["den"] = den
        announced(den)
        beside(hosts, "c", coordinator("lab"), on_c)

    beside(hosts, "a", coordinator("den"), on_a)


def test_none_is_one_line_and_69(hosts, tmp_path, job, monkeypatch):
    """One that is told not to announce itself, or listens on loopback alone, is not found."""
    monkeypatch.setenv("SAMESTEP_HOME", str(tmp_path / "home"))
    quiet = ("--bind", "0.0.0.0:0", "--no-announce")
    for number, options in enumerate((quiet, ("--bind", "127.0.0.1:0"))):
        directory = tmp_path / str(number)
        directory.mkdir()

        def story(cluster: Cluster) -> None:
            del cluster
            arguments = (*WORKER, "--retry-for", "2")
            code, _, err = ended(hosts.start("b", *arguments, environment=elsewhere(tmp_path)))
            assert code == 69
            (line,) = err.splitlines()
            assert "none announces itself on the network" in line
            assert "worker --coordinator HOST:PORT" in line

        beside(hosts, "a", partial(Cluster, directory, *options, *job), story)


def test_on_one_machine_it_is_as_ever(hosts, tmp_path, job, monkeypatch):
    """At the address where coordinators listen if they are not told where: nobody else is asked."""
    monkeypatch.setenv("SAMESTEP_HOME", str(tmp_path / "home"))

    def story(cluster: Cluster) -> None:
        worker = hosts.start("a", *WORKER)
        assert cluster.result()["workers"].keys() == {"w"}
        code, out, _ = ended(worker)
        assert code == 0
        assert "network" not in out
        assert "found" not in out

    beside(hosts, "a", lambda: Cluster(tmp_path, "--bind", "127.0.0.1:9000", *job), story)
