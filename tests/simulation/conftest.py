"""Fixtures that simulate clusters, and a summary of the schedules after a test run."""

import gc
import logging
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import structlog

from tests.simulation.cluster import Cluster

_PROPERTY = "simulated"
_PLANTED = "planted"


@pytest.fixture(scope="session")
def _home(tmp_path_factory):
    """A home where coordinators and workers find each other's secrets."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def simulate(_home, monkeypatch):
    """Return a function that simulates a seed to its end, in a temporary directory: in memory where
    possible, unless the test names its location."""
    monkeypatch.setenv("SAMESTEP_HOME", str(_home))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else None

    def simulate(seed, parent=parent, **options):
        # Collect garbage between two simulations only: a seed must behave the same each time.
        gc.disable()
        try:
            with tempfile.TemporaryDirectory(dir=parent) as root:
                return Cluster(seed, Path(root), **options).run()
        finally:
            gc.enable()
            gc.collect()
            _freeze_imports()

    yield simulate
    structlog.reset_defaults()


@cache
def _freeze_imports():
    """Freeze imported modules once, so that later garbage collections do not scan them."""
    gc.freeze()


@pytest.fixture
def record_counts(record_property):
    """Record the number of schedules, their events and their duration."""
    return lambda counts: record_property(_PROPERTY, dict(counts))


def pytest_terminal_summary(terminalreporter):
    total: Counter[str] = Counter()
    planted = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, counts in getattr(report, "user_properties", ()):
                if name == _PROPERTY and report.when == "call":
                    total.update(counts)
                elif name == _PLANTED and report.when == "call":
                    planted.append(counts)
    if planted:
        terminalreporter.section("planted faults, and the seed that showed each")
        for fault, seed, options, first in sorted(planted):
            slow = (
                ""
                if seed == first
                else f"; the table's seed {first} no longer does: replace it by {seed}"
            )
            terminalreporter.write_line(f"{seed:5}  {fault}  ({options}{slow})")
    if not total["schedules"]:
        return
    seconds = total.pop("ms") / 1000
    schedules = total.pop("schedules")
    terminalreporter.section("simulated")
    terminalreporter.write_line(
        f"{schedules} schedules in {seconds:.1f} s of one core, {schedules / seconds:.0f} a second"
    )
    summary = (f"{name} {count}" for name, count in sorted(total.items()))
    terminalreporter.write_line(", ".join(summary))
