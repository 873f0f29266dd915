"""A directory whose name is too long is a usage error for every command."""

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from protocol.base.errors import UsageError

LONG = "x" * 300


@pytest.mark.parametrize(
    "option",
    [
        ["--out", LONG, "--expect-workers", "1"],
        ["--out", LONG, "--expect-workers", "1", "--resume"],
        ["--out", LONG, "--expect-workers", "1", "--resume", "--from-step", "3"],
        ["audit", LONG],
        ["report", LONG],
    ],
)
def test_long_name_is_refused_in_one_line(option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, option)
    assert isinstance(result.exception, UsageError)
    assert not [*tmp_path.iterdir()]
