"""A worker's side of a connection, message by message."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from backends.base.interface import Loss
from protocol.base import limits
from protocol.base.errors import (
    BackendUnavailable,
    DataError,
    DeviceError,
    MessageError,
    OutOfOrder,
)
from protocol.exact.reduction.bfloat16 import pack
from protocol.exact.reduction.tree import Subtree
from protocol.exact.replica import StatePart
from protocol.exact.update import step_scalars
from protocol.spec.manifest import (
    Block,
    EmbeddingField,
    EmbeddingLayout,
    Manifest,
    TensorSpec,
)
from protocol.spec.run_spec import ScriptedRun
from protocol.spec.sections.exchange import ExchangeSpec
from protocol.spec.sections.optimizer import Sgd
from protocol.wire import messages as msg
from protocol.wire.peers import OwnerTable
from tests.exchanging_session import ExchangingSession
from worker.logic import actions as act
from worker.logic import events
from worker.logic.events import StepId
from worker.logic.session import SessionPhase

TERM = 7
SPEC = ScriptedRun(task="scripted", steps=3, optimizer=Sgd(name="sgd", lr=0.1))
MANIFEST = Manifest(
    blocks=(
        Block(name="embedding", kind="non_block", tensors=(TensorSpec(name="e", shape=(2,)),)),
        Block(name="layer", kind="block", tensors=(TensorSpec(name="w", shape=(3,)),)),
    ),
    train_samples=8,
    evaluation_parts=4,
)
DIGEST = "0" * 64
STEP_FIELDS = {"term": TERM, "step": 0, "attempt": 0}
SCALARS = step_scalars(SPEC.optimizer, 1, 0, 3, 1.0)


def body(values):
    return np.array(values, "<f4").view(np.uint8)


def end_run(reason):
    return msg.EndRun(run_id="run", outcome="finished", reason=reason, weights=None, metrics={})


def start_run(run_id="run", term=TERM, step=0, blobs=None, spec=SPEC):
    message = msg.StartRun(run_id=run_id, term=term, step=step, blobs=blobs)
    return message, np.frombuffer(spec.to_bytes(), np.uint8)


def built(run_id="run", step=0):
    return events.Built(
        run_id=run_id, manifest=MANIFEST, initial_digest=DIGEST, step=step,
        state_digest=DIGEST, numerics_profile=DIGEST,
        numerics_text="text", backend="cpu", device="a processor",
    )  # fmt: skip


WELCOME = msg.Welcome(
    worker="ann", term=TERM, heartbeat_interval_ms=1000, liveness_timeout_ms=8000, key=b""
)


def welcomed_session(terms=None):
    session = ExchangingSession(terms)
    session.welcome(WELCOME)
    return session


def ready_session():
    session = welcomed_session()
    session.receive(*start_run())
    session.result(built())
    return session


def plan(*subtrees, **change):
    fields = {**STEP_FIELDS, "uploads": 100, "owners": 0, "loss_scale": 1.0, **change}
    return msg.StepPlan(**fields, view=1, microbatches=4, subtrees=subtrees)


def working_session():
    session = ready_session()
    session.receive(plan((0, 2)), None)
    return session


def deliver_averages(session, **change):
    for kind, block, values in (
        (msg.AveragedBlockGradient, 1, [1, 2, 3]), (msg.AveragedNonBlockGradient, 0, [4, 5]),
    ):  # fmt: skip
        message = kind(**{**STEP_FIELDS, **change}, block=block, chunk=0)
        assert session.receive(message, body(values)) == []


def commit(**change):
    scalars = change.pop("scalars", SCALARS)
    return msg.Commit(
        **{**STEP_FIELDS, **change}, scalars=scalars, loss=0.5, averages_digest=DIGEST
    )


def messages_sent(actions):
    return [action.message for action in actions if isinstance(action, act.Transmit)]


def kinds(actions):
    return [type(action).__name__ for action in actions if not isinstance(action, act.PrintLine)]


# A loss that couples all samples of a step.


def session_with_embeddings():
    session = welcomed_session()
    session.receive(*start_run())
    layout = EmbeddingLayout(fields=(EmbeddingField(name="e", dtype="float32"),))
    session.result(replace(built(), manifest=MANIFEST.model_copy(update={"embeddings": layout})))
    return session


def embeddings_chunk(chunk=0, *, last=True, **change):
    return msg.StepEmbeddings(**{**STEP_FIELDS, **change}, chunk=chunk, last=last)


def test_embeddings_go_to_the_engine_with_the_plan_for_gradients():
    session = session_with_embeddings()
    first = session.receive(plan((0, 2), phase="embeddings"), None)
    assert kinds(first) == ["CancelWork", "Compute"]
    attempt = STEP_FIELDS["attempt"] + 1
    assert session.receive(embeddings_chunk(last=False, attempt=attempt), body([1, 2])) == []
    assert session.receive(embeddings_chunk(1, attempt=attempt), body([3])) == []
    actions = session.receive(plan((0, 2), attempt=attempt), None)
    assert kinds(actions) == ["CancelWork", "LoadEmbeddings", "Compute"]
    load = actions[1]
    assert load.step_id == actions[2].step_id
    assert load.rows.view(np.float32).tolist() == [1, 2, 3]


def test_embeddings_of_another_attempt_or_step_are_dropped():
    def session_after(*messages):
        session = session_with_embeddings()
        for message in messages:
            session.receive(message, body([1]) if message.body == "bytes" else None)

    attempt, step = STEP_FIELDS["attempt"] + 1, STEP_FIELDS["step"] + 1
    for messages in (
        (plan((0, 2)),),
        (embeddings_chunk(), plan((0, 2), attempt=attempt)),
        (embeddings_chunk(last=False), plan((0, 2))),
        (embeddings_chunk(), plan((0, 2), phase="embeddings"), plan((0, 2))),
        (embeddings_chunk(step=step),),
        (embeddings_chunk(1),),
        (embeddings_chunk(last=False), embeddings_chunk(1, attempt=attempt)),
    ):
        with pytest.raises(OutOfOrder, match=r"StepPlan|StepEmbeddings"):
            session_after(*messages)
    with pytest.raises(OutOfOrder, match="expected none"):
        ready_session().receive(embeddings_chunk(), body([1]))
    with pytest.raises(OutOfOrder, match="a plan for gradients, got one for embeddings"):
        ready_session().receive(plan((0, 2), phase="embeddings"), None)


# Handshake and start.


def test_known_device_memory_of_a_task_is_reported():
    for memory_text, expected_text in (
        ("", "a processor"),
        ("1.00 GiB of 2.00 GiB", "; memory: 1.00 GiB of 2.00"),
    ):
        session = welcomed_session()
        session.receive(*start_run())
        actions = session.result(replace(built(), memory=memory_text))
        (line,) = [action.text for action in actions if isinstance(action, act.PrintLine)]
        assert expected_text in line
        assert ("memory" in line) == bool(memory_text)


def test_measured_distance_from_torch_is_reported():
    session = welcomed_session()
    session.receive(*start_run())
    actions = session.result(replace(built(), parity="gradients within 1e-06 of torch's"))
    (line,) = [action.text for action in actions if isinstance(action, act.PrintLine)]
    assert line.endswith("; gradients within 1e-06 of torch's")


def test_current_activity_is_one_line():
    session = welcomed_session()
    assert session.status() == "ann: waiting for a run"
    session.receive(*start_run())
    assert session.status() == "ann: run run: not ready yet"
    session.result(built(step=2))
    assert session.status() == "ann: run run: step 2 of 3"
    session.drain()
    assert session.status() == "ann: run run: step 2 of 3, draining"
    session.receive(end_run("over"), None)
    assert session.status() == "ann: waiting for a run, draining"


def test_a_coordinator_of_an_earlier_term_is_refused():
    terms = {"run": 8}
    with pytest.raises(OutOfOrder, match="term 8 or later for run run, got 7"):
        welcomed_session(terms).receive(*start_run())
    session = welcomed_session(terms)
    session.receive(*start_run(term=9))
    session.receive(*start_run("another", term=1))
    assert terms == {"run": 9, "another": 1}


def test_returning_worker_keeps_its_state_and_reports_it():
    session = welcomed_session()
    actions = session.receive(*start_run(step=5))
    assert act.Build("run", SPEC, keep_state=True) in actions
    (message,) = messages_sent(session.result(built(step=4)))
    assert message.step == 4
    assert session.step == 4


def test_a_run_is_built_and_answered_with_the_manifest():
    session = welcomed_session()
    actions = session.receive(*start_run())
    assert kinds(actions) == ["CancelWork", "Build"]
    assert act.Build("run", SPEC, keep_state=False) in actions
    actions = session.result(built())
    assert kinds(actions) == ["Expect", "Transmit"]
    (transmit,) = [action for action in actions if isinstance(action, act.Transmit)]
    assert isinstance(transmit.message, msg.Ready)
    assert transmit.message.run_id == "run"
    assert transmit.body == MANIFEST.to_bytes()


def test_invalid_spec_ends_the_connection():
    with pytest.raises(MessageError):
        welcomed_session().receive(start_run()[0], np.frombuffer(b"{}", np.uint8))


def test_unbuildable_task_is_reported_with_its_exit_code():
    session = welcomed_session()
    session.receive(*start_run())
    (message,) = messages_sent(session.result(events.BuildFailed("run", DataError("no such file"))))
    assert message == msg.Unready(run_id="run", reason="no such file", own=False, exit_code=2)
    build_failure = events.BuildFailed("run", DataError("too large"), is_local=True)
    (message,) = messages_sent(session.result(build_failure))
    assert message == msg.Unready(run_id="run", reason="too large", own=True, exit_code=2)


def test_task_with_changed_state_is_reported_with_its_exit_code():
    session = ready_session()
    (message,) = messages_sent(
        session.result(events.TaskRefused("run", DataError("the teacher changed")))
    )
    assert message == msg.Unready(
        run_id="run", reason="the teacher changed", own=False, exit_code=2
    )
    assert session.result(events.TaskRefused("earlier", DataError("the teacher changed"))) == []


@pytest.mark.parametrize(
    "error", [BackendUnavailable("vulkan", "no driver"), DeviceError("card", "out of memory")]
)
def test_unusable_device_ends_the_worker_but_not_the_run(error):
    session = welcomed_session()
    session.receive(*start_run())
    goodbye, leave = session.result(events.BuildFailed("run", error))
    assert isinstance(goodbye.message, msg.Goodbye)
    assert leave == act.Leave(str(error), False, error.exit_code, is_failure=True)


@pytest.mark.parametrize(
    ("error", "reason", "exit_code"),
    [
        (BackendUnavailable("vulkan", "no\ndriver"),
            "backend 'vulkan' is not usable here: no driver", 69),
        (DeviceError("card", "lost"), "device 'card' failed: lost", 1),
        (OSError("no such library"), "the device failed: no such library", 1),
    ],
)  # fmt: skip
def test_device_is_opened_without_a_run_and_an_unusable_one_leaves(error, reason, exit_code):
    session = ExchangingSession()
    assert act.OpenDevice() in session.welcome(WELCOME)
    assert session.result(events.DeviceFailed(error)) == [
        act.Transmit(msg.Goodbye(reason=reason, retry=False, exit_code=exit_code)),
        act.Leave(reason, False, exit_code, is_failure=True),
    ]


def test_results_of_another_run_or_connection_are_dropped():
    session = welcomed_session()
    late_results = [
        built("old"), events.BuildFailed("old", DataError("x")), events.Applied(3, DIGEST),
        events.PartEvaluated(3, 0, {}), events.StateCopied([], 0, 0),
        events.SubtreeDone(StepId(0, 0), Subtree(0, 1), Loss(1, 1), 1.0),
    ]  # fmt: skip
    for event in late_results:
        assert session.result(event) == []
    session.receive(*start_run())
    for event in late_results:
        assert session.result(event) == []


def test_task_requested_by_two_connections_is_answered_once():
    session = ready_session()
    assert session.result(built()) == []


def test_new_run_discards_the_previous_one():
    session = working_session()
    deliver_averages(session)
    session.receive(*start_run("next"))
    assert session.result(events.SubtreeDone(StepId(0, 0), Subtree(0, 2), Loss(1, 1), 1.0)) == []
    assert session.receive(msg.Assign(**STEP_FIELDS, view=1, subtrees=((2, 4),)), None) == []
    session.result(built("next"))
    with pytest.raises(OutOfOrder, match="expected all of its averages first"):
        session.receive(commit(), None)


def test_every_message_and_result_has_an_answer_in_every_phase():
    for table in (ExchangingSession._MESSAGES, ExchangingSession._RESULTS):
        assert all(row.keys() == set(SessionPhase) for row in table.values())
    assert ExchangingSession._RESULTS.keys() == set(get_args(events.Event))
    session = ExchangingSession()
    phases = [session.phase]
    session.welcome(WELCOME)
    for step in (lambda: session.receive(*start_run()), lambda: session.result(built())):
        step()
        phases.append(session.phase)
    assert phases == list(SessionPhase)
    session.receive(end_run("over"), None)
    assert (session.phase, session.run_id, session.step) == (SessionPhase.IDLE, "", 0)


# Invalid messages.


@pytest.mark.parametrize(
    ("message", "values"),
    [
        (plan((0, 2), term=6), None),
        (msg.Assign(**{**STEP_FIELDS, "term": 8}, view=1, subtrees=()), None),
        (commit(term=6), None),
        (
            msg.AveragedBlockGradient(**{**STEP_FIELDS, "term": 6}, block=1, chunk=0),
            body([1, 2, 3]),
        ),
        (msg.EvalPlan(term=6, step=0, lo=0, hi=1), None),
    ],
)
def test_another_term_is_out_of_order(message, values):
    with pytest.raises(OutOfOrder, match="expected term 7"):
        working_session().receive(message, values)


@pytest.mark.parametrize(
    "message",
    [
        msg.StateRequest(run_id="other"),
        msg.Hello(
            release="0",
            name="x",
            instance="0" * 32,
            backend="cpu",
            duty="train",
            nonce=bytes(32),
            enrolled=False,
        ),
        msg.SubtreeLoss(**STEP_FIELDS, lo=0, hi=1, loss_sum=1, weight=1, sums=b"", elapsed_ms=1),
        plan((0, 1), step=1),
        plan((0, 3)),
        plan((3, 2)),
        commit(step=2),
        commit(),
        msg.EvalPlan(term=TERM, step=1, lo=0, hi=1),
        msg.EvalPlan(term=TERM, step=0, lo=0, hi=5),
        msg.EvalPlan(term=TERM, step=0, lo=0, hi=2**62),
    ],
)
def test_mismatched_message_ends_the_connection(message):
    with pytest.raises(OutOfOrder):
        ready_session().receive(message, None)


@pytest.mark.parametrize(
    "message",
    [plan((0, 1)), msg.StateRequest(run_id="run"), msg.EvalPlan(term=7, step=0, lo=0, hi=1)],
)
def test_work_before_the_task_is_built_is_out_of_order(message):
    session = welcomed_session()
    session.receive(*start_run())
    with pytest.raises(OutOfOrder):
        session.receive(message, None)


@pytest.mark.parametrize(
    "message",
    [
        msg.Heartbeat(), msg.Continue(**STEP_FIELDS), msg.Cancel(**STEP_FIELDS, subtrees=((0, 1),)),
        msg.Assign(**{**STEP_FIELDS, "attempt": 1}, view=1, subtrees=((2, 4),)),
    ],
)  # fmt: skip
def test_messages_without_a_request_do_nothing(message):
    assert working_session().receive(message, None) == []


# Steps.


def test_a_plan_abandons_older_work_and_starts_its_subtrees():
    actions = working_session().receive(plan((0, 1), (2, 4), attempt=1), None)
    assert actions == [
        act.CancelWork(),
        act.Compute(StepId(0, 1), 4, Subtree(0, 1)),
        act.Compute(StepId(0, 1), 4, Subtree(2, 4)),
    ]


def test_additional_subtrees_are_accepted_once():
    session = working_session()
    assign = msg.Assign(**STEP_FIELDS, view=2, subtrees=((0, 2), (2, 3)))
    assert session.receive(assign, None) == [act.Compute(StepId(0, 0), 4, Subtree(2, 3))]
    assert session.receive(assign, None) == []


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("averages", ["float32", "bfloat16"])
def test_gradients_are_encoded_as_in_the_spec(precision, averages):
    exchange = ExchangeSpec(precision=precision, averages=averages)
    session = welcomed_session()
    session.receive(*start_run(spec=SPEC.model_copy(update={"exchange": exchange})))
    expect, *_ = session.result(built())
    assert expect == act.Expect(MANIFEST.blocks, exchange.codecs)
    session.receive(plan((0, 2)), None)
    values = np.array([1, -2.5, 3], "f4")
    (payload,) = session.result(events.BlockSum(StepId(0, 0), Subtree(0, 2), 1, values, 2.0))
    assert np.asarray(payload.body).tobytes() == pack(values, precision).tobytes()
    for kind, block, sums in (
        (msg.AveragedBlockGradient, 1, values), (msg.AveragedNonBlockGradient, 0, values[:2]),
    ):  # fmt: skip
        raw = pack(sums, averages).view(np.uint8)
        session.receive(kind(**STEP_FIELDS, block=block, chunk=0), raw)
    (apply,) = [a for a in session.receive(commit(), None) if isinstance(a, act.Apply)]
    assert [a.tolist() for a in apply.averages] == [[1, -2.5], [1, -2.5, 3]]


def test_sums_and_losses_are_sent_only_for_current_subtrees():
    session = working_session()
    step_id, subtree = StepId(0, 0), Subtree(0, 2)
    (payload,) = session.result(events.BlockSum(step_id, subtree, 1, np.ones(3, "f4"), 2.0))
    assert isinstance(payload, act.Transmit)
    assert isinstance(payload.message, msg.BlockGradientPayload)
    assert (payload.message.subtree, payload.message.weight) == (subtree, 2.0)
    (other,) = messages_sent(
        session.result(events.BlockSum(step_id, subtree, 0, np.ones(2, "f4"), 2.0))
    )
    assert isinstance(other, msg.NonBlockGradientPayload)
    (loss,) = messages_sent(
        session.result(events.SubtreeDone(step_id, subtree, Loss(3.0, 2.0), 5.0))
    )
    assert isinstance(loss, msg.SubtreeLoss)
    assert (loss.loss_sum, loss.elapsed_ms) == (3.0, 5.0)
    for stale_step in (StepId(0, 1), StepId(1, 0)):
        assert session.result(events.SubtreeDone(stale_step, subtree, Loss(1, 1), 1.0)) == []
    assert session.result(events.SubtreeDone(step_id, Subtree(2, 4), Loss(1, 1), 1.0)) == []


def test_a_commit_cancels_then_applies_the_averages():
    session = working_session()
    deliver_averages(session)
    cancel, apply = session.receive(commit(), None)
    assert isinstance(cancel, act.CancelWork)
    assert isinstance(apply, act.Apply)
    assert [values.tolist() for values in apply.averages] == [[4, 5], [1, 2, 3]]
    assert apply.scalars == SCALARS
    assert session.step == 1
    assert session.result(events.SubtreeDone(StepId(0, 0), Subtree(0, 2), Loss(1, 1), 1.0)) == []
    assert session.receive(commit(), None) == []
    (step_applied,) = messages_sent(session.result(events.Applied(1, DIGEST)))
    assert step_applied == msg.StepApplied(term=TERM, step=1, state_digest=DIGEST)


def test_a_commit_takes_the_averages_of_its_own_attempt():
    session = working_session()
    deliver_averages(session)
    with pytest.raises(OutOfOrder, match="expected all of its averages first"):
        session.receive(commit(attempt=1), None)


def test_a_skipped_step_needs_no_averages():
    assert working_session().receive(commit(scalars=None), None) == [
        act.CancelWork(),
        act.Apply([], None),
    ]


def test_averages_of_past_steps_are_dropped_and_of_future_steps_stored():
    session = working_session()
    session.receive(commit(scalars=None), None)
    deliver_averages(session)
    assert session._exchange._averages == {}
    deliver_averages(session, step=1)
    assert [type(a) for a in session.receive(commit(step=1), None)] == [act.CancelWork, act.Apply]


# State.


def chunk(**change):
    fields = {"kind": "parameters", "block": 0, "step": 2, "optimizer_step": 1, "last": False}
    return msg.StateChunk(**{"run_id": "run", "chunk": 0, **fields, **change})


def test_a_state_is_loaded_and_the_steps_continue_from_it():
    session = ready_session()
    (load,) = session.receive(chunk(), body([1, 2]))
    assert isinstance(load, act.LoadChunk)
    assert load.values.tolist() == [1, 2]
    actions = session.receive(chunk(block=1, last=True), body([1, 2, 3]))
    assert actions[1:] == [act.Restore(2, 1)]
    assert session.step == 2
    assert kinds(session.receive(plan((0, 4), step=2), None)) == ["CancelWork", "Compute"]


@pytest.mark.parametrize("bad_message", [chunk(run_id="other"), chunk(optimizer_step=3)])
def test_mismatched_state_is_out_of_order(bad_message):
    with pytest.raises(OutOfOrder):
        ready_session().receive(bad_message, body([1, 2]))


@pytest.mark.parametrize("counts", [[2], [-1], [0.5], [float("nan")]])
def test_missed_updates_are_whole_numbers_up_to_all_updates(counts):
    session = ready_session()
    (load,) = session.receive(chunk(kind="missed_updates"), body([1]))
    assert isinstance(load, act.LoadChunk)
    with pytest.raises(OutOfOrder, match="whole numbers up to 1, got others"):
        session.receive(chunk(kind="missed_updates"), body(counts))


def test_initial_state_is_sent_as_parameters_only():
    session = ready_session()
    assert session.receive(msg.StateRequest(run_id="run"), None) == [act.CopyState()]
    parts = [
        StatePart("parameters", 0, np.zeros(2, "f4")), StatePart("parameters", 1, np.ones(3, "f4")),
        StatePart("first_moment", 0, np.zeros(2, "f4")),
    ]  # fmt: skip
    messages = messages_sent(session.result(events.StateCopied(parts, 0, 0)))
    assert [(m.kind, m.block, m.last) for m in messages] == [
        ("parameters", 0, False), ("parameters", 1, True),
    ]  # fmt: skip
    assert session.result(events.StateCopied(parts, 1, 1)) == []


# Evaluation, halts and the end.


def test_evaluation_parts_are_computed_and_answered():
    session = ready_session()
    actions = session.receive(msg.EvalPlan(term=TERM, step=0, lo=2, hi=4), None)
    assert actions == [act.Evaluate(0, 2), act.Evaluate(0, 3)]
    (result,) = messages_sent(session.result(events.PartEvaluated(0, 2, {"correct": 3.0})))
    assert result == msg.EvalResult(term=TERM, step=0, part=2, sums={"correct": 3.0})


def test_a_halt_abandons_everything():
    session = working_session()
    assert kinds(session.receive(msg.Halt(**STEP_FIELDS, reason="a NaN"), None)) == ["CancelWork"]
    assert session.result(events.SubtreeDone(StepId(0, 0), Subtree(0, 2), Loss(1, 1), 1.0)) == []


def test_worker_waits_for_the_next_run_after_a_run():
    session = working_session()
    actions = session.receive(end_run("done"), None)
    assert kinds(actions) == ["CancelWork"]
    assert session.result(events.Applied(1, DIGEST)) == []
    with pytest.raises(OutOfOrder):
        session.receive(plan((0, 1)), None)
    assert kinds(session.receive(*start_run("next"))) == ["CancelWork", "Build"]


def test_goodbye_ends_the_session():
    goodbye = msg.Goodbye(reason="done", retry=False, exit_code=0)
    assert working_session().receive(goodbye, None) == [
        act.CancelWork(),
        act.Leave("done", False, 0),
    ]


def test_drain_is_announced_once():
    session = working_session()
    assert messages_sent(session.drain()) == [msg.Drain()]
    assert session.drain() == []


def test_lost_device_is_reported_with_its_error_text():
    device_error = DeviceError("card", "the device was lost")
    assert working_session().result(events.DeviceFailed(device_error))[-1] == act.Leave(
        "device 'card' failed: the device was lost", False, 1, is_failure=True
    )


def test_a_broken_device_is_reported_and_ends_the_worker():
    actions = working_session().result(events.DeviceFailed(RuntimeError("out of\n memory")))
    (goodbye,) = messages_sent(actions)
    assert isinstance(goodbye, msg.Goodbye)
    assert "out of memory" in goodbye.reason
    assert actions[-1] == act.Leave("the device failed: out of memory", False, 1, is_failure=True)


def payloads(actions):
    return [(m.lo, m.block) for m in messages_sent(actions) if hasattr(m, "block")]


def test_gradients_are_sent_within_the_credit():
    session = ready_session()
    session.receive(plan((0, 2), (2, 4), uploads=1), None)
    step_id, sums = StepId(0, 0), {1: np.ones(3, "f4"), 0: np.ones(2, "f4")}
    sent_chunks = [
        payloads(session.result(events.BlockSum(step_id, subtree, block, sums[block], 2.0)))
        for subtree in (Subtree(0, 2), Subtree(2, 4))
        for block in (1, 0)
    ]
    assert sent_chunks == [[(0, 1)], [], [(2, 1)], []]
    stale_credit = msg.Credit(**{**STEP_FIELDS, "attempt": 1}, uploads=2)
    assert session.receive(stale_credit, None) == []
    session.receive(msg.Cancel(**STEP_FIELDS, subtrees=((2, 4),)), None)
    assert payloads(session.receive(msg.Credit(**STEP_FIELDS, uploads=2), None)) == [(0, 0)]
    assert session.receive(msg.Credit(**STEP_FIELDS, uploads=2), None) == []


def test_queued_gradients_of_a_finished_step_are_never_sent():
    session = ready_session()
    session.receive(plan((0, 2), uploads=0), None)
    step_id = StepId(0, 0)
    session.result(events.BlockSum(step_id, Subtree(0, 2), 1, np.ones(3, "f4"), 2.0))
    session.receive(plan((0, 2), attempt=1, uploads=2), None)
    assert session.receive(msg.Credit(**{**STEP_FIELDS, "attempt": 1}, uploads=2), None) == []


# Inner phases of replicas.

STEP_ID, LEAF = StepId(0, 0), Subtree(1, 2)


def inner_state(*, inner=4, last=True, **change):
    fields = {**STEP_FIELDS, "replica": 1, "own": True, **change}
    return msg.InnerStateChunk(**fields, inner=inner, last=last)


def waiting_session():
    session = ready_session()
    session.receive(plan((1, 2)), None)
    (request,) = session.result(events.InnerStateNeeded(STEP_ID, 4, LEAF, with_carried=True))
    assert request.message == msg.InnerStateRequest(**STEP_FIELDS, replica=1, own=True)
    return session


def raw(*values):
    return np.array(values, np.uint8)


def test_inner_phase_continues_once_its_state_is_complete():
    session = waiting_session()
    assert session.receive(inner_state(last=False), raw(1, 2)) == []
    give, compute = session.receive(inner_state(), raw(3))
    assert (give.step_id, give.replica, give.inner, give.with_carried) == (STEP_ID, 1, 4, True)
    assert give.content.tolist() == [1, 2, 3]
    assert compute == act.Compute(STEP_ID, 4, LEAF)
    assert session.receive(inner_state(), raw(3)) == []


def test_state_is_requested_once():
    """A subtree that is canceled and assigned again does not request the state again."""
    session = waiting_session()
    session.receive(inner_state(last=False), raw(1))
    session.receive(msg.Cancel(**STEP_FIELDS, subtrees=((1, 2),)), None)
    session.receive(msg.Assign(**STEP_FIELDS, view=2, subtrees=((1, 2),)), None)
    assert session.result(events.InnerStateNeeded(STEP_ID, 4, LEAF, with_carried=True)) == []
    give, _ = session.receive(inner_state(), raw(2))
    assert give.content.tolist() == [1, 2]


def test_state_that_nobody_awaits_is_dropped():
    session = waiting_session()
    session.receive(msg.Cancel(**STEP_FIELDS, subtrees=((1, 2),)), None)
    assert session.receive(inner_state(), raw(1)) == []
    session = waiting_session()
    session.receive(plan((1, 2), attempt=1), None)
    assert session.receive(inner_state(), raw(1)) == []


def test_progress_and_checkpoints_of_an_inner_phase_are_reported(monkeypatch):
    monkeypatch.setattr(limits, "BODY_BYTES", 4)
    session = ready_session()
    session.receive(plan((1, 2)), None)
    (report,) = session.result(events.InnerPhaseStep(STEP_ID, LEAF, 7))
    assert report.message == msg.InnerPhaseProgress(**STEP_FIELDS, replica=1, inner=7)
    actions = session.result(events.InnerCheckpoint(STEP_ID, LEAF, 7, np.arange(9, dtype=np.uint8)))
    chunk_ids = [(p.message.chunk, p.message.last) for p in actions]
    assert chunk_ids == [(0, False), (1, False), (2, True)]
    assert np.concatenate([p.body for p in actions]).tolist() == list(range(9))
    session.receive(msg.Cancel(**STEP_FIELDS, subtrees=((1, 2),)), None)
    assert session.result(events.InnerPhaseStep(STEP_ID, LEAF, 8)) == []
    assert session.result(events.InnerCheckpoint(STEP_ID, LEAF, 8, raw(1))) == []


@pytest.mark.parametrize("bad_block", [0, 1, None])
def test_finite_sums_sent_to_owners_are_compared(bad_block):
    session = ready_session()
    table = OwnerTable(members=("ann", "bob"), owners=(0, 1), scribe=None)
    session.receive(
        msg.Owners(run_id="run", term=TERM, number=1), np.frombuffer(table.to_bytes(), np.uint8)
    )
    session.receive(plan((0, 2), owners=1), None)
    step_id, subtree = StepId(0, 0), Subtree(0, 2)
    for block, elements in ((1, 3), (0, 2)):
        values = np.full(elements, np.nan if block == bad_block else 1.0, "f4")
        session.result(events.BlockSum(step_id, subtree, block, values, 2.0))
    (loss,) = messages_sent(
        session.result(events.SubtreeDone(step_id, subtree, Loss(1.0, 2.0), 1.0))
    )
    assert bool(loss.sums) == (bad_block is None)
