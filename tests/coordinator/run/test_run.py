"""What the transcripts do not show of `Run`: settings, and that it never minds what comes after.

The scenarios themselves are in `tests/transcripts`, the disturbances in `tests/simulation`.
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
from tests.transcripts.transcript import Stage

SPEC = ScriptedRun(task="scripted", steps=2)

OUTSIDE_OF_RUNS = {
    Heartbeat, Goodbye, MemoryReturned, BlobRequest, Preparing,
}  # fmt: skip
"""Messages that the shell answers by itself."""

AFTER = [
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


def training():
    stage = Stage(workers="1")
    for word in ("invite", "ready"):
        stage.command(word, ["ann"], {})
    stage.command("loaded", [], {})
    return stage


def test_the_table_has_every_input_and_every_phase():
    assert set(Run._INPUTS) == {*get_args(inputs.Input)} - {inputs.WorkerMessage}
    assert set(Run._MESSAGES) == FROM_WORKER[Phase.OPEN] - OUTSIDE_OF_RUNS
    for row in (*Run._INPUTS.values(), *Run._MESSAGES.values()):
        assert set(row) == set(RunPhase)


@pytest.mark.parametrize("message", ["payload ann 0-4", "loss ann 0-4", "applied ann 0"])
def test_what_belongs_to_a_step_is_out_of_order_before_the_first_one(message):
    stage = Stage(workers="2")
    for word in ("invite", "ready"):
        stage.command(word, ["ann"], {})
    word, *plain = message.split()
    (refused,) = stage.command(word, plain, {})
    assert refused.startswith("OutOfOrder")
    assert "before the first step" in refused


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("stop.figure", {"stop": StopSpec(figure="nonsense")}),
        ("checkpoint.metric", {"checkpoint": CheckpointSpec(metric="nonsense")}),
    ],
)
def test_a_metric_that_the_task_does_not_measure_ends_the_run_before_it_starts(key, given):
    stage = Stage(workers="1")
    stage.run.spec = stage.run.spec.model_copy(update=given)
    stage.command("invite", ["ann"], {})
    transcript = " ".join(stage.command("ready", ["ann"], {}))
    assert f"{key}: expected a metric of this task, got 'nonsense'; it has mean" in transcript
    assert stage.run.phase is RunPhase.OVER


def test_a_group_that_matches_no_tensor_ends_the_run_before_it_starts():
    stage = Stage(workers="1")
    optimizer = Adamw(groups=(ParameterGroup(match=("no.such",)),))
    stage.run.spec = stage.run.spec.model_copy(update={"optimizer": optimizer})
    stage.command("invite", ["ann"], {})
    transcript = " ".join(stage.command("ready", ["ann"], {}))
    assert "optimizer.groups[0].match: expected the name of a trained tensor" in transcript
    assert stage.run.phase is RunPhase.OVER


def test_an_invitation_carries_the_run_spec():
    (action,) = Run("run", SPEC, 4, 1).step(WorkerAvailable("ann"))
    message = StartRun(run_id="run", term=4, step=0, blobs=None)
    assert action == Send("ann", message, SPEC.to_bytes())


def test_before_the_first_worker_there_is_nothing_to_tell():
    run = Run("run", SPEC, 4, 1)
    assert (run.steps_committed, run.losses, run.phase) == (0, [], RunPhase.WAITING)
    assert run.step(HaltRun("x")) == run.step(ContinueRun()) == []


@pytest.mark.parametrize(("word", "plain", "options"), AFTER)
def test_a_run_that_is_over_does_nothing_more(word, plain, options):
    stage = training()
    assert any("finish failed" in line for line in stage.command("give-up", [], {}))
    assert stage.command(word, plain, options) == []
    assert stage.run.phase is RunPhase.OVER


def test_a_run_that_is_over_keeps_nobody_from_leaving():
    stage = training()
    stage.command("give-up", [], {})
    assert stage.command("drains", ["ann"], {}) == ["dismiss ann, 0: drained"]


@pytest.mark.parametrize("word", ["halt", "drain"])
def test_an_operator_s_word_is_taken_once(word):
    stage = training()
    stage.command(word, [], {})
    assert not any("report" in line for line in stage.command(word, [], {}))


def test_a_message_that_is_none_of_a_run_s_is_out_of_order():
    stage = training()
    with pytest.raises(OutOfOrder, match="Heartbeat"):
        stage.run.step(WorkerMessage("ann", Heartbeat()))
    assert stage.run.step(WorkerMessage("nobody", Heartbeat())) == []


def test_a_drain_before_the_start_ends_at_once():
    run = Run("run", SPEC, 4, 2)
    run.step(WorkerAvailable("ann"))
    (finish,) = run.step(DrainRun())
    assert finish == Finish("drained", "drained before the start", 0)


def test_a_drain_of_a_halted_run_fails_with_the_reason():
    stage = training()
    stage.command("halt", [], {})
    assert stage.command("drain", [], {})[0] == "finish failed, 1: halted: halted by the operator"


def test_who_has_no_part_in_the_run_may_leave_and_says_nothing_else():
    run = Run("run", SPEC, 4, 1)
    assert run.step(WorkerMessage("refused", Drain())) == [
        Dismiss("refused", "drained", ExitCode.OK)
    ]
    assert run.step(WorkerMessage("refused", Heartbeat())) == []
