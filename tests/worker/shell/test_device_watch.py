"""A device that does not answer is reported once; one that is slow as ever is not."""

import queue

import pytest

from worker.shell import device_watch
from worker.shell.device_watch import DeviceWatch


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(device_watch, "_LEAST_S", 0.06)
    monkeypatch.setattr(device_watch, "_FIRST_ANSWER_S", 0.06)
    monkeypatch.setattr(device_watch, "_PREPARATION_S", 0.06)


@pytest.fixture
def watched():
    """A watch, and the queue of what it reports."""
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = DeviceWatch(reasons.put)
    watch.start()
    yield watch, reasons
    watch.close()


def test_an_answer_that_does_not_come_is_reported_once(watched):
    watch, reasons = watched
    with watch.awaiting():
        reason = reasons.get(timeout=60)
        with pytest.raises(queue.Empty):
            reasons.get(timeout=0.2)
    assert watch.is_hanging
    assert reason.startswith("expected an answer within 0 s (there was none before), got none")


def test_while_nothing_is_awaited_nothing_is_late(watched):
    watch, reasons = watched
    assert list(watch.await_each([1, 2])) == [1, 2]
    with pytest.raises(queue.Empty):
        reasons.get(timeout=0.2)


@pytest.mark.parametrize(
    ("slowest_s", "waited_s", "is_over"),
    [(None, 1700, False), (None, 1900, True), (0.1, 59, False), (0.1, 61, True),
     (10, 299, False), (10, 301, True)],
)  # fmt: skip
def test_the_limit_follows_from_the_slowest_answer(monkeypatch, slowest_s, waited_s, is_over):
    monkeypatch.undo()
    watch = DeviceWatch(print)
    with watch.awaiting():
        watch._slowest_s = slowest_s
        assert bool(watch.overdue(waited_s)) == is_over


def test_where_the_task_reads_samples_meanwhile_it_has_ten_minutes(monkeypatch):
    monkeypatch.undo()
    watch = DeviceWatch(print)
    with watch.awaiting(with_data=True):
        watch._slowest_s = 0.1
        assert not watch.overdue(599)
        assert watch.overdue(601)


def test_a_preparation_without_progress_is_reported(watched):
    watch, reasons = watched
    with watch.preparing("it is opened"):
        reason = reasons.get(timeout=60)
    assert reason.startswith("expected an answer within 0 s (or a progress line, while it is op")
    assert watch.is_hanging


def test_each_line_of_progress_gives_a_preparation_its_full_time(monkeypatch):
    monkeypatch.undo()
    watch = DeviceWatch(print)
    watch.restart_limit()
    assert not watch._awaited, "nothing is prepared"
    with watch.preparing("it is opened"):
        before = watch._awaited
        watch.restart_limit()
        assert 0 < before < watch._awaited
        assert not watch.overdue(1700)
        assert watch.overdue(1900)
    assert not watch._awaited
    with watch.awaiting():
        assert "there was none before" in watch.overdue(1900), "a preparation is no measurement"
