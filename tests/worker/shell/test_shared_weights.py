"""A CPU that computes in the replica's memory has the results of one with separate memory."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest

from backends.base.interface import Array, Backend
from backends.cpu import CpuBackend
from protocol.exact.reduction.tree import Subtree
from protocol.exact.replica import Replica
from protocol.exact.update import step_scalars
from protocol.spec.run_spec import RunSpec, parse_run_spec
from tests.processes import PATIENCE_S
from worker.logic import actions as act
from worker.logic import events
from worker.logic.events import StepId
from worker.shell.engine import Engine
from worker.tasks.base.task import Task
from worker.tasks.registry import build

SCHEDULE_FREE = {"name": "schedule-free", "lr": 0.1}
REPLICAS = {"count": 2, "inner_steps": 2}


def spec(**changes: Any) -> RunSpec:
    """Return a spec whose 8 features put the bias at an address that cannot be shared."""
    return parse_run_spec(
        {
            "task": "regress",
            "regress": {"samples": 32, "features": 8, "noise": 0.1},
            "batch": {"samples": 8, "microbatch": 4},
            "optimizer": {"name": "adamw", "lr": 0.1},
            "steps": 8,
            **changes,
        }
    )


class _BackendFactory:
    def backend(self) -> Backend:
        return CpuBackend()

    def task(self, spec: RunSpec) -> Task:
        return build(spec)


class Device:
    """An engine on the CPU, and a separate replica for comparison."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self._events: queue.Queue[events.Event] = queue.Queue()
        self.engine = Engine(_BackendFactory(), self._events.put)
        self.engine.do(act.Build("run", spec, keep_state=False))
        self.digest = self.until(events.Built)[0].state_digest
        task = build(spec)
        self.replica = Replica(task.manifest.blocks, spec.step_optimizer)
        self.replica.load_parameters(task.initial_parameters())

    def until(self, kind: type) -> tuple[Any, list[Any]]:
        before = []
        while not isinstance(event := self._events.get(timeout=PATIENCE_S), kind):
            before.append(event)
        return event, before

    def step(self, gradient: float, *, skip: bool = False) -> None:
        """Apply a step on both, and compare their digests."""
        replica = self.replica
        gradients = [np.full_like(values, gradient) for values in replica.parameters]
        scalars = step_scalars(
            self.spec.step_optimizer, replica.optimizer_step + 1, replica.step, 8, 1.0
        )
        self.engine.do(act.Apply(gradients, None if skip else scalars))
        replica.skip() if skip else replica.apply(gradients, scalars)
        assert self.until(events.Applied)[0].state_digest == replica.state_digest()

    def gradients(self) -> list[Array]:
        self.engine.do(act.Compute(StepId(self.replica.step, 0), 2, Subtree(0, 2)))
        return [each.values for each in self.until(events.SubtreeDone)[1]]

    def evaluate(self) -> dict[str, float]:
        self.engine.do(act.Evaluate(self.replica.step, 0))
        return dict(self.until(events.PartEvaluated)[0].sums)


@pytest.mark.parametrize(
    "changes",
    [{}, {"optimizer": SCHEDULE_FREE}, {"replicas": REPLICAS}],
    ids=["shared", "averages", "replicas"],
)
def test_computing_and_evaluating_do_not_change_the_replica(changes):
    device = Device(spec(**changes))
    assert device.digest == device.replica.state_digest()
    for number in range(3):
        if device.spec.replicas is None:
            device.gradients()
        else:  # an inner phase updates a copy
            device.engine.do(act.Compute(StepId(number, 0), 2, Subtree(0, 1)))
            device.until(events.SubtreeDone)
        first = device.evaluate()
        device.step(0.5)
        assert device.evaluate() != first
    device.engine.close()


@pytest.mark.parametrize(
    "arithmetic", ["native", pytest.param("canonical", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("is_skipped", [False, True], ids=["steps", "no update yet"])
def test_worker_with_the_state_of_another_computes_the_same(arithmetic, is_skipped):
    """A state before the first update has no moments; a later worker may return to it."""
    run_spec = spec(arithmetic={"mode": arithmetic})
    source, late_device = Device(run_spec), Device(run_spec)
    source.step(0.5, skip=is_skipped)
    source.step(-0.25, skip=is_skipped)
    for gradient in (1.0, 2.0, 3.0):
        late_device.step(gradient)
    late_device.gradients()
    source.engine.do(act.CopyState())
    state_copy = source.until(events.StateCopied)[0]
    for part in state_copy.parts:
        late_device.engine.do(act.LoadChunk(part.kind, part.block, 0, part.values))
    late_device.engine.do(act.Restore(state_copy.step, state_copy.optimizer_step))
    assert late_device.until(events.Applied)[0].state_digest == source.replica.state_digest()
    late_device.replica = source.replica
    assert [x.tobytes() for x in late_device.gradients()] == [
        x.tobytes() for x in source.gradients()
    ]
    assert late_device.evaluate() == source.evaluate()
    source.engine.close()
    late_device.engine.close()
