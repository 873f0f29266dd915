"""The worker of a script's own process."""

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


def test_who_leaves_as_it_ends_by_itself_leaves_like_any_other():
    """Its thread lives for a moment after its event loop is closed."""
    raised: list[Exception | None] = []
    workers: queue.SimpleQueue[WorkerThread] = queue.SimpleQueue()

    class EventQueue(queue.SimpleQueue[Any]):
        def put(self, item, *args, **named):
            worker = workers.get()
            try:
                worker.drain()
                raised.append(None)
            except RuntimeError as error:
                raised.append(error)
            super().put(item, *args, **named)

    happened = EventQueue()
    nobody = Target("127.0.0.1", 1, "alone", "cpu", retry_for_s=0.0)
    worker = WorkerThread(nobody, None, WorkerCredentials(), lambda _: None, happened)
    workers.put(worker)
    ended = happened.get(timeout=60)
    worker.end()
    assert isinstance(ended, WorkerEnded)
    assert isinstance(ended.error, Unreachable)
    assert raised == [None]


TRAINED = {"weight": np.ones(3, np.float32)}


def joined(ended: EndRun | None) -> Any:
    task = SimpleNamespace(
        trained=lambda: TRAINED, load=lambda _: None, user=SimpleNamespace(module=None),
    )  # fmt: skip
    rows = {5: {"step": 5, "loss": 1.0}}
    return _joined_result(SimpleNamespace(built=task), SimpleNamespace(ended=ended, rows=rows))  # type: ignore[arg-type]


def end(**changes: Any) -> EndRun:
    same: dict[str, Any] = {
        "outcome": "finished", "reason": "why", "weights": weights_digest(TRAINED),
        "metrics": {"loss": 0.25, "ratio": None},
    }  # fmt: skip
    return EndRun(run_id="run", **{**same, **changes})


def test_who_has_joined_has_the_outcome_and_the_weights_of_the_run():
    for outcome in ("finished", "drained"):
        result = joined(end(outcome=outcome))
        assert (result.outcome, result.steps, result.digest) == (outcome, 5, end().weights)
        assert result.metrics["loss"] == 0.25
        assert math.isnan(result.metrics["ratio"])


@pytest.mark.parametrize(
    ("ended", "why"),
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
def test_other_weights_than_the_run_has_are_no_result(ended, why):
    with pytest.raises(RunFailed, match=why):
        joined(ended)
