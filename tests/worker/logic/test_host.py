"""A host's decisions: which device computes what, whose state is right, and who is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.base.interface import Loss
from protocol.base.errors import BackendUnavailable, DeviceError, RunFailed
from protocol.exact.replica import StatePart
from protocol.exact.tree import Node
from protocol.exact.tree_sum import TreeSum, add_arrays
from protocol.spec.manifest import Block, Manifest, TensorSpec
from tests.live_service import scripted_spec
from worker.logic import actions as act
from worker.logic import events
from worker.logic.events import StepAttempt
from worker.logic.host import (
    MOST_RESTARTS,
    Begin,
    End,
    Give,
    Host,
    Output,
    Remark,
    ToDevice,
    as_reported,
)

BLOCKS = tuple(
    Block(name=name, kind="block", tensors=(TensorSpec(name=name, shape=(3,)),)) for name in "ab"
)
MANIFEST = Manifest(blocks=BLOCKS, train_samples=64, evaluation_parts=2)
SPEC = scripted_spec()
PLACE = StepAttempt(0, 0)
BUILT = events.Built("r", MANIFEST, "0" * 64, 0, "0" * 64, "5" * 64, "probe", "cpu", "CPU")
M = 6


def unlike_manifest(**changes: Any) -> Manifest:
    return MANIFEST.model_copy(update=changes)


def host(*names: str) -> Host:
    """One whose devices have all built the run's task."""
    made = Host(names)
    made.begin()
    made.do(act.Build("r", SPEC, keep=False))
    for name in names:
        made.told(name, BUILT)
    return made


def leaf(number: int, block: int) -> np.ndarray:
    """A microbatch's gradient; of such values the order of sums shows in the bits."""
    return (np.arange(3, dtype=np.float32) + 1) * np.float32(0.1 + number * 1.7**number + block)


def node_sum(node: Node, block: int) -> np.ndarray:
    sums = TreeSum[np.ndarray](node.leaves, add_arrays)
    for number in range(*node):
        sums.put(Node(number - node.lo, number - node.lo + 1), leaf(number, block))
    assert sums.total is not None
    return sums.total


def orders(outputs: list[Output], device: str) -> list[act.DeviceAction]:
    return [x.action for x in outputs if isinstance(x, ToDevice) and x.device == device]


def computes(outputs: list[Output]) -> list[tuple[str, Node]]:
    return [
        (output.device, output.action.node)
        for output in outputs
        if isinstance(output, ToDevice) and isinstance(output.action, act.Compute)
    ]


def given(outputs: list[Output]) -> list[events.Event]:
    return [output.event for output in outputs if isinstance(output, Give)]


def told(outputs: list[Output]) -> str:
    return "\n".join(output.text for output in outputs if isinstance(output, Remark))


def do_part(made: Host, name: str, node: Node, ms: float = 10.0) -> list[Output]:
    """A device computes a part, and says all of it."""
    outputs: list[Output] = []
    for block in (1, 0):
        values = node_sum(node, block)
        outputs += made.told(name, events.BlockSum(PLACE, node, block, values, node.leaves))
    loss = Loss(float(node.leaves), float(node.leaves))
    return outputs + made.told(name, events.NodeDone(PLACE, node, loss, ms * node.leaves))


def test_nobody_can_tell_how_many_devices_there_were():
    expected = {block: node_sum(Node(0, M), block) for block in (0, 1)}
    for names in (("a",), ("a", "b"), ("a", "b", "c"), tuple("abcdefgh")):
        made = host(*names)
        parts = computes(made.do(act.Compute(PLACE, M, Node(0, M))))
        assert sorted(n for _, part in parts for n in range(*part)) == list(range(M))
        outputs = [x for name, part in reversed(parts) for x in do_part(made, name, part)]
        sums = [event for event in given(outputs) if isinstance(event, events.BlockSum)]
        assert {event.block for event in sums} == {0, 1}
        for event in sums:
            assert (event.node, event.weight) == (Node(0, M), M)
            assert event.values.tobytes() == expected[event.block].tobytes()
        (done,) = [event for event in given(outputs) if isinstance(event, events.NodeDone)]
        assert done.loss == Loss(M, M)


def test_work_goes_by_measured_speed():
    made = host("slow", "quick")
    for name, node in computes(made.do(act.Compute(PLACE, M, Node(0, 4)))):
        do_part(made, name, node, ms=30.0 if name == "slow" else 10.0)
    parts = computes(made.do(act.Compute(PLACE, M, Node(0, 4))))
    leaves = {name: sum(n.leaves for who, n in parts if who == name) for name, _ in parts}
    assert leaves == {"slow": 1, "quick": 3}


def test_the_host_s_speed_is_that_of_all_its_devices():
    made = host("a", "b")
    parts = computes(made.do(act.Compute(PLACE, M, Node(0, 4))))
    outputs = [x for name, part in parts for x in do_part(made, name, part, ms=10.0)]
    (done,) = [event for event in given(outputs) if isinstance(event, events.NodeDone)]
    assert done.elapsed_ms == pytest.approx(20.0)


def test_what_a_lost_device_owes_is_computed_by_its_siblings():
    made = host("a", "b")
    parts = dict(computes(made.do(act.Compute(PLACE, M, Node(0, 4)))))
    do_part(made, "a", parts["a"])
    made.told("b", events.BlockSum(PLACE, parts["b"], 1, node_sum(parts["b"], 1), 2.0))
    outputs = made.lost("b", "was ended by SIGKILL")
    assert Begin("b") in outputs
    assert "'b' was ended by SIGKILL; begun again, 1 of at most 3 times" in told(outputs)
    again = computes(outputs)
    assert {name for name, _ in again} == {"a"}
    finished = [x for name, part in again for x in do_part(made, name, part)]
    sums = {e.block: e.values for e in given(finished) if isinstance(e, events.BlockSum)}
    # Of block 1 all had come before the loss.
    assert sums[0].tobytes() == node_sum(Node(0, 4), 0).tobytes()
    assert sums.keys() == {0}


def test_a_device_that_is_begun_again_gets_a_sibling_s_state_first():
    made = host("a", "b")
    made.do(act.Apply([], None))
    for name in "ab":
        made.told(name, events.Applied(1, "1" * 64))
    made.lost("b", "was ended by SIGKILL")
    (copy,) = made.told("b", BUILT)
    assert copy == ToDevice("a", act.CopyState())
    apply = act.Apply([], None)
    assert made.do(apply) == [ToDevice("a", apply)]  # kept for b, until it has the state before
    parts = [StatePart("parameters", n, np.full(3, n, np.float32)) for n in (0, 1)]
    copied = made.told("a", events.StateCopied(parts, 1, 1))
    assert [type(order) for order in orders(copied, "b")] == [
        act.LoadChunk, act.LoadChunk, act.Restore, act.Apply,
    ]  # fmt: skip
    assert computes(made.do(act.Compute(PLACE, M, Node(0, 1))))[0][0] != "b"
    outputs = made.told("b", events.Applied(1, "1" * 64))
    assert "'b' takes part" in told(outputs)
    names = {name for name, _ in computes(made.do(act.Compute(PLACE, M, Node(1, 2))))}
    assert names == {"b"}


def test_a_device_that_is_begun_again_while_a_state_is_loaded_has_missed_a_part_of_it():
    made = host("a", "b")
    first, second = (act.LoadChunk("parameters", n, 0, np.ones(3, np.float32)) for n in (0, 1))
    made.do(first)
    made.lost("b", "was ended by SIGKILL")
    assert made.told("b", BUILT) == [ToDevice("a", act.CopyState())]
    restore = act.Restore(0, 0)
    assert made.do(second) + made.do(restore) == [ToDevice("a", second), ToDevice("a", restore)]
    copied = orders(made.told("a", events.StateCopied([], 0, 0)), "b")
    assert copied == [act.Restore(0, 0), second, restore]


def test_one_whose_state_is_another_after_that_is_left_out():
    made = host("a", "b")
    made.lost("b", "was ended by SIGKILL")
    made.do(act.Restore(3, 3))
    made.told("a", events.Applied(3, "3" * 64))
    made.told("b", BUILT)
    made.told("a", events.StateCopied([], 3, 3))
    assert "left out" in told(made.told("b", events.Applied(3, "4" * 64)))


def test_a_device_of_another_signature_is_left_out_and_the_rest_goes_on():
    made = Host(("a", "b", "odd"))
    made.do(act.Build("r", SPEC, keep=False))
    made.told("odd", replace(BUILT, signature="6" * 64))
    made.told("a", BUILT)
    outputs = made.told("b", BUILT)
    assert "device 'odd' is left out of the run" in told(outputs)
    assert "a worker of its own" in told(outputs)
    (built,) = given(outputs)
    assert isinstance(built, events.Built)
    assert (built.devices, built.device) == (2, "2 x CPU")
    assert {name for name, _ in computes(made.do(act.Compute(PLACE, M, Node(0, M))))} == {"a", "b"}


def test_the_coordinator_is_told_why_a_device_is_left_out():
    made = Host(("a", "odd"))
    made.do(act.Build("r", SPEC, keep=False))
    made.told("a", BUILT)
    (built,) = given(made.told("odd", replace(BUILT, signature="6" * 64)))
    assert isinstance(built, events.Built)
    assert built.devices == 1
    assert built.left_out.startswith("device 'odd' is left out: its gradients would have other")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"initial_digest": "1" * 64}, "initial weights"),
        ({"manifest": unlike_manifest(digests={"data": "1" * 64})}, "data"),
        ({"manifest": unlike_manifest(train_samples=65)}, "model shape, sample counts"),
    ],
)
def test_a_task_that_is_another_on_each_device_is_refused(change, named):
    made = Host(("a", "b"))
    made.do(act.Build("r", SPEC, keep=False))
    made.told("a", BUILT)
    (failed,) = given(made.told("b", replace(BUILT, **change)))
    assert isinstance(failed, events.BuildFailed)
    assert not failed.own, "no other machine would do better"
    assert str(failed.error).startswith(f"expected the task to build the same {named}")
    assert "seeded with the run spec's seed" in str(failed.error)


def test_one_answer_for_all_and_the_device_that_differs_is_named():
    made = host("a", "b", "c")
    made.do(act.Apply([], None))
    made.told("a", events.Applied(1, "1" * 64))
    assert not made.told("b", events.Applied(1, "2" * 64))
    (answer,) = given(made.told("c", events.Applied(1, "1" * 64)))
    assert answer == events.Applied(1, "1" * 64, {"b": "2" * 64})


def test_an_answer_does_not_wait_for_one_that_is_lost():
    made = host("a", "b")
    made.do(act.Apply([], None))
    made.told("a", events.Applied(1, "1" * 64))
    assert given(made.lost("b", "was ended by SIGKILL")) == [events.Applied(1, "1" * 64)]


def test_values_that_are_not_finite_are_told_with_their_device():
    values = np.array([1, np.inf, 2], np.float32)
    made = host("a", "b")
    parts = dict(computes(made.do(act.Compute(PLACE, M, Node(0, 2)))))
    reported = as_reported(events.BlockSum(PLACE, parts["b"], 1, values, 1.0))
    assert given(made.told("b", reported)) == [events.NotFinite(PLACE, parts["b"], 1, "b")]
    nan = events.NodeDone(PLACE, parts["a"], Loss(float("nan"), 1.0), 1.0)
    assert given(made.told("a", nan)) == [events.NotFinite(PLACE, parts["a"], None, "a")]


def test_without_any_device_that_has_the_state_the_host_joins_anew():
    made = host("a", "b")
    made.lost("a", "was ended by SIGKILL")
    (lost,) = given(made.lost("b", "was ended by SIGKILL"))
    assert isinstance(lost, events.DevicesLost)


def test_a_process_that_ends_again_and_again_is_left_out():
    made = host("a", "b")
    for _ in range(MOST_RESTARTS):
        assert Begin("b") in made.lost("b", "was ended by SIGKILL")
    outputs = made.lost("b", "was ended by SIGKILL")
    assert Begin("b") not in outputs
    assert "it is left out" in told(outputs)
    assert not given(outputs)


def test_a_device_that_fails_is_left_out_and_the_last_one_is_the_host_s_end():
    made = host("a", "b")
    error = DeviceError("card", "out of memory")
    outputs = made.told("a", events.DeviceFailed(error))
    assert End("a") in outputs
    assert "'a' is left out" in told(outputs)
    assert given(made.told("b", events.DeviceFailed(error))) == [events.DeviceFailed(error)]


def test_a_device_that_is_not_there_is_the_end_of_the_host():
    made = Host(("a", "b"))
    event = events.DeviceFailed(BackendUnavailable("cuda", "no driver"))
    assert given(made.told("a", event)) == [event]


def test_a_task_that_nobody_can_build_is_told_once():
    made = Host(("a", "b"))
    made.do(act.Build("r", SPEC, keep=False))
    failed = events.BuildFailed("r", RunFailed("no memory"), own=True)
    assert not given(made.told("a", failed))
    assert given(made.told("b", replace(failed, own=False))) == [replace(failed, own=False)]


def test_a_part_that_waits_for_files_goes_on_with_its_node():
    made = host("a", "b")
    compute = act.Compute(PLACE, M, Node(0, 2))
    parts = dict(computes(made.do(compute)))
    wanted = events.FilesWanted(("x",), (PLACE, M, parts["b"]))
    assert given(made.told("b", wanted)) == [replace(wanted, for_node=(PLACE, M, Node(0, 2)))]
    assert computes(made.do(compute)) == [("b", parts["b"])]


def test_what_is_cancelled_is_nobody_s():
    made = host("a", "b")
    parts = computes(made.do(act.Compute(PLACE, M, Node(0, 4))))
    cancelled = made.do(act.CancelNode(PLACE, Node(0, 4)))
    expected = [act.CancelNode(PLACE, part) for _, part in parts]
    assert [*orders(cancelled, "a"), *orders(cancelled, "b")] == expected
    assert not given([x for name, part in parts for x in do_part(made, name, part)])
