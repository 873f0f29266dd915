"""`coordinator doctor`: each thing that goes wrong is made to, and is named with what to do."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from coordinator import doctor
from coordinator.disk.directory_lock import DirectoryLock
from coordinator.doctor import ServicePlan, examine
from coordinator.members.credentials import CoordinatorCredentials
from coordinator.storage.directory.run_directory import RunDirectory
from protocol.cli.doctor import Finding
from protocol.machine.secret_file import write_secret
from tests.cluster import Cluster
from tests.commands import called
from tests.durable_run import small_disk, written_run
from tests.live_service import scripted_spec
from tests.network_hosts import network
from tests.processes import ended

ROOT = Path(__file__).parents[3]


@pytest.fixture
def plan(tmp_path):
    def make(**changes):
        values = {
            "bind": ("127.0.0.1", 0),
            "control": ("127.0.0.1", 0),
            "directory": tmp_path / "runs",
            "home": tmp_path / "home",
        }
        return ServicePlan(**(values | changes))

    return make


def findings(plan: ServicePlan, check: str) -> Finding:
    (finding,) = [each for each in examine(plan) if each.check == check]
    return finding


@contextlib.contextmanager
def taken_port():
    """A port of some other service, which closes each connection at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_sound_machine_has_no_failure_and_nothing_is_left(plan, tmp_path):
    outcomes = {each.check: each.outcome for each in examine(plan())}
    assert "failure" not in outcomes.values()
    assert outcomes.keys() >= {
        "release", "state directory", "secrets", "run directory", "sync", "runs",
        "workers' port", "reachable", "control port", "open files", "memory", "clock",
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == []


# Secrets.


def test_secrets_that_fit(plan, tmp_path):
    CoordinatorCredentials.open(tmp_path / "home")
    fits = findings(plan(), "secrets")
    assert fits.outcome == "ok"
    assert "no worker's key yet" in fits.found
    assert findings(plan(), "state mode").outcome == "ok"


@pytest.mark.parametrize("name", ["certificate.pem", "key.pem", "join.token", "workers.json"])
def test_a_secret_that_others_may_read(plan, tmp_path, name):
    CoordinatorCredentials.open(tmp_path / "home").enrol("w")
    (tmp_path / "home" / "coordinator" / name).chmod(0o640)
    wrong = findings(plan(), "secrets")
    assert wrong.outcome == "failure"
    assert f"{name}' can be read by others (mode 0640)" in wrong.found
    assert "chmod 600" in wrong.found


@pytest.mark.parametrize(
    ("name", "expected_text"),
    [
        ("key.pem", "key.pem is missing"),
        ("certificate.pem", "certificate.pem is missing"),
        ("join.token", "the join token is missing"),
    ],
)
def test_a_secret_that_is_lost(plan, tmp_path, name, expected_text):
    CoordinatorCredentials.open(tmp_path / "home")
    (tmp_path / "home" / "coordinator" / name).unlink()
    wrong = findings(plan(), "secrets")
    outcome = "warning" if name == "join.token" else "failure"
    assert (wrong.outcome, expected_text in wrong.found) == (outcome, True)
    assert not (tmp_path / "home" / "coordinator" / name).exists()


def test_a_token_and_keys_without_a_certificate(plan, tmp_path):
    CoordinatorCredentials.open(tmp_path / "home").enrol("w")
    for name in ("certificate.pem", "key.pem"):
        (tmp_path / "home" / "coordinator" / name).unlink()
    wrong = findings(plan(), "secrets")
    assert "certificate.pem and key.pem are missing" in wrong.found
    assert (wrong.outcome, "every worker needs that token" in wrong.advice) == ("warning", True)


@pytest.mark.parametrize("text", ["", "nothing of the kind\n"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("certificate.pem", "remove both: the next start makes new ones"),
        ("key.pem", "remove both: the next start makes new ones"),
        ("join.token", "the next start makes a new one"),
        ("workers.json", "restore the file from a backup, or remove it"),
    ],
)
def test_a_secret_that_is_none(plan, tmp_path, name, expected, text):
    CoordinatorCredentials.open(tmp_path / "home").enrol("w")
    write_secret(tmp_path / "home" / "coordinator" / name, text)
    wrong = findings(plan(), "secrets")
    assert wrong.outcome == ("warning" if name == "join.token" else "failure")
    assert expected in wrong.line()
    assert name in wrong.line()
    assert ("empty" in wrong.line()) == (not text)


def test_a_token_of_another_certificate(plan, tmp_path):
    CoordinatorCredentials.open(tmp_path / "home")
    other = CoordinatorCredentials.open(tmp_path / "other").join_token().reveal()
    write_secret(tmp_path / "home" / "coordinator" / "join.token", other)
    assert "belongs to another certificate" in findings(plan(), "secrets").found


def test_a_state_directory_that_is_open_to_others(plan, tmp_path):
    CoordinatorCredentials.open(tmp_path / "home")
    (tmp_path / "home" / "coordinator").chmod(0o755)
    wrong = findings(plan(), "state mode")
    assert (wrong.outcome, "chmod 700" in wrong.advice) == ("warning", True)


# Disk and runs.


def test_a_run_directory_that_is_full(plan, tmp_path):
    with small_disk(tmp_path / "disk", 64) as disk:
        with (disk / "filler").open("wb", buffering=0) as filler:
            filler.write(bytes(64 * 1024))
        checks = {each.check: each for each in examine(plan(directory=disk))}
        for check in ("run directory", "sync"):
            assert checks[check].outcome == "failure"
            assert "No space left" in checks[check].found
            assert "--out" in checks[check].advice


def test_a_slow_disk(plan, monkeypatch):
    monkeypatch.setattr(doctor, "SLOW_SYNC_MS", 0.0)
    slow = findings(plan(), "sync")
    assert (slow.outcome, "each step waits" in slow.advice) == ("warning", True)


def test_unfinished_runs(plan, tmp_path):
    RunDirectory(tmp_path / "runs" / "one").begin("one", scripted_spec())
    below = findings(plan(), "runs")
    assert below.outcome == "warning"
    assert below.advice == f"coordinator --out {tmp_path}/runs --resume"
    assert str(tmp_path / "runs" / "one") in below.found
    alone = findings(plan(directory=tmp_path / "runs" / "one"), "runs")
    assert alone.outcome == "warning"
    lock = DirectoryLock.acquire(tmp_path / "runs")
    try:
        assert findings(plan(), "runs").outcome == "ok"
    finally:
        lock.release()


def test_a_run_that_cannot_be_read(plan, tmp_path):
    RunDirectory(tmp_path / "runs").begin("one", scripted_spec())
    (tmp_path / "runs" / "result.json").write_text("{")
    assert findings(plan(), "runs").outcome == "failure"


# Ports.


def test_a_port_in_use_by_someone_else(plan):
    with taken_port() as port:
        for check, changes in (
            ("workers' port", {"bind": ("127.0.0.1", port)}),
            ("control port", {"control": ("127.0.0.1", port)}),
        ):
            wrong = findings(plan(**changes), check)
            assert wrong.outcome == "failure"
            assert f"127.0.0.1:{port} is in use" in wrong.found


def test_an_address_that_is_not_this_machine_s(plan):
    wrong = findings(plan(bind=("192.0.2.77", 0)), "workers' port")
    assert (wrong.outcome, "cannot be bound" in wrong.found) == ("failure", True)
    wrong = findings(plan(bind=("no-such-host.invalid", 0)), "workers' port")
    assert (wrong.outcome, "cannot be bound" in wrong.found) == ("failure", True)


def test_a_control_port_that_others_could_reach(plan):
    wrong = findings(plan(control=("0.0.0.0", 0)), "control port")
    assert (wrong.outcome, "ssh -N -L" in wrong.found) == ("failure", True)


def test_loopback_is_not_for_others(plan):
    alone = findings(plan(), "reachable")
    assert (alone.outcome, "--bind 0.0.0.0:" in alone.advice) == ("warning", True)


def test_all_addresses(plan):
    every = findings(plan(bind=("0.0.0.0", 0)), "reachable")
    if every.outcome == "ok":
        assert "worker doctor --coordinator" in every.found
    else:  # a machine without a network
        assert "no address" in every.found


def test_a_machine_without_a_network(plan):
    with network("alone", subnet="10.8.2") as machines:
        subprocess.run(
            ["ip", "-n", machines.namespace("alone").name, "addr", "flush", "dev", "eth0"],
            check=True,
        )
        alone = machines.run_on("alone", lambda: findings(plan(bind=("0.0.0.0", 0)), "reachable"))
    assert (alone.outcome, "no address that others can reach" in alone.found) == ("failure", True)


def test_beside_a_coordinator_that_works(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMESTEP_HOME", str(tmp_path / "home"))
    with Cluster(tmp_path, "--expect-workers", "1") as cluster:
        arguments = ["--bind", cluster.address["data"], "--control", cluster.address["control"]]
        out = ("--out", str(tmp_path / "out"))
        done = ended("coordinator", "doctor", *arguments, *out, "--json")
        checks = {each["check"]: each for each in json.loads(done.stdout)["checks"]}
        assert done.returncode == 0, done.stdout
        assert "this user's coordinator listens" in checks["workers' port"]["found"]
        assert "a coordinator answers" in checks["control port"]["found"]
        assert "a coordinator works in" in checks["runs"]["found"]


def test_a_failure_is_exit_code_1_and_a_line_on_standard_output(tmp_path):
    with taken_port() as port:
        done = ended(
            "coordinator", "doctor", "--bind", f"127.0.0.1:{port}", "--control", "127.0.0.1:0",
            "--out", str(tmp_path),
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert all(line.split()[0] in {"ok", "warning", "failure"} for line in lines)
    assert [line.split(":")[0] for line in lines if line.startswith("failure")] == [
        "failure  workers' port"
    ]


def test_a_working_directory_that_was_removed_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    ended = called("coordinator", "doctor", environment={"SAMESTEP_HOME": str(tmp_path / "home")})
    assert ended.returncode == 2
    assert "this one was removed; change to another (cd)" in ended.stderr
    run = written_run(tmp_path / "run")
    ended = called("coordinator", "report", str(run), "--output", "page.html")
    assert ended.returncode == 2
    assert "--output: expected a file that can be written" in ended.stderr
