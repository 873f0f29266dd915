"""The worker within a script's own process."""

from __future__ import annotations

import math
import queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from protocol.base.errors import RunFailed, Unreachable
from protocol.exact.digest import weights_digest
from protocol.wire.messages import EndRun
from samestep.fitting import _joined_result
from samestep.worker_thread import WorkerEnded, WorkerThread
from worker.join.credentials import WorkerCredentials
from worker.shell.client import Target


def test_leaving_while_the_thread_ends_is_a_normal_leave():
    """Its thread lives briefly after its event loop is closed."""
    errors: list[Exception | None] = []
    workers: queue.SimpleQueue[WorkerThread] = queue.SimpleQueue()

    class EventQueue(queue.SimpleQueue[Any]):
        def put(self, item, *args, **options):
            worker = workers.get()
            try:
                worker.drain()
                errors.append(None)
            except RuntimeError as error:
                errors.append(error)
            super().put(item, *args, **options)

    event_queue = EventQueue()
    missing_coordinator = Target("127.0.0.1", 1, "alone", "cpu", retry_for_s=0.0)
    worker = WorkerThread(
        missing_coordinator, None, WorkerCredentials(), lambda _: None, event_queue
    )
    workers.put(worker)
    end = event_queue.get(timeout=60)
    worker.end()
    assert isinstance(end, WorkerEnded)
    assert isinstance(end.error, Unreachable)
    assert errors == [None]


TRAINED = {"weight": np.ones(3, np.float32)}


def joined_result(end: EndRun | None) -> Any:
    task = SimpleNamespace(
        trained_tensors=lambda: TRAINED, load=lambda _: None, user=SimpleNamespace(module=None),
    )  # fmt: skip
    rows = {5: {"step": 5, "loss": 1.0}}
    call: Any = SimpleNamespace(built_task=task)
    worker: Any = SimpleNamespace(end_message=end, rows=rows)
    return _joined_result(call, worker)


def end(**changes: Any) -> EndRun:
    result_fields: dict[str, Any] = {
        "outcome": "finished", "reason": "why", "weights": weights_digest(TRAINED),
        "metrics": {"loss": 0.25, "ratio": None},
    }  # fmt: skip
    return EndRun(run_id="run", **{**result_fields, **changes})


def test_joined_script_gets_outcome_and_weights():
    for outcome in ("finished", "drained"):
        result = joined_result(end(outcome=outcome))
        assert (result.outcome, result.steps, result.digest) == (outcome, 5, end().weights)
        assert result.metrics["loss"] == 0.25
        assert math.isnan(result.metrics["ratio"])


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (None, "this worker left before the run was over"),
        (end(outcome="failed", weights=None), "^why$"),
        (
            end(weights="a" * 64),
            "expected weights a{64}, this worker has .* as it had missed steps",
        ),
        (end(weights=None), "expected weights none"),
    ],
)
def test_weights_that_differ_from_the_run_are_no_result(ended, reason):
    with pytest.raises(RunFailed, match=reason):
        joined_result(ended)
