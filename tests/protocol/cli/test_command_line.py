"""Preparations that both commands make at their start."""

import resource

import pytest

from protocol.base.errors import UsageError
from protocol.cli.command_line import require_open_files


@pytest.fixture
def script_limits(monkeypatch):
    """Return a function that scripts the limits of open files; it returns a list of the limits that
    are set."""
    limits_set = []

    def limit(soft, hard):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        monkeypatch.setattr(
            resource, "setrlimit", lambda _, new_limits: limits_set.append(new_limits)
        )
        return limits_set

    return limit


@pytest.mark.parametrize(
    ("soft", "hard", "set_to"),
    [(64, 4096, [(128, 4096)]), (1024, 4096, []), (resource.RLIM_INFINITY,) * 2 + ([],)],
)
def test_open_file_limit_is_raised_as_needed(script_limits, soft, hard, set_to):
    limits_set = script_limits(soft, hard)
    require_open_files(128)
    assert limits_set == set_to


def test_low_open_file_limit_is_reported(script_limits):
    script_limits(32, 64)
    with pytest.raises(UsageError, match="a limit of 128 or more, got 64; ulimit -n 1024"):
        require_open_files(128)
