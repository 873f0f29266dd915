"""The worker in the process of a script, and the result of a script that joined a run."""

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


def test_drain_while_the_thread_ends_raises_no_error():
    """The thread runs for a moment after its event loop is closed."""
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


def make_end(**changes: Any) -> EndRun:
    result_fields: dict[str, Any] = {
        "outcome": "finished", "reason": "why", "weights": weights_digest(TRAINED),
        "metrics": {"loss": 0.25, "ratio": None},
    }  # fmt: skip
    return EndRun(run_id="run", **{**result_fields, **changes})


def test_joined_script_gets_outcome_digest_and_metrics():
    for outcome in ("finished", "drained"):
        result = joined_result(make_end(outcome=outcome))
        assert (result.outcome, result.steps, result.digest) == (outcome, 5, make_end().weights)
        assert result.metrics["loss"] == 0.25
        assert math.isnan(result.metrics["ratio"])


@pytest.mark.parametrize(
    ("end_message", "reason"),
    [
        (None, "this worker left before the run was over"),
        (make_end(outcome="failed", weights=None), "^why$"),
        (
            make_end(weights="a" * 64),
            "expected weights a{64}, this worker has .* as it had missed steps",
        ),
        (make_end(weights=None), "expected weights none"),
    ],
)
def test_run_without_equal_final_weights_has_no_result(end_message, reason):
    with pytest.raises(RunFailed, match=reason):
        joined_result(end_message)
