"""The state of inner phases that a worker stores from round to round."""

from __future__ import annotations

import queue

import numpy as np
import pytest

from protocol.exact.reduction.tree import Subtree
from protocol.exact.update import step_scalars
from tests.live_service import ScriptedFactory, scripted_spec
from tests.processes import PATIENCE_S
from worker.logic import actions as act
from worker.logic.events import Applied, Built, InnerStateNeeded, StepId, SubtreeDone
from worker.shell.engine import Engine

SPEC = scripted_spec(
    batch={"samples": 2, "microbatch": 1},
    replicas={"count": 2, "inner_steps": 2, "inner_state": "carry"},
)


@pytest.mark.parametrize(
    ("committed_attempt", "repeat", "needs_state"),
    [(0, False, False), (1, False, True), (0, True, True)],
)
def test_inner_phase_state_counts_if_its_attempt_is_committed(
    committed_attempt, repeat, needs_state
):
    """A halted attempt may have failed, and attempts of an earlier term have the same numbers."""
    events: queue.Queue[object] = queue.Queue()
    engine = Engine(ScriptedFactory(), events.put)

    def first_event(*kinds: type) -> object:
        while not isinstance(event := events.get(timeout=PATIENCE_S), kinds):
            pass
        return event

    engine.do(act.Build("run", SPEC, keep_state=False))
    first_event(Built)
    engine.do(act.Compute(StepId(0, 0), 2, Subtree(1, 2)))
    first_event(SubtreeDone)
    if repeat:
        engine.do(act.Build("run", SPEC, keep_state=True))
    averages = [np.zeros(16, np.float32) for _ in range(3)]
    engine.do(
        act.Apply(
            averages, step_scalars(SPEC.step_optimizer, 1, 0, SPEC.steps, 0.0), committed_attempt
        )
    )
    first_event(Applied)
    engine.do(act.Compute(StepId(1, 0), 2, Subtree(1, 2)))
    assert isinstance(first_event(InnerStateNeeded, SubtreeDone), InnerStateNeeded) == needs_state
    engine.close()
