"""`fit` in a Slurm step with several tasks: rank, address, devices, failures and time limits."""

from __future__ import annotations

import asyncio
import os
import queue
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.base.errors import DataError, RunFailed, Unreachable
from protocol.machine.secret_file import write_secret
from samestep import fitting, srun
from samestep.coordinator_subprocess import CoordinatorEnded, WorkersChanged, _WorkerRoster
from samestep.srun import SrunStep, TaskDeadline

TASK = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "2",
}  # fmt: skip


def step_of(environment=TASK):
    step = SrunStep.of(environment)
    assert step is not None
    return step


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMESTEP_HOME", str(tmp_path))
    return tmp_path


def test_step_is_read_from_the_environment_of_a_task():
    step = step_of()
    assert (step.task, step.tasks, step.nodes, step.local_task) == (2, 3, 2, 1)
    assert (step.is_leader, step.name, step.bind) == (False, "7.0.0", "0.0.0.0:0")
    assert step_of(TASK | {"SLURM_RESTART_COUNT": "4"}).name == "7.0.4"
    assert step_of(TASK | {"SLURM_STEP_NUM_NODES": "1"}).bind == "127.0.0.1:0"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        TASK | {"SLURM_STEP_NUM_TASKS": "1"},
        TASK | {"TORCHELASTIC_RUN_ID": "none"},
        # A batch script, before srun: one process, however many tasks its job has.
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},
    ],
)
def test_single_process_trains_alone(environment):
    assert SrunStep.of(environment) is None


def test_other_tasks_find_the_address_that_task_0_publishes(home):
    step = step_of()
    with step.reporting_failures():
        step.publish("127.0.0.1", 4321)
        options = step.join_options("cpu", None)
        assert (
            options.find_coordinator() == asyncio.run(options.search_again()) == ("127.0.0.1", 4321)
        )
    assert not list((home / "srun").iterdir())


@pytest.mark.usefixtures("home")
def test_other_tasks_fail_with_the_reason_of_task_0():
    step = step_of()
    with pytest.raises(DataError), step.reporting_failures():
        raise DataError("expected more samples")
    with pytest.raises(RunFailed, match="task 0 of this srun step failed: expected more samples"):
        step.join_options("cpu", None).find_coordinator()
    with pytest.raises(SystemExit), step.reporting_failures():
        raise SystemExit
    with pytest.raises(RunFailed, match="it was interrupted"):
        step.join_options("cpu", None).find_coordinator()


def test_missing_shared_directory_is_explained(home, monkeypatch, capsys):
    """While a task waits it names task 0, which may have failed before its call of `fit`."""
    monkeypatch.setattr(srun, "_ADDRESS_TIMEOUT_S", 0.0)
    monkeypatch.setattr(srun, "_POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(srun, "_REPORT_INTERVAL_S", 0.0)
    write_secret(home / "srun" / "other.json", "{}")
    with pytest.raises(Unreachable, match="set SAMESTEP_HOME to one on a shared"):
        step_of().join_options("cpu", None).find_coordinator()
    assert "waiting 0 s for task 0 to call samestep.fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cards", "backend", "device", "card"),
    [
        (0, "auto", None, None),
        (1, "cuda", None, None),
        (4, "auto", None, 1),
        (4, "auto", 3, 3),
    ],
)
def test_each_task_of_a_node_takes_its_own_card(monkeypatch, cards, backend, device, card):
    monkeypatch.setattr(srun, "_cards", lambda _: cards)
    assert step_of().device_of(backend, device) == (backend, card)


@pytest.mark.usefixtures("home")
def test_later_call_of_fit_keeps_the_failure_of_an_earlier_call():
    """Task 0 may catch the error and call `fit` again while others are in the first call."""
    first_call = step_of()
    options = first_call.join_options("cpu", None)
    with pytest.raises(DataError), first_call.reporting_failures():
        raise DataError("expected more samples")
    second_call = replace(first_call, call=2)
    with second_call.reporting_failures():
        assert options.failure() == "task 0 of this srun step failed: expected more samples"
        assert not second_call.join_options("cpu", None).failure()


def test_files_of_killed_steps_are_removed(home):
    for name, modified_s in (("1.0.0.1.json", 0), ("1.0.0.1.failed", 0), ("6.0.0.1.json", 4e9)):
        write_secret(home / "srun" / name, "{}")
        os.utime(home / "srun" / name, (modified_s, modified_s))
    with step_of().reporting_failures():
        assert [path.name for path in (home / "srun").iterdir()] == ["6.0.0.1.json"]


def build_worker(*events, idle_s=0.0):
    """Return a joined worker and the queue of its events."""
    event_queue: Any = queue.SimpleQueue()
    for event in events:
        event_queue.put(event)
    joined_worker: Any = SimpleNamespace(end_message=None, idle_s=idle_s, address="127.0.0.1:9000")
    return joined_worker, event_queue


@pytest.mark.parametrize(
    ("failure", "idle_s", "message"),
    [
        ("task 0 of this srun step failed: no data", 0.0, "^task 0 .* failed: no data$"),
        ("", 300.0, "expected a run from the coordinator at 127.0.0.1:9000 within 300 s, got none"),
    ],
)
def test_worker_stops_waiting_after_a_failure_of_task_0_or_a_time_limit(
    monkeypatch, failure, idle_s, message
):
    monkeypatch.setattr(fitting, "_POLL_INTERVAL_S", 0.0)
    joined_worker, event_queue = build_worker(idle_s=idle_s)
    options = replace(step_of().join_options("cpu", None), failure=lambda: failure)
    with pytest.raises((RunFailed, Unreachable), match=message):
        fitting._follow(
            joined_worker,
            event_queue,
            None,
            lambda: fitting._reason_to_stop_waiting(joined_worker, options),
        )


def test_worker_waits_at_least_ten_seconds_for_a_run():
    options = replace(step_of().join_options("cpu", None), failure=str, retry_for_s=0.0)
    assert fitting._reason_to_stop_waiting(build_worker(idle_s=9.9)[0], options) is None
    assert fitting._reason_to_stop_waiting(build_worker(idle_s=10.0)[0], options) is not None


class DrainableCoordinator:
    """A coordinator process that exits when it is drained."""

    def __init__(self, *events):
        _, self.event_queue = build_worker(*events)

    def drain(self):
        self.event_queue.put(CoordinatorEnded(0))


def test_task_0_waits_for_the_other_tasks_with_a_time_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(srun, "_JOIN_TIMEOUT_S", 0.0)
    coordinator: Any = DrainableCoordinator(WorkersChanged(frozenset("ab"), has_started=False))
    with pytest.raises(Unreachable, match=r"expected all 3 tasks .* within 0 s, got 2: .*_EXPECT_"):
        fitting._handle_events(
            coordinator, build_worker()[0], coordinator.event_queue, tmp_path, print,
            is_alone=False, deadline=TaskDeadline(3),
        )  # fmt: skip


def test_deadline_runs_before_training_while_fewer_tasks_than_expected_are_usable():
    roster, deadline = _WorkerRoster(), TaskDeadline(2)

    def has_deadline_after(event, **fields):
        change = roster.apply({"event": event, **fields})
        assert change is not None
        deadline.update(change.workers, has_started=change.has_started)
        return deadline.deadline_s is not None

    assert roster.apply({"event": "said"}) is None
    assert [
        has_deadline_after("worker_connected", worker="a"),
        has_deadline_after("worker_connected", worker="b"),
        has_deadline_after("worker_unready", worker="b", reason="no rule"),
        has_deadline_after("worker_connected", worker="c"),
        has_deadline_after("worker_disconnected", worker="c"),
        has_deadline_after("started"),
        has_deadline_after("worker_disconnected", worker="a"),
    ] == [True, False, True, False, True, False, False]
