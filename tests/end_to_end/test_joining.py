"""Workers on a second machine: printed instructions, tokens, and error messages."""

from __future__ import annotations

import contextlib
import json
import shlex
from functools import partial
from pathlib import Path

import pytest

from coordinator.members.credentials import CoordinatorCredentials
from coordinator.members.invitation import invitation, status_line
from protocol.wire.authentication import new_key
from protocol.wire.join_token import JoinToken
from tests.cluster import Cluster
from tests.commands import run_command
from tests.processes import Process


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SAMESTEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def run_options(tmp_path) -> tuple[str, str]:
    spec = tmp_path / "run.yaml"
    spec.write_text("task: scripted\nsteps: 3\nbatch: {samples: 4, microbatch: 1}\n")
    return "--run", str(spec)


def remote_environment(tmp_path: Path, **overrides: str) -> dict[str, str]:
    """Return the environment of another machine."""
    return {"SAMESTEP_HOME": str(tmp_path / "there"), **overrides}


def run_coordinator(*arguments: str) -> str:
    completed = run_command("coordinator", *arguments)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.strip()


def last_line(process: Process) -> str:
    assert process.stderr is not None
    (line,) = process.stderr.read().strip().splitlines()
    return line


def close_process(process: Process) -> None:
    """Wait for the process and close its streams; another worker of its name follows."""
    process.wait()
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()


def secrets_of(home: Path) -> list[str]:
    """Return everything that no output may contain: the token's secret, keys, the control token."""
    secrets = [CoordinatorCredentials.open(home).join_token().reveal().partition(".")[2]]
    workers = home / "coordinator" / "workers.json"
    if workers.exists():
        secrets += [entry["key"] for entry in json.loads(workers.read_text()).values()]
    return secrets + [path.read_text().strip() for path in home.rglob("control/*.token")]


def command_lines() -> list[bytes]:
    """Return the command lines of all processes; one may end meanwhile."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines.append(path.read_bytes())
    return lines


def test_other_machine_joins_with_the_token_and_returns_without(tmp_path, own_home, run_options):
    arguments = ("--bind", "0.0.0.0:0", "--log-json", *run_options)
    with Cluster(tmp_path, "--expect-workers", "2", *arguments) as cluster:
        secrets = secrets_of(own_home)
        token = run_coordinator("token", "show")
        first_worker = cluster.start_worker(
            "far",
            "--backend",
            "scripted",
            environment=remote_environment(tmp_path, SAMESTEP_TOKEN=token),
        )
        cluster.wait_for("worker_connected", worker="far")
        assert first_worker.stdout is not None
        assert any(
            "joined as 'far'" in line for line in first_worker.stdout
        )  # and has stored its key
        assert run_coordinator("token", "workers").endswith("  far")
        first_worker.kill()
        close_process(first_worker)
        cluster.wait_for("worker_disconnected", worker="far")
        run_coordinator("token", "rotate")
        second_worker = cluster.start_worker(
            "far", "--backend", "scripted", environment=remote_environment(tmp_path)
        )
        cluster.start_worker("near", "--backend", "scripted")
        secrets += secrets_of(own_home)
        status = cluster.ask("GET", "/status")
        assert status["encryption"] == "TLS 1.3"
        assert cluster.result()["workers"].keys() == {"far", "near"}
        assert cluster.wait_for_exit(second_worker) == 0
        texts = [*cluster.whole_output(), json.dumps(status), json.dumps(cluster._events)]
        for process in (cluster.coordinator, *cluster.workers.values()):
            texts += [stream.read() for stream in (process.stdout, process.stderr) if stream]
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    texts += [path.read_text(errors="replace") for path in files]
    for secret in (*secrets, token):
        assert not any(secret in text for text in texts)


def test_wrong_token_gives_one_line_and_exit_code_77(tmp_path, own_home):
    with Cluster(tmp_path, "--expect-workers", "1") as cluster:
        valid_token = CoordinatorCredentials.open(own_home).join_token()
        wrong_secret = JoinToken(valid_token.fingerprint, new_key()).reveal()
        wrong_certificate = JoinToken(b"x" * 32, valid_token.secret).reveal()
        for name, token in (("a", wrong_secret), ("b", wrong_certificate)):
            environment = remote_environment(tmp_path, SAMESTEP_TOKEN=token)
            worker = cluster.start_worker(name, "--backend", "scripted", environment=environment)
            assert cluster.wait_for_exit(worker) == 77
            line = last_line(worker)
            assert "coordinator token show" in line
            assert token.partition(".")[2] not in line
        rejected_worker = cluster.start_worker("c", environment=remote_environment(tmp_path))
        assert cluster.wait_for_exit(rejected_worker) == 77
        assert "no join token" in last_line(rejected_worker)
        assert not cluster.events_named("worker_connected")


def test_a_revoked_worker_ends_with_77(tmp_path):
    with Cluster(tmp_path, "--expect-workers", "2") as cluster:
        token = run_coordinator("token", "show")
        environment = remote_environment(tmp_path, SAMESTEP_TOKEN=token)
        remote_worker = cluster.start_worker(
            "far", "--backend", "scripted", environment=environment
        )
        cluster.start_worker("near", "--backend", "scripted")
        cluster.wait_for("worker_connected", worker="far")
        cluster.wait_for("worker_connected", worker="near")
        assert "the key of 'far' is revoked" in run_coordinator("token", "revoke", "far")
        assert cluster.wait_for_exit(remote_worker) == 77
        assert last_line(remote_worker) == "worker: the key of 'far' was revoked"
        close_process(remote_worker)
        for environment in (
            remote_environment(tmp_path),
            remote_environment(tmp_path, SAMESTEP_TOKEN=token),
        ):
            returned_worker = cluster.start_worker("far", environment=environment)
            assert cluster.wait_for_exit(returned_worker) == 77
            close_process(returned_worker)
        workers = cluster.ask("GET", "/status")["workers"]
        assert [worker["name"] for worker in workers] == ["near"]


def test_token_file_that_others_may_read_is_refused(tmp_path, own_home):
    path = tmp_path / "token"
    path.write_text(CoordinatorCredentials.open(own_home).join_token().reveal())
    path.chmod(0o644)
    completed = run_command("worker", "--token-file", str(path))
    assert completed.returncode == 2
    assert "chmod 600" in completed.stderr
    assert len(completed.stderr.strip().splitlines()) == 1


def test_plaintext_needs_a_flag_on_both_sides_and_is_shown(tmp_path, run_options):
    with Cluster(tmp_path, "--expect-workers", "1", "--plaintext", *run_options) as cluster:
        tls_worker = cluster.start_worker("tls", "--backend", "scripted")
        assert cluster.wait_for_exit(tls_worker) == 78
        assert "--plaintext" in last_line(tls_worker)
        rejected_worker = cluster.start_worker(
            "stranger", "--plaintext", environment=remote_environment(tmp_path)
        )
        assert cluster.wait_for_exit(rejected_worker) == 77
        assert cluster.ask("GET", "/status")["encryption"] == "none (--plaintext)"
        assert "NOT ENCRYPTED" in run_coordinator("status", "--control", cluster.address["control"])
        cluster.start_worker("w", "--plaintext", "--backend", "scripted")
        assert cluster.result()["workers"].keys() == {"w"}


def test_plaintext_worker_is_refused_by_a_tls_coordinator(tmp_path):
    with Cluster(tmp_path, "--expect-workers", "1") as cluster:
        plaintext_worker = cluster.start_worker("plain", "--plaintext")
        assert cluster.wait_for_exit(plaintext_worker) == 78
        line = "worker: the coordinator speaks TLS: start this worker without --plaintext"
        assert last_line(plaintext_worker) == line


def test_local_workers_need_no_token_argument(tmp_path, own_home):
    spec = tmp_path / "run.yaml"
    spec.write_text("task: scripted\nsteps: 20\nbatch: {samples: 4, microbatch: 1}\n")
    arguments = ("--run", str(spec), "--local-workers", "2", "--backend", "scripted:5")
    with Cluster(tmp_path, "--bind", "0.0.0.0:0", *arguments) as cluster:
        cluster.wait_for("committed", step=1)
        secrets = secrets_of(own_home)
        lines = command_lines()
        assert any(b"local-1" in line for line in lines)
        assert not any(secret.encode() in line for secret in secrets for line in lines)
        assert cluster.result()["workers"].keys() == {"local"}


# Printed lines.


def printed_lines(own_home, host, *, plaintext=False, to_terminal=False, name="") -> list[str]:
    credentials = CoordinatorCredentials.open(own_home)
    options = {"plaintext": plaintext, "to_terminal": to_terminal, "name": name}
    return list(invitation(credentials, (host, 9000), **options))


def test_loopback_prints_one_line_without_secrets(own_home):
    for to_terminal in (False, True):
        lines = printed_lines(own_home, "127.0.0.1", to_terminal=to_terminal)
        assert lines == ["listening for workers: worker --coordinator 127.0.0.1:9000"]


def test_terminal_shows_one_line_to_paste(own_home):
    token = CoordinatorCredentials.open(own_home).join_token().reveal()
    *_, line = printed_lines(own_home, "192.0.2.7", to_terminal=True)
    assert line == f"  SAMESTEP_TOKEN={token} worker --coordinator 192.0.2.7:9000"


def test_log_explains_how_to_get_the_token(own_home):
    (secret,) = secrets_of(own_home)
    *_, line = printed_lines(own_home, "192.0.2.7")
    assert secret not in line
    assert "$(ssh 192.0.2.7 coordinator token show)" in line


def test_service_log_names_the_owner_of_the_token(own_home, monkeypatch):
    monkeypatch.setenv("STATE_DIRECTORY", str(own_home))
    *_, line = printed_lines(own_home, "192.0.2.7")
    assert f"$(ssh root@192.0.2.7 SAMESTEP_HOME={own_home} coordinator token show)" in line


def test_printed_commands_are_quoted_for_the_shell(own_home, monkeypatch):
    credentials = CoordinatorCredentials.open(own_home)
    lines = partial(
        invitation, credentials, ("192.0.2.7", 9000),
        name="", plaintext=False, script="my run's.py",
    )  # fmt: skip
    first, *_, last = lines(to_terminal=True)
    command = ["worker", "--coordinator", "192.0.2.7:9000", "my run's.py"]
    assert shlex.split(first.partition(": ")[2]) == command
    assert shlex.split(last)[1:] == command
    monkeypatch.setenv("STATE_DIRECTORY", str(own_home))
    credentials.home = Path("/srv/my runs")
    *_, line = lines(to_terminal=False)
    ssh_command = shlex.split(line.partition('"$(')[2].partition(')"')[0])
    assert ssh_command[:2] == ["ssh", "root@192.0.2.7"]
    remote_words = ["SAMESTEP_HOME=/srv/my runs", "coordinator", "token", "show"]
    assert shlex.split(ssh_command[2]) == remote_words


def test_plaintext_is_shown_and_passed_on(own_home):
    lines = printed_lines(own_home, "192.0.2.7", plaintext=True)
    assert any("NOT ENCRYPTED" in line for line in lines)
    assert lines[-1].endswith("worker --coordinator 192.0.2.7:9000 --plaintext")


def test_this_machine_is_reached_by_loopback(own_home):
    assert printed_lines(own_home, "0.0.0.0")[0].endswith("worker --coordinator 127.0.0.1:9000")


def test_control_token_is_shown_on_terminals_in_the_fragment():
    line = status_line(("127.0.0.1", 9001), "s3cret", to_terminal=True)
    assert "http://127.0.0.1:9001/#token=s3cret" in line
    assert "s3cret" not in status_line(("127.0.0.1", 9001), "s3cret", to_terminal=False)


def test_control_token_of_a_running_coordinator_is_printed(tmp_path):
    with Cluster(tmp_path, "--expect-workers", "1") as cluster:
        token = run_coordinator("token", "control", cluster.address["control"])
        assert f"Bearer {token}" == cluster._authorization()["Authorization"]
