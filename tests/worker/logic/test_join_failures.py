"""Joining again and again without a step: the time to try is begun anew twice, and then no more."""

import pytest

from tests.worker.logic.test_session import built, start_run, welcomed
from worker.logic.join_failures import JoinFailures


def given_a_run(*, prepared: bool = False, step: int = 0):
    session = welcomed()
    session.receive(*start_run(step=step))
    if prepared:
        session.result(built(step=step))
    return session


def test_the_third_loss_without_a_step_counts_and_is_reported():
    joins = JoinFailures()
    lines, begun_anew = [], []
    for _ in range(6):
        begun_anew.append(joins.connection_lost(given_a_run(), asked_to_return=False))
        lines.append(joins.warning(given_a_run(), "silent for 8 s"))
    assert begun_anew == [True, True, False, False, False, False]
    assert [bool(line) for line in lines] == [False, False, True, False, False, True]
    assert "lost the connection 3 times in a row while the run's files were fetched" in lines[2]
    assert "silent for 8 s" in lines[2]
    assert "MTU" in lines[2]


@pytest.mark.parametrize(
    ("session", "told"),
    [
        (welcomed(), False),  # no run: nothing was expected
        (given_a_run(), True),  # the coordinator said so
        (given_a_run(prepared=True), False),  # it waits for others
        (given_a_run(prepared=True, step=5), False),  # it has taken steps
    ],
)
def test_what_begins_the_time_again(session, told):
    joins = JoinFailures()
    for _ in range(5):
        joins.connection_lost(given_a_run(), asked_to_return=False)
    assert joins.connection_lost(session, asked_to_return=told)
    assert joins.count == 0
