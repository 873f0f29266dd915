"""Progress of preparing a model reaches the listener of the same thread, once a second at most."""

import time
from itertools import count

import pytest

from backends.base import progress


def test_progress_reports_bytes_and_remaining_time(monkeypatch):
    seconds = count(0.0, 0.5)  # each reading of the clock is half a second later
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    lines: list[str] = []
    with progress.report_to(lines.append):
        progress.report("reading the model 'm'")
        meter = progress.Meter("read", 8 << 30)
        for _ in range(4):
            meter.add(1 << 30)
    assert lines == [
        "reading the model 'm'", "read 2.00 GiB of 8.00 GiB, 3 s left",
        "read 4.00 GiB of 8.00 GiB, 2 s left", "",
    ]  # fmt: skip


def test_progress_without_a_listener_is_ignored():
    progress.report("reading")
    progress.Meter("read", 1).add(1)


def test_an_error_ends_the_progress():
    lines: list[str] = []
    with pytest.raises(ValueError, match="invalid literal"), progress.report_to(lines.append):
        progress.report(str(int("no number")))
    assert lines == [""]
