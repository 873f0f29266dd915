"""`Run`: settings, and input that arrives before the start or after the end.

Scenarios are in `tests/transcripts`, disturbances in `tests/simulation`.
"""

from typing import get_args

import pytest

from coordinator.run import inputs
from coordinator.run.inputs import (
    ContinueRun,
    DrainRun,
    HaltRun,
    WorkerAvailable,
    WorkerMessage,
)
from coordinator.run.outputs.actions import Dismiss, Finish, Send
from coordinator.run.run import Run, RunPhase
from protocol.base.errors import ExitCode, OutOfOrder
from protocol.spec.run_spec import ScriptedRun
from protocol.spec.sections.checkpoint import CheckpointSpec, StopSpec
from protocol.spec.sections.optimizer import Adamw, ParameterGroup
from protocol.wire.connection import FROM_WORKER, Phase
from protocol.wire.messages import (
    BlobRequest,
    Drain,
    Goodbye,
    Heartbeat,
    MemoryReturned,
    Preparing,
    StartRun,
)
from tests.transcripts.transcript import ScriptedCoordinator

SPEC = ScriptedRun(task="scripted", steps=2)

SHELL_MESSAGES = {
    Heartbeat, Goodbye, MemoryReturned, BlobRequest, Preparing,
}  # fmt: skip
"""Messages that the shell handles without a run."""

LATE_COMMANDS = [
    ("applied", ["ann", "1"], {}),
    ("subtree", ["ann", "0-4"], {"step": "1"}),
    ("replica", ["2"], {}),
    ("result", ["ann", "0"], {}),
    ("lost", ["ann"], {}),
    ("drain", [], {}),
    ("halt", [], {}),
    ("continue", [], {}),
    ("give-up", [], {}),
    ("invite", ["bob"], {}),
]


def training_stage():
    stage = ScriptedCoordinator(workers="1")
    for command in ("invite", "ready"):
        stage.command(command, ["ann"], {})
    stage.command("loaded", [], {})
    return stage


def test_input_table_has_every_input_and_every_phase():
    assert set(Run._INPUTS) == {*get_args(inputs.Input)} - {inputs.WorkerMessage}
    assert set(Run._MESSAGES) == FROM_WORKER[Phase.OPEN] - SHELL_MESSAGES
    for row in (*Run._INPUTS.values(), *Run._MESSAGES.values()):
        assert set(row) == set(RunPhase)


@pytest.mark.parametrize("message", ["payload ann 0-4", "loss ann 0-4", "applied ann 0"])
def test_step_messages_are_out_of_order_before_the_first_step(message):
    stage = ScriptedCoordinator(workers="2")
    for command in ("invite", "ready"):
        stage.command(command, ["ann"], {})
    command, *arguments = message.split()
    (refusal,) = stage.command(command, arguments, {})
    assert refusal.startswith("OutOfOrder")
    assert "before the first step" in refusal


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("stop.figure", {"stop": StopSpec(figure="nonsense")}),
        ("checkpoint.metric", {"checkpoint": CheckpointSpec(metric="nonsense")}),
    ],
)
def test_unknown_metric_ends_the_run_before_it_starts(key, changes):
    stage = ScriptedCoordinator(workers="1")
    stage.run.spec = stage.run.spec.model_copy(update=changes)
    stage.command("invite", ["ann"], {})
    transcript = " ".join(stage.command("ready", ["ann"], {}))
    assert f"{key}: expected a metric of this task, got 'nonsense'; it has mean" in transcript
    assert stage.run.phase is RunPhase.OVER


def test_unmatched_parameter_group_ends_the_run_before_it_starts():
    stage = ScriptedCoordinator(workers="1")
    optimizer = Adamw(groups=(ParameterGroup(match=("no.such",)),))
    stage.run.spec = stage.run.spec.model_copy(update={"optimizer": optimizer})
    stage.command("invite", ["ann"], {})
    transcript = " ".join(stage.command("ready", ["ann"], {}))
    assert "optimizer.groups[0].match: expected the name of a trained tensor" in transcript
    assert stage.run.phase is RunPhase.OVER


def test_invitation_carries_the_run_spec():
    (action,) = Run("run", SPEC, 4, 1).step(WorkerAvailable("ann"))
    message = StartRun(run_id="run", term=4, step=0, blobs=None)
    assert action == Send("ann", message, SPEC.to_bytes())


def test_status_is_empty_before_the_first_worker():
    run = Run("run", SPEC, 4, 1)
    assert (run.steps_committed, run.losses, run.phase) == (0, [], RunPhase.WAITING)
    assert run.step(HaltRun("x")) == run.step(ContinueRun()) == []


@pytest.mark.parametrize(("command", "arguments", "options"), LATE_COMMANDS)
def test_ended_run_ignores_input(command, arguments, options):
    stage = training_stage()
    assert any("finish failed" in line for line in stage.command("give-up", [], {}))
    assert stage.command(command, arguments, options) == []
    assert stage.run.phase is RunPhase.OVER


def test_workers_may_leave_an_ended_run():
    stage = training_stage()
    stage.command("give-up", [], {})
    assert stage.command("drains", ["ann"], {}) == ["dismiss ann, 0: drained"]


@pytest.mark.parametrize("command", ["halt", "drain"])
def test_operator_command_is_applied_once(command):
    stage = training_stage()
    stage.command(command, [], {})
    assert not any("report" in line for line in stage.command(command, [], {}))


def test_message_of_another_kind_is_out_of_order():
    stage = training_stage()
    with pytest.raises(OutOfOrder, match="Heartbeat"):
        stage.run.step(WorkerMessage("ann", Heartbeat()))
    assert stage.run.step(WorkerMessage("nobody", Heartbeat())) == []


def test_drain_before_the_start_ends_the_run_at_once():
    run = Run("run", SPEC, 4, 2)
    run.step(WorkerAvailable("ann"))
    (finish,) = run.step(DrainRun())
    assert finish == Finish("drained", "drained before the start", 0)


def test_drain_of_a_halted_run_fails_with_the_reason():
    stage = training_stage()
    stage.command("halt", [], {})
    assert stage.command("drain", [], {})[0] == "finish failed, 1: halted: halted by the operator"


def test_worker_outside_the_run_may_only_leave():
    run = Run("run", SPEC, 4, 1)
    assert run.step(WorkerMessage("refused", Drain())) == [
        Dismiss("refused", "drained", ExitCode.OK)
    ]
    assert run.step(WorkerMessage("refused", Heartbeat())) == []
