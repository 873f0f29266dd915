"""Logging: a daemon survives the loss of its standard error."""

import io
import sys

import structlog

from coordinator.operator.structured_log import set_up_logging


def test_logging_survives_a_closed_standard_error(monkeypatch):
    closed_stream, open_stream = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", closed_stream)
    try:
        set_up_logging(None, as_json=False)
        log = structlog.get_logger("test")
        closed_stream.close()
        log.warning("nobody_hears_this")
        monkeypatch.setattr(sys, "stderr", open_stream)
        log.warning("this_is_heard")
    finally:
        structlog.reset_defaults()
    assert "this_is_heard" in open_stream.getvalue()


def test_a_file_of_lines_has_no_colors(capsys):
    try:
        set_up_logging(None, as_json=False)
        structlog.get_logger().warning("blob_changed", path="data.csv")
    finally:
        structlog.reset_defaults()
    line = capsys.readouterr().err
    assert "blob_changed" in line
    assert "\x1b" not in line
