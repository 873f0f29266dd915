"""For all tests: nothing is read from or written to the user's own tokens and keys, and no example
fails for its time: other work on the machine may have taken it."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from tests.processes import begin_fork_server, started

settings.register_profile("loaded machine", deadline=None)
settings.load_profile("loaded machine")


def pytest_configure(config):
    """One server for all that run tests at a time."""
    if not hasattr(config, "workerinput"):
        begin_fork_server()


MOST_STARTED = {"forked": 30, "anew": 2}
"""By one test that is not slow: what keeps a plain run within minutes, however the tests grow."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Bound the processes that a test starts."""
    before = dict(started)
    result = yield
    for how, most in MOST_STARTED.items():
        begun = started[how] - before[how]
        if begun > most and item.get_closest_marker("slow") is None:
            pytest.fail(
                f"expected at most {most} processes {how}, it has started {begun}; "
                "start fewer, or mark it slow and keep a smaller one"
            )
    return result


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory):
    """Daemons that a test starts inherit it."""
    kept = {name: os.environ.pop(name, None) for name in ("SAMESTEP_TOKEN", "SAMESTEP_TOKEN_FILE")}
    before = os.environ.get("SAMESTEP_HOME")
    os.environ["SAMESTEP_HOME"] = str(tmp_path_factory.mktemp("home"))
    yield
    for name, value in {**kept, "SAMESTEP_HOME": before}.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
