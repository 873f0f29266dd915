"""For all tests: nothing is read from or written to the user's own tokens and keys, and no example
fails for its time: other work on the machine may have taken it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from protocol.base.errors import SamestepError
from protocol.machine.compiler import build_kernels
from tests.no_disk_sync import wait_for_no_disk
from tests.processes import ADDRESS, begin_fork_server, started

# A test starts processes that would each compile all of our modules.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# More processes than cores: torch's threads that wait leave them to others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("loaded machine", deadline=None)
settings.load_profile("loaded machine")
with contextlib.suppress(SamestepError):  # no compiler: their tests are skipped, numpy computes
    build_kernels()  # of the sources as they are now


def pytest_configure(config):
    """One server for all that run tests at a time, from which they come themselves."""
    gc.disable()
    wait_for_no_disk()
    if ADDRESS not in os.environ:
        begin_fork_server(*config.args)


def pytest_xdist_setupnodes(specs):
    for spec in specs:
        spec.python = shlex.join(
            [sys.executable, str(Path(__file__).with_name("forked_python.py"))]
        )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Each process begins with its share of the tests that wait for other processes: what is left
    for the end is short. Tests of one file stay together, for what they share."""
    files = [[*tests] for _, tests in itertools.groupby(items, key=lambda item: item.path)]
    shares: list[list[pytest.Item]] = [
        [] for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    ]
    for tests in files:
        if LONG & {*tests[0].path.parts}:
            min(shares, key=len).extend(tests)
    rest = [item for tests in files for item in tests if not LONG & {*item.path.parts}]
    each = -(-len(items) // len(shares))
    for share in shares:
        missing = max(0, each - len(share))
        share.extend(rest[:missing])
        del rest[:missing]
    items[:] = [*itertools.chain(*shares), *rest]


def pytest_collection_finish():
    """What has been imported stays: to look through all of it takes a second each time."""
    gc.freeze()
    gc.enable()


LONG = {
    "chaos", "deploy", "end_to_end", "standin", "torchrun",
    "test_docs_run.py", "test_memory_check.py", "test_real_scripts.py",
}  # fmt: skip
"""Folders and files of tests that wait for other processes."""
MOST_STARTED = {"forked": 30, "anew": 3}
"""By one test that is not slow: what keeps a plain run within minutes, however the tests grow."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Bound the processes that a test starts; an interrupt of its own ends it alone."""
    before = dict(started)
    try:
        result = yield
    except KeyboardInterrupt:
        if "interrupt" not in item.fixturenames:
            raise
        pytest.fail("the interrupt that the test has sent came out of it")
    for how, most in MOST_STARTED.items():
        started_here = started[how] - before[how]
        if started_here > most and item.get_closest_marker("slow") is None:
            pytest.fail(
                f"expected at most {most} processes {how}, it has started {started_here}; "
                "start fewer, or mark it slow and keep a smaller one"
            )
    return result


@pytest.fixture
def interrupt():
    """Sends this process what Ctrl-C does; no test does so otherwise (see `tests/test_tidy.py`)."""
    return lambda *_: os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="session", autouse=True)
def _homes(tmp_path_factory):
    """Where state directories are made; what modules share is in the first."""
    homes = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SAMESTEP_TOKEN", "SAMESTEP_TOKEN_FILE"):
            patch.delenv(name, raising=False)
        patch.setenv("SAMESTEP_HOME", str(homes / "0"))
        yield (homes / str(number) for number in itertools.count(1))


@pytest.fixture(autouse=True)
def _own_home(_homes, monkeypatch):
    """No test finds what another has left; daemons that it starts inherit it."""
    monkeypatch.setenv("SAMESTEP_HOME", str(next(_homes)))
