"""A worker that repeatedly joins without a step restarts its time limit only twice."""

import pytest

from tests.worker.logic.test_session import built, start_run, welcomed_session
from worker.logic.join_failures import JoinFailures


def session_with_run(*, prepared: bool = False, step: int = 0):
    session = welcomed_session()
    session.receive(*start_run(step=step))
    if prepared:
        session.result(built(step=step))
    return session


def test_the_third_loss_without_a_step_counts_and_is_reported():
    joins = JoinFailures()
    lines, limit_restarts = [], []
    for _ in range(6):
        limit_restarts.append(joins.connection_lost(session_with_run(), is_return_requested=False))
        lines.append(joins.warning(session_with_run(), "silent for 8 s"))
    assert limit_restarts == [True, True, False, False, False, False]
    assert [bool(line) for line in lines] == [False, False, True, False, False, True]
    assert "lost the connection 3 times in a row while the run's files were fetched" in lines[2]
    assert "silent for 8 s" in lines[2]
    assert "MTU" in lines[2]


@pytest.mark.parametrize(
    ("session", "is_asked"),
    [
        (welcomed_session(), False),  # no run: nothing was expected
        (session_with_run(), True),  # the coordinator asked the worker to return
        (session_with_run(prepared=True), False),  # the worker waits for others
        (session_with_run(prepared=True, step=5), False),  # the worker has applied steps
    ],
)
def test_events_that_restart_the_time_limit(session, is_asked):
    joins = JoinFailures()
    for _ in range(5):
        joins.connection_lost(session_with_run(), is_return_requested=False)
    assert joins.connection_lost(session, is_return_requested=is_asked)
    assert joins.count == 0
