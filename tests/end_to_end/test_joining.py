"""A second machine: what the coordinator prints, what a worker there needs, and what it is told."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from coordinator.members.credentials import CoordinatorCredentials
from coordinator.members.invitation import invitation, status_line
from protocol.wire.authentication import new_key
from protocol.wire.join_token import JoinToken
from tests.cluster import Cluster
from tests.commands import called
from tests.processes import Process


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SAMESTEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def job(tmp_path) -> tuple[str, str]:
    spec = tmp_path / "run.yaml"
    spec.write_text("task: scripted\nsteps: 3\nbatch: {samples: 4, microbatch: 1}\n")
    return "--run", str(spec)


def there(tmp_path: Path, **more: str) -> dict[str, str]:
    """The environment of another machine."""
    return {"SAMESTEP_HOME": str(tmp_path / "there"), **more}


def command(*arguments: str) -> str:
    done = called("coordinator", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def last_line(process: Process) -> str:
    assert process.stderr is not None
    (line,) = process.stderr.read().strip().splitlines()
    return line


def forget(process: Process) -> None:
    """Another of the same name comes after it."""
    process.wait()
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()


def secrets_of(home: Path) -> list[str]:
    """All that must be in no output: the token's secret, keys, the control token."""
    secrets = [CoordinatorCredentials.open(home).join_token().reveal().partition(".")[2]]
    workers = home / "coordinator" / "workers.json"
    if workers.exists():
        secrets += [entry["key"] for entry in json.loads(workers.read_text()).values()]
    return secrets + [path.read_text().strip() for path in home.rglob("control/*.token")]


def command_lines() -> list[bytes]:
    """Of all processes that there are; one may end while it is looked at."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines.append(path.read_bytes())
    return lines


def test_another_machine_comes_in_with_the_token_and_comes_back_without(tmp_path, own_home, job):
    arguments = ("--bind", "0.0.0.0:0", "--log-json", *job)
    with Cluster(tmp_path, "--expect-workers", "2", *arguments) as cluster:
        hidden = secrets_of(own_home)
        token = command("token", "show")
        first = cluster.worker(
            "far", "--backend", "scripted", environment=there(tmp_path, SAMESTEP_TOKEN=token)
        )
        cluster.wait_for("worker_connected", worker="far")
        assert first.stdout is not None
        assert any("joined as 'far'" in line for line in first.stdout)  # and has kept its key
        assert command("token", "workers").endswith("  far")
        first.kill()
        forget(first)
        cluster.wait_for("worker_disconnected", worker="far")
        command("token", "rotate")
        again = cluster.worker("far", "--backend", "scripted", environment=there(tmp_path))
        cluster.worker("near", "--backend", "scripted")
        hidden += secrets_of(own_home)
        status = cluster.ask("GET", "/status")
        assert status["encryption"] == "TLS 1.3"
        assert cluster.result()["workers"].keys() == {"far", "near"}
        assert cluster.wait_for_exit(again) == 0
        cluster._drainer.join()
        texts = [*cluster.output, json.dumps(status), json.dumps(cluster._events)]
        for process in (cluster.coordinator, *cluster.workers.values()):
            texts += [stream.read() for stream in (process.stdout, process.stderr) if stream]
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    texts += [path.read_text(errors="replace") for path in written]
    for secret in (*hidden, token):
        assert not any(secret in text for text in texts)


def test_a_wrong_token_is_one_line_and_77(tmp_path, own_home):
    with Cluster(tmp_path, "--expect-workers", "1") as cluster:
        good = CoordinatorCredentials.open(own_home).join_token()
        wrong_secret = JoinToken(good.fingerprint, new_key()).reveal()
        wrong_certificate = JoinToken(b"x" * 32, good.secret).reveal()
        for name, token in (("a", wrong_secret), ("b", wrong_certificate)):
            environment = there(tmp_path, SAMESTEP_TOKEN=token)
            worker = cluster.worker(name, "--backend", "scripted", environment=environment)
            assert cluster.wait_for_exit(worker) == 77
            line = last_line(worker)
            assert "coordinator token show" in line
            assert token.partition(".")[2] not in line
        without = cluster.worker("c", environment=there(tmp_path))
        assert cluster.wait_for_exit(without) == 77
        assert "no join token" in last_line(without)
        assert not cluster.every("worker_connected")


def test_a_revoked_worker_ends_with_77(tmp_path):
    with Cluster(tmp_path, "--expect-workers", "2") as cluster:
        token = command("token", "show")
        environment = there(tmp_path, SAMESTEP_TOKEN=token)
        far = cluster.worker("far", "--backend", "scripted", environment=environment)
        cluster.worker("near", "--backend", "scripted")
        cluster.wait_for("worker_connected", worker="far")
        cluster.wait_for("worker_connected", worker="near")
        assert "the key of 'far' is revoked" in command("token", "revoke", "far")
        assert cluster.wait_for_exit(far) == 77
        assert last_line(far) == "worker: the key of 'far' was revoked"
        forget(far)
        for environment in (there(tmp_path), there(tmp_path, SAMESTEP_TOKEN=token)):
            back = cluster.worker("far", environment=environment)
            assert cluster.wait_for_exit(back) == 77
            forget(back)
        workers = cluster.ask("GET", "/status")["workers"]
        assert [worker["name"] for worker in workers] == ["near"]


def test_a_token_file_that_others_may_read(tmp_path, own_home):
    path = tmp_path / "token"
    path.write_text(CoordinatorCredentials.open(own_home).join_token().reveal())
    path.chmod(0o644)
    ended = called("worker", "--token-file", str(path))
    assert ended.returncode == 2
    assert "chmod 600" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_plaintext_is_by_flag_on_both_sides_and_is_shown(tmp_path, job):
    with Cluster(tmp_path, "--expect-workers", "1", "--plaintext", *job) as cluster:
        encrypted = cluster.worker("tls", "--backend", "scripted")
        assert cluster.wait_for_exit(encrypted) == 78
        assert "--plaintext" in last_line(encrypted)
        without = cluster.worker("stranger", "--plaintext", environment=there(tmp_path))
        assert cluster.wait_for_exit(without) == 77
        assert cluster.ask("GET", "/status")["encryption"] == "none (--plaintext)"
        assert "NOT ENCRYPTED" in command("status", "--control", cluster.address["control"])
        cluster.worker("w", "--plaintext", "--backend", "scripted")
        assert cluster.result()["workers"].keys() == {"w"}


def test_a_worker_that_was_told_not_to_use_tls(tmp_path):
    with Cluster(tmp_path, "--expect-workers", "1") as cluster:
        plain = cluster.worker("plain", "--plaintext")
        assert cluster.wait_for_exit(plain) == 78
        line = "worker: the coordinator speaks TLS: start this worker without --plaintext"
        assert last_line(plain) == line


def test_local_workers_need_nothing_and_no_argument_holds_a_token(tmp_path, own_home):
    spec = tmp_path / "run.yaml"
    spec.write_text("task: scripted\nsteps: 20\nbatch: {samples: 4, microbatch: 1}\n")
    arguments = ("--run", str(spec), "--local-workers", "2", "--backend", "scripted:5")
    with Cluster(tmp_path, "--bind", "0.0.0.0:0", *arguments) as cluster:
        cluster.wait_for("committed", step=1)
        hidden = secrets_of(own_home)
        lines = command_lines()
        assert any(b"local-1" in line for line in lines)
        assert not any(secret.encode() in line for secret in hidden for line in lines)
        assert cluster.result()["workers"].keys() == {"local"}


# What is printed.


def printed(own_home, host, *, plaintext=False, to_terminal=False, name="") -> list[str]:
    credentials = CoordinatorCredentials.open(own_home)
    options = {"plaintext": plaintext, "to_terminal": to_terminal, "name": name}
    return list(invitation(credentials, (host, 9000), **options))


def test_on_loopback_there_is_one_line_and_no_secret(own_home):
    for to_terminal in (False, True):
        lines = printed(own_home, "127.0.0.1", to_terminal=to_terminal)
        assert lines == ["listening for workers: worker --coordinator 127.0.0.1:9000"]


def test_a_terminal_is_shown_one_line_to_paste(own_home):
    token = CoordinatorCredentials.open(own_home).join_token().reveal()
    *_, line = printed(own_home, "192.0.2.7", to_terminal=True)
    assert line == f"  SAMESTEP_TOKEN={token} worker --coordinator 192.0.2.7:9000"


def test_a_log_is_told_how_to_get_the_token(own_home):
    (secret,) = secrets_of(own_home)
    *_, line = printed(own_home, "192.0.2.7")
    assert secret not in line
    assert "$(ssh 192.0.2.7 coordinator token show)" in line


def test_a_service_s_log_says_whose_the_token_is(own_home, monkeypatch):
    monkeypatch.setenv("STATE_DIRECTORY", str(own_home))
    *_, line = printed(own_home, "192.0.2.7")
    assert f"$(ssh root@192.0.2.7 SAMESTEP_HOME={own_home} coordinator token show)" in line


def test_plaintext_is_said_and_passed_on(own_home):
    lines = printed(own_home, "192.0.2.7", plaintext=True)
    assert any("NOT ENCRYPTED" in line for line in lines)
    assert lines[-1].endswith("worker --coordinator 192.0.2.7:9000 --plaintext")


def test_this_machine_is_reached_by_loopback(own_home):
    assert printed(own_home, "0.0.0.0")[0].endswith("worker --coordinator 127.0.0.1:9000")


def test_the_control_token_is_for_a_terminal_and_in_the_fragment():
    line = status_line(("127.0.0.1", 9001), "s3cret", to_terminal=True)
    assert "http://127.0.0.1:9001/#token=s3cret" in line
    assert "s3cret" not in status_line(("127.0.0.1", 9001), "s3cret", to_terminal=False)


def test_the_control_token_of_a_running_coordinator(tmp_path):
    with Cluster(tmp_path, "--expect-workers", "1") as cluster:
        token = command("token", "control", cluster.address["control"])
        assert f"Bearer {token}" == cluster._bearing()["Authorization"]
