"""The engine's real thread, with a device that computes nothing."""

import queue
import threading

import numpy as np
import pytest
import torch

from backends.base.interface import BlockGradient, Loss
from backends.scripted import ScriptedBackend, ScriptedProgram
from protocol.base.errors import (
    BackendUnavailable,
    DataError,
    MainMemoryTooSmall,
    SamestepError,
    SubnormalsFlushed,
)
from protocol.exact.reduction.tree import Subtree
from protocol.exact.replica import Replica
from protocol.exact.samples import SampleOrder
from protocol.exact.update import step_scalars
from protocol.spec.run_spec import ScriptedRun
from protocol.spec.sections.optimizer import Momentum, ScheduleFree
from protocol.spec.sections.tasks import BatchSpec, ScriptedSpec
from tests.cluster import PATIENCE_S
from worker.logic import actions as act
from worker.logic import events
from worker.logic.events import StepId
from worker.shell.engine import Engine
from worker.tasks.small.scripted import Scripted

SPEC = ScriptedRun(
    task="scripted", steps=4, batch=BatchSpec(samples=8, microbatch=2),
    optimizer=Momentum(name="momentum", lr=0.1),
    scripted=ScriptedSpec(blocks=2, block_bytes=64, samples=8),
)  # fmt: skip
SCALARS = step_scalars(SPEC.optimizer, 1, 0, 4, 1.0)
ONES = [np.ones(16, np.float32), np.ones(16, np.float32)]


class GatedProgram(ScriptedProgram):
    """A program that pauses before each block of a microbatch while the gate is closed."""

    def __init__(self, trainable, gate, reached_queue):
        super().__init__(trainable, 0.0)
        self._gate, self._reached = gate, reached_queue

    def gradients(self, leaves):
        stream = super().gradients(leaves)
        program = self

        class GatedStream:
            def __iter__(self):
                for item in stream:
                    program._reached.set()
                    assert program._gate.wait(PATIENCE_S)
                    yield item

            def close(self):
                stream.close()

        return GatedStream()


class Backend(ScriptedBackend):
    def __init__(self, gate, reached_queue):
        super().__init__()
        self._gate, self._reached = gate, reached_queue
        self.refusal: Exception | None = None

    def compile(self, trainable, example, others=(), evaluations=()):
        del example, others, evaluations
        if self.refusal is not None:
            raise self.refusal
        return GatedProgram(trainable, self._gate, self._reached)


class BackendFactory:
    """A factory that counts its tasks, and raises `failure` or `missing` where they are set."""

    def __init__(self):
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()
        self.built = 0
        self.failure: Exception | None = None
        self.missing: Exception | None = None
        self._backend = Backend(self.gate, self.reached)

    def backend(self):
        if self.missing is not None:
            raise self.missing
        return self._backend

    def task(self, spec):
        if self.failure is not None:
            raise self.failure
        self.built += 1
        return Scripted(spec)


class Device:
    """An engine and its reports."""

    def __init__(self):
        self.factory = BackendFactory()
        self.events: queue.Queue[events.Event] = queue.Queue()
        self.engine = Engine(self.factory, self.events.put)

    def next_event(self):
        return self.events.get(timeout=PATIENCE_S)

    def until(self, kind):
        earlier_events = []
        while not isinstance(event := self.next_event(), kind):
            earlier_events.append(event)
        return event, earlier_events

    def build(self, spec=SPEC, run_id="run"):
        self.engine.do(act.Build(run_id, spec, keep_state=False))
        return self.until(events.Built)[0]


@pytest.fixture
def device():
    new_device = Device()
    yield new_device
    new_device.factory.gate.set()
    new_device.engine.close()
    assert all(thread.name != "engine" for thread in threading.enumerate())


def test_device_is_opened_without_a_task_and_only_failures_are_reported(device):
    device.factory.missing = error = BackendUnavailable("cuda", "no driver")
    device.engine.do(act.OpenDevice())
    assert device.next_event() == events.DeviceFailed(error)
    device.factory.missing = None
    device.engine.do(act.OpenDevice())
    device.engine.do(act.Build("run", SPEC, keep_state=False))
    assert isinstance(device.next_event(), events.Built)


def test_thread_that_flushes_subnormals_applies_and_builds_nothing(device):
    device.build()
    device.engine._thread.submit(lambda: map(torch.set_flush_denormal, [True]))
    device.engine.do(act.Apply(list(ONES), SCALARS))
    failure, _ = device.until(events.DeviceFailed)
    assert isinstance(failure.error, SubnormalsFlushed)
    device.engine.do(act.Build("next", SPEC.model_copy(update={"seed": 5}), keep_state=False))
    build_failure, _ = device.until(events.BuildFailed)
    assert isinstance(build_failure.error, SubnormalsFlushed)
    assert "the worker's thread that applies updates flushes subnormal" in str(build_failure.error)


def test_numerics_profile_includes_subnormal_handling(device, monkeypatch):
    subnormal_build = device.build()
    assert "subnormals kept" in subnormal_build.numerics_text
    monkeypatch.setattr(GatedProgram, "keeps_subnormals", lambda _: False)
    device.engine.do(act.Apply(list(ONES), SCALARS))
    failure, _ = device.until(events.DeviceFailed)
    assert "since the run began, a thread that computes gradients flushes" in str(failure.error)
    flushed = device.build(SPEC.model_copy(update={"seed": 5}))
    assert "subnormals flushed" in flushed.numerics_text
    monkeypatch.undo()
    assert (
        device.build(SPEC.model_copy(update={"seed": 5})).numerics_profile
        == flushed.numerics_profile
    )
    assert (
        device.build().numerics_profile
        == subnormal_build.numerics_profile
        != flushed.numerics_profile
    )


def reference_replica():
    task = Scripted(SPEC)
    replica = Replica(task.manifest.blocks, SPEC.optimizer)
    replica.load_parameters(task.initial_parameters())
    return replica


def test_built_task_starts_at_the_initial_state(device):
    built = device.build()
    assert built.run_id == "run"
    assert built.state_digest == reference_replica().state_digest()
    assert built.manifest == Scripted(SPEC).manifest


def test_a_subtree_gives_its_blocks_in_reverse_order_then_its_loss(device):
    device.build()
    device.engine.do(act.Compute(StepId(0, 0), 4, Subtree(0, 4)))
    subtree_done, sums = device.until(events.SubtreeDone)
    assert [block_sum.block for block_sum in sums] == [1, 0]
    assert {block_sum.weight for block_sum in sums} == {8.0} == {subtree_done.loss.weight}
    assert subtree_done.elapsed_ms > 0


def test_subtree_sums_follow_the_tree(device):
    device.build()
    parts = {}
    for subtree in (Subtree(0, 4), Subtree(0, 2), Subtree(2, 4), Subtree(2, 3), Subtree(3, 4)):
        device.engine.do(act.Compute(StepId(1, 0), 4, subtree))
        parts[subtree] = {each.block: each.values for each in device.until(events.SubtreeDone)[1]}
    for block in (0, 1):
        total = parts[Subtree(0, 2)][block] + parts[Subtree(2, 4)][block]
        assert total.tobytes() == parts[Subtree(0, 4)][block].tobytes()
        pair = parts[Subtree(2, 3)][block] + parts[Subtree(3, 4)][block]
        assert pair.tobytes() == parts[Subtree(2, 4)][block].tobytes()


def test_cancel_abandons_current_and_pending_subtrees(device):
    device.build()
    device.factory.reached.clear()
    device.factory.gate.clear()
    device.engine.do(act.Compute(StepId(0, 0), 4, Subtree(0, 2)))
    device.engine.do(act.Compute(StepId(0, 0), 4, Subtree(2, 4)))
    device.engine.do(act.Evaluate(0, 1))
    assert device.factory.reached.wait(PATIENCE_S)
    device.engine.do(act.CancelWork())
    device.engine.do(act.Compute(StepId(0, 1), 4, Subtree(0, 1)))
    device.factory.gate.set()
    subtree_done, earlier_events = device.until(events.SubtreeDone)
    assert (subtree_done.step_id, subtree_done.subtree) == (StepId(0, 1), Subtree(0, 1))
    assert all(event.step_id == StepId(0, 1) for event in earlier_events)


def test_steps_give_the_digest_of_the_exact_update(device):
    device.build()
    replica = reference_replica()
    device.engine.do(act.Apply(list(ONES), SCALARS))
    device.engine.do(act.Apply([], None))
    device.engine.do(act.Apply(list(ONES), SCALARS))
    for is_applied in (True, False, True):
        replica.apply(ONES, SCALARS) if is_applied else replica.skip()
        assert device.until(events.Applied)[0] == events.Applied(
            replica.step, replica.state_digest()
        )


def test_applied_step_is_not_canceled(device):
    device.build()
    device.engine.do(act.Apply(list(ONES), SCALARS))
    device.engine.do(act.CancelWork())
    assert device.until(events.Applied)[0].step == 1


def test_a_state_is_copied_and_restored(device):
    device.build()
    device.engine.do(act.Apply(list(ONES), SCALARS))
    device.engine.do(act.CopyState())
    applied_event = device.until(events.Applied)[0]
    state_copy, _ = device.until(events.StateCopied)
    assert (state_copy.step, state_copy.optimizer_step) == (1, 1)
    device.build(run_id="again")
    for part in state_copy.parts:
        device.engine.do(act.LoadChunk(part.kind, part.block, 0, part.values))
    device.engine.do(act.Restore(1, 1))
    assert device.until(events.Applied)[0] == applied_event


def test_a_copy_is_not_changed_by_later_steps(device):
    device.build()
    device.engine.do(act.CopyState())
    device.engine.do(act.Apply(list(ONES), SCALARS))
    state_copy, _ = device.until(events.StateCopied)
    device.until(events.Applied)
    initial = Scripted(SPEC).initial_parameters()
    assert [p.values.tolist() for p in state_copy.parts if p.kind == "parameters"] == [
        values.tolist() for values in initial
    ]


def test_equal_spec_reuses_the_task_at_its_initial_state(device):
    first = device.build()
    device.engine.do(act.Apply(list(ONES), SCALARS))
    device.until(events.Applied)
    second = device.build(run_id="second")
    assert device.factory.built == 1
    assert second.state_digest == first.state_digest
    assert second.run_id == "second"
    device.build(SPEC.model_copy(update={"seed": 5}))
    assert device.factory.built == 2


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_task_owner_gets_its_module_back_with_trained_values(device, is_evaluated):
    """Schedule-free averages values apart from the parameters at which gradients are computed."""
    optimizer = ScheduleFree(name="schedule-free", lr=0.1)
    device.build(SPEC.model_copy(update={"optimizer": optimizer}))
    job = device.engine._job
    loads = []
    job.program.load = lambda parameters: loads.append([array.copy() for array in parameters])
    for step in (1, 2):
        device.engine.do(act.Apply(list(ONES), step_scalars(optimizer, step, step - 1, 4, 1.0)))
        device.until(events.Applied)
    if is_evaluated:
        device.engine.do(act.Evaluate(2, 3))
        device.until(events.PartEvaluated)
    device.engine.close()
    for loaded_values, trained in zip(loads[-1], job.replica.trained_weights(), strict=True):
        np.testing.assert_array_equal(loaded_values, trained)
        assert not np.array_equal(loaded_values, job.replica.parameters[0])


def test_evaluation_of_a_part_is_reported(device):
    device.build()
    device.engine.do(act.Evaluate(0, 3))
    assert device.until(events.PartEvaluated)[0] == events.PartEvaluated(
        0, 3, {"samples": 1.0, "parts": 1}
    )


def test_unbuildable_task_is_reported_and_the_next_may_build(device):
    device.factory.failure = DataError("no such file")
    device.engine.do(act.Build("run", SPEC, keep_state=False))
    failure = device.next_event()
    assert isinstance(failure, events.BuildFailed)
    assert str(failure.error) == "no such file"
    assert not failure.is_local
    device.factory.failure = None
    device.build()


def test_refusal_of_a_device_is_local(device):
    device.factory.backend().refusal = SamestepError("too large")
    device.engine.do(act.Build("run", SPEC, keep_state=False))
    failure = device.next_event()
    assert isinstance(failure, events.BuildFailed)
    assert (str(failure.error), failure.is_local) == ("too large", True)
    device.factory.backend().refusal = None
    device.build()


def _error_of(work):
    try:
        work()
    except (MemoryError, RuntimeError) as error:
        return error
    raise AssertionError("nothing was raised")


def _raise_without_text():
    raise RuntimeError


def test_library_error_while_building_is_one_line(device):
    for library_error, expected_text, is_local in (
        (RuntimeError("size of tensor a\n(3)"), "RuntimeError: size of tensor a (3)", False),
        (_error_of(_raise_without_text), "RuntimeError in test_engine.py, line ", False),
        (MemoryError(), "not enough main memory is available; ", True),
        (
            _error_of(lambda: torch.empty(2**45)),
            "available: tried to allocate 131072.00 GiB; ",
            True,
        ),
        (
            _error_of(lambda: np.empty(2**45, "f4")),
            "available: tried to allocate 131072.00 GiB",
            True,
        ),
    ):
        device.factory.failure = library_error
        device.engine.do(act.Build("run", SPEC, keep_state=False))
        failure = device.next_event()
        assert isinstance(failure, events.BuildFailed)
        message = str(failure.error)
        assert message.startswith("the task 'scripted' cannot be built: ")
        assert expected_text in message
        assert (" is free: close other programs, add memory or swap" in message) is is_local
        assert (failure.is_local, failure.error.exit_code) == (is_local, 1 if is_local else 2)
    device.factory.failure = None
    device.build()


def test_insufficient_host_memory_is_local(device):
    device.factory.failure = MainMemoryTooSmall(2, 1)
    device.engine.do(act.Build("run", SPEC, keep_state=False))
    failure = device.next_event()
    assert isinstance(failure, events.BuildFailed)
    assert failure.is_local
    device.factory.failure = None
    device.build()


@pytest.mark.parametrize("microbatches", [3, 5])
def test_a_plan_for_another_task_is_reported(device, microbatches):
    device.build()
    device.engine.do(act.Compute(StepId(0, 0), microbatches, Subtree(0, 1)))
    failure, _ = device.until(events.DeviceFailed)
    assert f"expected 4 microbatches, got a plan of {microbatches}" in str(failure.error)


def test_library_error_of_the_device_is_reported(device, monkeypatch):
    device.build()

    def raise_out_of_memory(*_arguments):
        raise MemoryError("out of memory")

    monkeypatch.setattr(GatedProgram, "gradients", raise_out_of_memory)
    device.engine.do(act.Compute(StepId(0, 0), 4, Subtree(0, 1)))
    failure, _ = device.until(events.DeviceFailed)
    assert "out of memory" in str(failure.error)


def test_failing_digest_is_reported(device, monkeypatch):
    device.build()

    def raise_out_of_memory(_replica):
        raise MemoryError("out of memory")

    monkeypatch.setattr(Replica, "state_digest", raise_out_of_memory)
    device.engine.do(act.Apply(list(ONES), SCALARS))
    device.engine.do(act.Apply(list(ONES), SCALARS))
    failure, _ = device.until(events.DeviceFailed)
    assert "out of memory" in str(failure.error)


def test_the_scripted_job_has_the_microbatches_of_its_spec():
    assert SampleOrder(SPEC.seed, 8, SPEC.batch).microbatch_count(0) == 4
    stream = ScriptedProgram(Scripted(SPEC).trainable, 0.0).gradients(
        [(Scripted(SPEC).batch([1, 2]), 3)]
    )
    assert [type(item) for item in stream] == [BlockGradient, BlockGradient, Loss]


def test_progress_of_a_preparation_is_available():
    lines: list[str] = []
    event_queue: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
    engine = Engine(BackendFactory(), event_queue.put, on_progress=lines.append)
    engine.do(act.OpenDevice())
    engine.do(act.Build("run", SPEC, keep_state=False))
    assert isinstance(event_queue.get(timeout=PATIENCE_S), events.Built)
    engine.close()
    name = BackendFactory().backend().info.name
    assert lines == [f"compiling for {name}", "computing the first microbatches", ""]
    assert engine.preparing == ""
