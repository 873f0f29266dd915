"""A device that does not answer is reported once; a device that is always slow is not."""

import queue

import pytest

from worker.shell import device_watch
from worker.shell.device_watch import DeviceWatch


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch):
    monkeypatch.setattr(device_watch, "_LEAST_S", 0.06)
    monkeypatch.setattr(device_watch, "_FIRST_ANSWER_S", 0.06)
    monkeypatch.setattr(device_watch, "_PREPARATION_S", 0.06)


@pytest.fixture
def watch_and_reports():
    """Return a watch, and the queue of its reports."""
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = DeviceWatch(reasons.put)
    watch.start()
    yield watch, reasons
    watch.close()


def test_missing_answer_is_reported_once(watch_and_reports):
    watch, reasons = watch_and_reports
    with watch.awaiting():
        reason = reasons.get(timeout=60)
        with pytest.raises(queue.Empty):
            reasons.get(timeout=0.2)
    assert watch.is_hanging
    assert reason.startswith("expected an answer within 0 s (there was none before), got none")


def test_nothing_is_late_without_a_request(watch_and_reports):
    watch, reasons = watch_and_reports
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


def test_limit_is_ten_minutes_while_the_task_reads_samples(monkeypatch):
    monkeypatch.undo()
    watch = DeviceWatch(print)
    with watch.awaiting(with_data=True):
        watch._slowest_s = 0.1
        assert not watch.overdue(599)
        assert watch.overdue(601)


def test_a_preparation_without_progress_is_reported(watch_and_reports):
    watch, reasons = watch_and_reports
    with watch.preparing("it is opened"):
        reason = reasons.get(timeout=60)
    assert reason.startswith("expected an answer within 0 s (or a progress line, while it is op")
    assert watch.is_hanging


def test_each_line_of_progress_gives_a_preparation_its_full_time(monkeypatch):
    monkeypatch.undo()
    watch = DeviceWatch(print)
    watch.restart_limit()
    assert not watch._awaited_answer, "nothing is prepared"
    with watch.preparing("it is opened"):
        before = watch._awaited_answer
        watch.restart_limit()
        assert 0 < before < watch._awaited_answer
        assert not watch.overdue(1700)
        assert watch.overdue(1900)
    assert not watch._awaited_answer
    with watch.awaiting():
        assert "there was none before" in watch.overdue(1900), "a preparation is no measurement"
