"""Admission and refusal of workers, and the choice of the worker that sends state 0."""

import numpy as np
import pytest

from coordinator.run.outputs.actions import DigestReplica, FillReplica, Seed, Send, Subscribe
from coordinator.run.workers.admission import Admission, is_stale
from coordinator.run.workers.membership import Membership, MemberState
from protocol.base.errors import OutOfOrder
from protocol.spec.cross_check import CrossCheck
from protocol.spec.manifest import Block, Manifest, TensorSpec
from protocol.wire.messages import (
    DeviceNote,
    Drain,
    Heartbeat,
    Ready,
    StateChunk,
    StepApplied,
    Unready,
)

MANIFEST = Manifest(
    blocks=(Block(name="b", kind="block", tensors=(TensorSpec(name="w", shape=(2,)),)),),
    train_samples=4,
    digests={"data": "d", "tokenizer": "t"},
)


def ready(state="0", signature="1", run_id="run"):
    return Ready(
        run_id=run_id, backend="cpu", device="a processor", initial_digest=state * 64,
        step=0, state_digest=state * 64,
        signature=signature * 64, signature_text="two threads",
    )  # fmt: skip


def make_admission(exactness="require", **members):
    membership = Membership()
    for name, state in members.items():
        membership.add(name).become_ready(ready(state))
    admission = Admission("run", exactness, membership, MANIFEST)
    admission.take_first_ready(ready())
    return admission, membership


@pytest.mark.parametrize("exactness", ["require", "prefer"])
def test_worker_like_the_first_is_admitted(exactness):
    assert make_admission(exactness)[0].find_refusal(MANIFEST, ready()) == ""


@pytest.mark.parametrize("exactness", ["require", "prefer"])
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"digests": {"data": "x", "tokenizer": "t"}}, "data"),
        ({"digests": {"data": "x", "tokenizer": "y"}}, "data, tokenizer"),
        ({"digests": {"data": "d", "tokenizer": "t", "base_weights": "w"}}, "base_weights"),
        ({"train_samples": 5}, "sample counts"),
    ],
)
def test_refusal_names_the_difference_of_manifests(exactness, change, difference):
    other = MANIFEST.model_copy(update=change)
    refusal = make_admission(exactness)[0].find_refusal(other, ready())
    assert f"expected the same {difference}" in refusal or difference in refusal


@pytest.mark.parametrize("is_evaluator", [False, True])
def test_other_constants_of_a_script_are_refused(is_evaluator):
    first, second = (
        MANIFEST.model_copy(update={"cross_check": CrossCheck(constants={"SCALE": text})})
        for text in ("2", "3")
    )
    admission = Admission("run", "prefer", Membership(), first)
    assert admission.find_refusal(first, ready(), evaluates=is_evaluator) == ""
    refusal = admission.find_refusal(second, ready(), evaluates=is_evaluator)
    assert refusal.startswith("expected SCALE = 2 as on the run's first worker, got 3: ")


def test_other_numerics_are_refused_only_if_exactness_is_required():
    exact, mixed = make_admission("require")[0], make_admission("prefer")[0]
    assert "two threads" in exact.find_refusal(MANIFEST, ready(signature="2"))
    assert "initial weights" in exact.find_refusal(MANIFEST, ready(state="2"))
    assert mixed.find_refusal(MANIFEST, ready("2", "2")) == ""


def requested_worker(actions):
    return [action.worker for action in actions if isinstance(action, Send)]


def test_state_is_requested_from_the_next_worker_after_a_loss():
    admission, members = make_admission("prefer", ann="2", bob="0", cem="0")
    assert requested_worker(admission.request_state()) == ["bob"]
    assert admission.request_state() == []
    members.remove("ann")
    assert admission.replace_uploader("ann") == []
    members.remove("bob")
    assert requested_worker(admission.replace_uploader("bob")) == ["cem"]
    members.remove("cem")
    assert admission.replace_uploader("cem") == []
    members.add("dan").become_ready(ready("2"))
    assert requested_worker(admission.request_state()) == ["dan"]
    admission.accept_upload(admission.upload, "2" * 64)
    members.remove("dan")
    assert admission.replace_uploader("dan") == []


def test_workers_with_the_loaded_state_become_active_at_once():
    admission, members = make_admission("prefer", ann="2", bob="0")
    members.add("preparing")
    admission.request_state()
    admission.accept_upload(admission.upload, "0" * 64)
    assert admission.admit_ready() == [Seed("ann"), Subscribe("bob", 0)]
    assert members.names(MemberState.ACTIVE) == ["bob"]
    assert members.names(MemberState.LOADING) == ["ann"]


def test_messages_before_ready_belong_to_an_earlier_run():
    _, members = make_admission(ann="0")
    new_member, ready_member = members.add("fresh"), members.get("ann")
    assert ready_member is not None
    step_applied = StepApplied(term=1, step=3, state_digest="0" * 64)
    assert is_stale(new_member, step_applied, "run")
    assert not is_stale(ready_member, step_applied, "run")
    assert not is_stale(new_member, Drain(), "run")
    assert not is_stale(new_member, DeviceNote(device="cpu0", text="left out"), "run")
    assert is_stale(new_member, Heartbeat(), "run")
    assert not is_stale(new_member, ready(), "run")
    assert is_stale(ready_member, ready(run_id="other"), "run")
    assert is_stale(new_member, Unready(run_id="other", reason="", own=False, exit_code=1), "run")


def chunk(*, last=False, **changes):
    message = StateChunk(
        run_id="run", kind="parameters", block=0, chunk=0, step=0, optimizer_step=0, last=last
    )
    return message.model_copy(update=changes), np.zeros(2, np.float32)


def test_only_the_requested_upload_fills_the_replica():
    admission, members = make_admission("prefer", ann="0", bob="0")
    with pytest.raises(OutOfOrder, match="not requested"):
        admission.take_state_chunk("ann", *chunk())
    admission.request_state()
    message, values = chunk()
    assert admission.take_state_chunk("ann", message, values) == [FillReplica(message, values)]
    members.remove("ann")
    admission.replace_uploader("ann")
    # Chunks still in transit from ann, and the digest of her upload, are ignored.
    assert admission.take_state_chunk("ann", *chunk()) == []
    assert admission.accept_upload(1, "0" * 64) == []
    assert not admission.has_state
    _, actions = admission.take_state_chunk("bob", *chunk(last=True))
    assert actions == DigestReplica(2)
    assert admission.take_state_chunk("bob", *chunk(last=True)) == []
    assert admission.accept_upload(2, "0" * 64) == []
    assert admission.has_state


@pytest.mark.parametrize("change", [{"kind": "first_moment"}, {"step": 1}, {"optimizer_step": 1}])
def test_state_0_has_only_parameters(change):
    admission, _ = make_admission("prefer", ann="0")
    admission.request_state()
    with pytest.raises(OutOfOrder, match="expected the parameters of step 0"):
        admission.take_state_chunk("ann", *chunk(**change))


def test_state_that_differs_from_its_digest_is_refused():
    admission, members = make_admission("prefer", ann="0", bob="0")
    admission.request_state()
    report, dismiss = admission.accept_upload(1, "2" * 64)
    assert report.event.worker == dismiss.worker == "ann"
    assert not admission.has_state
    members.remove("ann")
    assert requested_worker(admission.replace_uploader("ann")) == ["bob"]
