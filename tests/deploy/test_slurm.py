"""deploy/slurm: a run that a real Slurm disturbs, user mistakes, and the scripts alone, with
stand-ins for the commands of Slurm and samestep."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from functools import cache

import pytest

from tests.cluster import PATIENCE_S, ROOT
from tests.commands import run_command
from tests.processes import start
from tests.samestep.scripts import close
from tests.slurm_cluster import slurm_cluster

STEPS = 120
RUN = f"""
name: paced
task: scripted
steps: {STEPS}
batch: {{samples: 8, microbatch: 1}}
optimizer: {{name: adamw, lr: 5.0e-3}}
"""
FILES = ("coordinator.sbatch", "worker.sbatch", "settings.sh", "step.sh", "control.sh")


@pytest.fixture(scope="module")
def slurm(reference_digest):
    del reference_digest  # it computes while the cluster starts
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture
def run(slurm, request):
    """A directory on the file system that all nodes share, created as in docs/slurm.md."""
    directory = slurm.directory / request.node.name
    directory.mkdir()
    for name in FILES:
        shutil.copy(ROOT / "deploy/slurm" / name, directory)
    (directory / "run.yaml").write_text(RUN)
    (directory / "more-important.sh").write_text("#!/bin/sh\n")
    yield directory
    slurm.run("scancel", "--quiet", "--full", "--signal=KILL", "--partition=low", check=False)
    slurm.run("scancel", "--quiet", "--full", "--signal=KILL", "--partition=high", check=False)


@pytest.fixture(scope="module")
def reference_digest(tmp_path_factory):
    """Return a function that waits for the digest of the same run with one undisturbed worker."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "run.yaml").write_text(RUN)
    process = start(
        "coordinator", "--run", str(directory / "run.yaml"), "--out", str(directory / "out"),
        "--local-workers", "1", "--backend", "scripted", "--bind", "127.0.0.1:0",
        "--control", "127.0.0.1:0",
    )  # fmt: skip

    @cache
    def digest():
        process.communicate(timeout=PATIENCE_S)
        return json.loads((directory / "out/result.json").read_text())["weights_digest"]

    yield digest
    process.kill()
    process.wait()
    close(process)


def log_of(directory, pattern):
    """Return the text of the logs whose names match."""
    return "".join(log.read_text() for log in sorted(directory.glob(pattern)))


@pytest.mark.slow
def test_preempted_workers_and_a_requeued_coordinator_leave_no_trace_in_the_digest(
    slurm, run, reference_digest, monkeypatch
):
    monkeypatch.setitem(slurm.environment, "SAMESTEP_BACKEND", "scripted:50")
    coordinator = slurm.submit("coordinator.sbatch", "-p", "high", "-w", "node1", cwd=run)
    workers = slurm.submit("worker.sbatch", "--array=1-4", "-x", "node1", cwd=run)

    def coordinator_log():
        return log_of(run, "samestep-coordinator-*.log")

    slurm.wait_until(lambda: "step 1/" in coordinator_log())
    secret = run / "keys/coordinator/join.token"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    # Two of the four workers run on each node: a job of higher priority takes one node.
    slurm.submit("more-important.sh", "-p", "high", "-w", "node3", "--exclusive", cwd=run)
    slurm.wait_until(lambda: coordinator_log().count(" left: drained") == 2)
    slurm.run("scontrol", "requeue", coordinator)
    slurm.wait_until(lambda: coordinator_log().count("listening for workers") == 2)
    slurm.wait_until(lambda: not slurm.states(coordinator) and not slurm.states(workers))
    result = json.loads((run / "run/result.json").read_text())
    assert (result["outcome"], result["steps"]) == ("finished", STEPS), slurm.logs()
    assert result["weights_digest"] == reference_digest()
    assert run_command("coordinator", "audit", str(run / "run")).returncode == 0
    logs = log_of(run, "samestep-worker-*.log")
    assert logs.count("goodbye: drained") == logs.count("samestep: requeueing job") == 2
    assert "the coordinator is at" in logs


@pytest.mark.slow
def test_mistakes_end_a_job_in_one_line_without_requeue(slurm, run, monkeypatch):
    monkeypatch.setitem(slurm.environment, "SAMESTEP_BACKEND", "scripted:50")
    other_directory = run / "elsewhere"
    other_directory.mkdir()
    misplaced_job = slurm.submit("../worker.sbatch", cwd=other_directory)
    coordinator = slurm.submit("coordinator.sbatch", "-w", "node1", cwd=run)
    secret = run / "keys/coordinator/join.token"
    slurm.wait_until((run / "address.json").exists)
    secret.chmod(0o640)
    exposed_job = slurm.submit("worker.sbatch", "-x", "node1", cwd=run)
    slurm.wait_until(lambda: not slurm.states(misplaced_job) and not slurm.states(exposed_job))
    assert "expected settings.sh in" in log_of(other_directory, "*.log")
    log_text = log_of(run, f"samestep-worker-{exposed_job}_*.log")
    assert "can be read by others (mode 0640)" in log_text
    assert "requeueing" not in log_text
    # A cancelled coordinator has saved its state; it is not requeued either.
    slurm.run("./control.sh", "status", cwd=run)
    slurm.run("scancel", coordinator)
    slurm.wait_until(lambda: not slurm.states(coordinator))
    assert "requeueing" not in log_of(run, "samestep-coordinator-*.log")
    # Workers that wait for a coordinator whose run spec is refused do not keep their nodes.
    monkeypatch.setitem(slurm.environment, "LOOK_EVERY_S", "0.2")
    secret.chmod(0o600)
    (run / "run.yaml").write_text(RUN.replace("scripted", "unheard-of"))
    waiting_job = slurm.submit("worker.sbatch", "-x", "node1", cwd=run)
    slurm.wait_until(lambda: log_of(run, f"samestep-worker-{waiting_job}_*.log"))
    refused_job = slurm.submit("coordinator.sbatch", "-w", "node1", cwd=run)
    slurm.wait_until(lambda: not slurm.states(refused_job) and not slurm.states(waiting_job))
    log_text = log_of(run, f"samestep-worker-{waiting_job}_*.log")
    assert f"the coordinator, job {refused_job}, ended with exit code 2" in log_text, log_text


@pytest.mark.slow
def test_jobs_drain_before_their_time_limit_and_are_requeued(
    slurm, run, reference_digest, monkeypatch
):
    """The test sends the signal of the time limit itself, because a limit is at least a minute."""
    monkeypatch.setitem(slurm.environment, "SAMESTEP_BACKEND", "scripted:50")
    coordinator = slurm.submit("coordinator.sbatch", "-w", "node1", cwd=run)
    workers = slurm.submit("worker.sbatch", "--array=1-4", "-x", "node1", cwd=run)

    def coordinator_log():
        return log_of(run, "samestep-coordinator-*.log")

    slurm.wait_until(lambda: "step 1/" in coordinator_log())
    slurm.run("scancel", "--batch", "--signal=USR1", f"{workers}_4", coordinator)
    slurm.wait_until(lambda: coordinator_log().count("listening for workers") == 2)
    slurm.wait_until(lambda: not slurm.states(coordinator) and not slurm.states(workers))
    result = json.loads((run / "run/result.json").read_text())
    assert (result["outcome"], result["steps"]) == ("finished", STEPS), slurm.logs()
    assert result["weights_digest"] == reference_digest()
    # The last task of an array has the ID of the whole array: address its signals to it alone.
    assert log_of(run, "samestep-worker-*.log").count("goodbye: drained") == 1


@pytest.mark.slow
def test_fit_under_srun_needs_no_flags(slurm, run, monkeypatch):
    """Three tasks on three nodes: one run, with the digest of a single task."""
    shutil.copy(ROOT / "docs/examples/sine.py", run)
    monkeypatch.setitem(slurm.environment, "SAMESTEP_BACKEND", "cpu")
    monkeypatch.setitem(slurm.environment, "SAMESTEP_HOME", str(run / "home"))
    python = (sys.executable, "sine.py")
    options = ("--partition=high", f"--chdir={run}")
    three_tasks = slurm.run("srun", *options, "--nodes=3", "--ntasks=3", *python)
    single_task = slurm.run("srun", *options, "--ntasks=1", *python)
    (digest,) = set(re.findall("digest ([0-9a-f]{64})", single_task))
    assert three_tasks.count(f", digest {digest}") == 3
    assert "connected" in three_tasks
    assert not list((run / "home/srun").iterdir())
    # A task that fails before the run starts ends all of them.
    (run / "sine.py").write_text((run / "sine.py").read_text().replace("batch=64", "batch=9999"))
    failure = slurm.run("srun", *options, "--nodes=3", "--ntasks=3", "-l", *python, check=False)
    assert "digest" not in failure


_COMMANDS = {
    "squeue": """case "$*" in
*--format=%l*) echo "${LIMIT-1-00:00:00}" ;;
*--jobs="${RUNNING-none}"*) echo "$RUNNING" ;;
esac""",
    "srun": """while [ "${1#--}" != "$1" ]; do shift; done
echo $$ >step.new; mv step.new step.pid; exec "$@" """,
    "scancel": 'kill -TERM "$(cat step.pid)"',
    "scontrol": 'echo "$*" >>scontrol.txt',
    "coordinator": 'echo "$*" >coordinator.txt; exit "${CODE-0}"',
    "worker": "exec sleep 60",
}


class Scripts:
    """The scripts of deploy/slurm in a separate directory, run as job 7."""

    def __init__(self, directory):
        self.directory = directory
        for name in FILES:
            shutil.copy(ROOT / "deploy/slurm" / name, directory)
        (directory / "run").mkdir()
        commands = directory / "venv/bin"
        commands.mkdir(parents=True)
        (commands / "activate").touch()
        for name, text in _COMMANDS.items():
            (commands / name).write_text(f"#!/bin/sh\n{text}\n")
            (commands / name).chmod(0o755)
        self.environment = {
            "PATH": f"{commands}:{os.environ['PATH']}", "SAMESTEP_VENV": str(directory / "venv"),
            "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "1", "SLURMD_NODENAME": "node1",
        }  # fmt: skip

    def start(self, script, *arguments, **environment):
        return subprocess.Popen(
            ["bash", script, *arguments], cwd=self.directory, env=self.environment | environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, script, *arguments, **environment):
        """Run a script; return its exit code and output."""
        process = self.start(script, *arguments, **environment)
        text, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, text

    def read(self, name):
        file = self.directory / name
        return file.read_text().strip() if file.exists() else None


@pytest.fixture
def scripts(tmp_path):
    return Scripts(tmp_path)


def test_refused_run_fails_its_job_despite_an_earlier_result(scripts):
    (scripts.directory / "run/result.json").write_text('{"outcome": "finished"}')
    assert scripts.run("coordinator.sbatch", CODE="2")[0] == 2
    assert scripts.run("coordinator.sbatch")[0] == 0
    assert "requeue" not in (scripts.read("scontrol.txt") or "")


def test_waiting_worker_is_requeued_at_its_time_limit(scripts):
    process = scripts.start("worker.sbatch")
    deadline_s = time.monotonic() + PATIENCE_S
    while scripts.read("step.pid") is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    text, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, text) == (0, "samestep: requeueing job 7\n")
    assert scripts.read("scontrol.txt") == "requeue 7"


def test_workers_end_with_a_coordinator_that_needs_its_user(scripts):
    """With a refused run spec, workers would otherwise keep their nodes for a day."""
    assert scripts.run("coordinator.sbatch", CODE="1")[0] == 1
    assert scripts.read("coordinator.failed") is None, "a resubmitted coordinator finds its workers"
    assert scripts.run("coordinator.sbatch", CODE="2")[0] == 2
    (scripts.directory / "step.pid").unlink()
    process = scripts.start("worker.sbatch", LOOK_EVERY_S="0.01")
    deadline_s = time.monotonic() + PATIENCE_S
    while scripts.read("step.pid") is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert process.poll() is None, "that failure was before this job"
    failed_marker = scripts.directory / "coordinator.failed"
    failed_marker.write_text(failed_marker.read_text().replace("7", "8"))
    text, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert text.startswith("samestep: the coordinator, job 8, ended with exit code 2 at 20")
    assert text.endswith(": see samestep-coordinator-8.log, then submit both again\n")


@pytest.mark.parametrize("limit", ["0:30", "2:59", "3:00"])
def test_too_short_time_limit_is_refused(scripts, limit):
    code, text = scripts.run("coordinator.sbatch", LIMIT=limit)
    assert code == 2
    assert f"expected a time limit of more than 3 minutes, got {limit}" in text
    assert scripts.read("coordinator.txt") is None


@pytest.mark.parametrize("limit", ["3:01", "10:00", "1:00:00", "2-00:00:00", "UNLIMITED", ""])
def test_longer_time_limit_is_accepted(scripts, limit):
    assert scripts.run("coordinator.sbatch", LIMIT=limit)[0] == 0
    assert "--resume" in scripts.read("coordinator.txt")


def test_control_script_stays_with_the_first_of_two_coordinators(scripts):
    (scripts.directory / "coordinator.job").write_text("5\n")
    (scripts.directory / "address.json").write_text('{"control": "127.0.0.1:9"}')
    code, text = scripts.run("coordinator.sbatch", RUNNING="5")
    assert code == 2
    assert "job 5 is the coordinator of" in text
    assert scripts.read("coordinator.job") == "5"
    assert scripts.run("control.sh", "status", RUNNING="5")[0] == 0
    assert scripts.read("coordinator.txt") == "status --control 127.0.0.1:9"
    # Once the first has ended, the second takes over.
    code, text = scripts.run("control.sh", "status")
    assert code == 69
    assert "the coordinator, job 5, is not running" in text
    assert scripts.run("coordinator.sbatch")[0] == 0
    assert scripts.read("coordinator.job") == "7"
