"""Fixtures of all tests. No test reads or writes the user's tokens and keys, and no Hypothesis
example fails for its duration, which depends on the load of the machine."""

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
from tests.no_disk_sync import disable_disk_sync
from tests.processes import ADDRESS, begin_fork_server, started

# Otherwise every process that a test starts compiles all of our modules.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# With more processes than cores, spinning threads of torch slow down the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(
    "loaded machine", deadline=None, max_examples=int(os.environ.get("SAMESTEP_EXAMPLES", "40"))
)
settings.load_profile("loaded machine")
# Without a compiler the kernels' tests are skipped, and numpy computes.
with contextlib.suppress(SamestepError):
    build_kernels()


def pytest_configure(config):
    """Start one server for all test processes; the test processes are forked from it, too."""
    gc.disable()
    disable_disk_sync()
    if ADDRESS not in os.environ:
        begin_fork_server(*config.args)


def pytest_xdist_setupnodes(specs):
    for spec in specs:
        spec.python = shlex.join(
            [sys.executable, str(Path(__file__).with_name("forked_python.py"))]
        )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Give each test process its share of the tests that wait for other processes, and run them
    first: late in the run they would leave the other processes idle. Tests of one file stay
    together because they share fixtures."""
    files = [[*tests] for _, tests in itertools.groupby(items, key=lambda item: item.path)]
    shares: list[list[pytest.Item]] = [
        [] for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    ]
    for tests in files:
        if LONG & {*tests[0].path.parts}:
            min(shares, key=len).extend(tests)
    other_tests = [item for tests in files for item in tests if not LONG & {*item.path.parts}]
    share_size = -(-len(items) // len(shares))
    for share in shares:
        free = max(0, share_size - len(share))
        share.extend(other_tests[:free])
        del other_tests[:free]
    items[:] = [*itertools.chain(*shares), *other_tests]


def pytest_collection_finish():
    """Freeze imported objects: a garbage collection over all of them takes a second each time."""
    gc.freeze()
    gc.enable()


LONG = {
    "chaos", "deploy", "end_to_end", "standin", "torchrun",
    "test_docs_run.py", "test_memory_check.py", "test_real_scripts.py",
}  # fmt: skip
"""Folders and files of tests that wait for other processes."""
MOST_PROCESSES = {"forked": 30, "fresh": 3}
"""Limits for one test that is not slow, by how processes start. They keep a default run within
minutes as tests are added."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Limit the processes that a test starts; an interrupt that it sends ends only this test."""
    started_before = dict(started)
    try:
        result = yield
    except KeyboardInterrupt:
        if "interrupt" not in item.fixturenames:
            raise
        pytest.fail("the test did not catch the interrupt that it sent")
    for method, limit in MOST_PROCESSES.items():
        processes = started[method] - started_before[method]
        if processes > limit and item.get_closest_marker("slow") is None:
            pytest.fail(
                f"expected the test to start at most {limit} processes ({method}), "
                f"got {processes}; start fewer, or mark it slow and add a smaller test"
            )
    return result


@pytest.fixture
def interrupt():
    """Return a function that sends this process what Ctrl-C sends. Tests must use this fixture to
    do so (see `tests/test_tidy.py`)."""
    return lambda *_: os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="session", autouse=True)
def _homes(tmp_path_factory):
    """Yield the directories for SAMESTEP_HOME: one per test; those of modules' fixtures share
    the first."""
    homes = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SAMESTEP_TOKEN", "SAMESTEP_TOKEN_FILE"):
            patch.delenv(name, raising=False)
        patch.setenv("SAMESTEP_HOME", str(homes / "0"))
        yield (homes / str(number) for number in itertools.count(1))


@pytest.fixture(autouse=True)
def _own_home(_homes, monkeypatch):
    """Give each test a new SAMESTEP_HOME, which the daemons that it starts inherit."""
    monkeypatch.setenv("SAMESTEP_HOME", str(next(_homes)))
