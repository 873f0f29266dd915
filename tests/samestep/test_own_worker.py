"""The worker of a script's own process."""

from __future__ import annotations

import queue
from typing import Any

from protocol.base.errors import Unreachable
from samestep.own_worker import OwnWorker, WorkerEnded
from worker.joining.credentials import WorkerCredentials
from worker.shell.client import Target


def test_who_leaves_as_it_ends_by_itself_leaves_like_any_other():
    """Its thread lives for a moment after its event loop is closed."""
    raised: list[Exception | None] = []
    made: queue.SimpleQueue[OwnWorker] = queue.SimpleQueue()

    class Happened(queue.SimpleQueue[Any]):
        def put(self, item, *given, **named):
            worker = made.get()
            try:
                worker.drain()
                raised.append(None)
            except RuntimeError as error:
                raised.append(error)
            super().put(item, *given, **named)

    happened = Happened()
    nobody = Target("127.0.0.1", 1, "alone", "cpu", retry_for_s=0.0)
    worker = OwnWorker(nobody, None, WorkerCredentials(), lambda _: None, happened)
    made.put(worker)
    ended = happened.get(timeout=60)
    worker.end()
    assert isinstance(ended, WorkerEnded)
    assert isinstance(ended.error, Unreachable)
    assert raised == [None]
