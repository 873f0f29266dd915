"""`worker doctor`: each fault is provoked, and the report names it with a remedy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from coordinator.members.credentials import CoordinatorCredentials
from protocol import PROTOCOL_VERSION
from protocol.cli.doctor import Finding
from protocol.machine.secret_file import write_secret
from protocol.wire.authentication import new_key
from protocol.wire.join_token import JoinToken
from tests.cluster import PATIENCE_S, Cluster
from tests.durable_run import small_disk
from tests.live_service import live_service
from tests.network_hosts import network
from worker.doctor import WorkerPlan, examine
from worker.join.credentials import WorkerCredentials
from worker.join.trial_join import _check_large_message, trial_join

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def samestep_home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SAMESTEP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SAMESTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "home"


def plan(**changes) -> WorkerPlan:
    values = {
        "coordinator": ("127.0.0.1", 1), "coordinator_name": "", "name": "w",
        "backend": "scripted", "devices": (0,), "token_file": None, "plaintext": False,
    }  # fmt: skip
    return WorkerPlan(**(values | changes))


def checks(worker_plan: WorkerPlan) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine(worker_plan)}


def join_findings(host: str, port: int, token: str = "", **overrides: object) -> list[Finding]:
    """Return the findings of another machine's doctor: its home is not the coordinator's."""
    environment = {"SAMESTEP_HOME": str(Path(os.environ["SAMESTEP_HOME"]) / "there")}
    if token:
        environment["SAMESTEP_TOKEN"] = token
    credentials = WorkerCredentials(None, environment=environment, **overrides)  # type: ignore[arg-type]
    return list(trial_join(host, port, "w", credentials))


@contextlib.contextmanager
def fixed_answer_server(answer: bytes, context=None):
    """Serve connections: send each one these bytes, then close it."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with contextlib.suppress(OSError), connection:
                    if context is not None:
                        connection = context.wrap_socket(connection, server_side=True)
                    connection.recv(1024)
                    connection.sendall(answer)
                    connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


# The machine.


def test_sound_machine_has_no_failure_and_no_leftovers(tmp_path):
    results = checks(plan())
    failed_checks = [finding.check for finding in results.values() if finding.outcome == "failure"]
    assert failed_checks == ["connection"]  # there is no coordinator
    assert results.keys() >= {"release", "cache", "open files", "memory", "clock", "keys"}
    assert list(tmp_path.iterdir()) == []


def test_full_cache_is_a_failure(tmp_path, monkeypatch):
    with small_disk(tmp_path / "disk", 64) as disk:
        monkeypatch.setenv("SAMESTEP_CACHE", str(disk))
        (disk / "filler").write_bytes(bytes(64 * 1024))
        full = checks(plan())["cache"]
    assert (full.outcome, "SAMESTEP_CACHE=DIR" in full.advice) == ("failure", True)


def test_key_readable_by_others_is_a_failure(samestep_home):
    write_secret(samestep_home / "worker" / "a.key", "00" * 32)
    assert checks(plan())["keys"].outcome == "ok"
    (samestep_home / "worker" / "a.key").chmod(0o644)
    finding = checks(plan())["keys"]
    assert (finding.outcome, "chmod 600" in finding.observation) == ("failure", True)


@pytest.mark.parametrize("text", ["", "00" * 31])
def test_damaged_key_is_a_failure(samestep_home, text):
    write_secret(samestep_home / "worker" / "a.key", text)
    finding = checks(plan())["keys"]
    assert (finding.outcome, "a.key' is damaged" in finding.observation) == ("failure", True)
    assert "coordinator token show" in finding.advice


def test_unusable_token_file_is_a_failure(tmp_path):
    path = tmp_path / "token"
    for message in ("does not exist", "expected a join token", "chmod 600"):
        finding = checks(plan(token_file=path))["token"]
        assert (finding.outcome, message in finding.observation) == ("failure", True)
        path.write_text("nothing of the kind\n")
        path.chmod(0o644 if message != "does not exist" else 0o600)


# The path to the coordinator.


@pytest.mark.parametrize(("name", "outcome"), [("", "warning"), ("den", "failure")])
def test_undiscovered_coordinator_is_reported(name, outcome):
    with network("alone", subnet="10.8.3") as hosts:
        results = hosts.run_on(
            "alone", lambda: checks(plan(coordinator=None, coordinator_name=name))
        )
    assert results["coordinator"].outcome == outcome
    assert "worker --coordinator HOST:PORT" in results["coordinator"].observation
    assert "connection" not in results


def test_unknown_host_name_is_a_failure():
    (line,) = join_findings("no-such-host.invalid", 9000)
    assert (line.check, line.outcome) == ("address", "failure")
    assert "use the coordinator's IP address" in line.advice


def test_address_of_this_machine_is_a_warning(monkeypatch):
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    first = join_findings("box", 9)[0]
    assert (first.outcome, "127.0.1.1, which is this machine" in first.observation) == (
        "warning",
        True,
    )


def test_port_without_a_listener_is_a_failure():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        line = join_findings("127.0.0.1", port)[-1]
    assert (line.check, line.outcome) == ("connection", "failure")
    assert line.observation == f"127.0.0.1:{port} refused the connection"
    assert "--bind 0.0.0.0:PORT" in line.advice


def test_unanswered_connection_is_a_failure(monkeypatch):
    """A listener with a full queue stops fixed_answer_server, like a dropping filter."""
    monkeypatch.setattr("worker.join.trial_join._TIMEOUT_S", 0.3)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        with contextlib.suppress(TimeoutError):
            while True:
                filler = socket.create_connection(listener.getsockname(), 0.3)
                stack.enter_context(filler)
        line = join_findings("127.0.0.1", listener.getsockname()[1])[-1]
    assert (line.check, line.outcome) == ("connection", "failure")
    assert "no answer" in line.observation
    assert "firewall" in line.advice


def test_undelivered_large_message_is_a_failure(monkeypatch):
    monkeypatch.setattr("worker.join.trial_join._LARGE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("worker.join.trial_join._POLL_INTERVAL_S", 0.02)
    near_end, far_end = socket.socketpair()
    with near_end, far_end:
        finding = _check_large_message(near_end, "192.0.2.1:9000")
    assert (finding.check, finding.outcome) == ("large messages", "failure")
    assert "the path silently drops packets above its MTU" in finding.observation
    near_end, far_end = socket.socketpair()
    with near_end:
        far_end.close()
        assert _check_large_message(near_end, "192.0.2.1:9000").outcome == "ok"


@pytest.mark.slow
def test_path_that_drops_large_packets_is_a_failure(tmp_path, monkeypatch, samestep_home):
    """Small messages pass: a worker would join, but never receive the state."""
    monkeypatch.setattr("worker.join.trial_join._LARGE_TIMEOUT_S", 0.5)
    spec = tmp_path / "run.yaml"
    spec.write_text("task: scripted\nsteps: 3\nbatch: {samples: 4, microbatch: 1}\n")
    with network("a", "b", subnet="10.8.4") as hosts:
        arguments = (
            "--bind",
            f"{hosts.address('a')}:0",
            "--control",
            "127.0.0.1:0",
            "--run",
            str(spec),
        )

        def check_from_another_host() -> None:
            with Cluster(tmp_path, "--expect-workers", "1", "--no-announce", *arguments) as cluster:
                host, _, port = cluster.address["data"].rpartition(":")
                token = CoordinatorCredentials.open(samestep_home).join_token().reveal()
                join = partial(join_findings, host, int(port), token)
                assert hosts.run_on("b", join)[-2].outcome == "ok"
                hosts.drop_large_packets("b", 1000)
                results = {finding.check: finding for finding in hosts.run_on("b", join)}
                assert results["token"].outcome == "ok"
                assert results["large messages"].outcome == "failure"
                assert (
                    "the path silently drops packets above its MTU"
                    in results["large messages"].observation
                )
                assert "mtu 1280" in results["large messages"].advice

        hosts.run_on("a", check_from_another_host)


def test_other_service_without_tls_is_a_failure():
    with fixed_answer_server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        line = join_findings("127.0.0.1", port)[-1]
    assert (line.check, line.outcome) == ("encryption", "failure")
    assert "got something else" in line.observation


def test_other_service_with_tls_is_a_failure(tmp_path):
    credentials = CoordinatorCredentials.open(tmp_path / "other")
    token = credentials.join_token().reveal()
    with fixed_answer_server(
        b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, credentials.server_context()
    ) as port:
        line = join_findings("127.0.0.1", port, token)[-1]
    assert line.outcome == "failure"
    assert "the server is not a coordinator" in line.observation


def test_connection_closed_at_once_is_a_failure():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept_and_close() -> None:
            listener.accept()[0].close()

        thread = threading.Thread(target=accept_and_close)
        thread.start()
        line = join_findings("127.0.0.1", listener.getsockname()[1])[-1]
        thread.join()
    assert line.outcome == "failure"
    assert "try again in some seconds" in line.advice


async def test_token_is_checked_without_a_trace(tmp_path, samestep_home):
    async with live_service(tmp_path / "runs", 1) as live:
        address = ("127.0.0.1", live.port)
        valid_token = CoordinatorCredentials.open(samestep_home).join_token()
        outcomes = await asyncio.to_thread(join_findings, *address, valid_token.reveal())
        assert [finding.outcome for finding in outcomes] == ["ok"] * 5
        assert f"the join token fits, and both have protocol version {PROTOCOL_VERSION}" in (
            outcomes[-1].observation
        )
        wrong_tokens = {
            "token": JoinToken(valid_token.fingerprint, new_key()).reveal(),
            "certificate": JoinToken(b"x" * 32, valid_token.secret).reveal(),
            "none": "",
        }
        for kind, token in wrong_tokens.items():
            line = (await asyncio.to_thread(join_findings, *address, token))[-1]
            assert (line.check, line.outcome) == ("token", "failure"), kind
            assert "coordinator token show" in line.observation
            assert not token or token.partition(".")[2] not in line.line()
        # The check leaves no trace: no member, no key.
        assert not live.service.sessions
        assert not live.events_named("worker_connected")
        assert CoordinatorCredentials.open(samestep_home).keys.names() == {}


async def test_key_is_valid_until_its_revocation(tmp_path, samestep_home):
    async with live_service(tmp_path / "runs", 1) as live:
        address = ("127.0.0.1", live.port)
        coordinator = CoordinatorCredentials.open(samestep_home)
        token = coordinator.join_token().reveal()
        credentials = WorkerCredentials(
            None, environment={"SAMESTEP_HOME": str(samestep_home / "there")}
        )
        credentials.store_key(coordinator.fingerprint, "w", coordinator.issue_key("w"))
        line = (await asyncio.to_thread(join_findings, *address))[-1]
        assert (line.outcome, "its key fits" in line.observation) == ("ok", True)
        coordinator.revoke("w")
        last_finding = (await asyncio.to_thread(join_findings, *address))[-1]
        assert (last_finding.check, last_finding.outcome) == ("token", "failure")
        assert "is not valid" in last_finding.observation
        assert (await asyncio.to_thread(join_findings, *address, token))[-1].outcome == "failure"
        current_token = coordinator.join_token().reveal()
        returned_finding = (await asyncio.to_thread(join_findings, *address, current_token))[-1]
        assert (
            returned_finding.outcome,
            "the join token fits" in returned_finding.observation,
        ) == (
            "ok",
            True,
        )


async def test_other_protocol_version_is_a_failure(tmp_path, samestep_home):
    async with live_service(tmp_path / "runs", 1) as live:
        token = CoordinatorCredentials.open(samestep_home).join_token().reveal()
        older_worker = (
            "import sys, protocol; protocol.PROTOCOL_VERSION -= 1\n"
            "from worker.cli import main; main()"
        )
        command = [sys.executable, "-c", older_worker, "doctor", "--backend", "scripted", "--json"]
        command += ["--coordinator", f"127.0.0.1:{live.port}"]
        environment = {"SAMESTEP_HOME": str(tmp_path / "there"), "SAMESTEP_TOKEN": token}
        completed = await asyncio.to_thread(
            subprocess.run, command, cwd=ROOT, env={**os.environ, **environment},
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    last_check = json.loads(completed.stdout)["checks"][-1]
    assert completed.returncode == 1
    assert (last_check["check"], last_check["outcome"]) == ("version", "failure")
    assert last_check["found"].endswith("upgrade this worker")


def test_plaintext_must_match_the_coordinator(tmp_path, samestep_home):
    with Cluster(tmp_path, "--expect-workers", "1", "--plaintext") as cluster:
        host, _, port = cluster.address["data"].rpartition(":")
        token = CoordinatorCredentials.open(samestep_home).join_token().reveal()
        line = join_findings(host, int(port), token)[-1]
        assert (line.check, "--plaintext" in line.advice) == ("encryption", True)
        assert join_findings(host, int(port), token, plaintext=True)[-1].outcome == "ok"
        invalid_token = JoinToken(b"x" * 32, new_key()).reveal()
        assert (
            join_findings(host, int(port), invalid_token, plaintext=True)[-1].outcome == "failure"
        )
