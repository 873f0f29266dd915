"""What both commands see to before they begin."""

import resource

import pytest

from protocol.base.errors import UsageError
from protocol.cli.command_line import need_open_files


@pytest.fixture
def limited(monkeypatch):
    """How many open files the system allows, now and at most; and what was then set."""
    limits_set = []

    def limit(soft, hard):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits_set.append(both))
        return limits_set

    return limit


@pytest.mark.parametrize(
    ("soft", "hard", "set_to"),
    [(64, 4096, [(128, 4096)]), (1024, 4096, []), (resource.RLIM_INFINITY,) * 2 + ([],)],
)
def test_as_many_files_are_allowed_as_it_takes(limited, soft, hard, set_to):
    limits_set = limited(soft, hard)
    need_open_files(128)
    assert limits_set == set_to


def test_fewer_than_it_takes_are_reported(limited):
    limited(32, 64)
    with pytest.raises(UsageError, match="a limit of 128 or more, got 64; ulimit -n 1024"):
        need_open_files(128)
