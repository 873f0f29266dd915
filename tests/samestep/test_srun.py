"""`fit` in a Slurm step of several tasks: which processes are one, and how they find each other."""

from __future__ import annotations

import asyncio

import pytest

from protocol.base.errors import DataError, RunFailed, Unreachable
from protocol.machine.secret_file import write_secret
from samestep import srun
from samestep.srun import SrunStep

TASK = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "2",
}  # fmt: skip


def step_of(environment=TASK):
    found = SrunStep.of(environment)
    assert found is not None
    return found


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMESTEP_HOME", str(tmp_path))
    return tmp_path


def test_a_task_of_several_knows_its_place():
    step = step_of()
    assert (step.task, step.tasks, step.nodes, step.local_task) == (2, 3, 2, 1)
    assert (step.leads, step.name, step.bind) == (False, "7.0.0", "0.0.0.0:0")
    assert step_of(TASK | {"SLURM_RESTART_COUNT": "4"}).name == "7.0.4"
    assert step_of(TASK | {"SLURM_STEP_NUM_NODES": "1"}).bind == "127.0.0.1:0"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        TASK | {"SLURM_STEP_NUM_TASKS": "1"},
        TASK | {"TORCHELASTIC_RUN_ID": "none"},
        # A batch script, before srun: it is one process, however many tasks its job may have.
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},
    ],
)
def test_what_is_no_task_of_several_trains_alone(environment):
    assert SrunStep.of(environment) is None


def test_the_others_find_what_task_0_publishes(home):
    step = step_of()
    with step.leading():
        step.publish("127.0.0.1", 4321)
        joining = step.join_options("cpu", None)
        assert joining.find() == asyncio.run(joining.find_again()) == ("127.0.0.1", 4321)
    assert not list((home / "srun").iterdir())


@pytest.mark.usefixtures("home")
def test_the_others_end_with_the_reason_of_task_0():
    step = step_of()
    with pytest.raises(DataError), step.leading():
        raise DataError("expected more samples")
    with pytest.raises(RunFailed, match="task 0 of this srun step failed: expected more samples"):
        step.join_options("cpu", None).find()
    with pytest.raises(SystemExit), step.leading():
        raise SystemExit
    with pytest.raises(RunFailed, match="it was interrupted"):
        step.join_options("cpu", None).find()


def test_where_no_file_is_shared_it_says_what_must_be(home, monkeypatch, capsys):
    """And while it waits, for whom: task 0 may have failed before it called `fit`."""
    monkeypatch.setattr(srun, "_FIND_FOR_S", 0.0)
    monkeypatch.setattr(srun, "_LOOK_FOR_S", 0.0)
    monkeypatch.setattr(srun, "_REPORT_EVERY_S", 0.0)
    write_secret(home / "srun" / "other.json", "{}")
    with pytest.raises(Unreachable, match="set SAMESTEP_HOME to one on a shared"):
        step_of().join_options("cpu", None).find()
    assert "waiting 0 s for task 0 to call samestep.fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cards", "backend", "device", "taken"),
    [
        (0, "auto", None, None),
        (1, "cuda", None, None),
        (4, "auto", None, 1),
        (4, "auto", 3, 3),
    ],
)
def test_each_task_of_a_node_takes_its_own_card(monkeypatch, cards, backend, device, taken):
    monkeypatch.setattr(srun, "_cards", lambda _: cards)
    assert step_of().device_of(backend, device) == (backend, taken)
