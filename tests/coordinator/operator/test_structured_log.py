"""The log: a standard error that is gone takes no daemon with it."""

import io
import sys

import structlog

from coordinator.operator.structured_log import set_up_logging


def test_a_closed_standard_error_loses_lines_and_nothing_else(monkeypatch):
    closed_stream, present = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", closed_stream)
    try:
        set_up_logging(None, as_json=False)
        log = structlog.get_logger("test")
        closed_stream.close()
        log.warning("nobody_hears_this")
        monkeypatch.setattr(sys, "stderr", present)
        log.warning("this_is_heard")
    finally:
        structlog.reset_defaults()
    assert "this_is_heard" in present.getvalue()
