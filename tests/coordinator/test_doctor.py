"""`coordinator doctor` names each fault with a remedy."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading

import pytest

from coordinator import doctor
from coordinator.disk.directory_lock import DirectoryLock
from coordinator.doctor import ServicePlan, examine
from coordinator.members.credentials import CoordinatorCredentials
from coordinator.storage.directory.run_directory import RunDirectory
from protocol.cli.doctor import Finding
from protocol.machine.secret_file import write_secret
from tests.cluster import Cluster
from tests.commands import run_command
from tests.durable_run import small_disk, written_run
from tests.live_service import scripted_spec
from tests.network_hosts import network
from tests.processes import run_to_end


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


def finding_of(plan: ServicePlan, check: str) -> Finding:
    (finding,) = [each for each in examine(plan) if each.check == check]
    return finding


@contextlib.contextmanager
def port_in_use():
    """Yield the port of another service, which closes each connection at once."""
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


def test_sound_machine_has_no_failure_and_no_leftover_files(plan, tmp_path):
    outcomes = {each.check: each.outcome for each in examine(plan())}
    assert "failure" not in outcomes.values()
    assert outcomes.keys() >= {
        "release", "state directory", "secrets", "run directory", "sync", "runs",
        "workers' port", "reachable", "control port", "open files", "memory", "clock",
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == []


# Secrets.


def test_matching_secrets_are_ok(plan, tmp_path):
    CoordinatorCredentials.open(tmp_path / "home")
    finding = finding_of(plan(), "secrets")
    assert finding.outcome == "ok"
    assert "no worker's key yet" in finding.observation
    assert finding_of(plan(), "state mode").outcome == "ok"


@pytest.mark.parametrize("name", ["certificate.pem", "key.pem", "join.token", "workers.json"])
def test_secret_that_others_may_read_is_a_failure(plan, tmp_path, name):
    CoordinatorCredentials.open(tmp_path / "home").issue_key("w")
    (tmp_path / "home" / "coordinator" / name).chmod(0o640)
    finding = finding_of(plan(), "secrets")
    assert finding.outcome == "failure"
    assert f"{name}' can be read by others (mode 0640)" in finding.observation
    assert "chmod 600" in finding.observation


@pytest.mark.parametrize(
    ("name", "expected_text"),
    [
        ("key.pem", "key.pem is missing"),
        ("certificate.pem", "certificate.pem is missing"),
        ("join.token", "the join token is missing"),
    ],
)
def test_missing_secret_is_reported(plan, tmp_path, name, expected_text):
    CoordinatorCredentials.open(tmp_path / "home")
    (tmp_path / "home" / "coordinator" / name).unlink()
    finding = finding_of(plan(), "secrets")
    outcome = "warning" if name == "join.token" else "failure"
    assert (finding.outcome, expected_text in finding.observation) == (outcome, True)
    assert not (tmp_path / "home" / "coordinator" / name).exists()


def test_token_and_worker_keys_without_a_certificate_are_reported(plan, tmp_path):
    CoordinatorCredentials.open(tmp_path / "home").issue_key("w")
    for name in ("certificate.pem", "key.pem"):
        (tmp_path / "home" / "coordinator" / name).unlink()
    finding = finding_of(plan(), "secrets")
    assert "certificate.pem and key.pem are missing" in finding.observation
    assert (finding.outcome, "every worker needs that token" in finding.advice) == ("warning", True)


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
def test_invalid_secret_is_reported(plan, tmp_path, name, expected, text):
    CoordinatorCredentials.open(tmp_path / "home").issue_key("w")
    write_secret(tmp_path / "home" / "coordinator" / name, text)
    finding = finding_of(plan(), "secrets")
    assert finding.outcome == ("warning" if name == "join.token" else "failure")
    assert expected in finding.line()
    assert name in finding.line()
    assert ("empty" in finding.line()) == (not text)


def test_token_of_another_certificate_is_reported(plan, tmp_path):
    CoordinatorCredentials.open(tmp_path / "home")
    other = CoordinatorCredentials.open(tmp_path / "other").join_token().reveal()
    write_secret(tmp_path / "home" / "coordinator" / "join.token", other)
    assert "belongs to another certificate" in finding_of(plan(), "secrets").observation


def test_state_directory_that_others_may_read_is_a_warning(plan, tmp_path):
    CoordinatorCredentials.open(tmp_path / "home")
    (tmp_path / "home" / "coordinator").chmod(0o755)
    finding = finding_of(plan(), "state mode")
    assert (finding.outcome, "chmod 700" in finding.advice) == ("warning", True)


# Disk and runs.


def test_full_disk_is_a_failure(plan, tmp_path):
    with small_disk(tmp_path / "disk", 64) as disk:
        with (disk / "filler").open("wb", buffering=0) as filler:
            filler.write(bytes(64 * 1024))
        checks = {each.check: each for each in examine(plan(directory=disk))}
        for check in ("run directory", "sync"):
            assert checks[check].outcome == "failure"
            assert "No space left" in checks[check].observation
            assert "--out" in checks[check].advice


def test_slow_disk_is_a_warning(plan, monkeypatch):
    monkeypatch.setattr(doctor, "SLOW_SYNC_MS", 0.0)
    finding = finding_of(plan(), "sync")
    assert (finding.outcome, "each step waits" in finding.advice) == ("warning", True)


def test_unfinished_run_is_a_warning_unless_a_coordinator_works_on_it(plan, tmp_path):
    RunDirectory(tmp_path / "runs" / "one").begin("one", scripted_spec())
    finding = finding_of(plan(), "runs")
    assert finding.outcome == "warning"
    assert finding.advice == f"coordinator --out {tmp_path}/runs --resume"
    assert str(tmp_path / "runs" / "one") in finding.observation
    run_finding = finding_of(plan(directory=tmp_path / "runs" / "one"), "runs")
    assert run_finding.outcome == "warning"
    lock = DirectoryLock.acquire(tmp_path / "runs")
    try:
        assert finding_of(plan(), "runs").outcome == "ok"
    finally:
        lock.release()


def test_unreadable_run_is_a_failure(plan, tmp_path):
    RunDirectory(tmp_path / "runs").begin("one", scripted_spec())
    (tmp_path / "runs" / "result.json").write_text("{")
    assert finding_of(plan(), "runs").outcome == "failure"


# Ports.


def test_port_of_another_service_is_a_failure(plan):
    with port_in_use() as port:
        for check, changes in (
            ("workers' port", {"bind": ("127.0.0.1", port)}),
            ("control port", {"control": ("127.0.0.1", port)}),
        ):
            finding = finding_of(plan(**changes), check)
            assert finding.outcome == "failure"
            assert f"127.0.0.1:{port} is in use" in finding.observation


def test_address_of_another_machine_is_a_failure(plan):
    finding = finding_of(plan(bind=("192.0.2.77", 0)), "workers' port")
    assert (finding.outcome, "cannot be bound" in finding.observation) == ("failure", True)
    finding = finding_of(plan(bind=("no-such-host.invalid", 0)), "workers' port")
    assert (finding.outcome, "cannot be bound" in finding.observation) == ("failure", True)


def test_control_port_that_others_could_reach_is_a_failure(plan):
    finding = finding_of(plan(control=("0.0.0.0", 0)), "control port")
    assert (finding.outcome, "ssh -N -L" in finding.observation) == ("failure", True)


def test_loopback_is_unreachable_for_others(plan):
    finding = finding_of(plan(), "reachable")
    assert (finding.outcome, "--bind 0.0.0.0:" in finding.advice) == ("warning", True)


def test_all_addresses_are_reachable_on_a_network(plan):
    finding = finding_of(plan(bind=("0.0.0.0", 0)), "reachable")
    if finding.outcome == "ok":
        assert "worker doctor --coordinator" in finding.observation
    else:  # a machine without a network
        assert "no address" in finding.observation


def test_machine_without_a_network_is_a_failure(plan):
    with network("alone", subnet="10.8.2") as machines:
        subprocess.run(
            ["ip", "-n", machines.namespace("alone").name, "addr", "flush", "dev", "eth0"],
            check=True,
        )
        finding = machines.run_on(
            "alone", lambda: finding_of(plan(bind=("0.0.0.0", 0)), "reachable")
        )
    assert (finding.outcome, "no address that others can reach" in finding.observation) == (
        "failure",
        True,
    )


def test_doctor_recognizes_a_running_coordinator(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMESTEP_HOME", str(tmp_path / "home"))
    with Cluster(tmp_path, "--expect-workers", "1") as cluster:
        arguments = ["--bind", cluster.address["data"], "--control", cluster.address["control"]]
        out_option = ("--out", str(tmp_path / "out"))
        completed = run_to_end("coordinator", "doctor", *arguments, *out_option, "--json")
        checks = {each["check"]: each for each in json.loads(completed.stdout)["checks"]}
        assert completed.returncode == 0, completed.stdout
        assert "this user's coordinator listens" in checks["workers' port"]["found"]
        assert "a coordinator answers" in checks["control port"]["found"]
        assert "a coordinator works in" in checks["runs"]["found"]


def test_failure_is_exit_code_1_and_a_line_on_standard_output(tmp_path):
    with port_in_use() as port:
        completed = run_to_end(
            "coordinator", "doctor", "--bind", f"127.0.0.1:{port}", "--control", "127.0.0.1:0",
            "--out", str(tmp_path),
        )  # fmt: skip
    assert completed.returncode == 1
    assert completed.stderr == ""
    lines = completed.stdout.splitlines()
    assert all(line.split()[0] in {"ok", "warning", "failure"} for line in lines)
    assert [line.split(":")[0] for line in lines if line.startswith("failure")] == [
        "failure  workers' port"
    ]


@pytest.fixture
def _removed_working_directory(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()


@pytest.mark.usefixtures("_removed_working_directory")
def test_removed_working_directory_is_a_one_line_error(tmp_path):
    completed = run_command(
        "coordinator", "doctor", environment={"SAMESTEP_HOME": str(tmp_path / "home")}
    )
    assert completed.returncode == 2
    assert completed.stderr.endswith("this one was removed; change to another (cd)\n")
    assert completed.stderr.count("\n") == 1


@pytest.mark.usefixtures("_removed_working_directory")
def test_report_in_a_removed_working_directory_names_its_option(tmp_path):
    run = written_run(tmp_path / "run")
    completed = run_command("coordinator", "report", str(run), "--output", "page.html")
    assert completed.returncode == 2
    assert "--output: expected a file that can be written" in completed.stderr
