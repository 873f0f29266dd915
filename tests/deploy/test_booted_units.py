"""The units on a booted machine: a run, and everything that systemd does for it."""

from __future__ import annotations

import json

import pytest

from backends.wgpu.device.adapters import adapters
from tests.booted_machine import COORDINATOR_HOME, INSTALL_DIRECTORY, booted_machine
from tests.cluster import PATIENCE_S
from tests.processes import start

COORDINATOR = "samestep-coordinator.service"
WORKERS = ("samestep-worker@scripted:20.service", "samestep-worker@scripted:21.service")
NAMES = ("lab-scripted:20", "lab-scripted:21")
STEPS = 100
# At this speed two workers take four seconds, however busy other tests keep this machine.
RUN = f"""
name: paced
task: scripted
steps: {STEPS}
batch: {{samples: 4, microbatch: 1}}
optimizer: {{name: adamw, lr: 5.0e-3}}
"""
RUN_ON_DEVICES = """
name: digits
task: digits
steps: 3
digits: {hidden: [16], holdout: 0.02}
batch: {samples: 16, microbatch: 8}
optimizer: {name: adamw, lr: 5.0e-3}
"""
TOKEN = f"{COORDINATOR_HOME}/coordinator/join.token"
WATCHDOG = "[Service]\nWatchdogSec=8\n"

RESTART_SCHEDULED = "5eb03494b6584870a536b337290809b3"
EXITED = "98e322203f7a4ed290d09fe03c09fe15"
FAILED = "d9b373ed55a64feb8242e02dbe79a49c"
"""MESSAGE_IDs of systemd's own entries; see sd-messages.h."""


@pytest.fixture(scope="module")
def reference_process(tmp_path_factory):
    """Run the same spec outside the machine with one fast worker; return its process."""
    directory = tmp_path_factory.mktemp("undisturbed")
    spec = directory / "paced.yaml"
    spec.write_text(RUN)
    process = start(
        "coordinator", "--run", str(spec), "--out", str(directory / "out"), "--local-workers", "1",
        "--backend", "scripted", "--bind", "127.0.0.1:0", "--control", "127.0.0.1:0",
    )  # fmt: skip
    yield process, directory / "out/result.json"
    process.terminate()  # ends its worker too, which has the same output open
    process.communicate()


@pytest.fixture(scope="module")
def machine(reference_process, tmp_path_factory):
    del reference_process  # it computes while the machine boots
    with booted_machine(tmp_path_factory.mktemp("boot")) as machine:
        machine.write(
            "/etc/samestep/coordinator.env",
            "SAMESTEP_EXPECT_WORKERS=2\nSAMESTEP_BIND=0.0.0.0:9000\n",
        )
        machine.write("/etc/samestep/paced.yaml", RUN)
        machine.write("/etc/samestep/digits.yaml", RUN_ON_DEVICES)
        for unit in ("samestep-coordinator.service", "samestep-worker@.service"):
            machine.write(f"/etc/systemd/system/{unit}.d/quick.conf", WATCHDOG)
        machine.run(
            "systemd-sysusers", f"{INSTALL_DIRECTORY}/source/deploy/systemd/samestep.sysusers"
        )
        machine.run("systemctl", "daemon-reload")
        # A separate network, where other machines could reach the coordinator.
        machine.run("ip", "link", "add", "lan", "type", "veth", "peer", "name", "cable")
        machine.run("ip", "address", "add", "192.0.2.7/24", "dev", "lan")
        for end in ("lan", "cable"):
            machine.run("ip", "link", "set", end, "up")
        machine.run("systemctl", "start", COORDINATOR)
        machine.run("install", "-D", "-m", "600", TOKEN, "/etc/credstore/samestep.join.token")
        yield machine


@pytest.fixture
def cluster(machine):
    """Return the machine with an idle coordinator and two workers."""
    machine.run("systemctl", "start", COORDINATOR, *WORKERS)
    return machine


@pytest.fixture(scope="module")
def digest(reference_process):
    process, result = reference_process
    assert process.wait(PATIENCE_S) == 0
    return json.loads(result.read_text())["weights_digest"]


def submit(machine, run="paced"):
    """Submit another run; return its id."""
    command = f"{INSTALL_DIRECTORY}/bin/coordinator"
    return machine.run(command, "submit", f"/etc/samestep/{run}.yaml").splitlines()[-1]


def start_run(machine):
    """Submit another run and wait for its first step; return a journal position before it, and its
    id."""
    start = machine.journal_end()
    run_id = submit(machine)
    machine.wait_for(start, SAMESTEP_RUN_ID=run_id, SAMESTEP_EVENT="committed")
    return start, run_id


def wait_for_result(machine, run_id, start):
    """Wait for the end of the run; return its result."""
    finished_fields = {"SAMESTEP_EVENT": "run_ended", "SAMESTEP_OUTCOME": "finished"}
    machine.wait_for(start, SAMESTEP_RUN_ID=run_id, **finished_fields)
    return json.loads(machine.path(f"{COORDINATOR_HOME}/runs/{run_id}/result.json").read_text())


@pytest.mark.slow
def test_devices_work_for_dynamic_users(machine):
    """The CPU, and Vulkan where it is available (Mesa's software driver needs writable, executable
    memory)."""
    second_device = "cpu1" if isinstance(adapters(), str) else "vulkan0"
    units = ["samestep-worker@cpu0.service", f"samestep-worker@{second_device}.service"]
    machine.run("systemctl", "stop", *WORKERS)
    machine.run("systemctl", "start", *units)
    start = machine.journal_end()
    run_id = submit(machine, "digits")
    result = wait_for_result(machine, run_id, start)
    for unit in (COORDINATOR, *units):
        assert int(machine.show(unit, "UID")) > 60_000
    entry = machine.wait_for(start, MESSAGE=f"run {run_id}: ready", _SYSTEMD_UNIT=units[0])
    assert entry["SAMESTEP_WORKER"] == "lab-cpu0"
    machine.run("systemctl", "stop", *units)
    assert result["exact"] == (second_device == "cpu1")
    assert set(result["workers"]) == {"lab-cpu0", f"lab-{second_device}"}


def test_journal_has_the_join_line_without_the_token(machine):
    command = f"SAMESTEP_HOME={COORDINATOR_HOME} coordinator token show"
    line = machine.wait_for(MESSAGE='  SAMESTEP_TOKEN="$(ssh root@192.0.2.7')
    assert command in line["MESSAGE"]
    assert "--coordinator 192.0.2.7:9000" in line["MESSAGE"]
    assert machine.path(TOKEN).read_text().strip() not in machine.journal()


def test_killed_daemons_are_restarted_and_the_run_has_the_same_digest(cluster, digest):
    start, run_id = start_run(cluster)
    killed_units = (COORDINATOR, WORKERS[0])
    cluster.run("systemctl", "kill", "--signal=KILL", *killed_units)
    for unit in killed_units:
        cluster.wait_for(start, MESSAGE_ID=RESTART_SCHEDULED, UNIT=unit)
    cluster.wait_for(start, SAMESTEP_EVENT="run_resumed", SAMESTEP_RUN_ID=run_id)
    assert wait_for_result(cluster, run_id, start)["weights_digest"] == digest


@pytest.mark.slow
def test_stopped_processes_are_replaced_by_the_watchdog(cluster, digest):
    start, run_id = start_run(cluster)
    stalled_units = (COORDINATOR, WORKERS[1])
    cluster.run("systemctl", "kill", "--signal=STOP", *stalled_units)
    for unit in stalled_units:
        cluster.wait_for(start, MESSAGE_ID=FAILED, UNIT=unit, UNIT_RESULT="watchdog")
        cluster.wait_for(start, MESSAGE_ID=RESTART_SCHEDULED, UNIT=unit)
        # The stopped process reports where it hung.
        cluster.wait_for(start, MESSAGE="Fatal Python error: Aborted", _SYSTEMD_UNIT=unit)
    assert wait_for_result(cluster, run_id, start)["weights_digest"] == digest


@pytest.mark.slow
def test_stop_drains_and_start_resumes_the_run(cluster, digest):
    start, run_id = start_run(cluster)
    cluster.run("systemctl", "stop", WORKERS[0])
    departure = cluster.wait_for(start, MESSAGE="goodbye: drained", _SYSTEMD_UNIT=WORKERS[0])
    assert (departure["SAMESTEP_WORKER"], departure["SAMESTEP_RUN_ID"]) == (NAMES[0], run_id)
    cluster.run("systemctl", "stop", COORDINATOR)
    cluster.wait_for(start, SAMESTEP_EVENT="draining")
    for unit in (WORKERS[0], COORDINATOR):
        assert cluster.show(unit, "ActiveState") == "inactive"
        assert cluster.show(unit, "Result") == "success"
    result_text = cluster.path(f"{COORDINATOR_HOME}/runs/{run_id}/result.json").read_text()
    assert json.loads(result_text)["outcome"] == "drained"
    start = cluster.journal_end()
    cluster.run("systemctl", "start", COORDINATOR, WORKERS[0])
    cluster.wait_for_status(COORDINATOR, rf"\w+, run {run_id} step \d+ of {STEPS}, \d of 2 workers")
    assert wait_for_result(cluster, run_id, start)["weights_digest"] == digest
    cluster.wait_for_status(COORDINATOR, f"finished, run {run_id} step {STEPS} of {STEPS}")
    cluster.wait_for_status(WORKERS[0], f"{NAMES[0]}: waiting for a run")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"SAMESTEP_COORDINATOR": "no.where:"}, "2"),
        ({"SAMESTEP_TOKEN": f"{'0' * 64}.{'A' * 43}", "SAMESTEP_NAME": "stranger"}, "77"),
    ],
)
def test_errors_that_need_an_operator_do_not_restart(machine, options, code):
    unit = f"samestep-worker@cpu{code}.service"
    lines = [f"{name}={value}\n" for name, value in options.items()]
    machine.write(f"/etc/samestep/worker-cpu{code}.env", "".join(lines))
    start = machine.journal_end()
    machine.run("systemctl", "start", "--no-block", unit)
    machine.wait_for(start, MESSAGE_ID=FAILED, UNIT=unit, UNIT_RESULT="exit-code")
    assert machine.show(unit, "ActiveState") == "failed"
    assert machine.show(unit, "ExecMainStatus") == code
    assert machine.show(unit, "NRestarts") == "0"
    entry = machine.wait_for(start, PRIORITY="3", _SYSTEMD_UNIT=unit)
    assert entry["SAMESTEP_EXIT_CODE"] == code


def test_an_unreachable_coordinator_is_retried(machine):
    unit = "samestep-worker@cpu69.service"
    options = "SAMESTEP_COORDINATOR=127.0.0.1:9\nSAMESTEP_RETRY_FOR=0\n"
    machine.write("/etc/samestep/worker-cpu69.env", options)
    start = machine.journal_end()
    machine.run("systemctl", "start", "--no-block", unit)
    machine.wait_for(start, MESSAGE_ID=EXITED, UNIT=unit, EXIT_STATUS="69")
    machine.wait_for(start, MESSAGE_ID=RESTART_SCHEDULED, UNIT=unit)
    machine.run("systemctl", "stop", unit)
