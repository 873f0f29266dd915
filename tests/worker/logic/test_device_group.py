"""A multi-device worker: division of work, changes of the replica, and lost devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.base.interface import Loss
from protocol.base.errors import BackendUnavailable, DeviceError, RunFailed
from protocol.exact.reduction.average import is_finite
from protocol.exact.reduction.reducer import NonFinite
from protocol.exact.reduction.tree import Subtree
from protocol.exact.reduction.tree_sum import TreeSum, add_arrays
from protocol.spec.manifest import Block, Manifest, TensorSpec
from tests.live_service import scripted_spec
from worker.logic import actions as act
from worker.logic import events
from worker.logic.device_group import (
    MOST_RESTARTS,
    Attach,
    ChangeReplica,
    CopyReplica,
    DeviceGroup,
    Emit,
    LogLine,
    Output,
    ResetReplica,
    Start,
    Stop,
    ToDevice,
    replace_non_finite,
)
from worker.logic.events import StepId

BLOCKS = tuple(
    Block(name=name, kind="block", tensors=(TensorSpec(name=name, shape=(3,)),)) for name in "ab"
)
MANIFEST = Manifest(blocks=BLOCKS, train_samples=64, evaluation_parts=2)
SPEC = scripted_spec()
STEP_ID = StepId(0, 0)
BUILT = events.Built("r", MANIFEST, "0" * 64, 0, "0" * 64, "5" * 64, "probe", "cpu", "CPU")
M = 6
PARAMETERS = [np.full(3, n, np.float32) for n in (0, 1)]
SKIP = act.Apply([], None)


def changed_manifest(**changes: Any) -> Manifest:
    return MANIFEST.model_copy(update=changes)


def group(*names: str) -> DeviceGroup:
    """Return a group whose devices have all built the run's task."""
    devices = DeviceGroup(names)
    devices.begin()
    devices.do(act.Build("r", SPEC, keep_state=False))
    build_on_all(devices, *names)
    return devices


def build_on_all(devices: DeviceGroup, *names: str, keeps_reading: bool = False) -> list[Output]:
    """Let all devices build the task and load the initial parameters."""
    outputs = [x for name in names for x in devices.report(name, BUILT)]
    outputs += devices.report(names[0], events.InitialParameters(PARAMETERS))
    for name in names:
        outputs += devices.report(name, events.WeightsTaken(0, keeps_reading))
    return outputs


def leaf(number: int, block: int) -> np.ndarray:
    """Return a microbatch's gradient; with these values the order of sums shows in the bits."""
    return (np.arange(3, dtype=np.float32) + 1) * np.float32(0.1 + number * 1.7**number + block)


def subtree_sum(subtree: Subtree, block: int) -> np.ndarray:
    sums = TreeSum[np.ndarray](subtree.leaves, add_arrays)
    for number in range(*subtree):
        sums.put(Subtree(number - subtree.lo, number - subtree.lo + 1), leaf(number, block))
    assert sums.total is not None
    return sums.total


def orders(outputs: list[Output], device: str) -> list[act.GroupOrder]:
    return [x.order for x in outputs if isinstance(x, ToDevice) and x.device == device]


def compute_orders(outputs: list[Output]) -> list[tuple[str, Subtree]]:
    return [
        (output.device, output.order.subtree)
        for output in outputs
        if isinstance(output, ToDevice) and isinstance(output.order, act.Compute)
    ]


def session_events(outputs: list[Output]) -> list[events.Event]:
    return [output.event for output in outputs if isinstance(output, Emit)]


def coordinator_messages(outputs: list[Output]) -> str:
    return "\n".join(output.text for output in outputs if isinstance(output, LogLine))


def lose_device(devices: DeviceGroup, name: str) -> list[Output]:
    return devices.handle_loss(name, "was ended by SIGKILL")


def fail_device(devices: DeviceGroup, name: str) -> list[Output]:
    return devices.report(name, events.DeviceFailed(DeviceError("card", "out of memory")))


def compute_part(
    devices: DeviceGroup, name: str, subtree: Subtree, ms: float = 10.0
) -> list[Output]:
    """Report a device's part: the sum of each block, and the loss."""
    outputs: list[Output] = []
    for block in (1, 0):
        values = subtree_sum(subtree, block)
        outputs += devices.report(
            name, events.BlockSum(STEP_ID, subtree, block, values, subtree.leaves)
        )
    loss = Loss(float(subtree.leaves), float(subtree.leaves))
    return outputs + devices.report(
        name, events.SubtreeDone(STEP_ID, subtree, loss, ms * subtree.leaves)
    )


def test_bits_do_not_depend_on_how_many_devices_compute():
    expected = {block: subtree_sum(Subtree(0, M), block) for block in (0, 1)}
    for names in (("a",), ("a", "b"), ("a", "b", "c"), tuple("abcdefgh")):
        devices = group(*names)
        parts = compute_orders(devices.do(act.Compute(STEP_ID, M, Subtree(0, M))))
        assert sorted(n for _, part in parts for n in range(*part)) == list(range(M))
        outputs = [x for name, part in reversed(parts) for x in compute_part(devices, name, part)]
        sums = [event for event in session_events(outputs) if isinstance(event, events.BlockSum)]
        assert {event.block for event in sums} == {0, 1}
        for event in sums:
            assert (event.subtree, event.weight) == (Subtree(0, M), M)
            assert event.values.tobytes() == expected[event.block].tobytes()
        (subtree_done,) = [
            event for event in session_events(outputs) if isinstance(event, events.SubtreeDone)
        ]
        assert subtree_done.loss == Loss(M, M)


def test_work_is_divided_by_measured_speed():
    devices = group("slow", "quick")
    for name, subtree in compute_orders(devices.do(act.Compute(STEP_ID, M, Subtree(0, 4)))):
        compute_part(devices, name, subtree, ms=30.0 if name == "slow" else 10.0)
    parts = compute_orders(devices.do(act.Compute(STEP_ID, M, Subtree(0, 4))))
    leaves = {name: sum(n.leaves for device, n in parts if device == name) for name, _ in parts}
    assert leaves == {"slow": 1, "quick": 3}


def test_worker_speed_is_that_of_all_its_devices():
    devices = group("a", "b")
    parts = compute_orders(devices.do(act.Compute(STEP_ID, M, Subtree(0, 4))))
    outputs = [x for name, part in parts for x in compute_part(devices, name, part, ms=10.0)]
    (subtree_done,) = [
        event for event in session_events(outputs) if isinstance(event, events.SubtreeDone)
    ]
    assert subtree_done.elapsed_ms == pytest.approx(20.0)


def test_siblings_compute_the_missing_sums_of_a_lost_device():
    devices = group("a", "b")
    parts = dict(compute_orders(devices.do(act.Compute(STEP_ID, M, Subtree(0, 4)))))
    compute_part(devices, "a", parts["a"])
    devices.report("b", events.BlockSum(STEP_ID, parts["b"], 1, subtree_sum(parts["b"], 1), 2.0))
    outputs = devices.handle_loss("b", "was ended by SIGKILL")
    assert Start("b") in outputs
    assert "'b' was ended by SIGKILL; restarted, 1 of at most 3 times" in coordinator_messages(
        outputs
    )
    repeat = compute_orders(outputs)
    assert {name for name, _ in repeat} == {"a"}
    reports = [x for name, part in repeat for x in compute_part(devices, name, part)]
    sums = {e.block: e.values for e in session_events(reports) if isinstance(e, events.BlockSum)}
    # Block 1 had arrived completely before the loss.
    assert sums[0].tobytes() == subtree_sum(Subtree(0, 4), 0).tobytes()
    assert sums.keys() == {0}


def test_replica_starts_from_one_device_and_all_read_it():
    devices = DeviceGroup(("a", "b"))
    devices.do(act.Build("r", SPEC, keep_state=False))
    devices.report("a", BUILT)
    (read,) = devices.report("b", BUILT)
    assert read == ToDevice("a", act.ReadInitial())
    assert not devices.report("b", events.InitialParameters(PARAMETERS)), (
        "the parameters of 'b' were not requested"
    )
    reset, *attached, built = devices.report("a", events.InitialParameters(PARAMETERS))
    assert isinstance(reset, ResetReplica)
    assert (reset.blocks, reset.parameters) == (BLOCKS, PARAMETERS)
    assert attached == [Attach("a", was_reset=True), Attach("b", was_reset=True)]
    assert isinstance(built, Emit)


@pytest.mark.parametrize("end_device", [lose_device, fail_device])
def test_device_lost_with_the_initial_parameters_is_replaced(end_device):
    devices = DeviceGroup(("a", "b"))
    devices.do(act.Build("r", SPEC, keep_state=False))
    devices.report("a", BUILT)
    devices.report("b", BUILT)
    outputs = end_device(devices, "a")
    if end_device is lose_device:
        outputs += devices.report("a", BUILT)
    assert ToDevice("a" if end_device is lose_device else "b", act.ReadInitial()) in outputs


def test_step_is_applied_once_and_read_by_all():
    devices = group("a", "b")
    assert devices.do(SKIP) == [
        ChangeReplica(SKIP),
        *(ToDevice(name, act.TakeWeights(1, 0, -1)) for name in "ab"),
    ]
    assert not devices.report("b", events.WeightsTaken(1, keeps_reading=False))
    assert not devices.replica_digest(1, "1" * 64)
    assert session_events(devices.report("a", events.WeightsTaken(1, keeps_reading=False))) == [
        events.Applied(1, "1" * 64)
    ]


def test_replica_is_unchanged_while_a_device_reads_it():
    devices = group("a", "b")
    devices.do(SKIP)
    devices.report("a", events.WeightsTaken(1, keeps_reading=False))
    compute = act.Compute(StepId(2, 0), M, Subtree(0, 1))
    assert devices.do(SKIP) + devices.do(compute) + devices.do(act.CopyState()) == []
    outputs = devices.report("b", events.WeightsTaken(1, keeps_reading=False))
    assert outputs[0] == ChangeReplica(SKIP)
    assert ToDevice("a", compute) == outputs[-2], "computed with the parameters of its step"
    assert outputs[-1] == CopyReplica()


def test_devices_that_read_on_release_the_replica_before_it_changes():
    devices = DeviceGroup(("a", "b"))
    devices.do(act.Build("r", SPEC, keep_state=False))
    build_on_all(devices, "a", "b", keeps_reading=True)
    assert devices.do(SKIP) == [ToDevice(name, act.ReleaseReplica()) for name in "ab"]
    assert not devices.report("a", events.ReplicaReleased())
    assert devices.report("b", events.ReplicaReleased())[0] == ChangeReplica(SKIP)


@pytest.mark.parametrize("end_device", [lose_device, fail_device])
@pytest.mark.parametrize("keeps_reading", [False, True])
def test_device_lost_while_reading_blocks_nothing(end_device, keeps_reading):
    devices = group("a", "b")
    devices.do(SKIP)
    devices.replica_digest(1, "1" * 64)
    devices.report("a", events.WeightsTaken(1, keeps_reading))
    devices.do(SKIP)
    outputs = end_device(devices, "b")
    assert events.Applied(1, "1" * 64) in session_events(outputs)
    if keeps_reading:
        outputs = devices.report("a", events.ReplicaReleased())
    assert ChangeReplica(SKIP) in outputs


def test_canceled_pending_work_reaches_no_device():
    devices = group("a", "b")
    devices.do(SKIP)
    devices.do(SKIP)
    for lo in range(3):
        devices.do(act.Compute(StepId(2, 0), M, Subtree(lo, lo + 1)))
    devices.do(act.CancelSubtree(StepId(2, 0), Subtree(1, 2)))
    outputs = [
        x
        for name in "ab"
        for x in devices.report(name, events.WeightsTaken(1, keeps_reading=False))
    ]
    assert {subtree.lo for _, subtree in compute_orders(outputs)} == {0, 2}
    devices.do(SKIP)
    devices.do(act.Compute(StepId(3, 0), M, Subtree(0, 1)))
    devices.do(act.CancelWork())
    outputs = [
        x
        for name in "ab"
        for x in devices.report(name, events.WeightsTaken(2, keeps_reading=False))
    ]
    assert not compute_orders(outputs)
    assert ChangeReplica(SKIP) in outputs, "a committed step is applied"


def test_restarted_device_reads_the_replica():
    devices = group("a", "b")
    devices.handle_loss("b", "was ended by SIGKILL")
    names = {name for name, _ in compute_orders(devices.do(act.Compute(STEP_ID, M, Subtree(0, 1))))}
    assert names == {"a"}
    outputs = devices.report("b", BUILT)
    assert Attach("b", was_reset=False) in outputs
    assert "'b' takes part from step 0 on" in coordinator_messages(outputs)
    names = {name for name, _ in compute_orders(devices.do(act.Compute(STEP_ID, M, Subtree(1, 2))))}
    assert names == {"b"}


def test_device_restarted_during_loading_reads_the_complete_state():
    devices = group("a", "b")
    chunks = [act.LoadChunk("parameters", n, 0, np.ones(3, np.float32)) for n in (0, 1)]
    assert devices.do(chunks[0]) == [ChangeReplica(chunks[0])]
    devices.handle_loss("b", "was ended by SIGKILL")
    assert Attach("b", was_reset=False) not in devices.report("b", BUILT)
    assert devices.do(chunks[1]) == [ChangeReplica(chunks[1])]
    restore = act.Restore(3, 2)
    assert devices.do(restore) == [
        ChangeReplica(restore), ToDevice("a", act.TakeWeights(3, 2, None)),
        Attach("b", was_reset=False),
    ]  # fmt: skip


@pytest.mark.parametrize("is_loading", [False, True])
def test_reconnecting_keeps_the_replica_unless_half_loaded(is_loading):
    devices = group("a", "b")
    devices.do(SKIP)
    if is_loading:
        devices.do(act.LoadChunk("parameters", 0, 0, np.ones(3, np.float32)))
    devices.do(act.CancelWork())
    devices.do(act.Build("r", SPEC, keep_state=True))
    for name in "ab":
        devices.report(name, events.WeightsTaken(1, keeps_reading=False))
    devices.report("a", BUILT)
    outputs = devices.report("b", BUILT)
    if is_loading:
        assert outputs == [ToDevice("a", act.ReadInitial())]
    else:
        assert [Attach("a", was_reset=False), Attach("b", was_reset=False)] == outputs[:2]
        assert not devices.replica_digest(1, "1" * 64), "a digest of the previous connection"
        assert devices.do(SKIP) == [], "all devices read its parameters"


def test_device_of_another_numerics_profile_is_excluded():
    devices = DeviceGroup(("a", "b", "odd"))
    devices.do(act.Build("r", SPEC, keep_state=False))
    devices.report("odd", replace(BUILT, numerics_profile="6" * 64))
    outputs = build_on_all(devices, "a", "b")
    assert "device 'odd' is left out of the run" in coordinator_messages(outputs)
    assert "start a separate worker" in coordinator_messages(outputs)
    (built,) = session_events(outputs)
    assert isinstance(built, events.Built)
    assert (built.devices, built.device) == (2, "2 x CPU")
    assert {
        name for name, _ in compute_orders(devices.do(act.Compute(STEP_ID, M, Subtree(0, M))))
    } == {
        "a",
        "b",
    }


def test_coordinator_learns_why_a_device_is_excluded():
    devices = DeviceGroup(("a", "odd"))
    devices.do(act.Build("r", SPEC, keep_state=False))
    devices.report("a", BUILT)
    devices.report("odd", replace(BUILT, numerics_profile="6" * 64))
    (built,) = session_events(devices.report("a", events.InitialParameters(PARAMETERS)))
    assert isinstance(built, events.Built)
    assert built.devices == 1
    assert built.left_out.startswith("device 'odd' is left out: expected the numerics profile")


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"initial_digest": "1" * 64}, "initial weights"),
        ({"manifest": changed_manifest(digests={"data": "1" * 64})}, "data"),
        ({"manifest": changed_manifest(train_samples=65)}, "model shape, sample counts"),
    ],
)
def test_task_that_differs_between_devices_is_refused(change, difference):
    devices = DeviceGroup(("a", "b"))
    devices.do(act.Build("r", SPEC, keep_state=False))
    devices.report("a", BUILT)
    (failure,) = session_events(devices.report("b", replace(BUILT, **change)))
    assert isinstance(failure, events.BuildFailed)
    assert not failure.is_local, "no other machine would do better"
    assert str(failure.error).startswith(f"expected the task to build the same {difference}")
    assert "seeded with the run spec's seed" in str(failure.error)


def non_finite(subtree, block, device):
    return events.NonFiniteSum(STEP_ID, NonFinite(subtree, None, block, device))


def test_values_that_are_not_finite_are_reported_with_their_device():
    values = np.array([1, np.inf, 2], np.float32)
    devices = group("a", "b")
    parts = dict(compute_orders(devices.do(act.Compute(STEP_ID, M, Subtree(0, 2)))))
    block_sum = events.BlockSum(STEP_ID, parts["b"], 1, values, 1.0)
    report = replace_non_finite(block_sum, lambda sums: sums if is_finite(sums) else None)
    assert session_events(devices.report("b", report)) == [non_finite(parts["b"], 1, "b")]
    nan = events.SubtreeDone(STEP_ID, parts["a"], Loss(float("nan"), 1.0), 1.0)
    assert session_events(devices.report("a", nan)) == [non_finite(parts["a"], None, "a")]


def test_worker_rejoins_if_no_device_has_the_state():
    devices = group("a", "b")
    devices.handle_loss("a", "was ended by SIGKILL")
    (loss,) = session_events(devices.handle_loss("b", "was ended by SIGKILL"))
    assert isinstance(loss, events.DevicesLost)


def test_repeatedly_ending_process_is_excluded():
    devices = group("a", "b")
    for _ in range(MOST_RESTARTS):
        assert Start("b") in devices.handle_loss("b", "was ended by SIGKILL")
    outputs = devices.handle_loss("b", "was ended by SIGKILL")
    assert Start("b") not in outputs
    assert "the device is left out" in coordinator_messages(outputs)
    assert not session_events(outputs)


def test_failing_device_is_excluded_and_the_last_one_ends_the_worker():
    devices = group("a", "b")
    error = DeviceError("card", "out of memory")
    outputs = devices.report("a", events.DeviceFailed(error))
    assert Stop("a") in outputs
    assert "'a' is left out" in coordinator_messages(outputs)
    assert session_events(devices.report("b", events.DeviceFailed(error))) == [
        events.DeviceFailed(error)
    ]


def test_missing_device_ends_the_worker():
    devices = DeviceGroup(("a", "b"))
    event = events.DeviceFailed(BackendUnavailable("cuda", "no driver"))
    assert session_events(devices.report("a", event)) == [event]


def test_unbuildable_task_is_reported_once():
    devices = DeviceGroup(("a", "b"))
    devices.do(act.Build("r", SPEC, keep_state=False))
    failure = events.BuildFailed("r", RunFailed("no memory"), is_local=True)
    assert not session_events(devices.report("a", failure))
    assert session_events(devices.report("b", replace(failure, is_local=False))) == [
        replace(failure, is_local=False)
    ]


def test_part_that_waits_for_files_continues_with_its_subtree():
    devices = group("a", "b")
    compute = act.Compute(STEP_ID, M, Subtree(0, 2))
    parts = dict(compute_orders(devices.do(compute)))
    expected = events.FilesNeeded(("x",), (STEP_ID, M, parts["b"]))
    assert session_events(devices.report("b", expected)) == [
        replace(expected, for_subtree=(STEP_ID, M, Subtree(0, 2)))
    ]
    assert compute_orders(devices.do(compute)) == [("b", parts["b"])]


def test_canceled_work_has_no_owner():
    devices = group("a", "b")
    parts = compute_orders(devices.do(act.Compute(STEP_ID, M, Subtree(0, 4))))
    canceled = devices.do(act.CancelSubtree(STEP_ID, Subtree(0, 4)))
    expected = [act.CancelSubtree(STEP_ID, part) for _, part in parts]
    assert [*orders(canceled, "a"), *orders(canceled, "b")] == expected
    assert not session_events(
        [x for name, part in parts for x in compute_part(devices, name, part)]
    )
